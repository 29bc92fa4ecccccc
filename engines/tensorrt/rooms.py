"""Scratch memory and staging regions, which all models of one worker share on the device.

Executions run one at a time, so one scratch block serves every model, as large as the largest needs. A *region* holds
the inputs and outputs of one execution from ``acquire`` until its results are on the host; with several, copies for the
next execution run beside the running one. Regions are lent, not owned: whoever needs one takes over the oldest that has
finished, else waits for the oldest that runs, else takes back the oldest that was only staged (its inputs are copied
again later). So nobody ever waits for a caller.

``generation`` counts how often scratch or regions moved: whoever remembers an address or a graph compares it.

All of it is used under the device's ``lock``; a thread that waits for the device to finish need not hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from engines.device.base import Buffer, Event, Span
from engines.device.shared import SharedDevice

REGIONS: Final = 3
"""One execution running, one staged, and one of the thread that loads and warms up models."""


class Lodger(Protocol):
    """An execution that holds a region."""

    def running(self) -> bool:
        """Whether it was launched and its results were not taken yet."""
        ...

    def settle(self) -> None:
        """Wait until it has run and keep its results; the region is free afterwards."""
        ...

    def unstage(self) -> None:
        """Give the region back before it ran; inputs are copied again when it is launched."""
        ...


@dataclass(slots=True, eq=False)
class Region:
    """Device memory of one execution's inputs and outputs, and the events around it."""

    index: int
    inputs_ready: Event
    copy_started: Event
    started: Event
    ended: Event
    outputs_ready: Event
    buffer: Buffer | None = None
    lodger: Lodger | None = None
    taken: int = 0

    @property
    def span(self) -> Span:
        assert self.buffer is not None, "no executable has asked for room yet"
        return Span.whole(self.buffer)


class Rooms:
    """The shared parts; ``start`` makes events, memory comes with ``require``."""

    def __init__(self, shared: SharedDevice) -> None:
        self.shared = shared
        self.device = shared.device
        self.lock = shared.lock
        self.generation = 0
        self.regions: list[Region] = []
        self._scratch: Buffer | None = None
        self._taken = 0

    def start(self) -> None:
        """Make events."""
        for index in range(REGIONS):
            event = self.device.event
            self.regions.append(Region(index, event(), event(), event(), event(), event()))

    @property
    def scratch(self) -> Span | None:
        """Scratch memory of every execution; None while no model needs any."""
        return None if self._scratch is None else Span.whole(self._scratch)

    @property
    def device_bytes(self) -> int:
        """What scratch and regions hold now."""
        buffers = [self._scratch, *(region.buffer for region in self.regions)]
        return sum(buffer.size_bytes for buffer in buffers if buffer is not None)

    def require(self, scratch_bytes: int, region_bytes: int) -> None:
        """Make room for an executable with these needs; waits for what runs if something must grow.

        Raises:
            OutOfDeviceMemory: it does not fit; what was there before is kept.
        """
        with self.lock:
            grow_scratch = scratch_bytes > (self._scratch.size_bytes if self._scratch is not None else 0)
            grow_regions = any(
                region.buffer is None or region.buffer.size_bytes < region_bytes for region in self.regions
            )
            if not grow_scratch and not grow_regions:
                return
            self.settle()
            fresh: list[Buffer] = []
            try:
                if grow_scratch:
                    fresh.append(self.device.allocate(scratch_bytes, "scratch of executions"))
                if grow_regions:
                    fresh += [self.device.allocate(max(region_bytes, 1), "staging region") for _ in self.regions]
            except BaseException:
                for buffer in fresh:
                    buffer.free()
                raise
            if grow_scratch:
                old, self._scratch = self._scratch, fresh.pop(0)
                if old is not None:
                    old.free()
            for region, buffer in zip(self.regions, fresh, strict=False):
                if region.buffer is not None:
                    region.buffer.free()
                region.buffer = buffer
            self.generation += 1

    def acquire(self, lodger: Lodger) -> Region:
        """Return a region for one execution; the lock is held."""
        region = min(self.regions, key=_availability)
        if region.lodger is not None:
            if region.lodger.running():
                region.lodger.settle()
            else:
                region.lodger.unstage()
        self._taken += 1
        region.lodger, region.taken = lodger, self._taken
        return region

    def settle(self) -> None:
        """Leave nothing in flight and no region taken; the lock is held."""
        for region in self.regions:
            if region.lodger is not None:
                if region.lodger.running():
                    region.lodger.settle()
                else:
                    region.lodger.unstage()
        self.device.synchronize()

    def close(self) -> None:
        """Free everything; every model must be closed."""
        with self.lock:
            self.settle()
            for region in self.regions:
                for event in (
                    region.inputs_ready, region.copy_started, region.started, region.ended, region.outputs_ready
                ):  # fmt: skip
                    event.close()
                if region.buffer is not None:
                    region.buffer.free()
            if self._scratch is not None:
                self._scratch.free()
                self._scratch = None
            self.regions.clear()


def _availability(region: Region) -> tuple[int, int]:
    """Order regions by who should give way first."""
    if region.lodger is None:
        # Always the first free one: graphs hold a region's addresses, so traffic that needs one region captures once.
        return (0, region.index)
    return (1 if region.lodger.running() else 2, region.taken)
