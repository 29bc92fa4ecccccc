"""Checks of one tensor list of a manifest: names, element types, axis letters and sizes.

Axis letters: ``n`` is the batch axis, at most once per tensor and at any place; every other letter belongs to its
tensor alone and has a size in ``dims``, where -1 marks a variable axis. ``max`` limits an executable output's axis
whose size depends on the data.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Final

from engines.bundle.document import shown
from engines.bundle.manifest import (
    BATCH_LETTER,
    MAX_AXIS_SIZE,
    MAX_TENSOR_AXES,
    MAX_TENSOR_NAME_BYTES,
    MAX_TENSORS,
    Problem,
)
from engines.bundle.signature import MAX_AXES
from engines.tensor import BY_NAME, BY_WIRE, TensorSpec

TENSOR_KEYS: Final = ("name", "dtype", "shape", "dims", "max")
MAX_TOLD_NAMES: Final = 20
"""Names a message lists before it says how many are left."""


class Notes:
    """The problems of one file, as they are found."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []

    def add(self, key: str, expected: str, found: str, fix: str) -> None:
        self.problems.append(Problem(self.file, key, expected, found, fix))

    def unknown_keys(self, value: dict[Any, Any], known: Iterable[str], at: str) -> None:
        """Note every key that is not one of ``known``, with the one that was probably meant."""
        known = tuple(known)
        for key in value:
            if key not in known:
                meant = close_match(key, known)
                fix = f"write {meant!r}" if meant else f"remove it; the keys here are {', '.join(known)}"
                self.add(join(at, key), "a known key", f"unknown key {shown(key)}", fix)


def join(at: str, key: Any) -> str:
    """Return the path of ``key`` inside ``at``."""
    text = key if isinstance(key, str) else str(key)
    text = text.encode("utf-8", "backslashreplace").decode()[:MAX_TENSOR_NAME_BYTES]
    return f"{at}.{text}" if at else text


def close_match(word: Any, known: Iterable[str]) -> str:
    """Return the one of ``known`` that was probably meant, or nothing."""
    if not isinstance(word, str) or len(word) > MAX_TENSOR_NAME_BYTES:
        return ""
    found = difflib.get_close_matches(word.lower(), tuple(known), n=1, cutoff=0.6)
    return found[0] if found else ""


