"""Calls with one request message and one answer: the hot path of inference, and the other unary methods.

An inference makes no task and no future: the message is decoded when the request has ended, the callback of
``Serving.start`` sends the answer. Its messages usually lie whole in one DATA frame; only others need a MessageReader.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engines.errors import DeadlineExceeded, ServingError
from frontend.grpc_fast import replies
from frontend.grpc_fast.messages import PREFIX_BYTES, CallFailure, Message, MessageReader
from frontend.grpc_fast.plans import Plan
from frontend.grpc_fast.repeated_call import RepeatedStream
from frontend.grpc_fast.repeats import Found
from frontend.grpc_methods import Method, failure_of, outcome_of
from frontend.http2.connection import Connection
from frontend.http2.stream import Buffer, Release, Stream
from frontend.inference import InferRequest, InferResponse
from frontend.serving import Call

if TYPE_CHECKING:
    from frontend.grpc_fast.service import Service

MAX_LEARNT_BYTES: Final = 64 * 1024
"""Longer messages seldom come in one piece, and are kept by nobody until their answer."""
_NO_MESSAGE: Final = "a unary call without a request message"
_TWO_MESSAGES: Final = "a unary call with more than one request message"


class UnaryCall(ABC):
    """Collects the one message of a call; what is done with it is the subclass's."""

    __slots__ = ("_connection", "_message", "_plan", "_reader", "_service", "_since_ns", "_stream", "arrival_ns")

    def __init__(self, service: Service, connection: Connection, stream: Stream, plan: Plan) -> None:
        self._service = service
        self._connection = connection
        self._stream = stream
        self._plan = plan
        self._reader: MessageReader | None = None
        self._message: Message | None = None
        self._since_ns = 0
        self.arrival_ns = service.clock()

    @property
    def deadline_ns(self) -> int | None:
        """Absolute deadline, None if the caller set none."""
        timeout_ns = self._plan.timeout_ns
        return self.arrival_ns + timeout_ns if timeout_ns else None

    # Receiver

    def data(self, data: bytes, at: int, stop: int) -> None:
        if self._reader is None and self._message is None and stop - at >= PREFIX_BYTES and not data[at]:
            size = int.from_bytes(data[at + 1 : at + PREFIX_BYTES], "big")
            if size == stop - at - PREFIX_BYTES and size <= self._service.limits.max_request_bytes:
                self.take(data, at, stop)
                return
        try:
            self._collect(data, at, stop)
        except (ServingError, CallFailure) as error:
            self.refuse(error)

    def end(self) -> None:
        message, self._message = self._message, None
        if message is None or (self._reader is not None and self._reader.under_way):
            self.refuse(CallFailure(replies.UNIMPLEMENTED, _NO_MESSAGE))
            return
        self.begin(message)

    def cancel(self) -> None:
        self._close()
        self.withdraw()

    def writable(self) -> None:  # noqa: B027
        """There is room for more; only a call with more than one answer waits for that."""

    def room(self) -> int:
        base = self._service.http2_limits.stream_window_bytes
        return base if self._reader is None else max(base, self._reader.missing)

    def tick(self, now_ns: int) -> None:
        if self._stream.ended:
            return
        deadline_ns = self.deadline_ns
        if not self._since_ns:
            self._since_ns = now_ns
        elif now_ns - self._since_ns > self._service.http2_limits.read_ns:
            limit_s = self._service.limits.read_timeout_seconds
            self.refuse(DeadlineExceeded(f"the request did not arrive within read_timeout_seconds = {limit_s:g} s"))
            return
        if deadline_ns is not None and now_ns > deadline_ns:
            self.refuse(DeadlineExceeded("Request timeout expired before the request had arrived"))

    # For subclasses

    def take(self, data: bytes, at: int, stop: int) -> None:
        """Keep the message, which came in one piece: ``data[at:stop]`` with its prefix."""
        self._message = data[at + PREFIX_BYTES : stop]

    @abstractmethod
    def begin(self, message: Message) -> None:
        """Act on the complete request."""

    @abstractmethod
    def withdraw(self) -> None:
        """Nobody waits for the answer."""

    def answer(self, parts: list[Buffer], size: int, release: Release | None) -> None:
        """Send the answer's message of ``size`` bytes, in parts."""
        prefix = b"\0" + size.to_bytes(4, "big")
        self._connection.sender.answer(
            self._stream, replies.HEAD, [prefix, *parts], size + PREFIX_BYTES, replies.OK_TAIL, release
        )

    def refuse(self, error: Exception) -> None:
        """Tell a failure."""
        self._close()
        if self._stream.open:
            told = error.told if isinstance(error, CallFailure) else outcome_of(failure_of(error))
            self._connection.sender.finish(self._stream, replies.failure_tail(told, alone=True))

    def _collect(self, data: bytes, at: int, stop: int) -> None:
        reader = self._reader
        if reader is None:
            service = self._service
            reader = self._reader = MessageReader(service.limits, service.room, self._plan.encoding)
        messages = reader.feed(data, at, stop)
        for message in messages:
            if self._message is not None:
                raise CallFailure(replies.UNIMPLEMENTED, _TWO_MESSAGES)
            self._message = message
        if reader.missing > self._stream.receive_window:
            self._connection.refill(self._stream)

    def _close(self) -> None:
        self._message = None
        if self._reader is not None:
            self._reader.close()


