"""One HTTP request and its answer, as an application sees them.

Theory of operation
    The connection calls ``Application.begin`` when the headers of a request with a body are complete and
    ``Application.handle`` when the request is complete. The application answers when it likes, from the loop's
    thread, by ``respond`` once, or by ``start``, ``send`` and ``end``. Answers may be given in any order: the
    connection sends them in the order of the requests. After a disconnect every call is a harmless
    no-op (``send`` raises).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol
from urllib.parse import unquote_to_bytes

from frontend.httpd import wire
from frontend.httpd.body import BodySink
from frontend.httpd.heads import Head
from frontend.httpd.wire import Headers, Part


class Application(Protocol):
    """What a server serves. All calls come on the loop's thread and must not block."""

    def begin(self, exchange: Exchange) -> BodySink | None:
        """Choose where the body goes; None: collected into ``exchange.body``, at most ``max_request_bytes``.

        Called only for requests with a body, before any of it was read. Answering here refuses the body unread.
        """
        ...

    def handle(self, exchange: Exchange) -> None:
        """Answer a complete request, now or later. Raising gives the client a 500."""
        ...

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        """Return Content-Type and body of an error found below the application (400, 408, 413, 500 ...)."""
        ...


class ClientDisconnected(Exception):
    """The client of a streamed answer went away."""


class Line(Protocol):
    """What an exchange needs of its connection."""

    def answer(
        self,
        exchange: Exchange,
        status: int,
        headers: Headers,
        parts: Sequence[Part],
        on_sent: Callable[[], None] | None,
    ) -> None: ...
    def answer_ready(self, exchange: Exchange, front: bytes, parts: Sequence[Part]) -> None: ...
    def open_stream(self, exchange: Exchange, status: int, headers: Headers) -> None: ...
    def stream(self, exchange: Exchange, parts: Sequence[Part], *, last: bool) -> None: ...
    def writable(self, exchange: Exchange) -> Awaitable[None] | None: ...
    def hold_body(self, exchange: Exchange, *, held: bool) -> None: ...
    def abort(self) -> None: ...


class Exchange:
    """A request and the means to answer it.

    Attributes:
        head: what the request line and the headers say; ``method``, ``target``, ``raw_path``, ``query`` and ``headers``
            are its own.
        body: complete when ``handle`` is called, empty if a sink took it. Belongs to the application.
        arrival_ns: monotonic, when the headers were complete.
        on_disconnect: called once if the client goes away before the answer was given in full.
        read_steps: raised by a sink each time the body came a good piece further: ``read_timeout_seconds`` begins anew.
        ends_with_input: a client that closes its sending half is taken to be gone. For streams that may be silent for
            long: whether it still reads could only be found out by writing.
    """

    # One is made per request and few of these ever change: what is not assigned costs nothing.
    body: bytes | bytearray | memoryview = b""
    on_disconnect: Callable[[], None] | None = None
    on_sent: Callable[[], None] | None = None
    answered = False
    streaming = False
    started = False
    complete = False
    read_steps = 0
    ends_with_input = False
    lost = False
    wants_continue = False
    charged_bytes = 0
    pending: list[Part] | None = None

    def __init__(self, line: Line, head: Head, arrival_ns: int) -> None:
        self._line = line
        self.head = head
        self.method = head.method
        self.target = head.target
        self.raw_path = head.raw_path
        self.query = head.query
        self.headers = head.headers
        self.http10 = head.http10
        self.keep_alive = head.keep_alive
        self.arrival_ns = arrival_ns

    @property
    def path(self) -> str:
        """The decoded path, for messages and logs; a router splits ``raw_path``, so that %2F separates nothing."""
        return unquote_to_bytes(self.raw_path).decode("utf-8", "replace")

    def respond(
        self, status: int, headers: Headers, parts: Sequence[Part] = (), on_sent: Callable[[], None] | None = None
    ) -> None:
        """Give the whole answer; exactly one of ``respond`` and ``start`` is called, once.

        Args:
            headers: without Content-Length, Transfer-Encoding, Connection and Date.
            parts: the body. Small ones are copied at once, large ones borrowed until ``on_sent``.
            on_sent: called once when no part is needed any more: sent, copied, or the client gone.

        Raises:
            RuntimeError: there was an answer already.
            ValueError: a header holds a line break. Nothing was sent and ``on_sent`` is not called.
        """
        if self.answered:
            raise RuntimeError(f"{self.method} {self.path} was answered twice")
        self._line.answer(self, status, headers, parts, on_sent)

    def respond_ready(self, front: bytes, parts: Sequence[Part]) -> None:
        """Give a whole answer of status 200 whose head was rendered before; as ``respond`` otherwise.

        Args:
            front: what ``wire.render_front`` returned for this body's length.
            parts: the body, at most ``outlet.COPY_BYTES`` long with the head; not needed any more afterwards.
        """
        if self.answered:
            raise RuntimeError(f"{self.method} {self.path} was answered twice")
        self._line.answer_ready(self, front, parts)

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer of unknown length; ``end`` must follow."""
        if self.answered:
            raise RuntimeError(f"{self.method} {self.path} was answered twice")
        self._line.open_stream(self, status, headers)

    async def send(self, data: Part) -> None:
        """Send a piece, waiting while the client does not read or an earlier answer is due.

        Raises:
            ClientDisconnected: nobody is there any more.
        """
        while (wait := self._line.writable(self)) is not None:
            await wait
        if self.lost:
            raise ClientDisconnected
        if len(data) and self.method != "HEAD":
            self._line.stream(self, [data] if self.http10 else wire.chunk(data), last=False)

    async def end(self) -> None:
        """Finish a streamed answer."""
        while (wait := self._line.writable(self)) is not None:
            await wait
        if not self.lost and self.streaming:
            self._line.stream(self, [] if self.http10 or self.method == "HEAD" else [wire.LAST_CHUNK], last=True)

    def hold_body(self, *, held: bool) -> None:
        """Stop or go on reading the body, for a sink that cannot keep up."""
        self._line.hold_body(self, held=held)

    def abort(self) -> None:
        """Drop the connection: the only way left to tell a client that a started answer failed."""
        self._line.abort()
