"""The management API over HTTP: an ``Application`` for everything under ``/api/v1``.

Theory of operation
    One table of endpoints (``endpoints``) is what requests are matched against and what the OpenAPI document is made
    of, so neither can know an endpoint that the other does not. Order of refusals: unknown path 404, method 405, body
    too large 413, caller 401 or 403, then query, body and what the endpoint itself refuses. Whatever a refused call
    would have changed is unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from engines.errors import ServingError
from frontend.httpd.body import BodySink
from frontend.httpd.exchange import ClientDisconnected, Exchange
from frontend.httpd.wire import Part
from frontend.openai.app import JSON, request_id
from frontend.openai.errors import MAX_MESSAGE_BYTES, ApiError, render
from frontend.platform.callers import Callers
from frontend.platform.documents import ErrorBody, ErrorDocument
from frontend.platform.http_calls import (
    LIMIT_NAME,
    MAX_BODY_BYTES,
    Call,
    Endpoint,
    body_too_large,
    read_body,
    read_query,
)
from frontend.platform.openapi import openapi_document
from frontend.platform.versions import HEADER, etag, read_if_match

log = logging.getLogger(__name__)

OPENAPI_PATH: Final = b"/api/v1/openapi.json"
_ALWAYS: Final = ((b"Cache-Control", b"no-store"), (b"X-Content-Type-Options", b"nosniff"))
_READS: Final = frozenset({"GET", "HEAD"})
Work = Coroutine[Any, Any, None]


class PlatformApp:
    """Provides ``Application`` for ``/api``."""

    def __init__(self, callers: Callers, endpoints: Sequence[Endpoint]) -> None:
        self._callers = callers
        self._endpoints = tuple(endpoints)
        self._document = msgspec.json.encode(openapi_document(self._endpoints))
        self._bodies: dict[Exchange, SmallBody] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, exchange: Exchange) -> BodySink | None:
        """Collect a small body; refuse a larger one by its announced length."""
        if int(exchange.headers.get(b"content-length", b"0")) > MAX_BODY_BYTES:
            fail(exchange, body_too_large())
            return None
        body = self._bodies[exchange] = SmallBody(partial(self._bodies.pop, exchange, None))
        return body

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        body = self._bodies.pop(exchange, None)
        if body is not None:
            exchange.body = body.taken()
        try:
            if exchange.raw_path == OPENAPI_PATH and exchange.method in _READS:
                reply(exchange, 200, self._document)
                return
            endpoint, path = self._find(exchange)
        except ServingError as error:
            fail(exchange, error)
            return
        self._spawn(exchange, self._answer(exchange, endpoint, path))

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        """Return the error in this API's form, for what the server itself refuses."""
        return JSON[1], error_document(status, message, None)

    async def close(self) -> None:
        """Give up every request under way; idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, exchange: Exchange) -> tuple[Endpoint, dict[str, str]]:
        method = "GET" if exchange.method == "HEAD" else exchange.method
        segments = exchange.raw_path[1:].split(b"/")
        allowed: set[str] = {"GET", "HEAD"} if exchange.raw_path == OPENAPI_PATH else set()
        for endpoint in self._endpoints:
            path = endpoint.match(segments)
            if path is None:
                continue
            if endpoint.method == method:
                return endpoint, path
            allowed |= {"GET", "HEAD"} if endpoint.method == "GET" else {endpoint.method}
        if not allowed:
            raise ApiError(404, f"no such path: {exchange.method} {exchange.path[:256]}")
        names = ", ".join(sorted(allowed))
        raise ApiError(405, f"{exchange.method} is not allowed here, expected {names}", headers=(("Allow", names),))

    async def _answer(self, exchange: Exchange, endpoint: Endpoint, path: dict[str, str]) -> None:
        principal = await self._callers.principal_of(exchange)
        endpoint.who.admit(principal)
        query = read_query(exchange, endpoint)
        body = read_body(exchange.body, exchange.headers.get(b"content-encoding", b"identity"), endpoint)
        versions = None if endpoint.version is None else read_if_match(exchange.headers.get(HEADER))
        document = await endpoint.handler(Call(principal, path, query, body, versions))
        tag = [] if endpoint.version is None else [(b"ETag", etag(endpoint.version(document)).encode())]
        reply(exchange, 200, msgspec.json.encode(document), tag)

    def _spawn(self, exchange: Exchange, work: Work) -> None:
        task = asyncio.get_running_loop().create_task(_guarded(exchange, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = partial(_cancel_read, exchange, task)


class SmallBody:
    """Provides ``BodySink`` for a body that is kept whole; ``forget`` is called if it never comes whole."""

    max_bytes = MAX_BODY_BYTES
    limit_name = LIMIT_NAME

    def __init__(self, forget: Callable[[], object]) -> None:
        self._forget = forget
        self._collected = bytearray()

    def write(self, chunk: bytes | memoryview) -> Part | None:
        """Take the next bytes."""
        self._collected += chunk
        return None

    def close(self) -> None:
        """The body is complete."""

    def abort(self) -> None:
        """No more will come."""
        self._forget()

    def taken(self) -> bytes:
        """Return the whole body."""
        return bytes(self._collected)


def reply(exchange: Exchange, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Answer with JSON and the request's id."""
    exchange.respond(status, [JSON, *_ALWAYS, *headers, (b"X-Request-Id", request_id(exchange).encode())], [body])


def fail(exchange: Exchange, error: ServingError) -> None:
    """Answer with a failure, unless there was an answer."""
    if exchange.answered:
        return
    told = render(error)
    param = error.param if isinstance(error, ApiError) else None
    headers = [
        (name.encode(), value.encode("latin-1", "replace")) for name, value in told.headers
        if name.lower() != "x-should-retry"
    ]  # fmt: skip
    reply(exchange, told.status, error_document(told.status, str(error), param), headers)


def error_document(status: int, message: str, param: str | None) -> bytes:
    """Return the error envelope as JSON; a long message is cut."""
    raw = (message or "unknown error").encode("utf-8", "replace")[:MAX_MESSAGE_BYTES]
    body = ErrorBody(
        code=str(status), message=raw.decode("utf-8", "ignore"), param=msgspec.UNSET if param is None else param
    )
    return msgspec.json.encode(ErrorDocument(error=body))


async def _guarded(exchange: Exchange, work: Work) -> None:
    with contextlib.suppress(ClientDisconnected):
        try:
            await work
        except ServingError as error:
            fail(exchange, error)
        except ClientDisconnected:
            raise
        except Exception:
            log.exception("platform.handler_failed path=%r", exchange.path)
            fail(exchange, ApiError(500, "internal error"))


def _cancel_read(exchange: Exchange, task: asyncio.Task[None]) -> None:
    # A change goes on: cut off in the middle, nobody would know whether it took place.
    if exchange.method in _READS:
        task.cancel()
