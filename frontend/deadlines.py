"""Answers requests whose deadline passes while they wait or run, whatever the worker is doing.

The worker sheds queued requests itself; this is what bounds a caller's wait while its batch executes, or while the
worker is stopped. Adding and removing one costs a set operation each: nothing is kept in order, and all are looked at
only when the earliest deadline seen since the last look has passed. Nothing ticks while nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

TICK_NS = 10_000_000
"""10 ms: an expiry is noticed at most that late, well within the 50 ms that rule 21 allows."""
NEVER_NS = 2**63 - 1


class Expiring(Protocol):
    """Something with a deadline."""

    deadline_ns: int

    def expire(self) -> None:
        """Answer the caller: the deadline has passed."""
        ...


class Deadlines:
    """Pending deadlines of one frontend."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock_ns: Callable[[], int]) -> None:
        self._loop = loop
        self._clock_ns = clock_ns
        self._items: set[Expiring] = set()
        self._earliest_ns = NEVER_NS
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Expiring) -> None:
        """Expire ``item`` within a tick after its deadline, unless it is removed first."""
        self._items.add(item)
        if item.deadline_ns < self._earliest_ns:
            self._earliest_ns = item.deadline_ns
        if self._timer is None:
            self._arm()

    def discard(self, item: Expiring) -> None:
        """Forget ``item``; harmless if it has expired."""
        self._items.discard(item)

    def __len__(self) -> int:
        return len(self._items)

    def _arm(self) -> None:
        self._timer = self._loop.call_later(TICK_NS / 1e9, self._on_tick)

    def _on_tick(self) -> None:
        self._timer = None
        now_ns = self._clock_ns()
        if self._earliest_ns <= now_ns:
            self._expire(now_ns)
        if self._items:
            self._arm()
        else:
            self._earliest_ns = NEVER_NS

    def _expire(self, now_ns: int) -> None:
        due = [item for item in self._items if item.deadline_ns <= now_ns]
        self._items.difference_update(due)
        self._earliest_ns = min((item.deadline_ns for item in self._items), default=NEVER_NS)
        for item in sorted(due, key=lambda item: item.deadline_ns):
            item.expire()
