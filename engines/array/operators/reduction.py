"""Operators that fold axes: sums, extremes, and the normalisations built from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from engines.array.operator import Array, Call, Operator, wide

_AXES_BECAME_AN_INPUT: Final = {"sum": 13}
"""Operator set from which the axes are an input; 18 for the others."""


def _reduce(name: str) -> Operator:
    def function(call: Call) -> Array:
        array = call.inputs[0]
        as_input = call.opset >= _AXES_BECAME_AN_INPUT.get(name, 18)
        axes = call.host_ints(1) if as_input else call.attributes.get("axes")
        if not axes and call.attributes.get("noop_with_empty_axes", 0):
            # Folding no axis still applies what a norm does to one element.
            return call.xp.absolute(array) if name == "l2" else array
        folded = tuple(sorted({axis % array.ndim for axis in axes or range(array.ndim)}))
        if not folded:
            return array
        keep = bool(call.attributes.get("keepdims", 1))
        source = array if name in ("max", "min") else wide(call.xp, array)
        if name == "l2":
            result = call.xp.sqrt(call.xp.square(source).sum(axis=folded, keepdims=keep))
        else:
            result = getattr(call.xp, name)(source, axis=folded, keepdims=keep)
        return _rounded_back(call.xp, result, array)

    return Operator(function, host=(1,))


def _rounded_back(xp: Any, result: Array, array: Array) -> Array:
    """Return a result in the array's type; means of integers are cut off, as ONNX Runtime does."""
    return result if result.dtype == array.dtype else xp.asarray(result).astype(array.dtype)


def _argument(name: str) -> Operator:
    def function(call: Call) -> Array:
        array = call.inputs[0]
        axis = call.attributes.get("axis", 0) % array.ndim
        find: Callable[..., Array] = getattr(call.xp, name)
        if call.attributes.get("select_last_index", 0):
            place = array.shape[axis] - 1 - find(call.xp.flip(array, axis), axis=axis)
        else:
            place = find(array, axis=axis)
        place = call.xp.asarray(place).astype(call.xp.int64)
        return call.xp.expand_dims(place, axis) if call.attributes.get("keepdims", 1) else place

    return Operator(function)


def _softmax(call: Call) -> Array:
    array = call.inputs[0]
    values = wide(call.xp, array)
    if call.opset >= 13:
        return _softmax_over(call.xp, values, (call.attributes.get("axis", -1) % array.ndim,)).astype(
            array.dtype, copy=False
        )
    # Before 13 the axis split the shape in two, and everything behind it was one distribution.
    first = call.attributes.get("axis", 1) % array.ndim
    return _softmax_over(call.xp, values, tuple(range(first, array.ndim))).astype(array.dtype, copy=False)


def _softmax_over(xp: Any, values: Array, axes: tuple[int, ...]) -> Array:
    raised = xp.exp(values - values.max(axis=axes, keepdims=True))
    return raised / raised.sum(axis=axes, keepdims=True)


def _layer_normalization(call: Call) -> Array:
    array, scale, bias = call.inputs[0], call.inputs[1], call.input(2)
    values = wide(call.xp, array)
    axes = tuple(range(call.attributes.get("axis", -1) % array.ndim, array.ndim))
    mean = values.mean(axis=axes, keepdims=True)
    centred = values - mean
    variance = (centred * centred).mean(axis=axes, keepdims=True)
    kind = values.dtype.type
    inverse = kind(1) / call.xp.sqrt(variance + kind(call.attributes.get("epsilon", 1e-5)))
    result = centred * inverse * wide(call.xp, scale)
    if bias is not None:
        result = result + wide(call.xp, bias)
    return (result.astype(array.dtype, copy=False), mean, inverse)[: call.output_count]


def _batch_normalization(call: Call) -> Array:
    array = call.inputs[0]
    values = wide(call.xp, array)
    shape = (1, -1) + (1,) * (array.ndim - 2)
    scale, bias, mean, variance = (wide(call.xp, part).reshape(shape) for part in call.inputs[1:5])
    kind = values.dtype.type
    factor = scale / call.xp.sqrt(variance + kind(call.attributes.get("epsilon", 1e-5)))
    return ((values - mean) * factor + bias).astype(array.dtype, copy=False)


OPERATORS: Final[dict[str, Operator]] = {
    "ReduceSum": _reduce("sum"),
    "ReduceMean": _reduce("mean"),
    "ReduceMax": _reduce("max"),
    "ReduceMin": _reduce("min"),
    "ReduceL2": _reduce("l2"),
    "ArgMax": _argument("argmax"),
    "ArgMin": _argument("argmin"),
    "Softmax": Operator(_softmax),
    "LayerNormalization": Operator(_layer_normalization),
    "BatchNormalization": Operator(_batch_normalization),
}
