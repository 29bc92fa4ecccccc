"""mosec: its front hands bodies to one Python worker a route, which decodes, stacks and runs: ``/raw`` and ``/json``.

Started with ``--wait 0``: a ``max_wait_time`` of 0 counts as unset there and falls back to that option. Classes are
importable and bound to nothing, since workers are spawned. Only one route is used at a time.
"""

from __future__ import annotations

import json

import numpy as np
from mosec import Runtime, Server, Worker
from onnx_session import MAX_BATCH, OnnxModel, row_shape


class RawWorker(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._model = OnnxModel()
        self._shape = row_shape()

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.float32).reshape(self._shape)

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        return list(self._model.run(np.stack(data)))

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()


class JsonWorker(RawWorker):
    def deserialize(self, data: bytes) -> np.ndarray:
        return np.asarray(json.loads(data)["X"], np.float32).reshape(self._shape)

    def serialize(self, data: np.ndarray) -> bytes:
        return json.dumps({"Y": data.ravel().tolist()}).encode()


if __name__ == "__main__":
    server = Server()
    server.register_runtime(
        {
            "/raw": [Runtime(RawWorker, num=1, max_batch_size=MAX_BATCH, max_wait_time=0)],
            "/json": [Runtime(JsonWorker, num=1, max_batch_size=MAX_BATCH, max_wait_time=0)],
        }
    )
    server.run()
