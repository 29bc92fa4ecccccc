"""Streams and events of the host device: operations that wait until somebody needs them done."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engines.device.base import Event, Stream
from engines.device.host_findings import Findings
from engines.device.host_order import HOST, Access, Clock, History, Order


@dataclass(frozen=True, slots=True)
class Touch:
    """A range of bytes that an operation reads or writes."""

    history: History
    start: int
    end: int
    writes: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """One piece of work of a stream.

    Attributes:
        after: a place in another stream's order that must be reached first.
    """

    title: str
    run: Callable[[], None]
    touches: Sequence[Touch] = ()
    after: Place | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Behind the first ``position`` operations of a stream."""

    stream: HostStream
    position: int

    @property
    def reached(self) -> bool:
        return self.stream.executed >= self.position


@dataclass(slots=True, eq=False)
class HostEvent:
    """A place that may be recorded anew."""

    queues: Queues
    place: Place | None = None
    clock: Clock = field(default_factory=dict)
    time_ns: int = 0
    closed: bool = False

    def done(self) -> bool:
        return self.queues.done(self)

    def synchronize(self) -> None:
        self.queues.findings.enter("synchronize")
        self.queues.finish(self.recorded(), self.clock)

    def close(self) -> None:
        self.closed = True

    def reached(self) -> None:
        self.time_ns = time.monotonic_ns()

    def recorded(self) -> Place:
        """Return where it was recorded last."""
        if self.closed:
            raise self.queues.findings.misuse("an event is used after it was closed")
        if self.place is None:
            raise self.queues.findings.misuse("an event is waited for but was never recorded")
        return self.place


class HostStream:
    """A queue of operations."""

    def __init__(self, queues: Queues, name: str, agent: int) -> None:
        self.name = name
        self.agent = agent
        self.handle = agent
        self.pending: deque[Operation] = deque()
        self.enqueued = 0
        self.executed = 0
        self.closed = False
        self._queues = queues

    def record(self, event: Event) -> None:
        self._queues.record(self, event)

    def wait(self, event: Event) -> None:
        self._queues.wait(self, event)

    def synchronize(self) -> None:
        self._queues.synchronize(self)

    def close(self) -> None:
        if not self.closed:
            self._queues.synchronize(self)
            self.closed = True


class Queues:
    """All streams of a device, and what the host and each of them has seen."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.order = Order()
        self.lock = threading.RLock()
        self._streams: list[HostStream] = []
        self._executor = threading.RLock()

    def stream(self, name: str) -> HostStream:
        with self.lock:
            stream = HostStream(self, name, self.order.agent())
            self._streams.append(stream)
            return stream

    def enqueue(self, stream: Stream, operation: Operation) -> None:
        """Put an operation into its stream, unless one of its accesses races with an earlier one."""
        own = self.own(stream)
        if own.closed:
            raise self.findings.misuse(f"stream '{own.name}' is used after it was closed")
        with self.lock:
            stamp = self.order.step(own.agent)
            for touch in operation.touches:
                access = Access(stamp, touch.start, touch.end, touch.writes, operation.title)
                add = touch.history.add
                self.findings.check(lambda add=add, access=access: add(self.order, access))  # type: ignore[misc]
            own.pending.append(operation)
            own.enqueued += 1

    def record(self, stream: HostStream, event: Event) -> None:
        self.findings.enter("record")
        own = self.own_event(event)
        with self.lock:
            self.enqueue(stream, Operation("record", own.reached))
            own.place = Place(stream, stream.enqueued)
            own.clock = self.order.snapshot(stream.agent)

    def wait(self, stream: HostStream, event: Event) -> None:
        self.findings.enter("wait")
        own = self.own_event(event)
        with self.lock:
            self.enqueue(stream, Operation("wait", _nothing, after=own.recorded()))
            self.order.join(stream.agent, own.clock)

    def synchronize(self, stream: HostStream) -> None:
        self.findings.enter("synchronize")
        with self.lock:
            place, clock = Place(stream, stream.enqueued), self.order.snapshot(stream.agent)
        self.finish(place, clock)

    def synchronize_all(self) -> None:
        for stream in self._streams:
            if not stream.closed:
                self.synchronize(stream)

    def done(self, event: HostEvent) -> bool:
        self.findings.enter("done")
        place = event.recorded()
        # The device gets on by one operation each time it is asked, or a caller that polls would never end.
        self._advance(place)
        if place.reached:
            self._see(event.clock)
        return place.reached

    def finish(self, place: Place, clock: Clock) -> None:
        """Run what the place needs, and let the host see it."""
        while self._advance(place):
            pass
        self._see(clock)

    def own(self, stream: Stream) -> HostStream:
        if isinstance(stream, HostStream) and stream in self._streams:
            return stream
        raise self.findings.misuse(f"stream '{stream.name}' belongs to another device")

    def own_event(self, event: Event) -> HostEvent:
        if not isinstance(event, HostEvent) or event.queues is not self:
            raise self.findings.misuse("an event of another device is used")
        if event.closed:
            raise self.findings.misuse("an event is used after it was closed")
        return event

    def _see(self, clock: Clock) -> None:
        with self.lock:
            self.order.join(HOST, clock)

    def _advance(self, target: Place) -> bool:
        """Run one operation that the target needs; return whether there was one."""
        with self._executor:
            stream = _runnable(target)
            if stream is None:
                return False
            operation = stream.pending.popleft()
            try:
                operation.run()
            finally:
                stream.executed += 1
            return True


def _runnable(target: Place) -> HostStream | None:
    """Return the stream whose next operation must run to come closer to the target; None once it is reached.

    Places only refer to what was enqueued before them, so this ends.
    """
    if target.reached:
        return None
    stream = target.stream
    while True:
        after = stream.pending[0].after
        if after is None or after.reached:
            return stream
        stream = after.stream


def _nothing() -> None:
    """A wait does nothing by itself."""
