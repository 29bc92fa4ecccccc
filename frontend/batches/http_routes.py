"""``/v1/files`` and ``/v1/batches`` over HTTP: paths, queries, answers; what they mean is in ``files`` and ``jobs``.

``mount`` gives the application to join under ``/v1``. Uploads stream: the body goes through a ``BodyPipe`` to a task
that authenticates first, so that nothing of a stranger's file touches the disk. Every refusal but 503 tells SDKs not to
send it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Coroutine, Mapping
from functools import partial
from typing import Any, Final, Literal, cast
from urllib.parse import parse_qsl

import msgspec

from engines.errors import ServingError
from frontend.batches.batch_requests import batch_object, read_idempotency_key, read_request, report_document
from frontend.batches.body_pipe import BodyPipe
from frontend.batches.filenames import attachment
from frontend.batches.files import Files, file_object
from frontend.batches.jobs import Created, Jobs
from frontend.batches.multipart import OVERHEAD_BYTES
from frontend.batches.objects import ObjectCorrupt, ObjectMissing, StorageUnavailable
from frontend.batches.prospects import Prospects
from frontend.batches.store.rows import FileRow
from frontend.batches.validation import InvalidBatchInput
from frontend.httpd.body import BodySink
from frontend.httpd.exchange import Application, ClientDisconnected, Exchange
from frontend.openai.app import JSON, reply, request_id, unknown_url, wrong_method
from frontend.openai.auth import Authenticator, Forbidden
from frontend.openai.errors import ApiError, error_body, render, type_of
from frontend.openai.principal import Principal, Role

log = logging.getLogger(__name__)

MAX_CREATE_BYTES: Final = 256 * 1024
MAX_FILES_PAGE: Final = 10_000
MAX_BATCHES_PAGE: Final = 100
DEFAULT_BATCHES_PAGE: Final = 20
STORAGE_RETRY_SECONDS: Final = 5
LIMIT_NAME: Final = "gateway.files.max_file_bytes"
_NO_RETRY: Final = ("x-should-retry", "false")
_RANGE: Final = re.compile(rb"bytes=(\d{0,18})-(\d{0,18})")
_ID_CHARS: Final = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_NUMBER: Final = re.compile(r"\d{1,9}")
Work = Coroutine[Any, Any, None]


def mount(app: FilesAndBatches) -> dict[bytes, Application]:
    """Return what goes under ``/v1``, by first path segment."""
    return {b"files": app, b"batches": app}


class FilesAndBatches:
    """Provides ``Application`` for both APIs."""

    def __init__(
        self, authenticator: Authenticator, files: Files, jobs: Jobs, prospects: Prospects | None = None
    ) -> None:
        self._authenticator = authenticator
        self._files = files
        self._jobs = jobs
        self._prospects = prospects
        self._tasks: set[asyncio.Task[None]] = set()
        self._uploads: set[Exchange] = set()

    def begin(self, exchange: Exchange) -> BodySink | None:
        """Stream an upload; collect a small body; refuse what is too large by its announced length."""
        announced = int(exchange.headers.get(b"content-length", b"0"))
        if _segments(exchange) == [b"files"] and exchange.method == "POST":
            # The form adds a little to its file; what passes here is measured again as it comes.
            if announced > self._files.max_file_bytes + OVERHEAD_BYTES:
                _fail(exchange, self._files.too_large())
                return None
            pipe = BodyPipe(exchange, (1 << 62), LIMIT_NAME)
            self._uploads.add(exchange)
            self._spawn(exchange, self._receive(exchange, pipe))
            return pipe
        if announced > MAX_CREATE_BYTES:
            _fail(exchange, _body_too_large())
        return None

    def handle(self, exchange: Exchange) -> None:
        """Answer one request; an upload's task answers by itself."""
        if exchange in self._uploads:
            return
        try:
            work = self._route(exchange)
        except ServingError as error:
            _fail(exchange, error)
            return
        self._spawn(exchange, work)

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        """Return the error in OpenAI's form, for what the server itself refuses."""
        return JSON[1], error_body(message, type_of(status), None, "request_too_large" if status == 413 else None)

    async def close(self) -> None:
        """Give up every request under way; idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _route(self, exchange: Exchange) -> Work:
        reads = ("GET", "HEAD")
        match _segments(exchange):
            case [b"files"]:
                _allow(exchange, "GET", "HEAD", "POST")
                if exchange.method == "POST":
                    raise ApiError(400, "the request has no body; expected a multipart form", code="invalid_multipart")
                return self._list_files(exchange)
            case [b"files", file_id]:
                _allow(exchange, *reads, "DELETE")
                act = self._delete_file if exchange.method == "DELETE" else self._show_file
                return act(exchange, _id(file_id))
            case [b"files", file_id, b"content"]:
                _allow(exchange, *reads)
                return self._send_content(exchange, _id(file_id))
            case [b"batches"]:
                _allow(exchange, *reads, "POST")
                return self._create(exchange) if exchange.method == "POST" else self._list_batches(exchange)
            case [b"batches", batch_id]:
                _allow(exchange, *reads)
                return self._show_batch(exchange, _id(batch_id))
            case [b"batches", batch_id, b"cancel"]:
                _allow(exchange, "POST")
                return self._cancel(exchange, _id(batch_id))
            case _:
                raise unknown_url(exchange)

    # Files

    async def _receive(self, exchange: Exchange, pipe: BodyPipe) -> None:
        try:
            principal = await self._writer(exchange)
            content_type = exchange.headers.get(b"content-type", b"").decode("latin-1")
            row = await self._files.receive(principal, content_type, pipe.pieces())
            _json(exchange, file_object(row))
        finally:
            self._uploads.discard(exchange)
            pipe.abandon()

    async def _list_files(self, exchange: Exchange) -> None:
        principal = await self._reader(exchange)
        query = _query(exchange)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, "expected asc or desc", code="invalid_value", param="order")
        page = await self._files.page(
            principal.workspace_id, _limit(query, MAX_FILES_PAGE, MAX_FILES_PAGE), query.get("purpose"),
            query.get("after"), cast('Literal["asc", "desc"]', order),
        )  # fmt: skip
        _json(exchange, _page([file_object(row) for row in page.rows], page.has_more))

    async def _show_file(self, exchange: Exchange, file_id: str) -> None:
        principal = await self._reader(exchange)
        _json(exchange, file_object(await self._files.get(principal.workspace_id, file_id)))

    async def _delete_file(self, exchange: Exchange, file_id: str) -> None:
        principal = await self._writer(exchange)
        await self._files.delete(principal.workspace_id, file_id)
        _json(exchange, {"id": file_id, "object": "file", "deleted": True})

    async def _send_content(self, exchange: Exchange, file_id: str) -> None:
        principal = await self._reader(exchange)
        if principal.role is Role.AUDITOR:
            raise Forbidden("an auditor's key reads settings and states; it cannot read files")
        row = await self._files.get(principal.workspace_id, file_id)
        start, end = _range(exchange, row.bytes)
        headers = [
            (b"Content-Type", b"application/octet-stream"),
            (b"Content-Disposition", attachment(row.filename)),
            (b"X-Content-Type-Options", b"nosniff"),
            (b"Cache-Control", b"private, no-store"),
            (b"Accept-Ranges", b"bytes"),
        ]
        partial_answer = (start, end) != (0, row.bytes)
        if partial_answer:
            headers.append((b"Content-Range", b"bytes %d-%d/%d" % (start, end - 1, row.bytes)))
        headers.append((b"X-Request-Id", request_id(exchange).encode()))
        status = 206 if partial_answer else 200
        if exchange.method == "HEAD":
            exchange.start(status, headers)
            await exchange.end()
            return
        async with contextlib.aclosing(self._files.read(row, start, end - start)) as pieces:
            await _stream(exchange, row, pieces, status, headers)

    # Batches

    async def _create(self, exchange: Exchange) -> None:
        principal = await self._writer(exchange)
        if len(exchange.body) > MAX_CREATE_BYTES:
            raise _body_too_large()
        request = read_request(exchange.body)
        key = read_idempotency_key(exchange.headers.get(b"idempotency-key"))
        made = await self._jobs.create(principal, request, key)
        _json(exchange, batch_object(made.row, await self._forecast(made)))

    async def _list_batches(self, exchange: Exchange) -> None:
        principal = await self._reader(exchange)
        query = _query(exchange)
        limit = _limit(query, DEFAULT_BATCHES_PAGE, MAX_BATCHES_PAGE)
        page = await self._jobs.page(principal.workspace_id, limit, query.get("after"))
        _json(exchange, _page([batch_object(row) for row in page.rows], page.has_more))

    async def _show_batch(self, exchange: Exchange, batch_id: str) -> None:
        principal = await self._reader(exchange)
        row = await self._jobs.get(principal.workspace_id, batch_id)
        _json(exchange, batch_object(row, await self._forecast(Created(row))))

    async def _cancel(self, exchange: Exchange, batch_id: str) -> None:
        principal = await self._writer(exchange)
        _json(exchange, batch_object(await self._jobs.cancel(principal.workspace_id, batch_id)))

    # Inside

    async def _forecast(self, batch: Created) -> dict[str, Any] | None:
        if self._prospects is None:
            return None
        if batch.lines is not None:
            return await self._prospects.of_new(batch.row, batch.lines)
        return await self._prospects.of(batch.row)

    async def _reader(self, exchange: Exchange) -> Principal:
        authorization = exchange.headers.get(b"authorization")
        return self._authenticator.remembered(authorization) or await self._authenticator.authenticate(authorization)

    async def _writer(self, exchange: Exchange) -> Principal:
        principal = await self._reader(exchange)
        if principal.role is Role.AUDITOR:
            raise Forbidden("an auditor's key reads settings and states; it changes nothing")
        return principal

    def _spawn(self, exchange: Exchange, work: Work) -> None:
        task = asyncio.get_running_loop().create_task(_guarded(exchange, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = partial(_cancel_task, task)


async def _guarded(exchange: Exchange, work: Work) -> None:
    with contextlib.suppress(ClientDisconnected):
        try:
            await work
        except ServingError as error:
            _fail(exchange, error)
        except ClientDisconnected:
            raise
        except Exception:
            log.exception("batches.handler_failed path=%r", exchange.path)
            if not exchange.answered:
                _fail(exchange, ApiError(500, "internal error", code="internal_error"))
            elif exchange.streaming:
                exchange.abort()


async def _stream(
    exchange: Exchange, row: FileRow, pieces: AsyncIterator[bytes], status: int, headers: list[tuple[bytes, bytes]]
) -> None:
    """Send pieces as they are read; what is found damaged after the start cuts the connection."""
    first = await anext(pieces, b"")
    exchange.start(status, headers)
    try:
        await exchange.send(first)
        async for piece in pieces:
            await exchange.send(piece)
    except ServingError as error:
        log.error("files.content_failed file=%s error=%s", row.id, str(error))
        exchange.abort()
        return
    await exchange.end()


def _cancel_task(task: asyncio.Task[None]) -> None:
    task.cancel()


def _fail(exchange: Exchange, error: ServingError) -> None:
    if exchange.answered:
        return
    if isinstance(error, InvalidBatchInput):
        _refuse_input(exchange, error)
        return
    told = render(_named(error))
    headers = told.headers
    if told.status != 503 and _NO_RETRY not in headers:
        headers = (*headers, _NO_RETRY)
    encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
    reply(exchange, told.status, [JSON, *encoded], told.body)


def _named(error: ServingError) -> ServingError:
    """Return a failure of the storage under the code that these APIs have for it."""
    if isinstance(error, StorageUnavailable):
        retry = (("Retry-After", str(STORAGE_RETRY_SECONDS)),)
        return ApiError(503, str(error), code="file_storage_unavailable", headers=retry)
    if isinstance(error, ObjectMissing):
        return ApiError(500, str(error), code="file_content_missing")
    if isinstance(error, ObjectCorrupt):
        return ApiError(500, str(error), code="file_content_damaged")
    return error


def _refuse_input(exchange: Exchange, error: InvalidBatchInput) -> None:
    told = msgspec.json.decode(error_body(str(error), type_of(400), "input_file_id", "invalid_batch_input"))
    body = msgspec.json.encode({**told, "errors": report_document(error.faults)})
    reply(exchange, 400, [JSON, (b"x-should-retry", b"false")], body)


def _json(exchange: Exchange, document: Mapping[str, Any]) -> None:
    reply(exchange, 200, [JSON], msgspec.json.encode(document))


def _page(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


def _segments(exchange: Exchange) -> list[bytes]:
    """Return the encoded path segments below /v1; a slash at the end changes nothing."""
    return exchange.raw_path.removeprefix(b"/v1/").removesuffix(b"/").split(b"/")


def _allow(exchange: Exchange, *methods: str) -> None:
    if exchange.method not in methods:
        raise wrong_method(exchange, methods)


def _id(segment: bytes) -> str:
    """Return a path's id; anything that cannot be one becomes the empty id, which names nothing."""
    return segment.decode() if _ID_CHARS.fullmatch(segment) else ""


