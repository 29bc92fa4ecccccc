"""Just enough of protobuf's wire format to take one repeated bytes field out of a message without copying it."""

from __future__ import annotations

from typing import Final

VARINT: Final = 0
FIXED_64: Final = 1
LENGTH_DELIMITED: Final = 2
FIXED_32: Final = 5
_MAX_VARINT_BYTES: Final = 10


def varint(value: int) -> bytes:
    """Return a non-negative integer as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def key(field: int, wire_type: int) -> bytes:
    """Return what stands before a field's value."""
    return varint(field << 3 | wire_type)


def cut_field(
    data: bytes | bytearray | memoryview, field: int, most_fields: int
) -> tuple[bytes, list[memoryview], int] | None:
    """Cut every value of a length-delimited top-level field out of a message.

    Returns:
        The message without the field, the values as views of ``data`` in their order, and the number of top-level
        fields; the walk ends as soon as that exceeds ``most_fields`` (the first two are then incomplete). None if
        the message is malformed or holds groups: protobuf itself should judge it.
    """
    view = memoryview(data)
    values: list[memoryview] = []
    rest: list[memoryview] = []
    kept_from = 0
    at = 0
    end = len(data)
    fields = 0
    wanted = field << 3 | LENGTH_DELIMITED
    while at < end:
        fields += 1
        if fields > most_fields:
            break
        start = at
        try:
            tag, at = read_varint(data, at)
            wire_type = tag & 7
            if wire_type == LENGTH_DELIMITED:
                size, at = read_varint(data, at)
                if tag == wanted and at + size <= end:
                    rest.append(view[kept_from:start])
                    values.append(view[at : at + size])
                    kept_from = at + size
                at += size
            elif wire_type == VARINT:
                _, at = read_varint(data, at)
            elif wire_type in (FIXED_64, FIXED_32):
                at += 8 if wire_type == FIXED_64 else 4
            else:
                return None
        except (IndexError, ValueError):
            return None
        if at > end:
            return None
    rest.append(view[kept_from:])
    return b"".join(rest), values, fields


def read_varint(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    """Return a varint and where it ends.

    Raises:
        IndexError: the data ends within it.
        ValueError: it is longer than varints are.
    """
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("varint of more than ten bytes")


def skip_field(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    """Return the number of the field that begins at a position, and where it ends.

    Raises:
        IndexError: the data ends within it.
        ValueError: it is malformed, or a group.
    """
    tag, at = read_varint(data, at)
    wire_type = tag & 7
    if wire_type == LENGTH_DELIMITED:
        size, at = read_varint(data, at)
        at += size
    elif wire_type == VARINT:
        _, at = read_varint(data, at)
    elif wire_type in (FIXED_64, FIXED_32):
        at += 8 if wire_type == FIXED_64 else 4
    else:
        raise ValueError(f"wire type {wire_type}")
    if at > len(data):
        raise IndexError(at)
    return tag >> 3, at
