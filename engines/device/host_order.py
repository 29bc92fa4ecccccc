"""Which accesses to memory are ordered: a race detector for streams.

Every stream and the host is an agent with a clock that counts its operations and remembers how far it has seen those of
the others. Enqueuing hands the host's knowledge to the stream, waiting for an event hands over what its stream knew
when it was recorded. Two accesses conflict if they overlap and one writes; a conflict where the later access's agent
has not seen the earlier one is a race, whatever happened to run first this time.

Pure: knows ranges of numbers, not memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HOST: Final = 0
"""The agent that stands for all threads of the host."""


class DeviceMisuse(AssertionError):
    """Our own code broke a rule of the device layer; the message names rule, memory and both operations."""


Clock = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Stamp:
    """One operation of an agent."""

    agent: int
    tick: int


class Order:
    """The clocks of all agents."""

    def __init__(self) -> None:
        self._clocks: list[dict[int, int]] = [{}]

    def agent(self) -> int:
        """Return a new agent, for a new stream."""
        self._clocks.append({})
        return len(self._clocks) - 1

    def step(self, agent: int) -> Stamp:
        """Return the stamp of an operation that the host enqueues now."""
        self.join(agent, self._clocks[HOST])
        clock = self._clocks[agent]
        clock[agent] = clock.get(agent, 0) + 1
        return Stamp(agent, clock[agent])

    def snapshot(self, agent: int) -> Clock:
        """Return what the agent has seen, its own operations included."""
        return dict(self._clocks[agent])

    def join(self, agent: int, seen: Clock) -> None:
        """Let an agent see what another has."""
        clock = self._clocks[agent]
        for other, tick in seen.items():
            if tick > clock.get(other, 0):
                clock[other] = tick

    def seen(self, stamp: Stamp, agent: int) -> bool:
        """Return whether the operation comes before whatever the agent does next."""
        return self._clocks[agent].get(stamp.agent, 0) >= stamp.tick


@dataclass(frozen=True, slots=True)
class Access:
    """What one operation does to a range of bytes."""

    stamp: Stamp
    start: int
    end: int
    writes: bool
    title: str


class History:
    """Accesses to one piece of memory that some future operation may race with.

    Args:
        title: how messages name the memory.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._accesses: list[Access] = []

    def add(self, order: Order, new: Access) -> None:
        """Check an access and remember it.

        Raises:
            DeviceMisuse: it races with an earlier one (rule 1 or 2).
        """
        kept: list[Access] = []
        for old in self._accesses:
            if old.start < new.end and new.start < old.end and (old.writes or new.writes):
                self._require_seen(order, old, new.stamp.agent, new)
            # What the host has seen, every later operation has seen.
            if not order.seen(old.stamp, HOST) and not _replaced(old, new):
                kept.append(old)
        kept.append(new)
        self._accesses = kept

    def require_quiet(self, order: Order, what: str, start: int = 0, end: int | None = None) -> None:
        """Raise DeviceMisuse unless the host has seen every access to these bytes (rule 3)."""
        for old in self._accesses:
            overlaps = old.end > start and (end is None or old.start < end)
            if overlaps and not order.seen(old.stamp, HOST):
                raise DeviceMisuse(f"{what} {self.title} while '{old.title}' may still use it: synchronize first")

    def _require_seen(self, order: Order, old: Access, agent: int, new: Access) -> None:
        if not order.seen(old.stamp, agent):
            raise DeviceMisuse(
                f"{self.title}: '{new.title}' {'writes' if new.writes else 'reads'} bytes {new.start} to {new.end} "
                f"that '{old.title}' {'writes' if old.writes else 'reads'} on another stream, and nothing orders the "
                "two: wait for an event recorded after the earlier one"
            )


def _replaced(old: Access, new: Access) -> bool:
    """Whether whatever races with ``old`` races with ``new`` too; the new access is ordered behind the old."""
    covered = new.start <= old.start and old.end <= new.end
    return covered and (new.writes or (old.stamp.agent == new.stamp.agent and not old.writes))


class Ranges:
    """A set of numbers as disjoint ranges; for the bytes that were written."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add [start, end)."""
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        """Take [start, end) out."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first >= last:
            return
        left = (self._starts[first], start) if self._starts[first] < start else None
        right = (end, self._ends[last - 1]) if self._ends[last - 1] > end else None
        rest = [part for part in (left, right) if part is not None]
        self._starts[first:last] = [part[0] for part in rest]
        self._ends[first:last] = [part[1] for part in rest]

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [start, end) that are in the set."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        return [(max(start, self._starts[at]), min(end, self._ends[at])) for at in range(first, last)]

    def missing(self, start: int, end: int) -> int | None:
        """Return the lowest number of [start, end) that is not in the set; None if all are."""
        at = start
        for low, high in self.within(start, end):
            if low > at:
                break
            at = high
        return at if at < end else None