def _query(exchange: Exchange) -> dict[str, str]:
    try:
        return dict(parse_qsl(exchange.query.decode(), keep_blank_values=True, errors="strict", max_num_fields=32))
    except ValueError:
        raise ApiError(
            400, "the query cannot be read: expected UTF-8 and at most 32 fields", code="invalid_value"
        ) from None


def _limit(query: Mapping[str, str], default: int, most: int) -> int:
    text = query.get("limit")
    if text is None:
        return default
    if not _NUMBER.fullmatch(text) or not text.isascii() or not 1 <= int(text) <= most:
        raise ApiError(400, f"expected a whole number from 1 to {most}", code="invalid_value", param="limit")
    return int(text)


def _range(exchange: Exchange, size: int) -> tuple[int, int]:
    """Return the bytes asked for, all of them unless a single range is asked (RFC 9110, 14.2). Raises: ApiError 416."""
    match = _RANGE.fullmatch(exchange.headers.get(b"range", b"").replace(b" ", b""))
    if match is None or match[1] == match[2] == b"":
        return 0, size
    if match[1] == b"":
        start, end = max(0, size - int(match[2])), size
    else:
        start = int(match[1])
        end = min(size, int(match[2]) + 1) if match[2] else size
        if match[2] and int(match[2]) < start:
            return 0, size  # malformed: as if not asked
    if start >= end:
        raise ApiError(
            416, f"the file has {size} bytes", code="invalid_range", headers=(("Content-Range", f"bytes */{size}"),)
        )
    return start, end


def _body_too_large() -> ApiError:
    return ApiError(413, f"the request body is larger than {MAX_CREATE_BYTES} bytes", code="request_too_large")
