"""Memory of the host device: allocations, and host memory that the device may reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from engines.device.base import ALIGNMENT_BYTES, Span
from engines.device.host_findings import Findings
from engines.device.host_order import History, Order, Ranges
from engines.staging import address_of
from engines.tensor import NDArray

FRESH: Final = 0xA5
"""Fills memory that was allocated and not written."""
GONE: Final = 0xDD
"""Fills memory that was freed or forgotten."""
PAGE_BYTES: Final = 4096


class HostBuffer:
    """An allocation of "device" memory.

    Args:
        freed: called once, before the memory goes; may raise DeviceMisuse to keep it.
    """

    def __init__(self, findings: Findings, size_bytes: int, purpose: str, freed: Callable[[HostBuffer], None]) -> None:
        self.title = f"device memory '{purpose}'"
        self.size_bytes = size_bytes
        self.history = History(self.title)
        self.written = Ranges()
        self._findings = findings
        self._freed = freed
        self._bytes: NDArray | None = _aligned(size_bytes, ALIGNMENT_BYTES, FRESH)
        self._address = address_of(self._bytes)

    @property
    def address(self) -> int:
        self.bytes(0, 0)
        return self._address

    def bytes(self, start: int, end: int) -> NDArray:
        """Return the bytes themselves; for the device."""
        if self._bytes is None:
            raise self._findings.misuse(f"{self.title} is used after it was freed (rule 3)")
        if not 0 <= start <= end <= self.size_bytes:
            raise self._findings.misuse(f"{self.title}: bytes {start} to {end} lie outside its {self.size_bytes}")
        return self._bytes[start:end]

    def free(self) -> None:
        if self._bytes is not None:
            self._freed(self)
            self._bytes.fill(GONE)
            self._bytes = None


class HostRegion:
    """Host memory that copies may name: pinned, or registered for a while. ``array`` is None once it is not."""

    def __init__(self, title: str, memory: NDArray, unlocked: Callable[[HostRegion], None], findings: Findings) -> None:
        self.title = title
        self.start = address_of(memory)
        self.end = self.start + memory.nbytes
        self.history = History(title)
        self._memory: NDArray | None = memory
        self._unlocked = unlocked
        self._findings = findings

    @classmethod
    def pinned(
        cls, size_bytes: int, purpose: str, unlocked: Callable[[HostRegion], None], findings: Findings
    ) -> HostRegion:
        return cls(f"pinned memory '{purpose}'", _aligned(size_bytes, PAGE_BYTES, FRESH), unlocked, findings)

    @property
    def array(self) -> NDArray:
        if self._memory is None:
            raise self._findings.misuse(f"{self.title} is used after it was freed (rule 3)")
        return self._memory

    def free(self) -> None:
        self.release()

    def release(self) -> None:
        if self._memory is not None:
            self._unlocked(self)
            self._memory = None


class HostMemory:
    """Everything that is allocated, pinned and registered."""

    def __init__(self, findings: Findings, order: Order, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._findings = findings
        self._order = order
        self._buffers: list[HostBuffer] = []
        self._regions: list[HostRegion] = []

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - sum(buffer.size_bytes for buffer in self._buffers)

    @property
    def left(self) -> list[str]:
        """What has not been freed yet."""
        return sorted([buffer.title for buffer in self._buffers] + [region.title for region in self._regions])

    def allocate(self, size_bytes: int, purpose: str) -> HostBuffer:
        buffer = HostBuffer(self._findings, size_bytes, purpose, self._free)
        self._buffers.append(buffer)
        return buffer

    def pin(self, size_bytes: int, purpose: str) -> HostRegion:
        region = HostRegion.pinned(size_bytes, purpose, self._unlock, self._findings)
        self._regions.append(region)
        return region

    def register(self, memory: NDArray, purpose: str) -> HostRegion | None:
        """Return the registration; None if some of this memory is registered or pinned already."""
        region = HostRegion(f"registered memory '{purpose}'", memory, self._unlock, self._findings)
        if any(region.start < other.end and other.start < region.end for other in self._regions):
            return None
        self._regions.append(region)
        return region

    def region(self, array: NDArray, title: str) -> HostRegion:
        """Return the pinned or registered memory that holds a host array."""
        start = address_of(array)
        for region in self._regions:
            if region.start <= start and start + array.nbytes <= region.end:
                return region
        raise self._findings.misuse(f"{title}: the host memory is neither pinned nor registered (rule 4)")

    def buffer(self, span: Span) -> HostBuffer:
        """Return the live allocation a span lies in."""
        if not isinstance(span.buffer, HostBuffer):
            raise self._findings.misuse(f"{span.buffer!r} is no memory of the host device")
        self.bytes(span)
        return span.buffer

    def bytes(self, span: Span) -> NDArray:
        """Return the bytes of a span."""
        assert isinstance(span.buffer, HostBuffer)
        return span.buffer.bytes(span.offset_bytes, span.offset_bytes + span.size_bytes)

    def require_written(self, span: Span, title: str) -> None:
        buffer = self.buffer(span)
        missing = buffer.written.missing(span.offset_bytes, span.offset_bytes + span.size_bytes)
        if missing is not None:
            raise self._findings.misuse(
                f"{buffer.title}: '{title}' reads byte {missing} before anything was written there"
            )

    def forget(self, span: Span) -> None:
        buffer, start, end = self.buffer(span), span.offset_bytes, span.offset_bytes + span.size_bytes
        self._findings.check(lambda: buffer.history.require_quiet(self._order, "forgetting", start, end))
        buffer.written.remove(start, end)
        self.bytes(span).fill(GONE)

    def _free(self, buffer: HostBuffer) -> None:
        if not self._findings.lost:
            self._findings.check(lambda: buffer.history.require_quiet(self._order, "freeing"))
        self._buffers.remove(buffer)

    def _unlock(self, region: HostRegion) -> None:
        if not self._findings.lost:
            self._findings.check(lambda: region.history.require_quiet(self._order, "unlocking"))
        self._regions.remove(region)


def _aligned(size_bytes: int, alignment_bytes: int, fill: int) -> NDArray:
    room = np.full(size_bytes + alignment_bytes, fill, np.uint8)
    start = -address_of(room) % alignment_bytes
    return room[start : start + size_bytes]
