"""Live gates that stay closed for a while after the last call: watches the routes whose settings ask for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from frontend.batches.scheduling.reopen_state import Absence
from frontend.batches.store.rows import SchedulingRow


class LiveTraffic(Protocol):
    def count(self, route_id: str) -> int | None:
        """Return the live calls under way on a route; None if that cannot be told now."""
        ...

    def moved_ns(self, route_id: str) -> int | None:
        """Return when a live call of this machine last began or ended on a route (CLOCK_MONOTONIC); None if never."""
        ...


class Reopening:
    """What is known of the gaps in live traffic, by route; used on one event loop."""

    def __init__(self, live: LiveTraffic) -> None:
        self._live = live
        self._routes: dict[str, tuple[int, Absence]] = {}
        """With the threshold that it was seen with."""

    def look(self, rows: Iterable[SchedulingRow], now_ns: int) -> None:
        """Look at the live traffic of every route that is to stay closed; forget the others."""
        wanted = {row.route_id: row for row in rows if row.reopen_after_s is not None}
        for gone in self._routes.keys() - wanted.keys():
            del self._routes[gone]
        for row in wanted.values():
            self.reopens_ns(row, self._live.count(row.route_id), now_ns)

    def reopens_ns(self, row: SchedulingRow, count: int | None, now_ns: int) -> int | None:
        """Take the live calls under way, and return when the gate opens if nobody calls; None if that is now."""
        threshold, after_s = row.yield_live_threshold, row.reopen_after_s
        if threshold is None or after_s is None or count is None:
            return None
        known = self._routes.get(row.route_id)
        if known is None or known[0] != threshold:
            known = self._routes[row.route_id] = (threshold, Absence())
        absence, limit_ns = known[1], after_s * 1_000_000_000
        # Below a higher threshold calls come and go without being in the way.
        moved_ns = self._live.moved_ns(row.route_id) if threshold == 1 else None
        absence.saw(count >= threshold, moved_ns, now_ns, limit_ns)
        return absence.reopens_ns(now_ns, limit_ns)
