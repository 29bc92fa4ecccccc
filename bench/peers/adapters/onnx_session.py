"""The model that a peer serves, opened alike in all of them: ONNX Runtime, one thread, no spinning.

Imported by adapters inside the peers' own environments: standard library, numpy and onnxruntime only. Settings come by
environment: PEER_MODEL_FILE, PEER_ROW_SHAPE (comma-separated, without the batch axis), PEER_PORT.
"""

from __future__ import annotations

import os

import numpy as np
import onnxruntime

MAX_BATCH = 32


def port() -> int:
    """Return where to listen, on 127.0.0.1 only."""
    return int(os.environ["PEER_PORT"])


def row_shape() -> tuple[int, ...]:
    """Return the shape of one row."""
    return tuple(int(size) for size in os.environ["PEER_ROW_SHAPE"].split(","))


class OnnxModel:
    """``X`` f32 [n, ...] to ``Y``; one execution at a time."""

    def __init__(self, path: str | None = None) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            path or os.environ["PEER_MODEL_FILE"], options, providers=["CPUExecutionProvider"]
        )

    def run(self, rows: np.ndarray) -> np.ndarray:
        """Return the outputs of a batch."""
        return self._session.run(None, {"X": rows})[0]
