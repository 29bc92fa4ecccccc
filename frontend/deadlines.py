"""Answers requests whose deadline passes while they wait or run, whatever the worker is doing.

The worker sheds queued requests itself; this is what bounds a caller's wait while its batch executes, or while the
worker is stopped. Deadlines fall into coarse ticks: adding and removing one costs a set operation, and nothing ticks
while nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

TICK_NS = 10_000_000
"""10 ms: an expiry is noticed at most that late, well within the 50 ms that rule 21 allows."""


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
        self._ticks: dict[int, set[Expiring]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0

    def add(self, item: Expiring) -> None:
        """Expire ``item`` within a tick after its deadline, unless it is removed first."""
        tick = item.deadline_ns // TICK_NS + 1
        waiting = self._ticks.get(tick)
        if waiting is None:
            waiting = self._ticks[tick] = set()
        waiting.add(item)
        if self._timer is None:
            self._last_tick = self._clock_ns() // TICK_NS - 1
            self._arm()

    def discard(self, item: Expiring) -> None:
        """Forget ``item``; harmless if it has expired."""
        tick = item.deadline_ns // TICK_NS + 1
        waiting = self._ticks.get(tick)
        if waiting is not None:
            waiting.discard(item)
            if not waiting:
                del self._ticks[tick]

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._ticks.values())

    def _arm(self) -> None:
        self._timer = self._loop.call_later(TICK_NS / 1e9, self._on_tick)

    def _on_tick(self) -> None:
        self._timer = None
        now_tick = self._clock_ns() // TICK_NS
        due = [tick for tick in self._ticks if tick <= now_tick] if now_tick != self._last_tick else []
        self._last_tick = now_tick
        for tick in sorted(due):
            for item in list(self._ticks.pop(tick, ())):
                item.expire()
        if self._ticks:
            self._arm()