class InferCall(UnaryCall):
    """One ModelInfer."""

    __slots__ = ("_call", "_found", "_learn")

    def __init__(self, service: Service, connection: Connection, stream: Stream, plan: Plan) -> None:
        super().__init__(service, connection, stream, plan)
        self._call: Call | None = None
        self._learn: tuple[bytes, InferRequest, object] | None = None
        self._found: Found | None = None

    def take(self, data: bytes, at: int, stop: int) -> None:
        super().take(data, at, stop)
        self._found = self._service.find(data, at, stop)

    def begin(self, message: Message) -> None:
        service = self._service
        if self._found is not None:
            assert service.app is not None, "only then is anything learnt"
            again = RepeatedStream(service.app, self._stream.id, self._plan, self._found, self.arrival_ns)
            self._connection.exchange(self._stream, again)
            return
        try:
            request = service.decode(message)
            if service.app is not None and isinstance(message, bytes) and len(message) <= MAX_LEARNT_BYTES:
                self._learn = message, request, service.serving.entries()
            request.deadline_ns = self.deadline_ns
            call = service.serving.start(request, self.arrival_ns, self._done)
        except Exception as error:
            self.refuse(error)
            return
        if self._stream.open:
            self._call = call

    def withdraw(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _done(self, outcome: InferResponse | ServingError) -> None:
        self._call = None
        if isinstance(outcome, ServingError):
            self.refuse(outcome)
            return
        if not self._stream.open:
            outcome.release()
            return
        try:
            parts, size = self._service.encode(outcome)
            if self._learn is not None:
                self._service.learn(self.arrival_ns, *self._learn, outcome, parts)
        except Exception as error:
            outcome.release()
            self.refuse(error)
            return
        self.answer(parts, size, outcome.release)


class MethodCall(UnaryCall):
    """A call of any other unary method, which is a coroutine function."""

    __slots__ = ("_method", "_task", "_timer")

    def __init__(self, method: Method, service: Service, connection: Connection, stream: Stream, plan: Plan) -> None:
        super().__init__(service, connection, stream, plan)
        self._method = method
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(bytes(message)))
        self._timer = expire_later(self._plan, self._expire)

    def withdraw(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _expire(self) -> None:
        self.withdraw()
        self.refuse(CallFailure(replies.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    async def _run(self, message: bytes) -> None:
        try:
            data = await self._method(message)
        except Exception as error:
            self.refuse(error)
        else:
            if self._stream.open:
                self.answer([data], len(data), None)
        finally:
            if self._timer is not None:
                self._timer.cancel()


def expire_later(plan: Plan, expire: Callable[[], None]) -> asyncio.TimerHandle | None:
    """Call ``expire`` when a call's time is over, if it has any."""
    if not plan.timeout_ns:
        return None
    return asyncio.get_running_loop().call_later(plan.timeout_ns / 1e9, expire)
