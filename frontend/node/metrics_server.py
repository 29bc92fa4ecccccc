"""The metrics port: figures of all processes, and the truth about whether this node can answer."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from frontend.http import HttpServer
from frontend.httpd.body import BodySink
from frontend.httpd.exchange import Exchange
from frontend.node import ports
from frontend.node.accept_loop import AcceptLoop
from frontend.node.node_state import Verdict
from frontend.node.status import NodeStatus
from frontend.settings import EndpointSettings
from worker.channel.node_link import State

log = logging.getLogger("node")

MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 64 * 1024
JSON = b"application/json"
_METHODS = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the answers come from.

    Attributes:
        scrape: Accept header -> exposition and its content type, with fresh figures.
        status: fresh status of the node.
        verdict: the node's state now.
    """

    scrape: Callable[[str], Awaitable[tuple[bytes, str]]]
    status: Callable[[], Awaitable[NodeStatus]]
    verdict: Callable[[], Verdict]


class MetricsServer:
    """Serves /metrics, /healthz, /readyz and /status until closed."""

    def __init__(self, host: str, port: int, sources: Sources) -> None:
        limits = EndpointSettings(max_connections=MAX_CONNECTIONS, max_request_bytes=MAX_REQUEST_BYTES)
        self._server = HttpServer(_Pages(sources), host, port, limits)
        self._address = (host, port)
        self._accepting: AcceptLoop | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            PortError: the port cannot be had.
        """
        await self._server.start(listen=False)
        self._accepting = AcceptLoop(ports.shared(*self._address, "metrics_port"), self._server.adopt)
        self._accepting.start()

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.close()
        await self._server.close()


class _Pages:
    """The application behind the metrics port."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, exchange: Exchange) -> BodySink | None:
        return None

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        return JSON, msgspec.json.encode({"error": message})

    def handle(self, exchange: Exchange) -> None:
        path = exchange.path
        if path not in ("/metrics", "/healthz", "/readyz", "/status"):
            _answer(exchange, 404, {"error": "Not Found; here are /metrics, /healthz, /readyz, /status"})
        elif exchange.method not in _METHODS:
            _answer(exchange, 405, {"error": f"expected GET or HEAD, got {exchange.method}"}, (b"Allow", b"GET, HEAD"))
        elif path == "/healthz":
            _answer(exchange, 200, {"live": True})
        elif path == "/readyz":
            verdict = self._sources.verdict()
            ready = verdict.state is State.READY
            body = {"ready": ready, "state": verdict.state.value, "reasons": verdict.reasons}
            _answer(exchange, 200 if ready else 503, body)
        else:
            task = asyncio.ensure_future(self._answer_later(exchange, path))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer_later(self, exchange: Exchange, path: str) -> None:
        try:
            if path == "/status":
                _answer(exchange, 200, msgspec.to_builtins(await self._sources.status()))
                return
            accept = exchange.headers.get(b"accept", b"").decode("latin-1")
            body, content_type = await self._sources.scrape(accept)
            headers = [(b"Content-Type", content_type.encode()), (b"Vary", b"Accept, Accept-Encoding")]
            if _takes_gzip(exchange.headers.get(b"accept-encoding", b"")):
                # Level 1: figures compress tenfold at any level, and the node should not spend time on it.
                body = gzip.compress(body, compresslevel=1, mtime=0)
                headers.append((b"Content-Encoding", b"gzip"))
            exchange.respond(200, headers, [body])
        except Exception:
            log.exception("metrics.failed path=%s", path)
            if not exchange.answered:
                _answer(exchange, 500, {"error": "the figures could not be rendered; the node's log says why"})


def _answer(exchange: Exchange, status: int, body: object, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"Content-Type", JSON), (b"Cache-Control", b"no-store"), *more]
    exchange.respond(status, headers, [msgspec.json.encode(body)])


def _takes_gzip(accept_encoding: bytes) -> bool:
    """Return whether a client wants gzip; ``gzip;q=0`` refuses it."""
    for part in accept_encoding.lower().split(b","):
        coding, _, parameters = part.partition(b";")
        if coding.strip() in (b"gzip", b"x-gzip", b"*"):
            quality = parameters.strip().removeprefix(b"q=")
            return not quality or quality.strip(b"0.") != b""
    return False
