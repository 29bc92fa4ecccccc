"""Answers over HTTP as the headers of their requests want them: with the request's id, and compressed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from frontend.httpd.exchange import Exchange
from frontend.httpd.wire import Headers, Part
from frontend.kserve.compression import Accepted, compress
from frontend.kserve.status import JSON_TYPE, error_body

log = logging.getLogger(__name__)
OnSent = Callable[[], None] | None

JSON_HEADERS: Final = [(b"Content-Type", JSON_TYPE.encode())]
OFFLOAD_BYTES: Final = 64 * 1024
"""Answers larger than this are compressed in a thread: zlib takes about 20 ms per MiB and lets go of the lock."""


def reply(exchange: Exchange, status: int, headers: Headers, parts: list[Part], on_sent: OnSent = None) -> None:
    """Answer under the request's ``X-Request-Id`` if it has one; ``on_sent`` as ``Exchange.respond``."""
    request_id = exchange.headers.get(b"x-request-id")
    if request_id is not None:
        headers = [*headers, (b"X-Request-Id", request_id)]
    exchange.respond(status, headers, parts, on_sent)


def reply_inferred(
    exchange: Exchange, headers: Headers, parts: list[Part], accepted: Accepted, on_sent: OnSent
) -> None:
    """Answer an inference that succeeded, compressed if that is accepted and its size is worth it."""
    size = sum(map(len, parts))
    encoding = accepted.for_size(size)
    if encoding == "identity":
        reply(exchange, 200, headers, parts, on_sent)
        return
    headers = [*headers, (b"Content-Encoding", encoding.encode())]
    pack = partial(compress, parts, encoding)
    if size <= OFFLOAD_BYTES:
        reply(exchange, 200, headers, pack(), on_sent)
        return
    packing = asyncio.get_running_loop().run_in_executor(None, pack)
    packing.add_done_callback(partial(_packed, exchange, headers, on_sent))


def _packed(exchange: Exchange, headers: Headers, on_sent: OnSent, packing: asyncio.Future[list[Part]]) -> None:
    if packing.cancelled() or packing.exception() is not None:
        log.error("http.compression_failed path=%r", exchange.path)
        if on_sent is not None:
            on_sent()
        reply(exchange, 500, JSON_HEADERS, [error_body("internal error")])
    else:
        reply(exchange, 200, headers, packing.result(), on_sent)
