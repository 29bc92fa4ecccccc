"""KServe v2 over HTTP: an ``Application`` over a ``Serving``.

The infer route runs without a task: decoded on arrival, answered by callback, withdrawn when the client goes. What it
sends borrows the response's arrays until the bytes are with the kernel. Nothing is decided by Content-Type: real
clients send none, or the wrong one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from engines.errors import InvalidInput, ServingError, Unavailable, Unsupported
from frontend.explanation import explanation_headers
from frontend.httpd.body import BodySink
from frontend.httpd.exchange import Exchange
from frontend.httpd.wire import Headers, Part
from frontend.inference import InferRequest, InferResponse
from frontend.kserve import http_paths, metadata
from frontend.kserve.body_codec import decode_infer, encode_infer
from frontend.kserve.client_memory import CUDA_TEXT, OFF_TEXT, unknown
from frontend.kserve.compression import ACCEPTED, decompress, read_accepted
from frontend.kserve.direct_body import DIRECT_BYTES, MAX_JSON_BYTES, DirectBody
from frontend.kserve.http_answers import JSON_HEADERS, reply, reply_inferred
from frontend.kserve.http_options import Options, header_length, repeat_options, take_options
from frontend.kserve.http_paths import Operation, Place
from frontend.kserve.repeats import Key, Plan, Plans
from frontend.kserve.status import JSON_TYPE, RETRY_AFTER_S, error_body, status_of
from frontend.serving import Serving
from worker.channel.messages import ModelEntry

log = logging.getLogger(__name__)
_Body = TypeVar("_Body")
Learn = Callable[[InferResponse, Headers, list[Part]], None]
Repeat = Callable[[Plan, Options, Exchange, Part, Callable[[Exchange, ServingError], None]], None]

_ACCEPTED: Final = [(b"Accept-Encoding", ACCEPTED.encode())]
_NO_LIFECYCLE: Final = "explicit model load / unload is not allowed if polling is enabled"


class _IndexBody(msgspec.Struct):
    ready: bool = False


class _RegisterBody(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


class KserveApp:
    """Answers everything under /v2."""

    def __init__(self, serving: Serving, repeat: Repeat | None = None) -> None:
        """``repeat`` runs requests that repeat an earlier one; without it all take the ordinary path."""
        self._serving = serving
        self._repeat = repeat
        self._plans = Plans()
        self._limits = serving.limits
        self._tasks: set[asyncio.Task[None]] = set()
        self._direct: dict[Exchange, DirectBody] = {}
        self._handlers: dict[Operation, Callable[[Exchange, Place], None]] = {
            Operation.SERVER_METADATA: self._server_metadata,
            Operation.SERVER_LIVE: self._server_live,
            Operation.SERVER_READY: self._server_ready,
            Operation.MODEL_METADATA: self._model_metadata,
            Operation.MODEL_READY: self._model_ready,
            Operation.MODEL_CONFIG: self._model_config,
            Operation.MODEL_STATISTICS: self._statistics,
            Operation.ALL_STATISTICS: self._statistics,
            Operation.INFER: self._infer,
            Operation.GENERATE: self._not_offered,
            Operation.INDEX: self._index,
            Operation.NAMED_INDEX: self._named_index,
            Operation.LOAD: self._no_lifecycle,
            Operation.UNLOAD: self._no_lifecycle,
            Operation.MEMORY_STATUS: self._memory_status,
            Operation.MEMORY_REGISTER: self._memory_register,
            Operation.MEMORY_UNREGISTER: self._memory_unregister,
            Operation.CUDA_STATUS: self._cuda_status,
            Operation.CUDA_REGISTER: self._cuda_register,
            Operation.CUDA_UNREGISTER: self._cuda_unregister,
            Operation.TRACE: self._not_offered,
            Operation.LOGGING: self._not_offered,
        }

    def begin(self, exchange: Exchange) -> BodySink | None:
        """Large raw tensors go where the worker reads them; all other bodies are collected in memory."""
        headers = exchange.headers
        body_bytes = int(headers.get(b"content-length", 0))
        if body_bytes < DIRECT_BYTES or exchange.method != "POST":
            return None
        length = headers.get(b"inference-header-content-length", b"")
        json_bytes = int(length) if length.isdigit() and len(length) <= 18 else 0
        place = http_paths.find(exchange.raw_path)
        if place is None or place.operation is not Operation.INFER or b"content-encoding" in headers:
            return None
        if not 0 < json_bytes <= MAX_JSON_BYTES or json_bytes >= body_bytes:
            return None
        return DirectBody(self._serving, exchange, place, json_bytes, self._direct, self._finish)

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        if self._direct and (body := self._direct.pop(exchange, None)) is not None:
            body.handle()
            return
        place = http_paths.find(exchange.raw_path)
        if place is None:
            reply(exchange, 404, JSON_HEADERS, [error_body("Not Found")])
            return
        methods = http_paths.METHODS[place.operation]
        if exchange.method not in methods:
            allow = (b"Allow", ", ".join(methods).encode())
            reply(exchange, 405, [*JSON_HEADERS, allow], [error_body("Method Not Allowed")])
            return
        try:
            self._handlers[place.operation](exchange, place)
        except ServingError as error:
            _fail(exchange, error)

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        """Return the error in KServe's form, for what the server itself refuses."""
        return JSON_TYPE.encode(), error_body(message)

    # Inference

    def _infer(self, exchange: Exchange, place: Place) -> None:
        repeat = self._repeat
        options = None if repeat is None else repeat_options(exchange)
        if repeat is not None and options is not None and (found := self._plans.find(exchange)) is not None:
            key, plan = found
            if plan is not None and self._serving.entry(place.name, place.version) is not plan.rows.entry:
                self._plans.forget(key)
            elif plan is not None and (elements := plan.elements(exchange.body)) is not None:
                exchange.head.handler = partial(self._infer_again, place, plan, options, repeat)
                repeat(plan, options, exchange, elements, _fail)
                return
            self._start(exchange, place, exchange.body, key)
            return
        encoding = exchange.headers.get(b"content-encoding")
        if encoding is None:
            self._start(exchange, place, exchange.body)
        else:
            # A small body may inflate to the limit, which takes too long for the loop.
            self._spawn(exchange, self._inflate(exchange, place, encoding.decode("latin-1")))

    async def _inflate(self, exchange: Exchange, place: Place, encoding: str) -> None:
        loop = asyncio.get_running_loop()
        limit = self._limits.max_request_bytes
        try:
            body = await loop.run_in_executor(None, decompress, exchange.body, encoding, limit)
        except Unsupported as error:
            _fail(exchange, error, _ACCEPTED)
            return
        exchange.on_disconnect = None
        self._start(exchange, place, body)

    def _start(self, exchange: Exchange, place: Place, body: Part, key: Key | None = None) -> None:
        request = decode_infer(place.name, place.version, body, header_length(exchange.headers), self._limits)
        take_options(request, exchange)
        learn = None
        if key is not None:
            with contextlib.suppress(ServingError):  # told below
                entry = self._serving.entry(place.name, place.version)
                learn = partial(self._learn, key, exchange.arrival_ns, body, request, place, entry)
        done = partial(self._finish, exchange, request.binary_default, learn=learn)
        call = self._serving.start(request, exchange.arrival_ns, done)
        if not exchange.answered:
            exchange.on_disconnect = call.cancel

    def _learn(
        self,
        key: Key,
        arrival_ns: int,
        body: Part,
        request: InferRequest,
        place: Place,
        entry: ModelEntry,
        response: InferResponse,
        head: Headers,
        parts: list[Part],
    ) -> None:
        """Learn from an answer, if the model is still the one that gave it."""
        with contextlib.suppress(ServingError):  # gone since
            if self._serving.entry(place.name, place.version) is entry:
                self._plans.learn(key, arrival_ns, body, request, entry, response, head, parts)

    def _infer_again(self, place: Place, plan: Plan, options: Options, repeat: Repeat, exchange: Exchange) -> None:
        """Handle a request whose head is that of one which followed ``plan``, so that only its body is compared."""
        try:
            if self._serving.entry(place.name, place.version) is plan.rows.entry:
                elements = plan.elements(exchange.body)
                if elements is not None:
                    repeat(plan, options, exchange, elements, _fail)
                    return
        except ServingError:
            pass  # told the ordinary way
        exchange.head.handler = None
        self.handle(exchange)

    def _finish(
        self,
        exchange: Exchange,
        binary_default: bool,
        outcome: InferResponse | ServingError,
        learn: Learn | None = None,
    ) -> None:
        """Take what became of a request; never raises, since nobody above could answer."""
        exchange.on_disconnect = None
        if isinstance(outcome, ServingError):
            _fail(exchange, outcome)
            return
        try:
            self._respond(exchange, binary_default, outcome, learn)
        except ServingError as error:
            outcome.release()
            _fail(exchange, error)
        except Exception:
            log.exception("http.answer_failed model=%s", outcome.model)
            outcome.release()
            if not exchange.answered:
                reply(exchange, 500, JSON_HEADERS, [error_body("internal error")])

    def _respond(self, exchange: Exchange, binary_default: bool, response: InferResponse, learn: Learn | None) -> None:
        content, parts = encode_infer(response, binary_default)
        headers = [(name.encode(), value.encode()) for name, value in content]
        if learn is not None:
            learn(response, headers, parts)
        if response.explained:
            headers += explanation_headers(response.parameters)
        accepted = read_accepted(exchange.headers.get(b"accept-encoding"))
        reply_inferred(exchange, headers, parts, accepted, response.release)

    # What is told of server and models

    def _server_metadata(self, exchange: Exchange, place: Place) -> None:
        _json(exchange, metadata.server_metadata(self._limits))

    def _server_live(self, exchange: Exchange, place: Place) -> None:
        live = self._serving.live()
        _json(exchange, {"live": live}, 200 if live else 503)

    def _server_ready(self, exchange: Exchange, place: Place) -> None:
        ready = self._serving.ready()
        _json(exchange, {"ready": ready}, 200 if ready else 503)

    def _model_metadata(self, exchange: Exchange, place: Place) -> None:
        entry = self._serving.entry(place.name, place.version)
        _json(exchange, metadata.model_metadata(entry, self._serving.versions(place.name)))

    def _model_ready(self, exchange: Exchange, place: Place) -> None:
        entry = self._serving.entry(place.name, place.version)
        _json(exchange, {"name": entry.name, "ready": True})

    def _model_config(self, exchange: Exchange, place: Place) -> None:
        _json(exchange, metadata.model_config(self._serving.entry(place.name, place.version)))

    def _statistics(self, exchange: Exchange, place: Place) -> None:
        self._spawn(exchange, self._ask_statistics(exchange, place))

    async def _ask_statistics(self, exchange: Exchange, place: Place) -> None:
        statistics = await self._serving.statistics(place.name, place.version)
        _json(exchange, metadata.statistics_document(statistics))

    def _index(self, exchange: Exchange, place: Place) -> None:
        asked = _parsed(exchange.body, _IndexBody) if len(exchange.body) else _IndexBody()
        _json(exchange, metadata.repository_index(self._serving.entries(), asked.ready))

    # Client shared memory

    def _memory_status(self, exchange: Exchange, place: Place) -> None:
        _json(exchange, self._serving.memory.status(place.name))

    def _memory_register(self, exchange: Exchange, place: Place) -> None:
        memory = self._serving.memory
        if not memory.enabled:
            raise Unsupported(OFF_TEXT)
        asked = _parsed(exchange.body, _RegisterBody)
        self._spawn(exchange, _after(exchange, memory.register(place.name, asked.key, asked.offset, asked.byte_size)))

    def _memory_unregister(self, exchange: Exchange, place: Place) -> None:
        self._spawn(exchange, _after(exchange, self._serving.memory.unregister(place.name)))

    # Known parts of the protocol that are not offered

    def _named_index(self, exchange: Exchange, place: Place) -> None:
        raise Unsupported("'repository_name' specification is not supported")

    def _no_lifecycle(self, exchange: Exchange, place: Place) -> None:
        raise Unavailable(_NO_LIFECYCLE)

    def _cuda_status(self, exchange: Exchange, place: Place) -> None:
        if place.name:
            raise unknown(place.name)
        _json(exchange, [])

    def _cuda_register(self, exchange: Exchange, place: Place) -> None:
        raise Unsupported(CUDA_TEXT)

    def _cuda_unregister(self, exchange: Exchange, place: Place) -> None:
        # Nothing is registered, so all is unregistered; load generators ask for it before they start.
        reply(exchange, 200, [], [])

    def _not_offered(self, exchange: Exchange, place: Place) -> None:
        raise Unsupported(f"{place.operation.name.lower()} is not offered by this server")

    # Inside

    def _spawn(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_guarded(exchange, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = partial(_cancel, task)


async def _guarded(exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except ServingError as error:
        _fail(exchange, error)
    except Exception:
        log.exception("http.handler_failed path=%r", exchange.path)
        if not exchange.answered:
            reply(exchange, 500, JSON_HEADERS, [error_body("internal error")])


async def _after(exchange: Exchange, work: Awaitable[None]) -> None:
    await work
    reply(exchange, 200, [], [])


def _parsed(body: Part, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidInput(f"failed to parse the request JSON buffer: {error}") from error


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _json(exchange: Exchange, document: object, status: int = 200) -> None:
    reply(exchange, status, JSON_HEADERS, [msgspec.json.encode(document)])


def _fail(exchange: Exchange, error: ServingError, headers: Headers = ()) -> None:
    status = status_of(error)
    retry_after_s = status.retry_after_s or (RETRY_AFTER_S if status.http == 503 else None)
    sent = [*JSON_HEADERS, *headers]
    if retry_after_s is not None:
        sent.append((b"Retry-After", b"%d" % retry_after_s))
    reply(exchange, status.http, sent, [error_body(error)])
