"""A device made of host memory, which enforces the rules of ``base.py`` and runs work as late as they allow.

For tests: what passes here does not rely on luck. Two things are done at once. ``host_order`` checks every access
against all earlier ones, so a missing wait is found whatever happens to run first. And operations run only when
something waits for them, in the laziest order that the rules allow, so reading a result early gives garbage: memory is
filled with a pattern when it is allocated, freed or forgotten.

A broken rule raises ``DeviceMisuse``; as something in between may catch that, ``close`` raises the first one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from engines.device.base import Capabilities, DeviceMemory, Event, Span, Stream, Work
from engines.device.errors import CannotCapture, CannotRegister, OutOfDeviceMemory
from engines.device.host_arrays import HostArrays, on_device, running
from engines.device.host_findings import Findings
from engines.device.host_memory import HostBuffer, HostMemory, HostRegion
from engines.device.host_stream import HostEvent, HostStream, Operation, Queues, Touch
from engines.staging import address_of
from engines.tensor import NDArray

DEFAULT_TOTAL_BYTES: Final = 1 << 30
ALL: Final = Capabilities(overlaps=True, graphs=True, registers=True)


class HostGraph:
    """Work that is run again at every launch, with the spans it was captured with."""

    def __init__(self, device: HostDevice, work: Work, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        self._device = device
        self._work: Work | None = work
        self._reads, self._writes = tuple(reads), tuple(writes)

    def launch(self, stream: Stream) -> None:
        if self._work is None:
            raise self._device.findings.misuse("a graph is launched after it was closed")
        self._device.run_on(stream, self._work, self._reads, self._writes, in_graph=True)

    def close(self) -> None:
        self._work = None


class HostDevice:
    """Implements ``Device``.

    Args:
        total_bytes: "device" memory; allocations beyond it fail.
        capabilities: to try what engines do on lesser devices.
    """

    name = "host"
    key = "host"

    def __init__(self, total_bytes: int = DEFAULT_TOTAL_BYTES, capabilities: Capabilities = ALL) -> None:
        self.capabilities = capabilities
        self.xp: Any = HostArrays()
        self.findings = Findings()
        self._queues = Queues(self.findings)
        self._memory = HostMemory(self.findings, self._queues.order, total_bytes)
        self._lock = self._queues.lock

    def lose(self, reason: str) -> None:
        """Let every call fail from now on, as a GPU does after an illegal address; for tests."""
        self.findings.lost = reason

    def view(self, address: int, size_bytes: int, *, writes: bool) -> NDArray:
        """Return "device" memory by its address, inside running work.

        For stand-ins of libraries that know only addresses; the work's launch must declare the bytes.
        """
        for spans, allowed in ((running.writes, True), (running.reads, not writes)):
            for span in spans:
                offset = address - span.address
                if allowed and offset >= 0 and offset + size_bytes <= span.size_bytes:
                    return self._memory.bytes(span)[offset : offset + size_bytes]
        raise self.findings.misuse(
            f"'{running.title or 'the host'}' {'writes' if writes else 'reads'} {size_bytes} bytes at {address:#x}, "
            "which its launch does not declare (rule 6)"
        )

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._memory.free_bytes, self._memory.total_bytes)

    def allocate(self, size_bytes: int, purpose: str) -> HostBuffer:
        self.findings.enter("allocate")
        with self._lock:
            free = self._memory.free_bytes
            if size_bytes > free:
                raise OutOfDeviceMemory(f"{purpose}: {size_bytes} bytes of device memory do not fit, {free} are free")
            return self._memory.allocate(size_bytes, purpose)

    def pinned(self, size_bytes: int, purpose: str) -> HostRegion:
        self.findings.enter("pinned")
        with self._lock:
            return self._memory.pin(size_bytes, purpose)

    def register(self, memory: NDArray, purpose: str) -> HostRegion:
        self.findings.enter("register")
        if not self.capabilities.registers:
            raise CannotRegister(f"{purpose}: this device registers no host memory")
        if not (memory.flags.c_contiguous and memory.flags.writeable):
            raise CannotRegister(f"{purpose}: only contiguous writable memory can be registered")
        with self._lock:
            region = self._memory.register(memory, purpose)
        if region is None:
            raise CannotRegister(f"{purpose}: this memory is registered already")
        return region

    def forget(self, target: Span) -> None:
        self.findings.enter("forget")
        with self._lock:
            self._memory.forget(target)

    def stream(self, name: str) -> HostStream:
        self.findings.enter("stream")
        return self._queues.stream(name)

    def event(self) -> HostEvent:
        self.findings.enter("event")
        return HostEvent(self._queues)

    def elapsed_ns(self, start: Event, end: Event) -> int:
        first, last = self._queues.own_event(start), self._queues.own_event(end)
        if not (first.recorded().reached and last.recorded().reached):
            raise self.findings.misuse("the time between two events is asked for before both were synchronized with")
        return last.time_ns - first.time_ns

    def synchronize(self) -> None:
        self._queues.synchronize_all()

    def copy_in(self, target: Span, source: NDArray, stream: Stream) -> None:
        self.findings.enter("copy_in")
        if target.size_bytes == 0:
            return
        with self._lock:
            buffer = self._memory.buffer(target)
            title = f"copy to {buffer.title} on '{stream.name}'"
            host, touch = self._host(source, target.size_bytes, title, writes=False)
            into = self._memory.bytes(target)
            operation = Operation(title, lambda: np.copyto(into, host), (_touch(buffer, target, True), touch))
            self._queues.enqueue(stream, operation)
            buffer.written.add(target.offset_bytes, target.offset_bytes + target.size_bytes)

    def copy_out(self, target: NDArray, source: Span, stream: Stream) -> None:
        self.findings.enter("copy_out")
        if source.size_bytes == 0:
            return
        with self._lock:
            buffer = self._memory.buffer(source)
            title = f"copy from {buffer.title} on '{stream.name}'"
            self._memory.require_written(source, title)
            host, touch = self._host(target, source.size_bytes, title, writes=True)
            out = self._memory.bytes(source)
            operation = Operation(title, lambda: np.copyto(host, out), (_touch(buffer, source, False), touch))
            self._queues.enqueue(stream, operation)

    def copy_within(self, target: Span, source: Span, stream: Stream) -> None:
        self.findings.enter("copy_within")
        with self._lock:
            into, out = self._memory.buffer(target), self._memory.buffer(source)
            title = f"copy from {out.title} to {into.title} on '{stream.name}'"
            if target.size_bytes != source.size_bytes:
                raise self.findings.misuse(f"{title}: {source.size_bytes} bytes into {target.size_bytes}")
            shift = target.offset_bytes - source.offset_bytes
            if into is out and abs(shift) < source.size_bytes:
                raise self.findings.misuse(f"{title}: its two ends overlap (rule 5)")
            to, come = self._memory.bytes(target), self._memory.bytes(source)
            touches = (_touch(out, source, False), _touch(into, target, True))
            self._queues.enqueue(stream, Operation(title, lambda: np.copyto(to, come), touches))
            # Copying bytes that nobody wrote is no mistake; reading the copy is.
            carried = out.written.within(source.offset_bytes, source.offset_bytes + source.size_bytes)
            into.written.remove(target.offset_bytes, target.offset_bytes + target.size_bytes)
            for low, high in carried:
                into.written.add(low + shift, high + shift)

    def zero(self, target: Span, stream: Stream) -> None:
        self.findings.enter("zero")
        with self._lock:
            buffer, into = self._memory.buffer(target), self._memory.bytes(target)
            title = f"zero {buffer.title} on '{stream.name}'"
            self._queues.enqueue(stream, Operation(title, lambda: into.fill(0), (_touch(buffer, target, True),)))
            buffer.written.add(target.offset_bytes, target.offset_bytes + target.size_bytes)

    def array(self, span: Span, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Any:
        if not running.title:
            raise self.findings.misuse("arrays of the device are made inside 'launch' only (rule 6)")
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size > span.size_bytes:
            raise self.findings.misuse(f"an array of {size} bytes over a span of {span.size_bytes}")
        writable = any(_within(span, other) for other in running.writes)
        array = self.view(span.address, size, writes=writable).view(dtype).reshape(shape)
        array.flags.writeable = writable
        return on_device(array)

    def launch(self, stream: Stream, work: Work, *, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        self.run_on(stream, work, tuple(reads), tuple(writes), in_graph=False)

    def capture(self, stream: Stream, work: Work, *, reads: Sequence[Span], writes: Sequence[Span]) -> HostGraph:
        self.findings.enter("capture")
        if not self.capabilities.graphs:
            raise CannotCapture("this device captures no graphs")
        self._queues.own(stream)
        for span in (*reads, *writes):
            self._memory.buffer(span)
        return HostGraph(self, work, reads, writes)

    def run_on(
        self, stream: Stream, work: Work, reads: tuple[Span, ...], writes: tuple[Span, ...], *, in_graph: bool
    ) -> None:
        """Enqueue work that may touch these spans; for ``launch`` and graphs."""
        self.findings.enter("launch")
        with self._lock:
            title = f"{'graph' if in_graph else 'launch'} {self._queues.own(stream).enqueued} on '{stream.name}'"
            for span in reads:
                self._memory.require_written(span, title)
            touches = [_touch(self._memory.buffer(span), span, False) for span in reads]
            touches += [_touch(self._memory.buffer(span), span, True) for span in writes]

            def run() -> None:
                running.title, running.in_graph, running.reads, running.writes = title, in_graph, reads, writes
                try:
                    # A GPU makes infinities without a word.
                    with np.errstate(all="ignore"):
                        work()
                finally:
                    running.title, running.in_graph, running.reads, running.writes = "", False, (), ()

            self._queues.enqueue(stream, Operation(title, run, touches))
            for span in writes:
                self._memory.buffer(span).written.add(span.offset_bytes, span.offset_bytes + span.size_bytes)

    def close(self) -> None:
        """Release everything.

        Raises:
            DeviceMisuse: a rule was broken earlier and something swallowed it, or memory was not freed.
        """
        if not self.findings.lost:
            self.synchronize()
        self.findings.require_none()
        if left := self._memory.left:
            raise self.findings.misuse(f"not freed when the device was closed: {', '.join(left)}")

    def _host(self, array: NDArray, size_bytes: int, title: str, *, writes: bool) -> tuple[NDArray, Touch]:
        """Return the host end of a copy as bytes, and what the copy does to it."""
        if array.nbytes != size_bytes:
            raise self.findings.misuse(f"{title}: {array.nbytes} bytes on the host, {size_bytes} on the device")
        if not array.flags.c_contiguous:
            raise self.findings.misuse(f"{title}: the host array is not contiguous")
        region = self._memory.region(array, title)
        start = address_of(array) - region.start
        return array.reshape(-1).view(np.uint8), Touch(region.history, start, start + size_bytes, writes)


def _touch(buffer: HostBuffer, span: Span, writes: bool) -> Touch:
    return Touch(buffer.history, span.offset_bytes, span.offset_bytes + span.size_bytes, writes)


def _within(span: Span, other: Span) -> bool:
    start = span.offset_bytes - other.offset_bytes
    return span.buffer is other.buffer and start >= 0 and start + span.size_bytes <= other.size_bytes
