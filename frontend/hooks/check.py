"""Comparing what a hook returned with the tensors the manifest declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from engines.errors import HookFailed
from engines.tensor import NDArray, TensorSpec


def check_tensors(
    declared: Sequence[TensorSpec], arrays: Mapping[str, Any], where: str, *, rows: int | None = None
) -> tuple[dict[str, NDArray], int | None]:
    """Return the arrays in declared order, C-contiguous and little-endian, and their rows along the batch axes.

    BYTES come back as object arrays of ``bytes`` (``str`` elements are encoded as UTF-8). Arrays that are right as they
    are are returned without a copy, so they may be views of shared memory. The rows are None if no declared tensor has
    a batch axis.

    Args:
        where: names the model and the hook, as ``run.place`` does; every message begins with it.
        rows: the number of rows there must be; None if any number will do.

    Raises:
        HookFailed: a tensor is missing, unexpected, or of another type, rank or size; names it, with what was expected
            and what was there.
    """
    _check_names(declared, arrays, where)
    checked: dict[str, NDArray] = {}
    found_rows: int | None = None
    first = ""
    for spec in declared:
        here = f"{where} returned tensor '{spec.name}'"
        array = checked[spec.name] = _array(spec, arrays[spec.name], here)
        _check_shape(spec, array.shape, here)
        if spec.batch_axis is None:
            continue
        count = array.shape[spec.batch_axis]
        if found_rows is not None and count != found_rows:
            raise HookFailed(f"{here}: expected {found_rows} rows as tensor '{first}' has, got {count}")
        found_rows, first = count, first or spec.name
    if rows is not None and found_rows is not None and found_rows != rows:
        raise HookFailed(f"{where} returned {found_rows} rows, expected {rows}: rows must stay one to one, in order")
    return checked, found_rows


def _check_names(declared: Sequence[TensorSpec], arrays: Mapping[str, Any], where: str) -> None:
    names = [spec.name for spec in declared]
    missing = [name for name in names if name not in arrays]
    unexpected = [str(name) for name in arrays if name not in names]
    if not missing and not unexpected:
        return
    parts = [f"{where}: expected tensors {', '.join(names)}"]
    if missing:
        parts.append(f"missing {', '.join(missing)}")
    if unexpected:
        parts.append(f"unexpected {', '.join(unexpected)}")
    if len(missing) == 1 and get_close_matches(missing[0], unexpected, n=1):
        parts.append(f"rename {get_close_matches(missing[0], unexpected, n=1)[0]} to {missing[0]}")
    raise HookFailed("; ".join(parts))


def _array(spec: TensorSpec, value: Any, here: str) -> NDArray:
    if spec.dtype == "bytes":
        return _bytes_array(value, here)
    dtype = spec.element.numpy
    if not isinstance(value, (np.ndarray, np.generic)):
        raise HookFailed(f"{here}: expected a numpy array of {dtype}, got {_type_text(value)}")
    array = np.asarray(value)
    if array.dtype != dtype:
        fix = f"; convert it with .astype(numpy.{dtype})" if spec.dtype != "bf16" and array.dtype.kind in "biuf" else ""
        raise HookFailed(f"{here}: expected dtype {dtype}, got {array.dtype}{fix}")
    return np.asarray(array, order="C")


def _bytes_array(value: Any, here: str) -> NDArray:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "OSU":
        found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else _type_text(value)
        raise HookFailed(f"{here}: expected a numpy array of dtype object holding bytes or str, got {found}")
    elements = value.ravel().tolist()
    changed = value.dtype.kind != "O"
    for index, element in enumerate(elements):
        if isinstance(element, bytes):
            continue
        if not isinstance(element, str):
            raise HookFailed(f"{here}: expected bytes or str in element {index}, got {_type_text(element)}")
        try:
            elements[index] = element.encode()
        except UnicodeEncodeError:
            raise HookFailed(f"{here}: element {index} is text that cannot be written as UTF-8") from None
        changed = True
    if not changed:
        return np.asarray(value, order="C")
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array.reshape(value.shape)


def _check_shape(spec: TensorSpec, shape: tuple[int, ...], here: str) -> None:
    fits = len(shape) == len(spec.shape) and all(
        expected in (-1, size) for expected, size in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(
            "n" if axis == spec.batch_axis else "any" if size == -1 else str(size)
            for axis, size in enumerate(spec.shape)
        )
        raise HookFailed(f"{here}: expected shape [{wanted}], got {list(shape)}")


def _type_text(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
