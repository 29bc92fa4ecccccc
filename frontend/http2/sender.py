"""The sending half of a connection: what goes out next, within the client's windows. Pure: bytes pile up in ``parts``.

Theory of operation
    Small answers that fit the windows become one piece at once. Everything else waits in its stream's queue; ``pump``
    cuts DATA frames from the queues in turn, a quantum each, as long as windows and room allow. A stream whose own
    window is empty leaves the turn until a WINDOW_UPDATE brings it back.
    Small data is copied, and what it borrowed is free at once; large data is lent: its release goes to ``releases``,
    which the transport's side calls when what it took with ``take`` has left the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from frontend.http2 import frames
from frontend.http2.frames import DATA_OPENS, Block
from frontend.http2.peer import ANSWER_CREDIT
from frontend.http2.stream import Buffer, Outgoing, Release, Stream

COPY_BYTES = 64 * 1024
"""Messages up to this size are copied into what is sent: cheaper than a system call's vector, and free at once."""
QUANTUM_BYTES = 256 * 1024
"""Data of one stream before another has its turn."""
FRAME_CREDIT = 2
"""WINDOW_UPDATE and PING frames that a DATA frame may call forth, for its stream and for the connection."""
BATCH_BYTES = 1024 * 1024
"""Data handed to the transport in one go."""


