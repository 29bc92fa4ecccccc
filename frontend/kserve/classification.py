"""Classification extension: the best classes of an output as strings ``value:index``."""

from __future__ import annotations

import numpy as np

from engines.errors import InvalidInput
from engines.tensor import NDArray
from frontend.inference import OutputTensor


def classify(output: OutputTensor) -> OutputTensor:
    """Return the BYTES tensor that stands for an output with ``classification`` = n.

    Shape (c,) gives (n,); an output with more axes gives (rows, n), over all elements of each entry of its first axis.
    Best first, ties by lower index, NaN last; n is cut to the number of elements. Bundles carry no labels, so none
    is appended.

    Raises:
        InvalidInput: the output has no order (BOOL, BYTES).
    """
    if output.datatype in ("BOOL", "BYTES"):
        raise InvalidInput(
            f"output '{output.name}': classification needs a numeric output, its datatype is '{output.datatype}'"
        )
    array = output.array
    rows = array.reshape(array.shape[0], -1) if array.ndim > 1 and array.size else array.reshape(1, -1)
    listed = [_best(row, output.classification) for row in rows]
    width = len(listed[0])
    classes = np.empty((len(listed), width), dtype=np.object_)
    for index, texts in enumerate(listed):
        classes[index, :] = texts
    if array.ndim > 1:
        shape: tuple[int, ...] = (array.shape[0], width)
        classes = classes if array.size else np.empty(shape, dtype=np.object_)
    else:
        shape = (width,)
    return OutputTensor(output.name, "BYTES", classes.reshape(shape), output.binary)


def _best(row: NDArray, count: int) -> list[bytes]:
    is_float = row.dtype.kind not in "iu"
    values = row.astype(np.float64) if is_float else row
    keys = np.where(np.isnan(values), -np.inf, values) if is_float else values
    # Sorting the mirrored row keeps equal values in index order once the result is turned round.
    order = len(keys) - 1 - np.argsort(keys[::-1], kind="stable")[::-1]
    form = "%f:%d" if is_float else "%d:%d"
    return [(form % (values[index], index)).encode() for index in order[:count]]
