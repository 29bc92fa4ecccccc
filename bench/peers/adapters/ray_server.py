"""Ray Serve with ``@serve.batch`` behind its HAProxy: ``/`` takes bare float32 or, as application/json, {"X": [...]}.

Ray binds to the host's address whatever it is told, so it is started in a network namespace that has nothing but its
own loopback, which this script turns on first. RAY_SERVE_ENABLE_HA_PROXY=1 comes with the environment.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import sys
import threading
from typing import Any

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def turn_loopback_on() -> None:
    """Bring ``lo`` up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


turn_loopback_on()

import numpy as np
import ray
from onnx_session import MAX_BATCH, OnnxModel, port, row_shape
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

QUIET = {"enable_access_log": False, "log_level": "WARNING"}


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.2}, logging_config=QUIET)
class Endpoint:
    def __init__(self) -> None:
        self._model = OnnxModel()
        self._shape = row_shape()

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=0.001)
    async def run(self, rows: list[Any]) -> list[Any]:
        return list(self._model.run(np.stack(rows)))

    async def __call__(self, request: Request) -> Response:
        if request.headers.get("content-type") == "application/json":
            row = np.asarray((await request.json())["X"], np.float32).reshape(self._shape)
            return JSONResponse({"Y": (await self.run(row)).ravel().tolist()})
        row = np.frombuffer(await request.body(), np.float32).reshape(self._shape)
        return Response((await self.run(row)).tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=512 << 20,
        _node_ip_address="127.0.0.1", _temp_dir=os.environ["PEER_SCRATCH"],
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": port()}, proxy_location="HeadOnly", logging_config=QUIET)
    serve.run(Endpoint.bind(), name="model", route_prefix="/", blocking=False)
    stop.wait()
    serve.shutdown()
    ray.shutdown()
    sys.exit(0)
