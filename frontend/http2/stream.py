"""One HTTP/2 stream: a request and its answer, between the connection and the application."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from frontend.http2.fields import Head
from frontend.http2.frames import Block

if TYPE_CHECKING:
    from frontend.http2.connection import Connection

Buffer = bytes | bytearray | memoryview
Release = Callable[[], None]


class Receiver(Protocol):
    """What the application makes of a request; called by the connection, never after ``cancel``."""

    def data(self, data: bytes, at: int, stop: int) -> None:
        """Take ``data[at:stop]``, some piece of the body; the next one follows it."""
        ...

    def end(self) -> None:
        """The request is complete."""
        ...

    def cancel(self) -> None:
        """Nobody waits for the answer: the client reset the stream, or is gone. The stream must not be used again."""
        ...

    def writable(self) -> None:
        """All that was sent on the stream has left it."""
        ...

    def room(self) -> int:
        """Return how many further bytes of body may come now."""
        ...

    def tick(self, now_ns: int) -> None:
        """Look at the time; called about once a second while the request is not complete or not answered."""
        ...


class Application(Protocol):
    """What a connection serves."""

    def interpret(self, head: Head) -> Any:
        """Make of a request's head what ``open`` needs; the result is shared by all requests with that head."""
        ...

    def open(self, connection: Connection, stream: Stream, value: Any) -> Receiver:
        """Begin a request; it may be answered at once."""
        ...

    def whole(self, stream_id: int, value: Any, data: bytes, at: int, stop: int) -> WholeStream | None:
        """Return the stream of a request whose body is ``data[at:stop]``, to be begun; None: it is to be opened.

        For requests that cost less if they are not taken apart: ``open`` does not follow, ``closed`` does.
        """
        ...

    def closed(self) -> None:
        """One of the streams that were opened is over."""
        ...


class Outgoing:
    """Parts that wait for the client's window. ``release`` is called when none of them is needed any more."""

    __slots__ = ("parts", "release")

    def __init__(self, parts: deque[memoryview], release: Release | None) -> None:
        self.parts = parts
        self.release = release


class Stream:
    """State of a stream; the connection and its sender write it, the application keeps its hands off.

    Attributes:
        receiver: set when the application has opened it.
        open: until its answer was sent in full, or it was reset.
        ended: the client sends no more.
        started: the head of the answer was sent.
        receive_window: bytes the client may still send.
        send_window: bytes that may still be sent; negative after a shrunk INITIAL_WINDOW_SIZE.
        body_left: of content-length; negative if the client told none.
        queue: data that is not sent yet, ``queued_bytes`` of it.
        tail: the block that ends the answer, once it is known.
        sent_bytes, stalled_ns: how much was sent, and since when (in ticks) it is not more; 0 if it moves.
    """

    # Values of the class instead of slots: a small request is answered before most of them change.
    open = True
    ended = False
    started = False
    ready = False
    receive_window = 0
    send_window = 0
    body_left = -1
    queue: deque[Outgoing] | None = None
    queued_bytes = 0
    tail: Block | None = None
    sent_bytes = 0
    stalled_at_bytes = 0
    stalled_ns = 0

    def __init__(self, stream_id: int) -> None:
        self.id = stream_id
        # Here, since mypyc (2.4) forgets such a default of a class whose type is a protocol.
        self.receiver: Receiver | None = None


class WholeStream(Stream):
    """A stream whose request was there in full; it is its own receiver, which the connection undoes at its end."""

    ended = True

    def begin(self, connection: Connection) -> None:
        """The connection knows the stream: act on the request. It may be answered at once."""
        raise NotImplementedError

    def data(self, data: bytes, at: int, stop: int) -> None: ...
    def end(self) -> None: ...
    def cancel(self) -> None:
        """See ``Receiver``."""
        raise NotImplementedError

    def writable(self) -> None: ...
    def room(self) -> int:
        return 0

    def tick(self, now_ns: int) -> None: ...
