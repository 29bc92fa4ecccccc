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


class ClientDisconnected(ConnectionError):
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
    def open_stream(self, exchange: Exchange, status: int, headers: Headers) -> None: ...
    def stream(self, exchange: Exchange, parts: Sequence[Part], *, last: bool) -> None: ...
    def writable(self, exchange: Exchange) -> Awaitable[None] | None: ...
    def hold_body(self, exchange: Exchange, *, held: bool) -> None: ...
    def abort(self) -> None: ...


class Exchange:
    """A request and the means to answer it.

    Attributes:
        method: as sent; ``GET``, ``POST`` ...
        target: request target as sent.
        raw_path: its path, still percent-encoded; ``*`` for ``OPTIONS *``.
        query: after the question mark, still encoded, empty if none.
        headers: lower-case names; values of repeated headers joined by ", " ("; " for cookie).
        body: complete when ``handle`` is called, empty if a sink took it. Belongs to the application.
        arrival_ns: monotonic, when the headers were complete.
        on_disconnect: called once if the client goes away before the answer was given in full.
        read_steps: raised by a sink each time the body came a good piece further: ``read_timeout_seconds`` begins anew.
        ends_with_input: a client that closes its sending half is taken to be gone. For streams that may be silent for
            long: whether it still reads could only be found out by writing.
    """

    __slots__ = (
        "_line", "answered", "arrival_ns", "body", "charged_bytes", "complete", "ends_with_input", "headers", "http10",
        "keep_alive", "lost", "method", "on_disconnect", "on_sent", "pending", "query", "raw_path", "read_steps",
        "started", "streaming", "target", "wants_continue",
    )  # fmt: skip

    def __init__(
        self,
        line: Line,
        method: str,
        target: bytes,
        headers: dict[bytes, bytes],
        arrival_ns: int,
        *,
        http10: bool,
        keep_alive: bool,
    ) -> None:
        self._line = line
        self.method = method
        self.target = target
        self.headers = headers
        self.arrival_ns = arrival_ns
        self.http10 = http10
        self.keep_alive = keep_alive
        path, _, self.query = target.partition(b"?")
        if not path.startswith(b"/") and b"://" in path:
            # Absolute form, as sent to proxies: every server must accept it.
            _, slash, rest = path.partition(b"://")[2].partition(b"/")
            path = slash + rest or b"/"
        self.raw_path = path
        self.body: bytes | bytearray | memoryview = b""
        self.on_disconnect: Callable[[], None] | None = None
        self.on_sent: Callable[[], None] | None = None
        self.answered = False
        self.streaming = False
        self.started = False
        self.complete = False
        self.read_steps = 0
        self.ends_with_input = False
        self.lost = False
        self.wants_continue = False
        self.charged_bytes = 0
        self.pending: list[Part] | None = None

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
