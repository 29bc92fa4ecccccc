"""Matrix products. Halves are multiplied as f32: their own sums would lose what the weights say."""

from __future__ import annotations

from typing import Final

from engines.array.operator import Array, Call, Operator, wide


def _matmul(call: Call) -> Array:
    left, right = call.inputs
    return call.xp.matmul(wide(call.xp, left), wide(call.xp, right)).astype(left.dtype, copy=False)


def _gemm(call: Call) -> Array:
    left, right, bias = wide(call.xp, call.inputs[0]), wide(call.xp, call.inputs[1]), call.input(2)
    if call.attributes.get("transA", 0):
        left = left.T
    if call.attributes.get("transB", 0):
        right = right.T
    kind = left.dtype.type
    product = call.xp.matmul(left, right)
    alpha, beta = call.attributes.get("alpha", 1.0), call.attributes.get("beta", 1.0)
    if alpha != 1.0:
        product = product * kind(alpha)
    if bias is not None:
        product = product + (wide(call.xp, bias) * kind(beta) if beta != 1.0 else wide(call.xp, bias))
    return product.astype(call.inputs[0].dtype, copy=False)


OPERATORS: Final[dict[str, Operator]] = {
    "MatMul": Operator(_matmul, multiplies=True),
    "Gemm": Operator(_gemm, multiplies=True),
}
