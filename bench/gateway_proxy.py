"""What the gateway adds to a live call: the same calls to an instant upstream, directly and through ``/v1``.

    .venv/bin/python bench/gateway_proxy.py --seconds 10

Three processes: the upstream, a gateway (one frontend's event loop with its real store, keys and HTTP client) and this
client, which takes turns between both ways, so that a noisy machine disturbs both alike. Then a stream: the upstream
writes the clock into every event, and the client subtracts it from its own; the direct way shows what the measurement
itself costs. Loopback only; prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.connection
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontend.dispatcher import Dispatcher
from frontend.gateway_settings import GatewayModel, GatewaySettings, RouteSettings
from frontend.http import HttpServer
from frontend.httpd.exchange import Exchange
from frontend.openai.development import development_key
from frontend.openai.service import GatewayService
from frontend.settings import EndpointSettings

EVENTS = 400
EVENT_PAUSE_S = 0.01
WARM_UP = 200
JSON = [(b"Content-Type", b"application/json")]
ANSWER = json.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 400}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
}).encode()  # fmt: skip
CALL = json.dumps({"model": "m", "messages": [{"role": "user", "content": "y" * 400}]}).encode()
STREAM_CALL = json.dumps({"model": "m", "messages": [], "stream": True}).encode()


class InstantUpstream:
    """Answers at once, or streams events that carry the time at which they were written."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, exchange: Exchange) -> None:
        return None

    def handle(self, exchange: Exchange) -> None:
        if b'"stream"' not in bytes(exchange.body):
            exchange.respond(200, JSON, [ANSWER])
            return
        task = asyncio.get_running_loop().create_task(self._stream(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self, exchange: Exchange) -> None:
        exchange.start(200, [(b"Content-Type", b"text/event-stream")])
        for _ in range(EVENTS):
            await asyncio.sleep(EVENT_PAUSE_S)
            await exchange.send(b"data: %d\n\n" % time.monotonic_ns())
        await exchange.send(b"data: [DONE]\n\n")
        await exchange.end()

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        return b"text/plain", message.encode()


def run_upstream(ready: multiprocessing.connection.Connection) -> None:
    async def main() -> None:
        server = HttpServer(InstantUpstream(), "127.0.0.1", 0, EndpointSettings())
        ready.send(await server.start())
        await asyncio.Event().wait()

    uvloop.run(main())


def run_gateway(ready: multiprocessing.connection.Connection, upstream_port: int, state_dir: str) -> None:
    async def main() -> None:
        route = RouteSettings(id="r", kind="openai_compatible", endpoint=f"http://127.0.0.1:{upstream_port}/v1")
        settings = GatewaySettings(
            enabled=True, development=True, state_dir=state_dir, models=(GatewayModel(name="m", routes=(route,)),)
        )
        # No call of this benchmark asks for our own worker.
        service = GatewayService(settings, None, {})  # type: ignore[arg-type]
        await service.start()
        await service.door.opened.wait()
        server = HttpServer(Dispatcher({b"v1": service.app}, InstantUpstream()), "127.0.0.1", 0, EndpointSettings())
        ready.send(await server.start())
        await asyncio.Event().wait()

    uvloop.run(main())


class Caller:
    """One connection that reads just enough of an answer to find its end."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._head = b"Host: x\r\nContent-Type: application/json\r\nAuthorization: Bearer " + key.encode() + b"\r\n"

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    def _send(self, body: bytes) -> None:
        self._writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\n" + self._head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        )

    async def call(self) -> float:
        """Return the seconds one call took."""
        began = time.perf_counter()
        self._send(CALL)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        await self._reader.readexactly(length)
        return time.perf_counter() - began

    async def stream(self) -> list[float]:
        """Return the seconds from the upstream's write to our read, per event."""
        self._send(STREAM_CALL)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        delays = []
        while True:
            line = await self._reader.readuntil(b"\n")
            if line.startswith(b"data: [DONE]"):
                await self._reader.readuntil(b"0\r\n\r\n")
                return delays
            if line.startswith(b"data: "):
                delays.append((time.monotonic_ns() - int(line[6:])) / 1e9)


def points(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    found = np.percentile(seconds, [50, 90, 99]) * 1e3
    return {"p50_ms": round(found[0], 3), "p90_ms": round(found[1], 3), "p99_ms": round(found[2], 3), "n": len(seconds)}


async def measure(direct_port: int, gateway_port: int, key: str, seconds: float, streams: int) -> dict[str, Any]:
    direct, through = Caller(direct_port, key), Caller(gateway_port, key)
    await direct.open()
    await through.open()
    for _ in range(WARM_UP):
        await direct.call()
        await through.call()
    took: dict[str, list[float]] = {"direct": [], "gateway": []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        took["direct"].append(await direct.call())
        took["gateway"].append(await through.call())
    delays = {"direct": await direct.stream(), "gateway": await through.stream()}
    many = [Caller(gateway_port, key) for _ in range(streams)]
    await asyncio.gather(*(caller.open() for caller in many))
    crowded = [delay for found in await asyncio.gather(*(caller.stream() for caller in many)) for delay in found]
    added = np.median(took["gateway"]) - np.median(took["direct"])
    return {
        "calls": {name: points(found) for name, found in took.items()},
        "added_p50_ms": round(float(added) * 1e3, 3),
        "event_delay": {name: points(found) for name, found in delays.items()},
        f"event_delay_{streams}_streams": points(crowded),
    }


def start(target: Any, *args: Any) -> tuple[multiprocessing.Process, int]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    if not ours.poll(60):
        raise TimeoutError(f"{target.__name__} did not start")
    return process, ours.recv()  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=16, help="streams at once in the last part")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as state_dir:
        key = development_key(Path(state_dir))
        upstream, upstream_port = start(run_upstream)
        gateway, gateway_port = start(run_gateway, upstream_port, state_dir)
        try:
            found = uvloop.run(measure(upstream_port, gateway_port, key, arguments.seconds, arguments.streams))
        finally:
            for process in (gateway, upstream):
                process.terminate()
                process.join()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
