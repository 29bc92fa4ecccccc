"""The device layer: memory, streams, events, copies and graphs, as every engine on a device uses them.

Two implementations: ``cupy_device.CupyDevice`` on a GPU, and ``host.HostDevice``, which keeps "device" memory in host
arrays, checks the rules below as a race detector would, and runs work as late as the rules allow.

Rules, which hold on both and which only the host device enforces:

1. Work on one stream runs in order; work on two streams has no order unless one waits for an event of the other.
2. The host sees what a stream did only after it has synchronized with the stream, or with an event recorded after it.
3. Memory is freed only when the host has synchronized with all work that uses it, and is not used afterwards.
4. Copies between host and device name host memory that is pinned (``pinned``) or registered (``register``), and which
   the host leaves alone until it has synchronized with the copy.
5. Both ends of a copy within the device are disjoint.
6. Work handed to ``launch`` and ``capture`` touches the declared spans only. It runs at once on a GPU and later on the
   host device: whatever it needs, addresses set on a context included, it must set itself when it is called.
7. A graph replays the addresses it was captured with; after these moved it must be captured again.

Units: bytes and nanoseconds. Addresses are integers, aligned to ``ALIGNMENT_BYTES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from engines.tensor import NDArray

ALIGNMENT_BYTES: Final = 256
"""Every allocation starts on such a boundary; device libraries ask for it."""

Work = Callable[[], None]
"""Enqueues on the stream it was given to; must not raise for what the model does (keep the error and raise later)."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the whole device, as its driver tells them; other processes count too."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do beside the rest.

    Attributes:
        overlaps: copies run beside execution.
        graphs: ``capture`` may work.
        registers: ``register`` may work.
        captures_products: a graph may hold matrix products of ``xp``.
    """

    overlaps: bool
    graphs: bool
    registers: bool
    captures_products: bool = True


class Buffer(Protocol):
    """One allocation of device memory, owned by whoever allocated it."""

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

    def free(self) -> None:
        """Give the memory back (rule 3). A second call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """A part of one allocation of device memory; owns nothing."""

    buffer: Buffer
    offset_bytes: int
    size_bytes: int

    @classmethod
    def whole(cls, buffer: Buffer) -> Span:
        return cls(buffer, 0, buffer.size_bytes)

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset_bytes

    def part(self, offset_bytes: int, size_bytes: int) -> Span:
        """Return a part of this span; asserts that it lies inside."""
        inside = min(offset_bytes, size_bytes) >= 0 and offset_bytes + size_bytes <= self.size_bytes
        assert inside, f"bytes {offset_bytes} to {offset_bytes + size_bytes} are outside a span of {self.size_bytes}"
        return Span(self.buffer, self.offset_bytes + offset_bytes, size_bytes)


class PinnedMemory(Protocol):
    """Page-locked host memory, owned by whoever allocated it."""

    @property
    def array(self) -> NDArray:
        """All of it as bytes (uint8, one axis), page-aligned; views of it count as pinned."""
        ...

    def free(self) -> None:
        """Give the memory back (rule 3); arrays over it must be gone. A second call does nothing."""
        ...


class Registration(Protocol):
    """Host memory of someone else that is page-locked until ``release``."""

    def release(self) -> None:
        """Undo it (rule 3). A second call does nothing."""
        ...


class Event(Protocol):
    """A place in a stream's order."""

    def done(self) -> bool:
        """Return whether the work before the last ``record`` is done; True counts as a synchronization."""
        ...

    def synchronize(self) -> None:
        """Wait, without spinning, for the work before the last ``record``."""
        ...

    def close(self) -> None: ...


class Stream(Protocol):
    """Work in order."""

    @property
    def name(self) -> str: ...
    @property
    def handle(self) -> int:
        """The driver's stream as an integer, for libraries that enqueue by themselves (inside ``launch`` only)."""
        ...

    def record(self, event: Event) -> None:
        """Place the event behind everything enqueued so far."""
        ...

    def wait(self, event: Event) -> None:
        """Hold later work of this stream until the event's last record is reached; the host does not wait."""
        ...

    def synchronize(self) -> None: ...
    def close(self) -> None: ...


class Graph(Protocol):
    """Captured work that is launched as one piece (rule 7)."""

    def launch(self, stream: Stream) -> None: ...
    def close(self) -> None: ...


class Device(Protocol):
    """One device of this process. Any thread may call; what one stream gets must come from one thread at a time."""

    @property
    def name(self) -> str:
        """For people: the product's name."""
        ...

    @property
    def key(self) -> str:
        """What a compiled artefact depends on: architecture, size of the chip and driver."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def xp(self) -> Any:
        """The array module that computes on this device, inside ``launch`` and ``capture``."""
        ...

    def memory(self) -> DeviceMemory: ...

    def allocate(self, size_bytes: int, purpose: str) -> Buffer:
        """Return device memory with undefined contents; ``purpose`` names it in messages.

        Raises:
            OutOfDeviceMemory: it does not fit.
        """
        ...

    def pinned(self, size_bytes: int, purpose: str) -> PinnedMemory:
        """Return page-locked host memory.

        Raises:
            DeviceFailed: the system does not lock that much memory.
        """
        ...

    def register(self, memory: NDArray, purpose: str) -> Registration:
        """Page-lock contiguous writable host memory where it lies, such as a mapping shared with another process.

        Raises:
            CannotRegister: the driver refuses, or this memory is registered already.
        """
        ...

    def stream(self, name: str) -> Stream: ...
    def event(self) -> Event: ...

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """Return device time between two recorded events; ``end`` must be synchronized with."""
        ...

    def copy_in(self, target: Span, source: NDArray, stream: Stream) -> None:
        """Enqueue a copy of a contiguous host array of the target's size to the device (rule 4)."""
        ...

    def copy_out(self, target: NDArray, source: Span, stream: Stream) -> None:
        """Enqueue a copy from the device to a contiguous host array of the source's size (rule 4)."""
        ...

    def copy_within(self, target: Span, source: Span, stream: Stream) -> None:
        """Enqueue a copy inside the device (rule 5)."""
        ...

    def zero(self, target: Span, stream: Stream) -> None:
        """Enqueue filling with zeros."""
        ...

    def forget(self, target: Span) -> None:
        """Declare that nobody reads these bytes again before they are written anew; free on a GPU."""
        ...

    def array(self, span: Span, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Any:
        """Return an array of ``xp`` over device memory, to use inside ``launch`` or ``capture``; copies nothing."""
        ...

    def launch(self, stream: Stream, work: Work, *, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        """Enqueue what ``work`` does (rule 6); a span that is read and then written stands in both lists."""
        ...

    def capture(self, stream: Stream, work: Work, *, reads: Sequence[Span], writes: Sequence[Span]) -> Graph:
        """Return a graph of what ``work`` would do, without doing it; launch the same work plainly once before.

        Raises:
            CannotCapture: the work does something that no graph can hold.
        """
        ...

    def synchronize(self) -> None:
        """Wait for all streams."""
        ...

    def close(self) -> None:
        """Release streams, events and pools; every allocation must be freed before."""
        ...
