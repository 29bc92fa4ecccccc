"""Hooks of the Magika bundle: a file's bytes to the model's features, its scores to a label.

The rules are those of the Magika library in its default, high-confidence mode: a label that the model is not sure of
enough is given as ``txt`` or ``unknown``, and content with fewer than 8 bytes to look at is not shown to the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

MODEL_DECIDES, EMPTY, TEXT, UNKNOWN = range(4)
_GIVEN = {EMPTY: b"empty", TEXT: b"txt", UNKNOWN: b"unknown"}


def load(path: str) -> dict[str, Any]:
    """Return the label table of the bundle in ``path``, with each label's answer and the score it needs."""
    table: dict[str, Any] = json.loads((Path(path) / "labels.json").read_text())
    needed = table["thresholds"]
    text_labels = set(table["text_labels"])
    answers = []
    for label in table["labels"]:
        sure = table["overwrite_map"].get(label, label)
        unsure = "txt" if sure in text_labels else "unknown"
        answers.append((sure.encode(), unsure.encode(), needed.get(label, table["medium_confidence_threshold"])))
    table["answers"] = answers
    return table


def preprocess(inputs: dict[str, np.ndarray], ctx: Any) -> dict[str, np.ndarray]:
    """``CONTENT`` (n files) to ``bytes`` int32 (n, 2048) and ``verdict`` uint8 (n,)."""
    contents = inputs["CONTENT"]
    table = ctx.state
    width = table["beg_size"] + table["end_size"]
    features = np.full((len(contents), width), table["padding_token"], np.int32)
    verdicts = np.zeros(len(contents), np.uint8)
    for row, content in enumerate(contents):
        verdicts[row] = _place(content, features[row], table)
    return {"bytes": features, "verdict": verdicts}


def postprocess(outputs: dict[str, np.ndarray], ctx: Any) -> dict[str, np.ndarray]:
    """Scores float32 (n, labels) and verdicts to ``LABEL`` and ``SCORE``; what the model did not decide scores 1."""
    scores = outputs["target_label"]
    best = scores.argmax(axis=1)
    score = scores[np.arange(len(best)), best].astype(np.float32)
    label = np.empty(len(best), object)
    for row, (index, verdict) in enumerate(zip(best, outputs["verdict_out"], strict=True)):
        if verdict != MODEL_DECIDES:
            label[row], score[row] = _GIVEN[int(verdict)], 1.0
        else:
            sure, unsure, needed = ctx.state["answers"][index]
            label[row] = sure if score[row] >= needed else unsure
    return {"LABEL": label, "SCORE": score}


def _place(content: bytes, features: np.ndarray, table: dict[str, Any]) -> int:
    """Write one file's features over the padding in ``features``; return the verdict."""
    if not content:
        return EMPTY
    block, width, few = table["block_size"], table["beg_size"], table["min_file_size_for_dl"]
    first = content[:block]
    start = first.lstrip()[:width]
    if len(content) < few or len(start) < few:
        return _verdict_on_few(first)
    end = content[-block:].rstrip()[-table["end_size"] :]
    features[: len(start)] = np.frombuffer(start, np.uint8)
    features[len(features) - len(end) :] = np.frombuffer(end, np.uint8)
    return MODEL_DECIDES


def _verdict_on_few(content: bytes) -> int:
    try:
        content.decode()
    except UnicodeDecodeError:
        return UNKNOWN
    return TEXT
