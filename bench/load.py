"""Load for any KServe v2 server: closed loop (a number of callers) or open loop (arrivals by the clock).

    .venv/bin/python bench/load.py --model mlp25m --protocol http-binary --concurrency 64 --seconds 10
    .venv/bin/python bench/load.py --model mlp25m --protocol grpc --rate 500 --seconds 10

Closed loop finds the peak; each caller sends its next request when it has its answer. Open loop shows latency as users
see it: requests are sent at Poisson arrivals whether or not earlier ones were answered, and latency counts from the
arrival that was due, so a stalled server cannot hide its stall. Bodies are rendered once; the client parses just enough
of an answer to find its end and its status. Bounded in time and in requests; loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import uvloop

MAX_SECONDS = 600
MAX_CONCURRENCY = 1024
MAX_PENDING = 20_000
"""Open-loop requests that may be unanswered; beyond it arrivals are counted as not sent, and the result says so."""

Send = Callable[[], Awaitable[str]]


@dataclass
class Result:
    """What a run saw. ``latencies_s`` of answers with status ok only."""

    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    not_sent: int = 0

    def summary(self) -> dict[str, Any]:
        """Return rates and percentiles as a JSON-ready value."""
        ok = self.statuses.get("ok", 0)
        points = np.percentile(self.latencies_s, [50, 90, 99, 99.9]) * 1e3 if self.latencies_s else [0.0] * 4
        return {
            "seconds": round(self.seconds, 3),
            "ok_per_s": round(ok / self.seconds, 1) if self.seconds else 0.0,
            "errors": {status: count for status, count in self.statuses.items() if status != "ok"},
            "not_sent": self.not_sent,
            "p50_ms": round(float(points[0]), 3),
            "p90_ms": round(float(points[1]), 3),
            "p99_ms": round(float(points[2]), 3),
            "p999_ms": round(float(points[3]), 3),
        }


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._need = -1
        self._waiter: asyncio.Future[tuple[int, bytes]] | None = None
        self._status = 0
        self._head = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: uvloop's transports do not inherit from asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._need < 0:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            self._status = int(head[9:12])
            # With the line's start: Inference-Header-Content-Length ends alike.
            at = head.find(b"\r\ncontent-length:")
            length = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self._head = end + 4
            self._need = self._head + length
        if len(self._buffer) >= self._need:
            body = bytes(self._buffer[self._head : self._need])
            del self._buffer[: self._need]
            self._need = -1
            waiter, self._waiter = self._waiter, None
            if waiter is not None and not waiter.done():
                waiter.set_result((self._status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(ConnectionResetError("the server closed the connection"))

    async def call(self, request: bytes) -> tuple[int, bytes]:
        """Send a rendered request; return status and body."""
        assert self.transport is not None
        if self.transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._waiter


async def connect(host: str, port: int) -> HttpConnection:
    """Open a connection."""
    _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, host, port)
    return connection


def http_request(path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """Render a POST once, to be sent many times."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def binary_infer(model: str, inputs: dict[str, tuple[str, np.ndarray]], **parameters: Any) -> bytes:
    """Render an inference request in the binary extension; ``inputs`` maps names to (datatype, array)."""
    header: dict[str, Any] = {
        "inputs": [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": datatype,
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, (datatype, array) in inputs.items()
        ],
        "parameters": {"binary_data_output": True, **parameters},
    }
    head = json.dumps(header).encode()
    body = head + b"".join(array.tobytes() for _, array in inputs.values())
    return http_request(f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": str(len(head))})


def json_infer(model: str, inputs: dict[str, tuple[str, np.ndarray]]) -> bytes:
    """Render an inference request in JSON."""
    body = {
        "inputs": [
            {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.ravel().tolist()}
            for name, (datatype, array) in inputs.items()
        ]
    }
    return http_request(f"/v2/models/{model}/infer", json.dumps(body).encode())


async def http_senders(host: str, port: int, request: bytes, count: int) -> list[Send]:
    """Return ``count`` senders, each with a connection of its own."""

    def sender(connection: HttpConnection) -> Send:
        async def send() -> str:
            status, _ = await connection.call(request)
            return "ok" if status == 200 else str(status)

        return send

    return [sender(await connect(host, port)) for _ in range(count)]


async def grpc_senders(
    host: str, port: int, model: str, inputs: dict[str, tuple[str, np.ndarray]], count: int
) -> list[Send]:
    """Return ``count`` senders over as many channels as a client library would open for them."""
    import grpc
    from tritonclient.grpc import InferInput
    from tritonclient.grpc._utils import _get_inference_request

    tensors = []
    for name, (datatype, array) in inputs.items():
        tensor = InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    raw = _get_inference_request(
        model_name=model, inputs=tensors, model_version="", request_id="", outputs=None, sequence_id=0,
        sequence_start=False, sequence_end=False, priority=0, timeout=None, parameters=None,
    ).SerializeToString()  # fmt: skip
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]

    def sender(call: Any) -> Send:
        async def send() -> str:
            try:
                await call(raw)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "ok"

        return send

    senders = []
    for _ in range(count):
        channel = grpc.aio.insecure_channel(f"{host}:{port}", options=options)
        senders.append(sender(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")))
    return senders


async def closed_loop(senders: list[Send], seconds: float, warm_up_s: float = 1.0) -> Result:
    """Let every sender send its next request as soon as it has an answer."""
    result = Result()
    begin = time.perf_counter() + warm_up_s
    end = begin + seconds

    async def caller(send: Send) -> None:
        while (started := time.perf_counter()) < end:
            status = await send()
            finished = time.perf_counter()
            if begin <= started and finished <= end:
                result.statuses[status] += 1
                if status == "ok":
                    result.latencies_s.append(finished - started)

    await asyncio.gather(*(caller(send) for send in senders))
    result.seconds = seconds
    return result


async def open_loop(senders: list[Send], rate_per_s: float, seconds: float, seed: int = 1) -> Result:
    """Send at Poisson arrivals; an arrival that finds every sender busy waits for one, and its wait counts."""
    result = Result()
    free: asyncio.Queue[Send] = asyncio.Queue()
    for send in senders:
        free.put_nowait(send)
    draw = random.Random(seed)
    tasks: set[asyncio.Task[None]] = set()

    async def one(due: float) -> None:
        send = await free.get()
        try:
            status = await send()
        finally:
            free.put_nowait(send)
        result.statuses[status] += 1
        if status == "ok":
            result.latencies_s.append(time.perf_counter() - due)

    start = due = time.perf_counter()
    while due < start + seconds:
        due += draw.expovariate(rate_per_s)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if len(tasks) >= MAX_PENDING:
            result.not_sent += 1
            continue
        task = asyncio.get_running_loop().create_task(one(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    result.seconds = time.perf_counter() - start
    return result


_NUMPY = {"FP32": np.float32, "INT32": np.int32, "INT64": np.int64, "FP64": np.float64, "UINT8": np.uint8}


async def inputs_of(host: str, port: int, model: str, rows: int) -> dict[str, tuple[str, np.ndarray]]:
    """Ask the server what the model takes; return seeded inputs of ``rows`` rows."""
    connection = await connect(host, port)
    status, body = await connection.call(
        f"GET /v2/models/{model} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
    )
    assert connection.transport is not None
    connection.transport.close()
    if status != 200:
        raise SystemExit(f"model {model}: {body.decode(errors='replace')}")
    draw = np.random.default_rng(1)
    made = {}
    for spec in json.loads(body)["inputs"]:
        if spec["datatype"] not in _NUMPY:
            raise SystemExit(f"model {model}: no random {spec['datatype']} inputs; choose a model with numeric inputs")
        shape = [rows if size < 0 else size for size in spec["shape"]]
        made[spec["name"]] = (spec["datatype"], draw.random(shape).astype(_NUMPY[spec["datatype"]]))
    return made


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out one measurement."""
    inputs = await inputs_of(arguments.host, arguments.http_port, arguments.model, arguments.rows)
    if arguments.protocol == "grpc":
        senders = await grpc_senders(
            arguments.host, arguments.grpc_port, arguments.model, inputs, arguments.concurrency
        )
    else:
        render = json_infer if arguments.protocol == "http-json" else binary_infer
        request = render(arguments.model, inputs)
        senders = await http_senders(arguments.host, arguments.http_port, request, arguments.concurrency)
    if arguments.rate:
        result = await open_loop(senders, arguments.rate, arguments.seconds)
    else:
        result = await closed_loop(senders, arguments.seconds)
    return result.summary()


def main() -> None:
    """Parse, run, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", choices=["127.0.0.1", "localhost", "::1"])
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--protocol", choices=["http-json", "http-binary", "grpc"], default="http-binary")
    parser.add_argument("--concurrency", type=int, default=64, help="callers, or open connections with --rate")
    parser.add_argument("--rate", type=float, default=0.0, help="open loop: arrivals per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    if not 0 < arguments.seconds <= MAX_SECONDS or not 0 < arguments.concurrency <= MAX_CONCURRENCY:
        parser.error(f"--seconds up to {MAX_SECONDS}, --concurrency up to {MAX_CONCURRENCY}")
    print(json.dumps(uvloop.run(run(arguments))))


if __name__ == "__main__":
    sys.exit(main())
