"""Tensors in their wire form: little-endian, row-major, BYTES with length prefixes."""

from __future__ import annotations

import numpy as np

from engines.tensor import NDArray, encode_bytes
from frontend.inference import OutputTensor

Buffer = bytes | bytearray | memoryview


def raw_part(output: OutputTensor) -> Buffer:
    """Return an output's wire form: a byte view of its array where that is contiguous, a copy where it is not."""
    array = output.array
    return encode_bytes(array) if array.dtype.hasobject else raw_bytes(array)


def raw_bytes(array: NDArray) -> Buffer:
    """Return the bytes of an array of fixed-size elements: a view where it is contiguous, a copy where it is not."""
    if array.size == 0:
        return b""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    # Through uint8: numpy cannot export a buffer of bfloat16.
    return array.reshape(-1).view(np.uint8).data
