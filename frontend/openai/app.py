"""The OpenAI-compatible surface over HTTP: an ``Application`` for everything under ``/v1``.

Files and batch jobs are applications of their own, mounted by their first path segment. Every answer carries
``X-Request-Id``; every error has OpenAI's shape, also those found below this application.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from engines.errors import ServingError
from frontend.httpd.body import BodySink
from frontend.httpd.exchange import Application, ClientDisconnected, Exchange
from frontend.httpd.wire import Headers
from frontend.openai import bodies
from frontend.openai.answers import AnswerStream, new_request_id, unknown_model
from frontend.openai.auth import Authenticator, Forbidden
from frontend.openai.calls import EMBEDDINGS, MODEL_ENDPOINTS, GatewayCall, UpstreamAnswer
from frontend.openai.errors import ApiError, error_body, render, type_of
from frontend.openai.execution import Gateway
from frontend.openai.principal import Principal, Role

log = logging.getLogger(__name__)

JSON: Final = (b"Content-Type", b"application/json")
LIMIT_NAME: Final = "gateway.max_body_bytes"
_ENDPOINTS: Final = {endpoint.encode(): endpoint for endpoint in MODEL_ENDPOINTS}
_MODELS: Final = b"/v1/models"
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACE: Final = {b"traceparent": "traceparent", b"tracestate": "tracestate", b"openai-beta": "OpenAI-Beta"}
"""Headers of a client that go upstream; nothing else does, least of all its Authorization."""
_TRACE_VALUE: Final = re.compile(rb"[\x20-\x7e]{1,512}")
Answer = Callable[[Principal], Coroutine[Any, Any, None] | None]
"""Answers for a known caller, at once or by what it returns."""
_STREAM_HEADERS: Final = ((b"Cache-Control", b"no-cache"), (b"X-Accel-Buffering", b"no"))


class OpenAiApp:
    """Answers everything under /v1."""

    def __init__(
        self,
        gateway: Gateway,
        authenticator: Authenticator,
        max_body_bytes: int,
        mounted: Mapping[bytes, Application] | None = None,
    ) -> None:
        """``mounted``: by first segment below /v1, such as ``files``; they authenticate by themselves."""
        self._gateway = gateway
        self._authenticator = authenticator
        self._max_body_bytes = max_body_bytes
        self._mounted = dict(mounted or {})
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, exchange: Exchange) -> BodySink | None:
        """Refuse what will be refused anyway before its body is read; otherwise the body is collected."""
        if (mounted := self._mount(exchange.raw_path)) is not None:
            return mounted.begin(exchange)
        try:
            self._authenticator.remembered(exchange.headers.get(b"authorization"))
            self._check_size(int(exchange.headers.get(b"content-length", b"0")))
        except ServingError as error:
            fail(exchange, error)
        return None

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        if (mounted := self._mount(exchange.raw_path)) is not None:
            mounted.handle(exchange)
            return
        path = exchange.raw_path.removesuffix(b"/")
        endpoint = _ENDPOINTS.get(path)
        if endpoint is not None:
            answer: Answer = partial(self._call, exchange, endpoint)
            allowed: tuple[str, ...] = ("POST",)
        elif path == _MODELS or (path.startswith(_MODELS + b"/") and path != _MODELS + b"/"):
            answer = partial(self._tell_models, exchange, path[len(_MODELS) + 1 :])
            allowed = ("GET", "HEAD")
        else:
            fail(exchange, unknown_url(exchange))
            return
        if exchange.method not in allowed:
            fail(exchange, wrong_method(exchange, allowed))
            return
        self._authenticated(exchange, answer)

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        """Return the error in OpenAI's form, for what the server itself refuses."""
        return JSON[1], error_body(message, type_of(status), None, "request_too_large" if status == 413 else None)

    async def close(self) -> None:
        """Withdraw every call under way; idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _mount(self, raw_path: bytes) -> Application | None:
        if not self._mounted:
            return None
        return self._mounted.get(raw_path[len(b"/v1/") :].partition(b"/")[0])

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise ApiError(
                413, f"request body of {size} bytes exceeds {LIMIT_NAME} = {self._max_body_bytes} bytes",
                code="request_too_large",
            )  # fmt: skip

    def _authenticated(self, exchange: Exchange, answer: Answer) -> None:
        """Go on as whoever calls: at once if the key was seen lately, else when the store has answered."""
        authorization = exchange.headers.get(b"authorization")
        try:
            principal = self._authenticator.remembered(authorization)
        except ServingError as error:
            fail(exchange, error)
            return
        if principal is None:
            self._spawn(exchange, self._when_authenticated(authorization, answer))
        elif (work := answer(principal)) is not None:
            self._spawn(exchange, work)

    async def _when_authenticated(self, authorization: bytes | None, answer: Answer) -> None:
        work = answer(await self._authenticator.authenticate(authorization))
        if work is not None:
            await work

    # Models

    def _tell_models(self, exchange: Exchange, encoded: bytes, principal: Principal) -> None:
        names = self._gateway.model_names()
        if not encoded:
            document: dict[str, Any] = {"object": "list", "data": [_model_object(name) for name in names]}
        else:
            name = unquote(encoded.decode("latin-1"))
            if name not in names:
                fail(exchange, unknown_model(name[:256]))
                return
            document = _model_object(name)
        reply(exchange, 200, [JSON], msgspec.json.encode(document))

    # Calls of models

    def _call(self, exchange: Exchange, endpoint: str, principal: Principal) -> Coroutine[Any, Any, None] | None:
        try:
            if principal.role is Role.AUDITOR:
                raise Forbidden("an auditor's key reads settings and states; it cannot use models")
            encoding = exchange.headers.get(b"content-encoding", b"identity")
            if encoding.lower() != b"identity":
                raise ApiError(415, "send the body without Content-Encoding", code="unsupported_encoding")
            self._check_size(len(exchange.body))
            body = bytes(exchange.body)
            exchange.body = b""
            fields = bodies.read_fields(body)
            streams = endpoint != EMBEDDINGS and bodies.read_flag(fields, "stream")
            call = GatewayCall(
                endpoint, body, bodies.read_text(fields, "model"), principal,
                request_id=request_id(exchange), trace=_trace(exchange.headers),
            )  # fmt: skip
        except ServingError as error:
            fail(exchange, error)
            return None
        return self._stream(exchange, call) if streams else self._answer(exchange, call)

    async def _answer(self, exchange: Exchange, call: GatewayCall) -> None:
        _give(exchange, await self._gateway.execute(call))

    async def _stream(self, exchange: Exchange, call: GatewayCall) -> None:
        answer = await self._gateway.stream(call)
        if isinstance(answer, UpstreamAnswer):
            _give(exchange, answer)
            return
        try:
            await _forward(exchange, answer)
        finally:
            answer.close()

    def _spawn(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_guarded(exchange, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = partial(_cancel, task)


def fail(exchange: Exchange, error: ServingError) -> None:
    """Answer with a failure, in OpenAI's shape."""
    told = render(error)
    headers = [JSON, *((name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in told.headers)]
    reply(exchange, told.status, headers, told.body)


def reply(exchange: Exchange, status: int, headers: Headers, body: bytes) -> None:
    """Answer with a complete body and the request's id."""
    if not any(name.lower() == b"x-request-id" for name, _ in headers):
        headers = [*headers, (b"X-Request-Id", request_id(exchange).encode())]
    exchange.respond(status, headers, [body])


def request_id(exchange: Exchange) -> str:
    """Return the client's own request id if it can be repeated safely, else a new one."""
    given = exchange.headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else new_request_id()


def unknown_url(exchange: Exchange) -> ApiError:
    """Return the error for a path that names nothing."""
    return ApiError(404, f"Unknown request URL: {exchange.method} {exchange.path[:256]}", code="unknown_url")


def wrong_method(exchange: Exchange, allowed: tuple[str, ...]) -> ApiError:
    """Return the error for a method that a path does not have."""
    names = ", ".join(allowed)
    return ApiError(
        405, f"{exchange.method} is not allowed here, expected {names}", code="method_not_allowed",
        headers=(("Allow", names),),
    )  # fmt: skip


def _model_object(name: str) -> dict[str, Any]:
    # When a model was made is not known here; 0 says so, and clients require a number.
    return {"id": name, "object": "model", "created": 0, "owned_by": "ringserve"}


def _give(exchange: Exchange, answer: UpstreamAnswer) -> None:
    headers = [(b"Content-Type", answer.content_type.encode("latin-1")), *_own_headers(answer)]
    reply(exchange, answer.status, headers, answer.body)


def _own_headers(answer: UpstreamAnswer | AnswerStream) -> list[tuple[bytes, bytes]]:
    headers = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in answer.headers]
    headers.append((b"X-Request-Id", answer.request_id.encode("latin-1", "replace")))
    if answer.upstream_request_id and answer.upstream_request_id != answer.request_id:
        headers.append((b"X-Upstream-Request-Id", answer.upstream_request_id.encode()))
    return headers


