"""A ``Manifest`` as the text of a ``manifest.yaml`` that reads back as an equal value."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Final

from engines.bundle.manifest import BATCH_LETTER, DEFAULT_MODEL_FILE, Manifest
from engines.tensor import TensorSpec

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_AMBIGUOUS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y"})
"""Words that some YAML reader takes for something else than text. The batch letter alone is written as it is."""


def to_yaml(manifest: Manifest) -> str:
    """Return a manifest a person can save and edit; parsing it gives ``manifest`` back, with ``derived`` False.

    Axis letters are not part of a manifest's value, so new ones are made up.
    """
    lines = ['format_version: "1"']
    if manifest.engine != "auto":
        lines.append(f"engine: {manifest.engine}")
    lines += _tensors("executable_inputs", manifest.inputs)
    lines += _tensors("executable_outputs", manifest.outputs)
    if manifest.batch_sizes != (0,):
        lines.append(f"batching: {{compiled_batch_sizes: {list(manifest.batch_sizes)}}}")
    if manifest.input_shapes:
        lines.append(f"input_shapes: {[list(sizes) for sizes in manifest.input_shapes]}")
    if manifest.client_inputs != manifest.inputs:
        lines += _tensors("client_inputs", manifest.client_inputs)
    if manifest.client_outputs != manifest.outputs:
        lines += _tensors("client_outputs", manifest.client_outputs)
    if manifest.hooks != "thread":
        lines.append(f"hooks: {{mode: {manifest.hooks}}}")
    if manifest.task:
        lines.append(f"task: {manifest.task}")
    if manifest.model_file != DEFAULT_MODEL_FILE:
        lines.append(f"model: {_scalar(manifest.model_file)}")
    return "\n".join(lines) + "\n"


def _tensors(key: str, specs: Sequence[TensorSpec]) -> list[str]:
    return [f"{key}:", *(f"  - {_tensor(spec)}" for spec in specs)]


def _tensor(spec: TensorSpec) -> str:
    letters = _letters(spec)
    sized = [(letter, size) for letter, size in zip(letters, spec.shape, strict=True) if letter != BATCH_LETTER]
    parts = [f"name: {_scalar(spec.name)}", f"dtype: {spec.dtype}", f"shape: {_scalar(letters)}"]
    if sized:
        parts.append(f"dims: {{{', '.join(f'{letter}: {size}' for letter, size in sized)}}}")
    limited = [(letter, limit) for letter, limit in zip(letters, spec.limits, strict=False) if limit]
    if limited:
        parts.append(f"max: {{{', '.join(f'{letter}: {limit}' for letter, limit in limited)}}}")
    return f"{{{', '.join(parts)}}}"


def _letters(spec: TensorSpec) -> str:
    """Return one letter per axis: ``n`` for the batch; ``chw`` for what looks like images, else a, b, c, ..."""
    others = len(spec.shape) - (spec.batch_axis is not None)
    image = others == 3 and spec.batch_axis == 0 and spec.shape[1] in (1, 3, 4)
    pool = iter("chw" if image else [letter for letter in string.ascii_lowercase if letter != BATCH_LETTER])
    return "".join(BATCH_LETTER if axis == spec.batch_axis else next(pool) for axis in range(len(spec.shape)))


def _scalar(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _AMBIGUOUS:
        return text
    return f'"{"".join(_escaped(character) for character in text)}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if " " <= character <= "~":
        return character
    code = ord(character)
    # JSON's surrogate pairs would not do: YAML readers take each half for a character of its own.
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
