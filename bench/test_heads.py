"""What a small request costs between its bytes and an application, by how its head is understood, without sockets.

Run: ``pytest bench/test_heads.py``. Figures are per request and its answer; compare columns of one run only. The same
from ``.venv/compiled`` measures it compiled, as ``scripts/serve`` runs it.
"""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Any

import pytest

from frontend.httpd.body import BodySink
from frontend.httpd.exchange import Exchange
from frontend.httpd.hangup import HangupWatch
from frontend.httpd.protocol import Connection
from frontend.httpd.state import ServerState
from frontend.settings import EndpointSettings

MESSAGE = (
    b"POST /v2/models/mlp25m/infer HTTP/1.1\r\nHost: serving.example:8000\r\nAccept: */*\r\n"
    b"Accept-Encoding: gzip, deflate\r\nUser-Agent: python-requests/2.32.3\r\n%b: 00-%032x-%016x-01\r\n"
    b"Content-Type: application/json\r\nContent-Length: 256\r\n\r\n" + b"x" * 256
)
"""Of a traced client; the figures in it are drawn anew for each request."""
NAMES = {"parsed": b"x-drawn", "same bytes": b"traceparent", "another trace": b"traceparent"}


class Answering:
    """An application that answers at once."""

    def begin(self, exchange: Exchange) -> BodySink | None:
        return None

    def handle(self, exchange: Exchange) -> None:
        exchange.head.handler = self.handle
        exchange.respond_ready(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n", [])

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        raise AssertionError(message)


class Swallowing:
    """A transport that counts what is written."""

    writes = 0

    def write(self, data: bytes) -> None:
        self.writes += 1

    def set_write_buffer_limits(self, high: int) -> None: ...

    def is_closing(self) -> bool:
        return False


@pytest.mark.parametrize("how", NAMES)
def test_request(benchmark: Any, how: str) -> None:
    loop = asyncio.new_event_loop()
    state = ServerState(Answering(), EndpointSettings(), lambda: 1, HangupWatch(loop), 1 << 30, lambda: None)
    connection, transport = Connection(state), Swallowing()
    connection.connection_made(transport)  # type: ignore[arg-type]
    messages = cycle([MESSAGE % (NAMES[how], number, number) for number in range(1 if how == "same bytes" else 16)])
    asked = 0

    def run() -> None:
        nonlocal asked
        asked += 1
        connection.data_received(next(messages))

    benchmark(run)
    connection.connection_lost(None)
    loop.close()
    assert transport.writes == asked == state.counters.answers[2]
