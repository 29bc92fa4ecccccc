"""Calls with many messages: ModelStreamInfer, reflection, and the health service's Watch.

What the client may send is bounded by the stream's window, which is widened again only as messages are taken; what
waits to be sent is bounded by not producing more while ``MAX_QUEUED_BYTES`` wait for the client's window.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Final

from engines.errors import DeadlineExceeded, ServingError
from frontend.grpc_fast import replies
from frontend.grpc_fast.calls import UnaryCall, expire_later
from frontend.grpc_fast.messages import PREFIX_BYTES, CallFailure, Message, MessageReader
from frontend.grpc_fast.plans import Plan
from frontend.grpc_methods import failure_of, outcome_of
from frontend.grpc_stream import STOPPING_TEXT, InferStream
from frontend.http2.connection import Connection
from frontend.http2.stream import Buffer, Release, Stream

if TYPE_CHECKING:
    from frontend.grpc_fast.service import Service

MAX_QUEUED_BYTES: Final = 1 << 20


class MessageStream(ABC):
    """The messages of one call in both directions; what they mean is the subclass's."""

    def __init__(self, service: Service, connection: Connection, stream: Stream, plan: Plan) -> None:
        self._service = service
        self._connection = connection
        self._stream = stream
        self._reader = MessageReader(service.limits, service.room, plan.encoding)
        self._unread: deque[Message] = deque()
        self._unread_bytes = 0
        self._since_ns = 0
        self._advancing = False
        self._timer = expire_later(plan, self._expire)

    # Receiver

    def data(self, data: bytes, at: int, stop: int) -> None:
        room = self._service.room
        try:
            for message in self._reader.feed(data, at, stop):
                size = len(message) + PREFIX_BYTES
                room.claim(size)
                self._unread_bytes += size
                self._unread.append(message)
        except (ServingError, CallFailure) as error:
            self.finish(error)
            return
        self.advance()
        if self._reader.missing > self._stream.receive_window:
            self._connection.refill(self._stream)

    def end(self) -> None:
        if self._reader.under_way:
            self.finish(CallFailure(replies.INTERNAL, "the request ended in the middle of a message"))
        else:
            self.advance()

    def cancel(self) -> None:
        self._close()

    def writable(self) -> None:
        self.advance()

    def room(self) -> int:
        base = self._service.http2_limits.stream_window_bytes
        return max(base, self._reader.missing) - self._unread_bytes

    def tick(self, now_ns: int) -> None:
        if not self._reader.under_way:
            self._since_ns = 0
        elif not self._since_ns:
            self._since_ns = now_ns
        elif now_ns - self._since_ns > self._service.http2_limits.read_ns:
            limit_s = self._service.limits.read_timeout_seconds
            text = f"a message of the stream did not arrive within read_timeout_seconds = {limit_s:g} s"
            self.finish(DeadlineExceeded(text))

    # For subclasses

    def advance(self) -> None:
        """Take messages and send answers, as far as it goes now."""
        if self._advancing or not self._stream.open:
            return
        self._advancing = True
        try:
            self._advance()
        finally:
            self._advancing = False
        self._connection.refill(self._stream)

    @abstractmethod
    def _advance(self) -> None: ...

    @abstractmethod
    def withdraw(self) -> None:
        """The call is over: cancel and release what is under way."""

    @property
    def clogged(self) -> bool:
        """Whether so much waits for the client's window that no more should be produced."""
        return self._stream.queued_bytes >= MAX_QUEUED_BYTES

    @property
    def read_all(self) -> bool:
        """Whether every message of the client was taken."""
        return self._stream.ended and not self._unread

    def take(self) -> Message:
        """Return the next message."""
        message = self._unread.popleft()
        size = len(message) + PREFIX_BYTES
        self._unread_bytes -= size
        self._service.room.free(size)
        return message

    def send(self, parts: Sequence[Buffer], release: Release | None) -> None:
        """Send one message."""
        sender = self._connection.sender
        if not self._stream.started:
            sender.start(self._stream, replies.HEAD)
        size = sum(map(len, parts))
        sender.send(self._stream, [b"\0" + size.to_bytes(4, "big"), *parts], size + PREFIX_BYTES, release)

    def finish(self, error: Exception | None = None) -> None:
        """End the call after all that was sent, with a failure if there is one."""
        self._close()
        if not self._stream.open or self._stream.tail is not None:
            return
        tail = replies.OK_TAIL
        if error is not None:
            told = error.told if isinstance(error, CallFailure) else outcome_of(failure_of(error))
            tail = replies.failure_tail(told, alone=not self._stream.started)
        elif not self._stream.started:
            tail = replies.OK_ALONE
        self._connection.sender.finish(self._stream, tail)

    def _expire(self) -> None:
        self.finish(CallFailure(replies.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _close(self) -> None:
        self._reader.close()
        while self._unread:
            self.take()
        if self._timer is not None:
            self._timer.cancel()
        self.withdraw()


class InferStreamCall(MessageStream):
    """One ModelStreamInfer."""

    def __init__(self, service: Service, connection: Connection, stream: Stream, plan: Plan) -> None:
        super().__init__(service, connection, stream, plan)
        deadline_ns = service.clock() + plan.timeout_ns if plan.timeout_ns else None
        self._requests = InferStream(service.serving, service.limits, deadline_ns, self.advance)
        self._stopping = service.draining.is_set()
        service.infer_streams.add(self)
        if self._stopping:
            self.advance()

    def drain(self) -> None:
        """Answer what was read, then tell the client that the server stops."""
        self._stopping = True
        self._requests.drain()
        self.advance()

    def _advance(self) -> None:
        requests = self._requests
        moved = True
        while moved and self._stream.open:
            moved = False
            while not self.clogged and (answer := requests.next_answer()) is not None:
                self.send(*answer)
                moved = True
            while self._unread and not requests.full and not self._stopping:
                requests.accept(self.take())
                moved = True
        if len(requests):
            return
        if self.read_all:
            self.finish()
        elif self._stopping:
            # What the client sent meanwhile was not read: an orderly end would tell it that all was answered.
            self.finish(CallFailure(replies.UNAVAILABLE, STOPPING_TEXT))

    def withdraw(self) -> None:
        self._service.infer_streams.discard(self)
        self._requests.withdraw()


class EachCall(MessageStream):
    """A call that answers each message by itself."""

    def __init__(
        self, answer: Callable[[bytes], bytes], service: Service, connection: Connection, stream: Stream, plan: Plan
    ) -> None:
        super().__init__(service, connection, stream, plan)
        self._answer = answer

    def withdraw(self) -> None:
        """Nothing is under way: a message is answered as soon as it is taken."""

    def _advance(self) -> None:
        while self._unread and not self.clogged:
            try:
                self.send([self._answer(bytes(self.take()))], None)
            except Exception as error:
                self.finish(error)
                return
        if self.read_all:
            self.finish()


class WatchCall(UnaryCall):
    """A call with one message that is answered by many."""

    __slots__ = ("_produce", "_task", "_timer", "_writable")

    def __init__(
        self,
        produce: Callable[[bytes], AsyncIterator[bytes]],
        service: Service,
        connection: Connection,
        stream: Stream,
        plan: Plan,
    ) -> None:
        super().__init__(service, connection, stream, plan)
        self._produce = produce
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()

    def begin(self, message: Message) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(bytes(message)))
        self._timer = expire_later(self._plan, self._expire)

    def writable(self) -> None:
        self._writable.set()

    def withdraw(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _expire(self) -> None:
        self.withdraw()
        self._finish(CallFailure(replies.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    async def _run(self, message: bytes) -> None:
        stream, sender = self._stream, self._connection.sender
        try:
            async for data in self._produce(message):
                if not stream.started:
                    sender.start(stream, replies.HEAD)
                self._writable.clear()
                sender.send(stream, [b"\0" + len(data).to_bytes(4, "big"), data], len(data) + PREFIX_BYTES, None)
                await self._writable.wait()
        except Exception as error:
            self._finish(error)
        else:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        stream = self._stream
        if not stream.open:
            return
        if error is not None:
            told = error.told if isinstance(error, CallFailure) else outcome_of(failure_of(error))
            tail = replies.failure_tail(told, alone=not stream.started)
        else:
            tail = replies.OK_TAIL if stream.started else replies.OK_ALONE
        self._connection.sender.finish(stream, tail)
