"""The ``data`` field of JSON tensors: lists of any nesting to arrays and back, with nothing coerced on the way.

Numbers are first read the quick way, which takes only what is right beyond doubt. Everything else is read again, typed
from the first byte: the number of opening brackets and the datatype choose a decoder that accepts exactly that nesting
and leaf type. Only when it refuses is the text parsed loosely, to say which element is wrong. Elements are taken in
reading order; the nesting must be rectangular but need not repeat the shape, as long as the number of elements fits:
``[1,2,3,4]`` and ``[[1,2],[3,4]]`` are the same tensor of shape [2,2] or [4].
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
import orjson
from msgspec import Raw

from engines.errors import InvalidInput, TooLarge
from engines.tensor import DType, NDArray, element_count
from frontend.inference import OutputTensor
from frontend.kserve.shapes import shaped, text_of

MAX_NESTING: Final = 100
NESTING_TEXT: Final = f"nesting depth exceeds maximum allowed limit ({MAX_NESTING})"
HALF_TYPES: Final = ("FP16", "BF16")
"""Not carried by JSON, in either direction: numbers as text would hide their rounding."""
_TYPED_NESTING: Final = 8
"""Deepest nesting with a decoder of its own; deeper data is legal, rare and takes the slow way."""
_ASK_BINARY: Final = "use the binary data format: request it with parameter 'binary_data' true"
_OPENING: Final = re.compile(rb"[ \t\r\n\[]*")
_LEAVES: Final[dict[str, tuple[type, str]]] = {
    "b": (bool, "a boolean"),
    "f": (float, "a number"),
    "O": (str, "a string"),
}
_INTEGER: Final[tuple[type, str]] = (int, "an integer")
SIMD_BYTES: Final = 2048
"""Shorter texts are not worth the calls around simdjson: of 64 numbers they take 5.2 us, ``struct`` 2.8."""
MAX_SIMD_BYTES: Final = 256 * 1024
"""Longer texts would leave a parser behind that keeps some ten times their size for good."""
_PACKED_AS: Final[dict[str, str]] = {
    "FP32": "f", "FP64": "d", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
}  # fmt: skip
"""Datatypes that are read the quick way, by their letter in ``struct``."""
_SIMD_NUMBERS: Final = {"d": np.dtype(np.float64), "i": np.dtype(np.int64), "u": np.dtype(np.uint64)}


def _simd_parser() -> Any:
    """Return a parser of simdjson, used by one thread; None if it is not installed (extra ``simd``)."""
    try:
        import simdjson
    except ImportError:
        return None
    return simdjson.Parser(MAX_SIMD_BYTES)


_simd: Any = _simd_parser()


def decode_data(name: str, dtype: DType, shape: tuple[int, ...], data: Raw, max_element_bytes: int) -> NDArray:
    """Return the array in a ``data`` field, in ``shape`` and in the datatype's numpy type.

    Raises:
        InvalidInput: wrong number, type or range of elements, ragged or too deep nesting; FP16 and BF16, which JSON
            does not carry.
        TooLarge: a BYTES element longer than ``max_element_bytes``.
    """
    if dtype.wire in HALF_TYPES:
        raise InvalidInput(
            f"input '{name}': sending {dtype.wire} data as JSON is not supported, use the binary data format: "
            "set 'binary_data_size' and append the raw tensor"
        )
    expected = element_count(shape)
    array = _quickly(dtype, expected, data)
    if array is not None:
        return shaped(name, array, shape)
    elements = _elements(name, dtype, data)
    if len(elements) != expected:
        raise InvalidInput(
            f"input '{name}': Shape does not match true shape of 'data' field: "
            f"shape {text_of(shape)} holds {expected} elements, data holds {len(elements)}"
        )
    return shaped(name, _array(name, dtype, elements, max_element_bytes), shape)


def encode_data(output: OutputTensor) -> list[Any] | Raw:
    """Return the flat list that stands for an output in JSON, or its rendering: as few digits as tell a number exactly.

    Raises:
        InvalidInput: JSON cannot carry it; says to ask for the binary form.
    """
    array = output.array.reshape(-1)
    if output.datatype in HALF_TYPES:
        raise InvalidInput(half_output_text(output.name, output.datatype))
    if array.dtype.hasobject:
        return _strings(output.name, array)
    return Raw(numbers_text(output.name, array))


def half_output_text(name: str, datatype: str) -> str:
    """Return why an FP16 or BF16 output cannot be told in JSON, and what to ask for."""
    return f"output '{name}': {datatype} data cannot be sent as JSON, {_ASK_BINARY}"


def numbers_text(name: str, array: NDArray) -> bytes:
    """Return the list that stands for a flat array of numbers in JSON: as few digits as tell each exactly.

    Raises:
        InvalidInput: one is NaN or infinite, which JSON cannot carry.
    """
    text = orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
    # NaN and infinity come out as null, and no number has an "n".
    if array.dtype.kind == "f" and b"n" in text:
        at = int(np.flatnonzero(~np.isfinite(array))[0])
        raise InvalidInput(f"output '{name}': element {at} is {array[at]}, which JSON cannot carry; {_ASK_BINARY}")
    return text


def pack_quickly(dtype: DType, expected: int, text: bytes, room: memoryview | bytearray) -> bool:
    """Write the ``expected`` elements of a list to ``room``; False where it is not beyond doubt that they fit.

    Of 1,024 numbers this takes 20 us, with simdjson 12, a typed decoder and ``numpy.array`` 40: numpy looks at every
    object of a list three times, ``struct`` once. It also refuses what is out of range or of another type, except for
    booleans; floats beyond their range only in its standard form (``<``).
    """
    letter = _PACKED_AS.get(dtype.wire)
    if letter is None:
        return False
    if _simd is not None and SIMD_BYTES <= len(text) <= MAX_SIMD_BYTES and text.rfind(b"[") == 0:
        return _pack_by_simd(_simd, dtype, expected, text, room)
    # true or false, which would pass for 1 and 0.
    if b"t" in text or b"f" in text:
        return False
    try:
        elements = _flattened(orjson.loads(text))
        if elements is None or len(elements) != expected:
            return False
        struct.pack_into(f"<{expected}{letter}", room, 0, *elements)
    except (ValueError, TypeError, OverflowError, struct.error):
        return False
    return True


def _pack_by_simd(parser: Any, dtype: DType, expected: int, text: bytes, room: memoryview | bytearray) -> bool:
    """``pack_quickly`` of a text whose only opening bracket is its first byte: no object is made per number."""
    kind = "d" if dtype.numpy.kind == "f" else "u" if dtype.wire == "UINT64" else "i"
    try:
        elements = np.frombuffer(parser.parse(text).as_buffer(of_type=kind), dtype=_SIMD_NUMBERS[kind])
    except (ValueError, TypeError, RuntimeError):
        return False
    if len(elements) != expected:
        return False
    written = np.frombuffer(room, dtype=dtype.numpy)
    with np.errstate(over="ignore"):
        written[:] = elements
    if kind == "d":
        return bool(np.isfinite(written).all())
    return dtype.itemsize == 8 or bool((written == elements).all())


def _quickly(dtype: DType, expected: int, data: Raw) -> NDArray | None:
    """Return the (expected,) elements of ``data`` if it is beyond doubt that they are what the datatype holds."""
    # No more elements than bytes: a shape may claim any number.
    if not 0 < expected < len(memoryview(data)):
        return None
    array = np.empty(expected, dtype=dtype.numpy)
    return array if pack_quickly(dtype, expected, bytes(memoryview(data)), array.data) else None


def _flattened(tree: Any) -> list[Any] | None:
    """Return the leaves of a list, or of a rectangular list of lists; None if it is neither, or deep.

    Leaves are lists or parts of strings where kinds of elements are mixed.

    Raises:
        TypeError: elements stand beside lists.
    """
    for _ in range(_TYPED_NESTING):
        if type(tree) is not list:
            return None
        if not tree or type(tree[0]) is not list:
            return tree
        if len(tree) == 1:
            tree = tree[0]
        elif len(set(map(len, tree))) > 1:
            return None
        else:
            tree = list(chain.from_iterable(tree))
    return None


@lru_cache(maxsize=64)
def _decoder(leaf: type, depth: int) -> msgspec.json.Decoder[Any]:
    nested: Any = leaf
    for _ in range(depth):
        nested = list[nested]
    return msgspec.json.Decoder(nested)


def _elements(name: str, dtype: DType, data: Raw) -> list[Any]:
    text = memoryview(data)
    opening = _OPENING.match(text)
    depth = opening.group().count(b"[") if opening else 0
    if depth == 0:
        raise InvalidInput(f"input '{name}': Unable to parse 'data': attempt to access JSON non-array as array")
    if depth > MAX_NESTING:
        raise InvalidInput(f"input '{name}': Unable to parse 'data': {NESTING_TEXT}")
    leaf, expected = _LEAVES.get(dtype.numpy.kind, _INTEGER)
    if depth > _TYPED_NESTING:
        return _elements_slowly(name, dtype, text, leaf, expected)
    try:
        elements = _decoder(leaf, depth).decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return _elements_slowly(name, dtype, text, leaf, expected)
    for _ in range(depth - 1):
        if len(set(map(len, elements))) > 1:
            _refuse_ragged(name, elements)
        elements = list(chain.from_iterable(elements))
    return elements  # type: ignore[no-any-return]


def _elements_slowly(name: str, dtype: DType, text: memoryview, leaf: type, expected: str) -> list[Any]:
    """Return the leaves of deeply nested data, or say which element does not fit."""
    try:
        tree = msgspec.json.decode(text)
    except RecursionError as error:
        raise InvalidInput(f"input '{name}': Unable to parse 'data': {NESTING_TEXT}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidInput(f"input '{name}': Unable to parse 'data': {error}") from error
    level: list[Any] = [tree]
    for depth in range(MAX_NESTING + 1):
        lists = sum(type(item) is list for item in level)
        if lists == 0:
            break
        if lists != len(level):
            raise InvalidInput(
                f"input '{name}': 'data' is ragged: lists and elements stand side by side at depth {depth}"
            )
        if len(set(map(len, level))) > 1:
            _refuse_ragged(name, level)
        level = list(chain.from_iterable(level))
    else:
        raise InvalidInput(f"input '{name}': Unable to parse 'data': {NESTING_TEXT}")
    accepted = (int, float) if leaf is float else (leaf,)
    for index, element in enumerate(level):
        if type(element) not in accepted:
            shown = msgspec.json.encode(element)[:80].decode("utf-8", "replace")
            raise InvalidInput(
                f"input '{name}': Unable to parse 'data': element {index} must be {expected} for datatype "
                f"'{dtype.wire}', got {shown}"
            )
    return level


def _refuse_ragged(name: str, lists: list[list[Any]]) -> NoReturn:
    lengths = sorted(set(map(len, lists)))
    raise InvalidInput(
        f"input '{name}': 'data' is ragged: lists of {lengths[0]} and of {lengths[-1]} entries stand side by side"
    )


def _array(name: str, dtype: DType, elements: list[Any], max_element_bytes: int) -> NDArray:
    match dtype.numpy.kind:
        case "O":
            return _bytes_array(name, elements, max_element_bytes)
        case "b":
            return np.array(elements, dtype=np.bool_)
        case "f":
            return _float_array(name, dtype, elements)
        case _:
            return _integer_array(name, dtype, elements)


def _float_array(name: str, dtype: DType, elements: list[Any]) -> NDArray:
    try:
        with np.errstate(over="ignore"):
            array = np.array(elements, dtype=np.float64).astype(dtype.numpy, copy=False)
    except OverflowError:
        array = np.array([np.inf])
    # JSON has no infinity, so one here is a number too large for the datatype.
    if not np.isfinite(array).all():
        raise InvalidInput(f"input '{name}': an element of 'data' is out of the range of {dtype.wire}")
    return array


def _integer_array(name: str, dtype: DType, elements: list[int]) -> NDArray:
    bounds = np.iinfo(dtype.numpy)
    try:
        return np.array(elements, dtype=dtype.numpy)
    except OverflowError as error:
        at = next(index for index, element in enumerate(elements) if not bounds.min <= element <= bounds.max)
        raise InvalidInput(
            f"input '{name}': element {at} is {elements[at]}, {dtype.wire} holds {bounds.min} to {bounds.max}"
        ) from error


def _bytes_array(name: str, elements: list[str], max_element_bytes: int) -> NDArray:
    array = np.empty(len(elements), dtype=np.object_)
    for index, element in enumerate(elements):
        raw = element.encode()
        if len(raw) > max_element_bytes:
            raise TooLarge(
                f"input '{name}': element {index} is {len(raw)} bytes, "
                f"the limit max_bytes_element is {max_element_bytes}"
            )
        array[index] = raw
    return array


def _strings(name: str, array: NDArray) -> list[str]:
    try:
        return [element if isinstance(element, str) else bytes(element).decode() for element in array.tolist()]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"output '{name}': an element is not UTF-8 text, {_ASK_BINARY}") from error
