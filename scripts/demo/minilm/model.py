"""Hook of the MiniLM bundle: texts to token numbers, padded to the smallest served sequence length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engines.errors import InvalidInput

LENGTHS = (16, 32, 64, 128, 256)
"""The served sequence lengths, as under ``input_shapes`` in the manifest. Longer texts are cut, as by its makers."""


def load(path: str) -> Tokenizer:
    """Return the tokenizer of the bundle in ``path``."""
    tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LENGTHS[-1])
    return tokenizer


def preprocess(inputs: dict[str, np.ndarray], ctx: Any) -> dict[str, np.ndarray]:
    """``TEXT`` (n UTF-8 texts) to ``ids``, ``mask``, ``types``, each int64 (n, length)."""
    encodings = ctx.state.encode_batch([_decode(text, row) for row, text in enumerate(inputs["TEXT"])])
    longest = max((len(encoding.ids) for encoding in encodings), default=0)
    length = next(length for length in LENGTHS if length >= longest)
    ids = np.zeros((len(encodings), length), np.int64)
    mask = np.zeros_like(ids)
    for row, encoding in enumerate(encodings):
        ids[row, : len(encoding.ids)] = encoding.ids
        mask[row, : len(encoding.ids)] = 1
    return {"ids": ids, "mask": mask, "types": np.zeros_like(ids)}


def _decode(text: bytes, row: int) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"TEXT row {row} is not UTF-8: byte {error.start} cannot be read") from None