class Sender:
    """What one connection sends.

    Attributes:
        parts, size: frames to be written, in order, and their bytes.
        releases: of memory that nothing beyond ``parts`` needs.
        window: bytes of data that the client takes on all streams together.
        awake: ``wake`` was called and ``take`` was not yet.
        held: the transport takes nothing now; data stays in the queues.
        credit: frames of the client that answer data, and count against nothing.
    """

    __slots__ = (
        "_finished", "_ready", "_wake", "awake", "credit", "frame_bytes", "held", "initial_window", "parts",
        "releases", "size", "window",
    )  # fmt: skip

    def __init__(self, wake: Callable[[], None], finished: Callable[[Stream], None]) -> None:
        self._wake = wake
        self._finished = finished
        self._ready: deque[Stream] = deque()
        self.parts: list[Buffer] = []
        self.size = 0
        self.releases: list[Release] = []
        self.window = frames.DEFAULT_WINDOW_BYTES
        self.initial_window = frames.DEFAULT_WINDOW_BYTES
        self.frame_bytes = frames.DEFAULT_FRAME_BYTES
        self.credit = 0
        self.awake = False
        self.held = False

    def control(self, data: bytes) -> None:
        """Write frames that no window holds back."""
        self.parts.append(data)
        self.size += len(data)
        if not self.awake:
            self.awake = True
            self._wake()

    def answer(
        self, stream: Stream, head: Block, parts: Sequence[Buffer], size: int, tail: Block, release: Release | None
    ) -> None:
        """Send a whole answer of one piece of data, ``size`` bytes in all.

        Parts that ``release`` frees are copied or lent; without it they are bytes of nobody else.
        """
        if size <= stream.send_window and size <= self.window and size <= self.frame_bytes and size <= COPY_BYTES:
            if release is not None:
                parts = (b"".join(parts),)
                release()
            # One join per turn puts it together with what else goes out: one per answer took 0.4 us more.
            number = stream.id.to_bytes(4, "big")
            self.parts += (
                head.opens, number, head.data, size.to_bytes(3, "big") + DATA_OPENS, number, *parts,
                tail.ends, number, tail.data,
            )  # fmt: skip
            self.size += size
            self.window -= size
            self.credit += FRAME_CREDIT + ANSWER_CREDIT
            if not self.awake:
                self.awake = True
                self._wake()
            self._finished(stream)
            return
        self.start(stream, head)
        self.send(stream, parts, size, release)
        self.finish(stream, tail)

    def start(self, stream: Stream, head: Block) -> None:
        """Send the head of an answer; ``finish`` must follow."""
        stream.started = True
        self.control(head.frame(stream.id))

    def send(self, stream: Stream, parts: Sequence[Buffer], size: int, release: Release | None) -> None:
        """Send a piece of data of ``size`` bytes, now or when the client takes it; ``size`` is not 0."""
        if size <= COPY_BYTES:
            waiting = Outgoing(deque((memoryview(b"".join(parts)),)), None)
            if release is not None:
                release()
        else:
            waiting = Outgoing(deque(memoryview(part) for part in parts if len(part)), release)
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.append(waiting)
        stream.queued_bytes += size
        self._rouse(stream)

    def finish(self, stream: Stream, tail: Block) -> None:
        """End the stream after all that was sent on it."""
        stream.tail = tail
        if not stream.queue:
            self._end(stream)

    def widen(self, stream: Stream, increment: int) -> bool:
        """Count a WINDOW_UPDATE of a stream, or the change of its initial window; return whether it is in bounds."""
        stream.send_window += increment
        if stream.send_window > frames.MOST_WINDOW_BYTES:
            return False
        if stream.queue:
            self._rouse(stream)
        return True

    def widen_all(self, increment: int) -> bool:
        """Count a WINDOW_UPDATE of the connection; return whether it is in bounds."""
        self.window += increment
        if self._ready and not self.awake:
            self.awake = True
            self._wake()
        return self.window <= frames.MOST_WINDOW_BYTES

    def drop(self, stream: Stream) -> None:
        """Forget what waits on a stream that is over."""
        queue, stream.queue = stream.queue, None
        stream.queued_bytes = 0
        for waiting in queue or ():
            if waiting.release is not None:
                # Pieces of it may lie in ``parts``.
                self.releases.append(waiting.release)

    def take(self) -> tuple[list[Buffer], list[Release]]:
        """Return what is to be written now, and whom to tell when that has left the process."""
        if self._ready and not self.held:
            self.awake = True
            self._pump()
        self.awake = False
        parts, releases = self.parts, self.releases
        self.parts, self.size, self.releases = [], 0, []
        return parts, releases

    def more(self) -> bool:
        """Whether another ``take`` would bring more data at once."""
        return bool(self._ready) and self.window > 0 and not self.held

    def _rouse(self, stream: Stream) -> None:
        if stream.send_window > 0 and not stream.ready:
            stream.ready = True
            self._ready.append(stream)
        if not self.awake:
            self.awake = True
            self._wake()

    def _pump(self) -> None:
        ready = self._ready
        while ready and self.window > 0 and self.size < BATCH_BYTES:
            stream = ready.popleft()
            stream.ready = False
            if not stream.queue or stream.send_window <= 0:
                continue
            self._send_some(stream)
            if not stream.queue:
                if stream.tail is not None:
                    self._end(stream)
                elif stream.receiver is not None:
                    stream.receiver.writable()
            elif stream.send_window > 0:
                stream.ready = True
                ready.append(stream)

    def _send_some(self, stream: Stream) -> None:
        queue = stream.queue
        assert queue
        room = min(self.window, stream.send_window, stream.queued_bytes, QUANTUM_BYTES)
        self.window -= room
        stream.send_window -= room
        stream.queued_bytes -= room
        stream.sent_bytes += room
        while room > 0:
            size = min(room, self.frame_bytes)
            room -= size
            self.parts.append(frames.HEADER.pack(size >> 8, size & 0xFF, frames.DATA, 0, stream.id))
            self.size += frames.FRAME_HEADER_BYTES + size
            self.credit += FRAME_CREDIT
            while size > 0:
                waiting = queue[0]
                part = waiting.parts[0]
                if len(part) > size:
                    self.parts.append(part[:size])
                    waiting.parts[0] = part[size:]
                    break
                self.parts.append(part)
                size -= len(part)
                waiting.parts.popleft()
                if not waiting.parts:
                    queue.popleft()
                    if waiting.release is not None:
                        self.releases.append(waiting.release)

    def _end(self, stream: Stream) -> None:
        assert stream.tail is not None
        self.control(stream.tail.last_frame(stream.id))
        self.credit += ANSWER_CREDIT
        self._finished(stream)
