"""Operators that slide a window over the spatial axes: convolution and pooling, over any number of those axes.

Windows are a strided view [n, c, *out, *kernel] of the padded input; a convolution is then one matrix product
(im2col), a pooling one reduction. The view copies nothing; the product does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

from engines.array.operator import Array, Call, Operator, wide


@dataclass(frozen=True, slots=True)
class _Windows:
    """Sizes of a sliding window, per spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    out: tuple[int, ...]

    @classmethod
    def of(cls, call: Call, sizes: tuple[int, ...], kernel: tuple[int, ...]) -> _Windows:
        """Return the window that a node's attributes describe over spatial ``sizes``."""
        rank = len(sizes)
        strides = tuple(call.attributes.get("strides", (1,) * rank))
        dilations = tuple(call.attributes.get("dilations", (1,) * rank))
        spans = tuple((size - 1) * step + 1 for size, step in zip(kernel, dilations, strict=True))
        auto = call.attributes.get("auto_pad", "NOTSET")
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            wanted = [-(-size // step) for size, step in zip(sizes, strides, strict=True)]
            total = [
                max(0, (count - 1) * step + span - size)
                for count, step, span, size in zip(wanted, strides, spans, sizes, strict=True)
            ]
            smaller = tuple(pad // 2 for pad in total)
            larger = tuple(pad - half for pad, half in zip(total, smaller, strict=True))
            before, after = (smaller, larger) if auto == "SAME_UPPER" else (larger, smaller)
        elif auto == "VALID":
            before = after = (0,) * rank
        else:
            pads = tuple(call.attributes.get("pads", (0,) * 2 * rank))
            before, after = pads[:rank], pads[rank:]
        ceil = bool(call.attributes.get("ceil_mode", 0))
        out = []
        for axis in range(rank):
            room = sizes[axis] + before[axis] + after[axis] - spans[axis]
            count = (-(-room // strides[axis]) if ceil else room // strides[axis]) + 1
            # A window that starts in the padding behind the input does not count.
            if ceil and (count - 1) * strides[axis] >= sizes[axis] + before[axis]:
                count -= 1
            out.append(count)
        return cls(kernel, strides, dilations, before, after, tuple(out))

    def view(self, xp: Any, array: Array, fill: Any) -> Array:
        """Return [n, c, *out, *kernel] over ``array`` [n, c, *spatial], padded with ``fill``."""
        rank = len(self.kernel)
        # With ceil_mode the last window may reach beyond the padding.
        reach = tuple(
            (count - 1) * stride + (size - 1) * step + 1
            for count, stride, size, step in zip(self.out, self.strides, self.kernel, self.dilations, strict=True)
        )
        widths = [(0, 0), (0, 0)]
        for axis in range(rank):
            size, before = array.shape[2 + axis], self.before[axis]
            widths.append((before, max(self.after[axis], reach[axis] - size - before)))
        padded = xp.pad(array, widths, mode="constant", constant_values=fill)
        steps = padded.strides
        return xp.lib.stride_tricks.as_strided(
            padded,
            shape=padded.shape[:2] + self.out + self.kernel,
            strides=steps[:2]
            + tuple(step * stride for step, stride in zip(steps[2:], self.strides, strict=True))
            + tuple(step * dilation for step, dilation in zip(steps[2:], self.dilations, strict=True)),
        )


def _conv(call: Call) -> Array:
    xp, array = call.xp, call.inputs[0]
    values, weights, bias = wide(xp, array), wide(xp, call.inputs[1]), call.input(2)
    groups = call.attributes.get("group", 1)
    rank = array.ndim - 2
    windows = _Windows.of(call, tuple(array.shape[2:]), tuple(weights.shape[2:]))
    view = windows.view(xp, values, 0)
    rows, channels, filters = array.shape[0], array.shape[1] // groups, weights.shape[0] // groups
    outputs = []
    for group in range(groups):
        part = view[:, group * channels : (group + 1) * channels]
        # [n, *out, c, *kernel], then one row per window.
        part = part.transpose(0, *range(2, 2 + rank), 1, *range(2 + rank, 2 + 2 * rank))
        columns = part.reshape(rows, prod(windows.out), channels * prod(windows.kernel))
        kernel = weights[group * filters : (group + 1) * filters].reshape(filters, -1)
        outputs.append(xp.matmul(columns, kernel.T).transpose(0, 2, 1))
    result = outputs[0] if groups == 1 else xp.concatenate(outputs, axis=1)
    result = result.reshape(rows, filters * groups, *windows.out)
    if bias is not None:
        result = result + wide(xp, bias).reshape(1, -1, *(1,) * rank)
    return result.astype(array.dtype, copy=False)


def _max_pool(call: Call) -> Array:
    array = call.inputs[0]
    if call.output_count > 1:
        raise ValueError("the second output, Indices, is not supported")
    windows = _Windows.of(call, tuple(array.shape[2:]), tuple(call.attributes["kernel_shape"]))
    values = wide(call.xp, array)
    lowest = -call.xp.inf if values.dtype.kind == "f" else call.xp.iinfo(values.dtype).min
    view = windows.view(call.xp, values, lowest)
    return view.max(axis=tuple(range(-len(windows.kernel), 0))).astype(array.dtype, copy=False)


def _average_pool(call: Call) -> Array:
    xp, array = call.xp, call.inputs[0]
    windows = _Windows.of(call, tuple(array.shape[2:]), tuple(call.attributes["kernel_shape"]))
    values = wide(xp, array)
    folded = tuple(range(-len(windows.kernel), 0))
    total = windows.view(xp, values, 0).sum(axis=folded)
    ones = xp.ones((1, 1, *array.shape[2:]), values.dtype)
    if call.attributes.get("count_include_pad", 0):
        # Padding counts, what ceil_mode reaches beyond it does not.
        widths = [(0, 0), (0, 0), *zip(windows.before, windows.after, strict=True)]
        padded = xp.pad(ones, widths, mode="constant", constant_values=1)
        inner = _Windows(
            windows.kernel, windows.strides, windows.dilations, (0,) * len(folded), (0,) * len(folded), windows.out
        )
        count = inner.view(xp, padded, 0).sum(axis=folded)
    else:
        count = windows.view(xp, ones, 0).sum(axis=folded)
    return (total / count).astype(array.dtype, copy=False)


def _global_average_pool(call: Call) -> Array:
    array = call.inputs[0]
    mean = wide(call.xp, array).mean(axis=tuple(range(2, array.ndim)), keepdims=True)
    return mean.astype(array.dtype, copy=False)


def _global_max_pool(call: Call) -> Array:
    array = call.inputs[0]
    return array.max(axis=tuple(range(2, array.ndim)), keepdims=True)


OPERATORS: Final[dict[str, Operator]] = {
    "Conv": Operator(_conv, multiplies=True),
    "MaxPool": Operator(_max_pool),
    "AveragePool": Operator(_average_pool),
    "GlobalAveragePool": Operator(_global_average_pool),
    "GlobalMaxPool": Operator(_global_max_pool),
}
