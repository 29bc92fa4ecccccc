"""Tensor element types and their three names: manifest (``f32``), wire (``FP32``), numpy (``float32``).

Everything is little-endian and row-major. BYTES exists only between clients and hooks: on the wire each element is a
u32 little-endian length followed by that many bytes (KServe v2, binary tensor data extension); in a hook it is an
object array of ``bytes``. It never enters shared memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from engines.errors import InvalidInput, TooLarge

NDArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: manifest name, such as ``f32``.
        wire: KServe v2 datatype, such as ``FP32``.
        itemsize: bytes per element; 0 for BYTES, whose elements differ in length.
        numpy: numpy dtype; ``object`` for BYTES.
    """

    name: str
    wire: str
    itemsize: int
    numpy: np.dtype[Any]


def _row(name: str, wire: str, numpy: Any) -> DType:
    dtype = np.dtype(numpy)
    return DType(name, wire, 0 if dtype.hasobject else dtype.itemsize, dtype)


DTYPES: Final[tuple[DType, ...]] = (
    _row("bool", "BOOL", np.bool_),
    _row("u8", "UINT8", np.uint8),
    _row("u16", "UINT16", np.uint16),
    _row("u32", "UINT32", np.uint32),
    _row("u64", "UINT64", np.uint64),
    _row("i8", "INT8", np.int8),
    _row("i16", "INT16", np.int16),
    _row("i32", "INT32", np.int32),
    _row("i64", "INT64", np.int64),
    _row("f16", "FP16", np.float16),
    _row("bf16", "BF16", ml_dtypes.bfloat16),
    _row("f32", "FP32", np.float32),
    _row("f64", "FP64", np.float64),
    _row("bytes", "BYTES", np.object_),
)
BY_NAME: Final[dict[str, DType]] = {dtype.name: dtype for dtype in DTYPES}
BY_WIRE: Final[dict[str, DType]] = {dtype.wire: dtype for dtype in DTYPES}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a model looks like.

    Attributes:
        name: the tensor's name in the model file or in ``client_inputs`` / ``client_outputs``.
        dtype: manifest name of the element type.
        shape: full shape in axis order; -1 marks the batch axis and variable axes.
        batch_axis: index of the batch axis in ``shape``, or None.
        limits: per axis, the largest size of an output axis whose size depends on the data; 0 elsewhere.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    batch_axis: int | None
    limits: tuple[int, ...] = ()

    @property
    def element(self) -> DType:
        """The element type's row of the dtype table."""
        return BY_NAME[self.dtype]


def element_count(shape: Sequence[int]) -> int:
    """Product of a fully known shape; 1 for a scalar."""
    count = 1
    for size in shape:
        count *= size
    return count


def encode_bytes(elements: NDArray) -> bytes:
    """Serialise an array of ``bytes`` or ``str`` objects in row-major order, each with its u32 length."""
    parts: list[bytes] = []
    for element in elements.ravel(order="C").tolist():
        raw = element.encode() if isinstance(element, str) else bytes(element)
        parts.append(struct.pack("<I", len(raw)))
        parts.append(raw)
    return b"".join(parts)


def decode_bytes(raw: memoryview | bytes, count: int, name: str, max_element_bytes: int) -> NDArray:
    """Parse ``count`` length-prefixed elements that fill ``raw`` exactly; return a 1-D object array of ``bytes``.

    Raises:
        InvalidInput: too few or too many bytes or elements; names the tensor.
        TooLarge: an element is longer than ``max_element_bytes``.
    """
    view = memoryview(raw)
    end = len(view)
    at = 0
    elements: list[bytes] = []
    while at < end:
        if end - at < 4:
            raise InvalidInput(
                f"input '{name}': incomplete string length indicator: expected 4 bytes at offset {at}, got {end - at}"
            )
        (length,) = struct.unpack_from("<I", view, at)
        at += 4
        if length > max_element_bytes:
            raise TooLarge(
                f"input '{name}': element {len(elements)} is {length} bytes, "
                f"the limit max_bytes_element is {max_element_bytes}"
            )
        if length > end - at:
            raise InvalidInput(
                f"input '{name}': incomplete string data: element {len(elements)} says {length} bytes, "
                f"only {end - at} left"
            )
        elements.append(bytes(view[at : at + length]))
        at += length
        if len(elements) > count:
            break
    if len(elements) != count:
        got = f"more than {count}" if len(elements) > count else str(len(elements))
        raise InvalidInput(f"input '{name}': unexpected number of string elements: expected {count}, got {got}")
    array = np.empty(count, dtype=np.object_)
    array[:] = elements
    return array
