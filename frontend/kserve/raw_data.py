"""Tensors in their wire form: little-endian, row-major, BYTES with length prefixes."""

from __future__ import annotations

import numpy as np

from engines.tensor import encode_bytes
from frontend.inference import OutputTensor

Buffer = bytes | bytearray | memoryview


def raw_part(output: OutputTensor) -> Buffer:
    """Return an output's wire form: a byte view of its array where that is contiguous, a copy where it is not."""
    array = output.array
    if array.dtype.hasobject:
        return encode_bytes(array)
    if array.size == 0:
        return b""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    # Through uint8: numpy cannot export a buffer of bfloat16.
    return array.reshape(-1).view(np.uint8).data
