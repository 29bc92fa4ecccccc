"""Operators that compute each element from the elements at its place, with broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, Final

import numpy as np
import onnx

from engines.array.operator import Array, Call, Operator, wide


def _binary(name: str) -> Operator:
    def function(call: Call) -> Array:
        return getattr(call.xp, name)(call.inputs[0], call.inputs[1])

    return Operator(function)


def _unary(name: str) -> Operator:
    def function(call: Call) -> Array:
        return getattr(call.xp, name)(call.inputs[0])

    return Operator(function)


def _variadic(name: str) -> Operator:
    def function(call: Call) -> Array:
        return reduce(getattr(call.xp, name), call.inputs)

    return Operator(function)


def _in_wide(compute: Callable[[Any, Array, Call], Array]) -> Operator:
    """Return an operator on one input that computes halves in f32 and rounds once at the end."""

    def function(call: Call) -> Array:
        array = call.inputs[0]
        return compute(call.xp, wide(call.xp, array), call).astype(array.dtype, copy=False)

    return Operator(function)


def _divide(call: Call) -> Array:
    """Divide; integers towards zero, as ONNX Runtime does, not down."""
    left, right = call.inputs
    if left.dtype.kind not in "iu":
        return call.xp.true_divide(left, right)
    quotient, remainder = call.xp.divmod(left, right)
    rounded_down = (remainder != 0) & ((left < 0) != (right < 0))
    return (quotient + rounded_down).astype(left.dtype)


def _power(call: Call) -> Array:
    base, exponent = call.inputs
    if base.dtype.kind in "iu" and exponent.dtype.kind in "iu":
        return call.xp.power(base, exponent).astype(base.dtype, copy=False)
    return call.xp.power(wide(call.xp, base), wide(call.xp, exponent)).astype(base.dtype, copy=False)


def _relu(call: Call) -> Array:
    return call.xp.maximum(call.inputs[0], call.inputs[0].dtype.type(0))


def _sigmoid(xp: Any, array: Array, call: Call) -> Array:
    # Through the exponential of a negative number only, which cannot overflow.
    small = xp.exp(-xp.abs(array))
    return xp.where(array >= 0, 1 / (1 + small), small / (1 + small)).astype(array.dtype, copy=False)


_ERFC_END: Final = 6.0
"""From here on erf is 1 to the last bit of f64."""
_ERFC_TERMS: Final = 28


def _erfc_series() -> list[float]:
    """Return Chebyshev coefficients of ln(erfc(x) / t) + x^2 over t = 2 / (2 + x), for 0 <= x <= _ERFC_END.

    That function of t is nearly straight, so a few terms give all digits. They are fitted to the standard library's
    erfc, which the array modules lack.
    """
    low = 2 / (2 + _ERFC_END)

    def straight(place: Any) -> Any:
        t = (np.asarray(place) * (1 - low) + (1 + low)) / 2
        x = 2 / t - 2
        return np.array([math.log(math.erfc(value) / part) + value * value for value, part in zip(x, t, strict=True)])

    return [float(value) for value in np.polynomial.chebyshev.chebinterpolate(straight, _ERFC_TERMS)]


_ERFC_SERIES: Final = _erfc_series()


_SMALL: Final = 0.5
"""Below this, 1 - erfc would lose digits; the Taylor series of erf has them all after a dozen terms."""
_TAYLOR: Final = [2 / math.sqrt(math.pi) * (-1) ** term / (math.factorial(term) * (2 * term + 1)) for term in range(13)]


def _error_function(xp: Any, array: Array, call: Call | None = None) -> Array:
    kind = array.dtype.type
    x = xp.minimum(xp.abs(array), kind(_ERFC_END))
    square = x * x
    t = kind(2) / (kind(2) + x)
    low = 2 / (2 + _ERFC_END)
    place = (t * kind(2) - kind(1 + low)) / kind(1 - low)
    twice = place + place
    after = before = xp.zeros_like(place)
    for coefficient in reversed(_ERFC_SERIES[1:]):
        after, before = twice * after - before + kind(coefficient), after
    straight = place * after - before + kind(_ERFC_SERIES[0])
    near_zero = xp.zeros_like(x)
    for coefficient in reversed(_TAYLOR):
        near_zero = near_zero * square + kind(coefficient)
    return xp.copysign(xp.where(x < kind(_SMALL), x * near_zero, kind(1) - t * xp.exp(straight - square)), array)


def _gelu(xp: Any, array: Array, call: Call) -> Array:
    kind = array.dtype.type
    if call.attributes.get("approximate", "none") == "tanh":
        inner = kind(math.sqrt(2 / math.pi)) * (array + kind(0.044715) * array * array * array)
        return kind(0.5) * array * (kind(1) + xp.tanh(inner))
    return kind(0.5) * array * (kind(1) + _error_function(xp, array * kind(math.sqrt(0.5))))


def _cast(call: Call) -> Array:
    target = onnx.helper.tensor_dtype_to_np_dtype(call.attributes["to"])
    return call.inputs[0].astype(target)


def _clip(call: Call) -> Array:
    array, low, high = call.input(0), call.input(1), call.input(2)
    if call.opset < 11:
        low, high = call.attributes.get("min"), call.attributes.get("max")
    kind = array.dtype.type
    if low is not None:
        array = call.xp.maximum(array, kind(low) if isinstance(low, float) else low)
    if high is not None:
        array = call.xp.minimum(array, kind(high) if isinstance(high, float) else high)
    return array


def _where(call: Call) -> Array:
    return call.xp.where(*call.inputs)


def _identity(call: Call) -> Array:
    return call.inputs[0]


OPERATORS: Final[dict[str, Operator]] = {
    "Add": _binary("add"),
    "Sub": _binary("subtract"),
    "Mul": _binary("multiply"),
    "Div": Operator(_divide),
    "Pow": Operator(_power),
    "Equal": _binary("equal"),
    "Greater": _binary("greater"),
    "GreaterOrEqual": _binary("greater_equal"),
    "Less": _binary("less"),
    "LessOrEqual": _binary("less_equal"),
    "And": _binary("logical_and"),
    "Or": _binary("logical_or"),
    "Not": _unary("logical_not"),
    "Neg": _unary("negative"),
    "Abs": _unary("absolute"),
    "Min": _variadic("minimum"),
    "Max": _variadic("maximum"),
    "Sum": _variadic("add"),
    "Sqrt": _in_wide(lambda xp, array, call: xp.sqrt(array)),
    "Exp": _in_wide(lambda xp, array, call: xp.exp(array)),
    "Log": _in_wide(lambda xp, array, call: xp.log(array)),
    "Tanh": _in_wide(lambda xp, array, call: xp.tanh(array)),
    "Reciprocal": _in_wide(lambda xp, array, call: array.dtype.type(1) / array),
    "Sigmoid": _in_wide(_sigmoid),
    "Erf": _in_wide(_error_function),
    "Gelu": _in_wide(_gelu),
    "Relu": Operator(_relu),
    "Cast": Operator(_cast),
    "Clip": Operator(_clip),
    "Where": Operator(_where),
    "Identity": Operator(_identity),
    "Dropout": Operator(_identity),
}
