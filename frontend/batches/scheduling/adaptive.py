"""Adapts the caps of routes whose ``max_concurrency`` is a range, and tells everybody: provides ``EffectiveCaps``.

Every runner watches: the batch lines of the installation, its own answers 429 and 503, and the live calls of its
machine. What hurts is seen where it happens, so any of them lowers a cap; one, which holds the duty, raises them. The
cap is in the store, and every change an edge of the route with its cause. It is changed only from the value that the
decision was made on: of two runners that see the same overload one halves the cap.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from frontend.batches.periodic import Periodic
from frontend.batches.scheduling.adaptive_state import Cap, Latencies, Range, Seen, Why, after, fitted, moved
from frontend.batches.scheduling.effective_caps import LiveLatencies
from frontend.batches.store.protocol import Store
from frontend.batches.store.route_rows import EdgeRow, RouteCap, RouteCount
from frontend.batches.store.rows import SECOND_US, SchedulingRow
from worker.channel.series import Series

log = logging.getLogger("batches")

DUTY: Final = "adaptive_caps"
LEASE_US: Final = 30 * SECOND_US
WINDOW_S: Final = 10.0
LOOK_S: Final = 2.0
DEFAULT_SHARE_PERCENT: Final = 20


@dataclass(slots=True)
class _Route:
    """A route that adapts. ``known``: live calls that had ended by the last window, per bucket."""

    cap: Cap
    latencies: Latencies
    known: Sequence[int]
    begun_ns: int
    stored: bool
    running: int = 0
    waiting: bool = True
    overloads: int = 0


class AdaptiveCaps:
    """Between ``start`` and ``close``; used on one event loop.

    Attributes:
        rows: the settings of all routes, from memory.
        counts: waiting and running lines per route of the installation, some seconds old.
    """

    def __init__(
        self,
        process_id: str,
        store: Store,
        live: LiveLatencies,
        *,
        window_s: float = WINDOW_S,
        look_s: float = LOOK_S,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.rows: Callable[[], Iterable[SchedulingRow]] = tuple
        self.counts: Callable[[], Iterable[RouteCount]] = tuple
        self._process_id = process_id
        self._store = store
        self._live = live
        self._window_ns = int(window_s * 1e9)
        self._clock_ns = clock_ns
        self._routes: dict[str, _Route] = {}
        self._changes: Counter[Why] = Counter()
        self._looking = Periodic("batches.caps", self.look, look_s)

    def start(self) -> None:
        """Begin to adapt."""
        self._looking.start()

    async def close(self) -> None:
        """Stop; idempotent. The caps stay as they are."""
        await self._looking.close()

    def cap(self, row: SchedulingRow) -> int:
        """See ``EffectiveCaps``. A route of which nothing is known yet has its least."""
        if row.min_concurrency is None:
            return row.max_concurrency
        route = self._routes.get(row.route_id)
        return row.min_concurrency if route is None else fitted(route.cap, _range(row)).lines

    def overload(self, route_id: str) -> None:
        """See ``EffectiveCaps``."""
        route = self._routes.get(route_id)
        if route is not None:
            route.overloads += 1

    async def look(self) -> None:
        """Look at every route that adapts, and decide where a window is over. Raises: StoreUnavailable."""
        rows = {row.route_id: row for row in self.rows() if row.min_concurrency is not None}
        for gone in self._routes.keys() - rows.keys():
            del self._routes[gone]
        if not rows:
            return
        now_ns = self._clock_ns()
        stored = {cap.route_id: cap.cap for cap in await self._store.scheduling.caps()}
        counts = {count.route_id: count for count in self.counts()}
        for route_id, row in rows.items():
            route = self._known(row, stored.get(route_id), now_ns)
            count = counts.get(route_id)
            route.running = max(route.running, 0 if count is None else count.running_lines)
            route.waiting = route.waiting and count is not None and count.waiting_lines > 0
        raises = await self._store.alerts.hold_duty(DUTY, self._process_id, LEASE_US)
        for route_id, row in rows.items():
            if now_ns - self._routes[route_id].begun_ns >= self._window_ns:
                await self._decide(row, self._routes[route_id], now_ns, raises=raises)

    def series(self) -> Iterable[Series]:
        """Yield how often this process changed a cap."""
        for why in Why:
            yield Series(
                name="gateway_batch_cap_changes_total", kind="counter", value=self._changes[why],
                help="Changes of adaptive caps of routes, by their cause.", labels={"reason": why.value},
            )  # fmt: skip

    # Inside

    def _known(self, row: SchedulingRow, stored: int | None, now_ns: int) -> _Route:
        route = self._routes.get(row.route_id)
        if route is None:
            route = self._routes[row.route_id] = _Route(
                Cap(_range(row).least if stored is None else stored),
                Latencies.empty(self._live.latency_bounds_s),
                self._live.latency_counts(row.route_id),
                now_ns,
                stored is not None,
            )
        elif stored is not None and (stored != route.cap.lines or not route.stored):
            if stored != route.cap.lines:
                route.latencies.forget_loaded()
            route.cap, route.stored = moved(route.cap, stored), True
        return route

    async def _decide(self, row: SchedulingRow, route: _Route, now_ns: int, *, raises: bool) -> None:
        allowed = _range(row)
        counts = self._live.latency_counts(row.route_id)
        route.latencies.add(
            [max(0, now - then) for now, then in zip(counts, route.known, strict=True)], route.running, allowed
        )
        seen = Seen(route.running, route.waiting, route.overloads, route.latencies.slow(allowed))
        before = route.cap
        route.known, route.begun_ns = counts, now_ns
        route.running, route.waiting, route.overloads = 0, True, 0
        cap, why = after(before, seen, allowed)
        if why is None:
            route.cap = cap
        elif cap.lines < before.lines or raises:
            lost = await self._change(row.route_id, route, cap, why)
            if lost and route.cap.lines > cap.lines < before.lines:
                # Raised by another meanwhile, which has not seen what hurts here.
                cap, why = after(route.cap, replace(seen, running=0), allowed)
                if why is not None:
                    await self._change(row.route_id, route, cap, why)

    async def _change(self, route_id: str, route: _Route, cap: Cap, why: Why) -> bool:
        """Set a cap; True if another process has set it meanwhile, which then holds."""
        expected = route.cap.lines if route.stored else None
        stands = await self._store.scheduling.put_cap(RouteCap(route_id, cap.lines, why.value), expected)
        route.stored = True
        route.latencies.forget_loaded()
        if (stands.cap, stands.why) != (cap.lines, why.value):
            route.cap = moved(route.cap, stands.cap)
            return True
        route.cap = cap
        self._changes[why] += 1
        log.info("batches.cap route=%s cap=%d reason=%s", route_id, cap.lines, why.value)
        await self._store.explain.add_edges(
            [EdgeRow(route_id, 0, self._process_id, None, cap=cap.lines, why=why.value)]
        )  # fmt: skip
        return False


def _range(row: SchedulingRow) -> Range:
    assert row.min_concurrency is not None
    share = row.latency_share_percent or DEFAULT_SHARE_PERCENT
    return Range(min(row.min_concurrency, row.max_concurrency), row.max_concurrency, share)
