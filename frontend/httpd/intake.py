"""Turns the bytes of one connection into exchanges: parsing, limits, request bodies.

llhttp (httptools) parses and refuses what could be read in two ways: both Content-Length and
Transfer-Encoding, repeated or odd lengths, folded headers, bare line feeds. Here are the limits it does not
know. Bytes are parsed in slices, so that a flood of tiny pipelined requests cannot be parsed far ahead of the answers.
The body of a known length does not go through the parser: it would copy it once more.
"""

from __future__ import annotations

import logging
from typing import Protocol

import httptools

from frontend.httpd.answers import AnswerQueue
from frontend.httpd.body import BodyBuffer, BodySink
from frontend.httpd.exchange import Exchange
from frontend.httpd.heads import Head, KnownHead, head_fault, known_head
from frontend.httpd.state import ServerState
from frontend.httpd.wire import Part

log = logging.getLogger(__name__)

SLICE_BYTES = 8 * 1024
MAX_HEADERS = 128
CHARGE_BYTES = 64 * 1024
"""Bodies up to this size are not counted against the server's body budget."""
VIEW_BYTES = 32 * 1024
"""Up to here copying a body costs less than a view of it does."""
_METHODS = {name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")}
FRAMING_PER_BODY_BYTE = 16
"""Chunk sizes, extensions and trailers may be this many times the body (one-byte chunks need 5)."""


class Owner(Protocol):
    def full(self) -> bool: ...
    def completed(self, exchange: Exchange) -> None: ...
    def refuse(self, exchange: Exchange | None, status: int, message: str) -> None: ...


class _Stop(Exception):
    """Leaves the parser; nothing more of this connection is read."""


class Intake:
    """The receiving half of a connection.

    Attributes:
        stopped: no further request is read from this connection.
        mid_message: a request has begun and is not complete.
        messages: requests begun.
        excess: bytes arrived that will never be read.
    """

    __slots__ = (
        "_answers", "_buffer", "_chunked", "_exchange", "_fed_bytes", "_header_bytes", "_headers", "_known", "_left",
        "_owner", "_parsed", "_parser", "_raw", "_received", "_sink", "_state", "_url", "excess", "messages",
        "mid_message", "stopped",
    )  # fmt: skip

    def __init__(self, state: ServerState, answers: AnswerQueue, owner: Owner) -> None:
        self._state = state
        self._answers = answers
        self._owner = owner
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] | None = None
        self._header_bytes = 0
        self._fed_bytes = self._received = 0
        self._exchange: Exchange | None = None
        self._sink: BodySink | None = None
        self._buffer: BodyBuffer | None = None
        self._chunked = False
        self._left, self._raw = 0, False
        self._known: KnownHead | None = None
        self._parsed: Head | None = None
        self.stopped = False
        self.mid_message = False
        self.messages = 0
        self.excess = False

    def feed(self, data: bytes | memoryview) -> int:
        """Parse until the end, a stop, or until the owner is full; return how many bytes were used."""
        size = len(data)
        position = 0
        messages = -2  # what goes on in the middle of a message, or waits, teaches no head
        if not self.mid_message and not self.stopped and type(data) is bytes and not self._owner.full():
            if self.take_known(data):
                return size
            messages = self.messages
        while position < size:
            if self.stopped:
                self.excess = True
                return size
            if not self.mid_message and self._owner.full():
                return position
            if self._raw:
                piece = memoryview(data)[position : position + self._left]
                position += len(piece)
                self._feed_raw(piece)
            else:
                position += self._parse(memoryview(data)[position : position + SLICE_BYTES])
        if self.messages == messages + 1 and not self.mid_message and self._parsed is not None and type(data) is bytes:
            # One whole message, whose head is known from then on.
            self._known = known_head(data, self._parsed, self._state.limits.max_header_bytes, self._known)
        return position

    def take_known(self, data: bytes) -> bool:
        """Take ``data`` if it is one whole message whose head was parsed before; return whether it is."""
        known = self._known
        if known is None or self.mid_message or self.stopped or (found := known.match(data)) is None:
            return False
        self._begin_known(data, *found)
        return True

    def _begin_known(self, data: bytes, head: Head, at: int) -> None:
        self.messages += 1
        exchange = Exchange(self._answers, head, self._state.clock())
        self._answers.add(exchange)
        body: bytes | memoryview = data[at:] if len(data) - at <= VIEW_BYTES else memoryview(data)[at:]
        # One that differs in its length may announce too much, which is refused below.
        if not body or (head.handler is not None and len(body) <= self._state.limits.max_request_bytes):
            exchange.body = body
            exchange.complete = True
            self._owner.completed(exchange)
            return
        self.mid_message = True
        self._exchange = exchange
        self._left = len(body)
        try:
            self._begin_body(exchange)
            self.on_body(body)
        except _Stop:
            return
        self.on_message_complete()

    def stop(self) -> None:
        """Read nothing more and release what an unfinished request holds; idempotent."""
        self.stopped = True
        sink, self._sink = self._sink, None
        self._buffer = None
        if sink is not None:
            try:
                sink.abort()
            except Exception:
                log.exception("http.sink_failed")

    def give_up(self, status: int, message: str) -> None:
        """Refuse the request that is being read."""
        self._refuse(status, message)

    def reading(self) -> Exchange | None:
        """Return the request whose body is being read."""
        return self._exchange

    def _parse(self, piece: bytes | memoryview) -> int:
        in_headers = self._headers is not None
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            # Not offered, so answered as if not asked for (RFC 9110, 7.8). llhttp has taken the request to be without a
            # body; on_headers_complete knows better. The parser's state is of no use any more.
            self._parser = httptools.HttpRequestParser(self)
            return int(upgrade.args[0])
        except httptools.HttpParserCallbackError:
            if not self.stopped:
                log.exception("http.parser_callback_failed")
                self._refuse(500, "internal error")
            return len(piece)
        except httptools.HttpParserError as error:
            if self.stopped:
                self.excess = True
            else:
                self._refuse(400, f"malformed HTTP request: {error}")
            return len(piece)
        if self._left > 0 and not self._raw and self._exchange is not None:
            self._raw = True
            self._parser = httptools.HttpRequestParser(self)
        elif in_headers and self._headers is not None:
            # httptools hands over whole headers only; this bounds what it collects for one endless header.
            self._header_bytes += len(piece)
            if self._header_bytes > self._state.limits.max_header_bytes + 2 * SLICE_BYTES:
                self._refuse_headers()
        elif self._chunked and self._exchange is not None:
            self._fed_bytes += len(piece)
            self._check_framing()
        return len(piece)

    def _check_framing(self) -> None:
        most = (FRAMING_PER_BODY_BYTE + 1) * self._received + self._state.limits.max_header_bytes + SLICE_BYTES
        if self._fed_bytes > most:
            self._refuse(400, "malformed HTTP request: more chunk framing than body")

    def _feed_raw(self, piece: memoryview) -> None:
        try:
            self.on_body(piece)
        except _Stop:
            return
        if self._left == 0:
            self._raw = False
            self.on_message_complete()

    # Parser callbacks; httptools calls them from within feed_data

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._header_bytes = 0
        self.mid_message = True
        self.messages += 1

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self._headers
        if headers is None:
            return  # a trailer; nothing here needs any
        name = name.lower()
        if name in headers:
            if name == b"host":
                self._refuse(400, "malformed HTTP request: more than one Host header")
                raise _Stop
            value = headers[name] + (b"; " if name == b"cookie" else b", ") + value
        elif len(headers) >= MAX_HEADERS:
            self._refuse(431, f"more than {MAX_HEADERS} headers")
            raise _Stop
        headers[name] = value

    def on_headers_complete(self) -> None:
        arrival_ns = self._state.clock()
        headers, self._headers = self._headers, None
        assert headers is not None
        parser = self._parser
        version = parser.get_http_version()
        method = parser.get_method()
        head = Head(
            _METHODS.get(method) or method.decode("latin-1"),
            self._url,
            headers,
            http10=version == "1.0",
            keep_alive=parser.should_keep_alive(),
        )
        self._parsed = head
        exchange = Exchange(self._answers, head, arrival_ns)
        self._exchange = exchange
        self._answers.add(exchange)
        length = headers.get(b"content-length")
        encoding = headers.get(b"transfer-encoding")
        self._left = 0 if length is None else int(length)
        self._chunked = encoding is not None
        self._fed_bytes = 0
        self._received = 0
        if (fault := head_fault(head, version)) is not None:
            self._refuse(*fault)
            raise _Stop
        self._check_header_bytes(exchange)
        if self._chunked and parser.should_upgrade():
            self._refuse(501, "an upgrade with a chunked body is not supported")
            raise _Stop
        if self._left or self._chunked:
            self._begin_body(exchange)
        if parser.should_upgrade() and self._left:
            self._raw = True

    def _begin_body(self, exchange: Exchange) -> None:
        self._sink = self._state.app.begin(exchange)
        if exchange.answered:
            self.stop()
            raise _Stop
        if not self._chunked:
            self._check_size(self._left)
        if self._sink is None:
            self._begin_buffer(exchange, self._left)
        if b"expect" in exchange.headers and not exchange.http10:
            self._answers.invite(exchange)

    def _begin_buffer(self, exchange: Exchange, length: int) -> None:
        if self._chunked:
            self._buffer = BodyBuffer(-1)
        elif length > CHARGE_BYTES:
            self._charge(exchange, length)
            self._buffer = BodyBuffer(length)

    def on_body(self, chunk: bytes | memoryview) -> None:
        exchange = self._exchange
        assert exchange is not None
        if not self._chunked:
            self._left -= len(chunk)
        else:
            self._received += len(chunk)
            self._check_size(self._received)
        if self._sink is None:
            self._collect(exchange, chunk)
        else:
            self._sink_in(exchange, self._sink, chunk)

    def _collect(self, exchange: Exchange, chunk: Part) -> None:
        buffer = self._buffer
        if buffer is None:
            if self._left == 0:
                exchange.body = chunk  # small and in one piece, as most are
                return
            buffer = self._buffer = BodyBuffer(self._left + len(chunk))
        if self._chunked and self._received > exchange.charged_bytes + CHARGE_BYTES:
            self._charge(exchange, self._received + CHARGE_BYTES - exchange.charged_bytes)
        buffer.write(chunk)

    def _sink_in(self, exchange: Exchange, sink: BodySink, chunk: bytes | memoryview) -> None:
        given_back = None
        try:
            given_back = sink.write(chunk)
        except Exception:
            log.exception("http.sink_failed")
            self._refuse(500, "internal error")
        if exchange.answered:
            self.stop()
            raise _Stop
        if given_back is not None:
            self._sink = None
            length = self._left + len(given_back)
            self._check_size(length)
            self._begin_buffer(exchange, length)
            self._collect(exchange, given_back)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if self._raw or exchange is None:
            return  # an upgrade request whose body is still to come
        self._exchange = None
        self.mid_message = False
        self._chunked = False
        sink, self._sink = self._sink, None
        buffer, self._buffer = self._buffer, None
        if sink is not None:
            if not self._close_sink(sink, exchange):
                return
        elif buffer is not None:
            exchange.body = buffer.take()
        exchange.complete = True
        if not exchange.keep_alive:
            self.stopped = True
        self._owner.completed(exchange)

    def _close_sink(self, sink: BodySink, exchange: Exchange) -> bool:
        try:
            sink.close()
        except Exception:
            log.exception("http.sink_failed")
            self.stop()
            self._owner.refuse(exchange, 500, "internal error")
            return False
        return True

    def _check_size(self, size: int) -> None:
        sink = self._sink
        allowed, name = (
            (self._state.limits.max_request_bytes, "max_request_bytes")
            if sink is None
            else (sink.max_bytes, sink.limit_name)
        )
        if size > allowed:
            what = "at least" if self._chunked else "of"
            self._refuse(413, f"request body {what} {size} bytes exceeds {name} = {allowed} bytes")
            raise _Stop

    def _charge(self, exchange: Exchange, size: int) -> None:
        state = self._state
        if state.buffered_bytes + size > state.body_budget_bytes:
            self._refuse(
                503, f"request bodies in memory reached their limit of {state.body_budget_bytes} bytes; retry later"
            )
            raise _Stop
        state.buffered_bytes += size
        exchange.charged_bytes += size

    def _check_header_bytes(self, exchange: Exchange) -> None:
        limit = self._state.limits.max_header_bytes
        if self._header_bytes == 0 and limit >= 2 * SLICE_BYTES:
            return  # they came within two slices
        headers = exchange.headers
        size = sum(map(len, headers)) + sum(map(len, headers.values())) + 4 * len(headers)
        if len(exchange.target) + size > limit:
            self._refuse_headers()
            raise _Stop

    def _refuse_headers(self) -> None:
        limit = self._state.limits.max_header_bytes
        self._refuse(431, f"request line and headers exceed max_header_bytes = {limit} bytes")

    def _refuse(self, status: int, message: str) -> None:
        self.stop()
        exchange, self._exchange = self._exchange, None
        self._owner.refuse(exchange, status, message)