def is_integer(value: Any) -> bool:
    """Whether a YAML value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def tensor_list(value: Any, at: str, notes: Notes) -> tuple[TensorSpec, ...] | None:
    """Return the tensors of the list at key ``at``, or None after noting what is wrong with it."""
    example = "one entry per tensor, such as [{name: x, dtype: f32, shape: nc, dims: {c: 3}}]"
    if not isinstance(value, list) or not value:
        notes.add(at, "a list of tensors", "an empty list" if value == [] else shown(value), f"write {example}")
        return None
    if len(value) > MAX_TENSORS:
        notes.add(at, f"at most {MAX_TENSORS} tensors", f"{len(value)}", "join tensors in the model")
        return None
    specs = [_tensor(entry, f"{at}[{index}]", at, notes) for index, entry in enumerate(value)]
    first: dict[str, int] = {}
    for index, entry in enumerate(value):
        name = entry.get("name") if isinstance(entry, dict) else None
        if isinstance(name, str) and first.setdefault(name, index) != index:
            found = f"{shown(name)}, also at {at}[{first[name]}]"
            notes.add(f"{at}[{index}].name", "every name once", found, "give the tensor its own name")
    known = [spec for spec in specs if spec is not None]
    return tuple(known) if len(known) == len(specs) else None


def _tensor(entry: Any, at: str, section: str, notes: Notes) -> TensorSpec | None:
    before = len(notes.problems)
    if not isinstance(entry, dict):
        notes.add(at, "a tensor", shown(entry), "write {name: x, dtype: f32, shape: nc, dims: {c: 3}}")
        return None
    notes.unknown_keys(entry, TENSOR_KEYS, at)
    name = _name(entry, at, notes)
    dtype = _dtype(entry, at, section, notes)
    letters = _letters(entry, at, notes)
    sizes = _sizes(entry.get("dims"), letters, at, notes)
    limits = _limits(entry, letters, sizes, at, section, notes)
    if len(notes.problems) > before or name is None or dtype is None or letters is None:
        return None
    shape = tuple(-1 if letter == BATCH_LETTER else sizes[letter] for letter in letters)
    batch_axis = letters.index(BATCH_LETTER) if BATCH_LETTER in letters else None
    by_axis = tuple(limits.get(letter, 0) for letter in letters) if limits else ()
    return TensorSpec(name, dtype, shape, batch_axis, by_axis)


def _name(entry: dict[Any, Any], at: str, notes: Notes) -> str | None:
    name = entry.get("name")
    if isinstance(name, str) and name:
        try:
            if len(name.encode()) <= MAX_TENSOR_NAME_BYTES:
                return name
            notes.add(f"{at}.name", f"at most {MAX_TENSOR_NAME_BYTES} bytes", f"{len(name.encode())}", "shorten it")
        except UnicodeEncodeError:
            notes.add(f"{at}.name", "valid Unicode", "a lone surrogate", "write the character itself, or rename it")
        return None
    if name is None or name == "":
        found = "nothing" if name is None else "an empty text"
        notes.add(f"{at}.name", "the tensor's name", found, "add name: NAME")
    else:
        notes.add(f"{at}.name", "a name", shown(name), f'put it in quotes: name: "{shown(name)}"')
    return None


def _dtype(entry: dict[Any, Any], at: str, section: str, notes: Notes) -> str | None:
    dtype = entry.get("dtype")
    client = section.startswith("client")
    known = [name for name in BY_NAME if client or name != "bytes"]
    if isinstance(dtype, str) and dtype in known:
        return dtype
    if dtype == "bytes":
        notes.add(
            f"{at}.dtype",
            f"a dtype of fixed size: {', '.join(known)}",
            "'bytes', which only client tensors may have",
            "turn bytes into numbers in preprocess, and declare the bytes tensor under client_inputs",
        )
        return None
    wire = BY_WIRE.get(dtype.upper()) if isinstance(dtype, str) else None
    numpy = {str(row.numpy): row.name for row in BY_NAME.values()}
    text = dtype if isinstance(dtype, str) else ""
    meant = wire.name if wire else numpy.get(text, "") or close_match(text, known)
    fix = f"write {meant}" if meant in known else "choose one of these"
    notes.add(f"{at}.dtype", f"one of {', '.join(known)}", shown(dtype), fix)
    return None


def _letters(entry: dict[Any, Any], at: str, notes: Notes) -> str | None:
    """Return the letters, also of a shape with mistakes noted, as long as sizes can be compared with them."""
    key = f"{at}.shape"
    shape = entry.get("shape")
    if not isinstance(shape, str):
        fix = 'write shape: nchw with dims: {c: 3, h: 224, w: 224}; shape: "" for a scalar'
        notes.add(key, "axis letters", shown(shape), fix)
        return None
    odd = sorted({letter for letter in shape if not ("a" <= letter <= "z")})
    if odd:
        small = shape.lower()
        fix = f"write {small}" if small.isascii() and small.isalpha() else "use other letters"
        notes.add(key, "letters a to z, one per axis", f"{shown(shape)} with {shown(''.join(odd))}", fix)
        return None
    if len(shape) > MAX_TENSOR_AXES:
        notes.add(key, f"at most {MAX_TENSOR_AXES} axes", f"{len(shape)}", "flatten axes in the model")
    repeated = sorted({letter for letter in shape if shape.count(letter) > 1})
    for letter in repeated:
        found = f"{letter!r} {shape.count(letter)} times in {shape!r}"
        if letter == BATCH_LETTER:
            notes.add(key, "at most one batch axis n", found, "give the axes that are not the batch other letters")
        else:
            notes.add(key, "each letter once", found, "give every axis its own letter, also where sizes are equal")
    return shape


def _sizes(dims: Any, letters: str | None, at: str, notes: Notes) -> dict[str, int]:
    """Return the size of every letter whose size is right."""
    key = f"{at}.dims"
    if dims is None:
        dims = {}
    if not isinstance(dims, dict):
        notes.add(key, "sizes by letter", shown(dims), "write dims: {c: 3, h: -1}")
        return {}
    sizes: dict[str, int] = {}
    for letter, size in dims.items():
        here = join(key, letter)
        if letter == BATCH_LETTER:
            notes.add(
                here, "no size for the batch letter n", shown(size), "list sizes in batching.compiled_batch_sizes"
            )
        elif letters is not None and (not isinstance(letter, str) or len(letter) != 1 or letter not in letters):
            notes.add(here, f"a letter of shape {letters!r}", shown(letter), "remove it, or add its letter to shape")
        elif is_integer(size) and (size == -1 or 1 <= size <= MAX_AXIS_SIZE):
            sizes[letter] = size
        else:
            notes.add(here, f"-1 (variable) or 1 to {MAX_AXIS_SIZE}", shown(size), "write the axis's size")
    for letter in letters or "":
        if letter != BATCH_LETTER and letter not in dims:
            notes.add(
                join(key, letter), f"a size for axis {letter!r}", "nothing", f"add {letter}: SIZE, or {letter}: -1"
            )
    return sizes


def _limits(
    entry: dict[Any, Any], letters: str | None, sizes: dict[str, int], at: str, section: str, notes: Notes
) -> dict[str, int]:
    key = f"{at}.max"
    limits = entry.get("max")
    if limits is None:
        return {}
    if section != "executable_outputs":
        fix = "remove it; input_shapes lists the sizes of inputs" if section == "executable_inputs" else "remove it"
        notes.add(key, "max on executable_outputs only", f"max in {section}", fix)
        return {}
    if not isinstance(limits, dict) or not limits:
        notes.add(key, "largest sizes by letter", shown(limits), "write max: {k: 100}")
        return {}
    if letters is not None and len(letters) > MAX_AXES:
        fix = "flatten axes in the model"
        notes.add(key, f"at most {MAX_AXES} axes on an output with max", f"{len(letters)}", fix)
    for letter, limit in limits.items():
        here = join(key, letter)
        if not isinstance(letter, str) or (letters is not None and letter not in letters) or letter == BATCH_LETTER:
            found = shown(letter)
            notes.add(here, f"a letter of shape {letters!r} other than n", found, "name the axis that varies")
        elif not is_integer(limit) or not 1 <= limit <= MAX_AXIS_SIZE:
            notes.add(here, f"1 to {MAX_AXIS_SIZE}", shown(limit), "write the largest size the model may return")
        elif sizes.get(letter, -1) != -1:
            found = f"dims.{letter}: {sizes[letter]}"
            notes.add(
                here, "dims of -1 for an axis with a max", found, f"write {letter}: -1 in dims, or remove the max"
            )
    return {letter: limit for letter, limit in limits.items() if isinstance(letter, str) and is_integer(limit)}
