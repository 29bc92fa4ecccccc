"""Shapes and tensor counts as clients state them, proven before anything is sized by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from engines.errors import InvalidInput, TooLarge
from engines.tensor import BY_WIRE, DType, NDArray
from frontend.settings import EndpointSettings

MAX_RANK: Final = 32
"""More axes than any model has; numpy itself stops at 64."""


def read_shape(name: str, sizes: Iterable[int]) -> tuple[int, ...]:
    """Return a tensor's shape; sizes are non-negative Python integers of any magnitude.

    Raises:
        InvalidInput: a negative size, or more than ``MAX_RANK`` axes.
    """
    shape = tuple(sizes)
    if len(shape) > MAX_RANK:
        raise InvalidInput(f"input '{name}': Unable to parse 'shape': at most {MAX_RANK} axes, got {len(shape)}")
    if shape and min(shape) < 0:
        raise InvalidInput(
            f"input '{name}': Unable to parse 'shape': All input dimensions should be specified "
            f"as non-negative integers, got {text_of(shape)}"
        )
    return shape


def read_datatype(name: str, datatype: str) -> DType:
    """Return the element type of a wire datatype.

    Raises:
        InvalidInput: unknown; lists the known ones.
    """
    dtype = BY_WIRE.get(datatype)
    if dtype is None:
        raise InvalidInput(f"invalid datatype for input {name}: got '{datatype}', expected one of {', '.join(BY_WIRE)}")
    return dtype


def shaped(name: str, array: NDArray, shape: tuple[int, ...]) -> NDArray:
    """Return a flat array of the right length in its shape.

    Raises:
        InvalidInput: numpy cannot express the shape (a size beyond the address space beside a 0).
    """
    try:
        return array.reshape(shape)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"unexpected shape for input '{name}': {text_of(shape)} is too large") from error


def text_of(shape: Sequence[int]) -> str:
    """Return ``[-1,16]``, the way clients print shapes."""
    return "[" + ",".join(map(str, shape)) + "]"


def refuse_large(size_bytes: int, limits: EndpointSettings) -> None:
    """Raise TooLarge if a body or message is over the limit that both protocols share."""
    if size_bytes > limits.max_request_bytes:
        raise TooLarge(
            f"request of {size_bytes} bytes exceeds the maximum allowed input size: "
            f"max_request_bytes is {limits.max_request_bytes}"
        )


def refuse_many(count: int, what: str, limits: EndpointSettings) -> None:
    """Raise TooLarge if a request names more inputs or outputs than ``max_tensors``."""
    if count > limits.max_tensors:
        raise TooLarge(f"request has {count} {what}, the limit max_tensors is {limits.max_tensors}")
