"""Operators that move elements or speak about shapes, and compute no values."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import numpy as np

from engines.array.operator import Array, Call, Operator


def _reshape(call: Call) -> Array:
    array, wanted = call.inputs[0], call.host_ints(1) or []
    if not call.attributes.get("allowzero", 0):
        wanted = [array.shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    return array.reshape(wanted)


def _transpose(call: Call) -> Array:
    array = call.inputs[0]
    return array.transpose(call.attributes.get("perm", tuple(reversed(range(array.ndim)))))


def _flatten(call: Call) -> Array:
    array = call.inputs[0]
    axis = call.attributes.get("axis", 1)
    axis = axis + array.ndim if axis < 0 else axis
    rows = int(np.prod(array.shape[:axis], dtype=np.int64))
    columns = int(np.prod(array.shape[axis:], dtype=np.int64))
    return array.reshape(rows, columns)


def _axes(call: Call) -> list[int] | None:
    """Return the axes of Squeeze and Unsqueeze: an input from operator set 13 on, an attribute before."""
    if call.opset >= 13:
        return call.host_ints(1)
    axes = call.attributes.get("axes")
    return None if axes is None else list(axes)


def _squeeze(call: Call) -> Array:
    array, axes = call.inputs[0], _axes(call)
    if axes is None:
        axes = [axis for axis, size in enumerate(array.shape) if size == 1]
    return call.xp.squeeze(array, axis=tuple(axes))


def _unsqueeze(call: Call) -> Array:
    array, axes = call.inputs[0], _axes(call) or []
    rank = array.ndim + len(axes)
    places = {axis % rank for axis in axes}
    remaining = iter(array.shape)
    return array.reshape([1 if axis in places else next(remaining) for axis in range(rank)])


def _shape(call: Call) -> Array:
    shape = call.inputs[0].shape
    start, end = call.attributes.get("start", 0), call.attributes.get("end", len(shape))
    return np.array(shape[slice(start, end)], np.int64)


def _concat(call: Call) -> Array:
    return call.xp.concatenate(call.inputs, axis=call.attributes["axis"])


def _slice(call: Call) -> Array:
    array = call.inputs[0]
    if call.opset < 10:
        starts, ends = call.attributes["starts"], call.attributes["ends"]
        axes, steps = call.attributes.get("axes"), None
    else:
        starts, ends = call.host_ints(1) or [], call.host_ints(2) or []
        axes, steps = call.host_ints(3), call.host_ints(4)
    cuts = [slice(None)] * array.ndim
    for start, end, axis, step in zip(
        starts, ends, axes or range(len(starts)), steps or [1] * len(starts), strict=True
    ):
        cuts[axis] = _cut(start, end, step, array.shape[axis])
    return array[tuple(cuts)]


def _cut(start: int, end: int, step: int, size: int) -> slice:
    """Return the slice ONNX means: ends are clamped, and -1 before a backward end means "before the first"."""
    start = start + size if start < 0 else start
    end = end + size if end < 0 else end
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start = min(max(start, 0), size - 1)
    end = min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step)


def _gather(call: Call) -> Array:
    table, indices = call.inputs
    axis = call.attributes.get("axis", 0)
    if call.refusals is not None:
        # A device module wraps indices instead of refusing them; numpy refuses.
        size = table.shape[axis]
        outside = ((indices < -size) | (indices >= size)).any()
        call.require_not(outside, f"an index is out of range for axis {axis} with {size} entries")
    return call.xp.take(table, indices, axis=axis)


def _expand(call: Call) -> Array:
    array, wanted = call.inputs[0], call.host_ints(1) or []
    shape = np.broadcast_shapes(array.shape, tuple(wanted))
    return call.xp.broadcast_to(array, shape)


def _constant_of_shape(call: Call) -> Array:
    fill = call.attributes.get("value", np.zeros(1, np.float32)).ravel()[0]
    return call.xp.full(call.host_ints(0) or (), fill, dtype=fill.dtype)


def _split(call: Call) -> Array:
    array = call.inputs[0]
    axis = call.attributes.get("axis", 0)
    sizes = call.host_ints(1) if call.opset >= 13 else call.attributes.get("split")
    if sizes is None:
        parts = call.attributes.get("num_outputs", call.output_count)
        # The last part is shorter where the size does not divide.
        step = -(-array.shape[axis] // parts)
        ends = [min(step * part, array.shape[axis]) for part in range(1, parts)]
    else:
        if sum(sizes) != array.shape[axis]:
            raise ValueError(f"sizes {list(sizes)} do not add up to the {array.shape[axis]} entries of axis {axis}")
        ends = list(accumulate(sizes))[:-1]
    return tuple(call.xp.split(array, ends, axis=axis))


def _pad(call: Call) -> Array:
    array = call.inputs[0]
    mode = call.attributes.get("mode", "constant")
    if call.opset < 11:
        pads, fill, axes = list(call.attributes["pads"]), call.attributes.get("value", 0.0), None
    else:
        pads = call.host_ints(1) or []
        given = call.input(2)
        fill = 0 if given is None else given.ravel()[0]
        axes = call.host_ints(3)
    places = [axis % array.ndim for axis in axes] if axes is not None else list(range(array.ndim))
    widths = [(0, 0)] * array.ndim
    for index, axis in enumerate(places):
        widths[axis] = (pads[index], pads[index + len(places)])
    # Negative widths cut; numpy's pad refuses them.
    cuts = tuple(
        slice(max(0, -before), size - max(0, -after)) for (before, after), size in zip(widths, array.shape, strict=True)
    )
    array = array[cuts]
    widths = [(max(0, before), max(0, after)) for before, after in widths]
    if mode == "constant":
        return call.xp.pad(array, widths, mode="constant", constant_values=fill)
    if mode in ("edge", "reflect", "wrap"):
        return call.xp.pad(array, widths, mode=mode)
    raise ValueError(f"mode {mode} is not supported")


def _non_zero(call: Call) -> Array:
    return call.xp.stack(call.xp.nonzero(call.inputs[0])).astype(call.xp.int64)


OPERATORS: Final[dict[str, Operator]] = {
    "Reshape": Operator(_reshape, host=(1,)),
    "Transpose": Operator(_transpose),
    "Flatten": Operator(_flatten),
    "Squeeze": Operator(_squeeze, host=(1,)),
    "Unsqueeze": Operator(_unsqueeze, host=(1,)),
    "Shape": Operator(_shape),
    "Concat": Operator(_concat),
    "Slice": Operator(_slice, host=(1, 2, 3, 4)),
    "Gather": Operator(_gather, may_refuse=True),
    "Expand": Operator(_expand, host=(1,)),
    "ConstantOfShape": Operator(_constant_of_shape, host=(0,)),
    "Split": Operator(_split, host=(1,)),
    "Pad": Operator(_pad, host=(1, 2, 3)),
    "NonZero": Operator(_non_zero, waits=True),
}