async def _forward(exchange: Exchange, answer: AnswerStream) -> None:
    """Pass a stream on, piece by piece as it comes; a failure in its middle becomes its last event."""
    headers = [(b"Content-Type", b"text/event-stream; charset=utf-8"), *_STREAM_HEADERS, *_own_headers(answer)]
    exchange.ends_with_input = True
    exchange.start(200, headers)
    ending = b"\n\n"
    pieces = answer.pieces()
    try:
        async for piece in pieces:
            ending = (ending + piece[-2:])[-2:]
            await exchange.send(piece)
    except ServingError as error:
        # What was cut off in the middle of an event is ended first, so that this one can be read.
        before = b"" if ending == b"\n\n" else b"\n\n"
        await exchange.send(before + b"data: " + render(error).body + b"\n\n")
    finally:
        await pieces.aclose()
    await exchange.end()


def _trace(headers: Mapping[bytes, bytes]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, value.decode())
        for key, name in _TRACE.items()
        if (value := headers.get(key)) is not None and _TRACE_VALUE.fullmatch(value)
    )


async def _guarded(exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(ClientDisconnected):
        try:
            await work
        except ServingError as error:
            fail(exchange, error)
        except ClientDisconnected:
            raise
        except Exception:
            log.exception("openai.handler_failed path=%r", exchange.path)
            if not exchange.answered:
                fail(exchange, ApiError(500, "internal error", code="internal_error"))
            elif exchange.streaming:
                exchange.abort()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
