"""The outlook of every unfinished batch, kept fresh for whoever asks: provides ``Outlooks``.

Theory of operation
    One look reads what waits and runs, the settings, caps and weights, and forecasts all batches together, in a thread.
    It is made when somebody asks and the last one is older than ``FRESH_S``; askers meanwhile are given the last one if
    it is younger than ``STALE_S``, else they share the new one. What the past says of a route is read seldom (days) and
    often (its last hours, for line times and closures).

    Every process that is asked looks for itself: the answer depends on the store alone, and fixed seeds make it the
    same everywhere.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from frontend.batches.scheduling import window_state
from frontend.batches.scheduling.forecast_history import MINUTE_US, History, closed_for, history, line_times
from frontend.batches.scheduling.forecast_state import DAY_S, HORIZON_S, Demand, Ends, RouteWorld, forecast
from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.scheduling.settings_document import window_of
from frontend.batches.scheduling.settings_past import as_if, counting, same_gates
from frontend.batches.scheduling.zones import UnknownZone
from frontend.batches.store.protocol import Store
from frontend.batches.store.route_rows import MinuteRow
from frontend.batches.store.rows import SECOND_US, BatchRow, SchedulingRow, WindowHours
from frontend.gateway_settings import BatchSettings

FRESH_S: Final = 5.0
STALE_S: Final = 30.0
PAST_US: Final = 14 * DAY_S * SECOND_US
RECENT_US: Final = 6 * 3600 * SECOND_US
RECENT_S: Final = 30.0
DAYS_S: Final = 1800.0
"""How long what the last days say of a route is taken as known."""
YOUNG_DAYS_S: Final = 120.0
"""The same for a route with little past."""
YOUNG_MINUTES: Final = 2000
MIN_LINES: Final = 5
"""With fewer measured lines there is no forecast."""
MAX_BATCHES: Final = 2000
PAGE: Final = 200
MAX_SPLIT: Final = 200
"""Batches whose running lines are told apart by route, in one look."""
MAX_INTERVALS: Final = 128
WINDOW_HOURS: Final[tuple[WindowHours, ...]] = (24, 48, 72, 168)

RouteOf = Callable[[str, str], str]
"""Endpoint and model to the route that a line would take now, empty for none."""


@dataclass(slots=True)
class _Past:
    days: History
    days_ns: int
    times_ns: int
    recent: tuple[MinuteRow, ...] = ()
    rows: int = 0


@dataclass(frozen=True, slots=True)
class _Picture:
    """One look: what it was made from, so that a further batch can be added, and what it says."""

    made_ns: int
    now_us: int
    batches: Mapping[str, BatchRow]
    demands: tuple[Demand, ...]
    worlds: dict[str, RouteWorld]
    weights: Mapping[str, int]
    outlooks: dict[str, Outlook]


class Forecaster:
    """Forecasts; used on one event loop, any number of askers.

    Args:
        route_of: for batches that no runner has taken up yet.
    """

    def __init__(
        self,
        store: Store,
        settings: BatchSettings,
        route_of: RouteOf = lambda endpoint, model: "",
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._store = store
        self._settings = settings
        self.route_of = route_of
        self._clock_ns = clock_ns
        self._past: dict[str, _Past] = {}
        self._picture: _Picture | None = None
        self._looking: asyncio.Task[_Picture] | None = None
        self._kept: tuple[str, int, Sequence[MinuteRow]] | None = None

    async def all(self) -> Mapping[str, Outlook]:
        """See ``Outlooks``. Raises: StoreUnavailable."""
        return (await self._fresh()).outlooks

    async def of(self, batch_id: str) -> Outlook | None:
        """See ``Outlooks``. Raises: StoreUnavailable."""
        return (await self._fresh()).outlooks.get(batch_id)

    async def would(self, row: BatchRow, lines: Mapping[str, int]) -> Outlook:
        """Return the outlook of a batch that nobody has taken up yet, behind all that are there.

        Args:
            lines: to run, by route.
        """
        picture = await self._fresh()
        known = [demand for demand in picture.demands if demand.batch_id != row.id]
        routes = {route for route, count in lines.items() if count}
        added = [Demand(row.id, row.workspace_id, route, lines[route]) for route in sorted(routes)]
        worlds = dict(picture.worlds)
        for route in routes - worlds.keys():
            worlds |= await self._worlds({route}, (), picture.now_us)
        demands = [*(demand for demand in known if demand.route_id in routes), *added]
        ends = await asyncio.to_thread(forecast, demands, worlds, picture.weights, picture.now_us / SECOND_US)
        return _outlook(row, ends.get(row.id), _measured(worlds, routes), picture.now_us)

    async def with_settings(self, row: SchedulingRow) -> Mapping[str, tuple[Outlook, Outlook]]:
        """See ``WhatIf``. Raises: StoreUnavailable."""
        picture = await self._fresh()
        affected = {demand.batch_id for demand in picture.demands if demand.route_id == row.route_id}
        if not affected:
            return {}
        # Such a batch may run on other routes too, which others want as well.
        routes = {demand.route_id for demand in picture.demands if demand.batch_id in affected}
        demands = [demand for demand in picture.demands if demand.route_id in routes]
        worlds = {route: picture.worlds[route] for route in routes}
        worlds[row.route_id] = await self._world_under(row, picture)
        ends = await asyncio.to_thread(forecast, demands, worlds, picture.weights, picture.now_us / SECOND_US)
        found = {}
        for batch_id in affected:
            on = {demand.route_id for demand in demands if demand.batch_id == batch_id}
            then = _outlook(picture.batches[batch_id], ends.get(batch_id), _measured(worlds, on), picture.now_us)
            found[batch_id] = (picture.outlooks[batch_id], then)
        return found

    async def close(self) -> None:
        """Stop looking; idempotent."""
        task, self._looking = self._looking, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _fresh(self) -> _Picture:
        picture = self._picture
        age_ns = 0 if picture is None else self._clock_ns() - picture.made_ns
        if picture is not None and age_ns < FRESH_S * 1e9:
            return picture
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
            # Whoever is given the last picture does not wait for what becomes of this.
            self._looking.add_done_callback(lambda task: task.cancelled() or task.exception())
        if picture is not None and age_ns < STALE_S * 1e9:
            return picture
        # Shielded: one asker that goes away does not take the answer from the others.
        return await asyncio.shield(self._looking)

    async def _look(self) -> _Picture:
        made_ns = self._clock_ns()
        now_us = await self._store.now_us()
        batches = await self._unfinished()
        demands = await self._demands(batches)
        worlds = await self._worlds({demand.route_id for demand in demands}, demands, now_us)
        weights = await self._store.scheduling.weights()
        ends = await asyncio.to_thread(forecast, demands, worlds, weights, now_us / SECOND_US)
        routes: dict[str, set[str]] = {}
        for demand in demands:
            routes.setdefault(demand.batch_id, set()).add(demand.route_id)
        outlooks = {
            batch_id: _outlook(batches[batch_id], ends.get(batch_id), _measured(worlds, on), now_us)
            for batch_id, on in routes.items()
        }
        self._picture = _Picture(made_ns, now_us, batches, tuple(demands), worlds, weights, outlooks)
        return self._picture

    # What waits

    async def _unfinished(self) -> dict[str, BatchRow]:
        """Return the batches that still have lines to run."""
        found: dict[str, BatchRow] = {}
        for offset in range(0, MAX_BATCHES, PAGE):
            page = await self._store.batches.list_batches(None, PAGE, offset=offset, active=True)
            for row in page.rows:
                if row.cancel_requested_at is None and row.status_detail in ("validating", "in_progress"):
                    found[row.id] = row
            if not page.has_more:
                break
        return found

    async def _demands(self, batches: Mapping[str, BatchRow]) -> list[Demand]:
        waiting: dict[str, dict[str, int]] = {}
        for wait in await self._store.scheduling.fresh_waits():
            if wait.batch_id in batches:
                waiting.setdefault(wait.batch_id, {})[wait.route_id] = wait.waiting_lines
        running = await self._store.scheduling.running_by_batch(list(batches))
        demands: list[Demand] = []
        split = 0
        for batch_id, row in batches.items():
            lines = waiting.get(batch_id, {})
            here = running.get(batch_id, 0)
            if here and len(lines) != 1 and split < MAX_SPLIT:
                split += 1
                by_route = await self._store.scheduling.running_on_route(batch_id)
            else:
                by_route = dict.fromkeys(lines, here) if len(lines) == 1 else {}
            if not lines and not by_route:
                lines = self._untaken(row)
            demands += [
                Demand(batch_id, row.workspace_id, route, lines.get(route, 0), by_route.get(route, 0))
                for route in sorted(lines.keys() | by_route.keys())
            ]
        return demands

    def _untaken(self, row: BatchRow) -> dict[str, int]:
        """Return where the lines of a batch will wait that no runner has."""
        left = row.request_total - row.request_completed - row.request_failed
        route = self.route_of(row.endpoint, row.public_model) if left > 0 else ""
        return {route: left} if route else {}

    # What the routes offer

    async def _worlds(self, routes: set[str], demands: Sequence[Demand], now_us: int) -> dict[str, RouteWorld]:
        if not routes:
            return {}
        rows = {row.route_id: row for row in await self._store.scheduling.all_settings()}
        adapted = {cap.route_id: cap.cap for cap in await self._store.scheduling.caps()}
        worlds = {}
        for route in sorted(routes):
            row = rows.get(route) or SchedulingRow(route, self._settings.default_max_concurrency)
            past = await self._known(route, row, now_us)
            batches = sum(demand.route_id == route for demand in demands)
            world = RouteWorld(
                self._cap(row, adapted.get(route), batches),
                past.days.times,
                days=past.days.days,
                closed_for_s=closed_for(counting(past.recent, row), now_us // MINUTE_US),
                spell_s=past.days.spell_s,
            )
            worlds[route] = replace(world, intervals=await asyncio.to_thread(_intervals, row, now_us))
        return worlds

    async def _world_under(self, new: SchedulingRow, picture: _Picture) -> RouteWorld:
        """Return what a route would offer under other settings."""
        route, now = new.route_id, picture.worlds[new.route_id]
        scheduling = self._store.scheduling
        old = await scheduling.settings(route) or SchedulingRow(route, self._settings.default_max_concurrency)
        adapted = next((cap.cap for cap in await scheduling.caps() if cap.route_id == route), None)
        batches = sum(demand.route_id == route for demand in picture.demands)
        world = replace(now, cap=self._cap(new, adapted, batches))
        if not same_gates(old, new) or window_of(old) != window_of(new):
            rows = await self._minutes_lately(route, picture.now_us)
            past = await asyncio.to_thread(_history_under, rows, old, new)
            closed_for_s = now.closed_for_s if same_gates(old, new) else 0.0
            world = replace(world, days=past.days, spell_s=past.spell_s, closed_for_s=closed_for_s)
        return replace(world, intervals=await asyncio.to_thread(_intervals, new, picture.now_us))

    async def _minutes_lately(self, route: str, now_us: int) -> Sequence[MinuteRow]:
        """Return a route's minutes; of the last one that was asked for, from memory: a form asks with every letter."""
        kept = self._kept
        if kept is None or kept[0] != route or self._clock_ns() - kept[1] >= RECENT_S * 1e9:
            kept = self._kept = (route, self._clock_ns(), await self._minutes(route, now_us))
        return kept[2]

    def _cap(self, row: SchedulingRow, adapted: int | None, batches: int) -> int:
        cap = row.max_concurrency
        if row.min_concurrency is not None:
            cap = min(cap, max(row.min_concurrency, adapted or 0))
        if self._settings.batch_concurrency:
            cap = min(cap, self._settings.batch_concurrency * max(1, batches))
        # One process runs all batches there; elsewhere their number is not known.
        return min(cap, max(1, self._settings.workers)) if self._store.kind == "sqlite" else cap

    async def _known(self, route: str, row: SchedulingRow, now_us: int) -> _Past:
        past = self._past.get(route)
        now_ns = self._clock_ns()
        keep_s = DAYS_S if past is not None and past.rows >= YOUNG_MINUTES else YOUNG_DAYS_S
        if past is None or now_ns - past.days_ns >= keep_s * 1e9 or not past.days.times.lines:
            rows = await self._minutes(route, now_us)
            days = await asyncio.to_thread(_history, rows, row)
            recent = tuple(one for one in rows if one.minute * MINUTE_US >= now_us - RECENT_US)
            past = self._past[route] = _Past(days, now_ns, now_ns, recent, len(rows))
        elif now_ns - past.times_ns >= RECENT_S * 1e9:
            past.recent = await self._store.explain.minutes(route, now_us - RECENT_US, now_us + MINUTE_US)
            past.times_ns = now_ns
            times = line_times(past.recent)
            if times.lines >= MIN_LINES:
                past.days = replace(past.days, times=times)
        return past

    async def _minutes(self, route: str, now_us: int) -> list[MinuteRow]:
        """Return the minutes of the last days, read day by day: all at once would hold the event loop up."""
        rows: list[MinuteRow] = []
        for since_us in range(now_us - PAST_US, now_us + MINUTE_US, DAY_S * SECOND_US):
            until_us = min(since_us + DAY_S * SECOND_US, now_us + MINUTE_US)
            rows += await self._store.explain.minutes(route, since_us, until_us)
        return rows


def _history(rows: Sequence[MinuteRow], row: SchedulingRow) -> History:
    """Return the past of a route; what its gates did under other settings says nothing."""
    known = {one.minute for one in counting(rows, row)}
    return history(rows, known.__contains__)


def _history_under(rows: Sequence[MinuteRow], old: SchedulingRow, new: SchedulingRow) -> History:
    """Return the past as it would have been under other settings; how long lines take does not depend on them."""
    return replace(history(as_if(rows, old, new)), times=line_times(rows))


def _intervals(row: SchedulingRow, now_us: int) -> tuple[tuple[float, float], ...] | None:
    window = window_of(row)
    if window is None:
        return None
    try:
        found = window_state.intervals(window, now_us, MAX_INTERVALS, HORIZON_S // DAY_S + 1)
    except UnknownZone:
        return ()
    return tuple(
        (
            (interval.opens_us - now_us) / SECOND_US,
            HORIZON_S if interval.closes_us is None else (interval.closes_us - now_us) / SECOND_US,
        )
        for interval in found
    )


def _measured(worlds: Mapping[str, RouteWorld], routes: set[str]) -> int:
    return min((worlds[route].times.lines for route in routes), default=0)


def _outlook(row: BatchRow, ends: Ends | None, measured: int, now_us: int) -> Outlook:
    expires_at = row.expires_at // SECOND_US
    if ends is None or measured < MIN_LINES:
        return Outlook(None, None, expires_at, False, None, 0)
    p50, p90 = (None if end is None else math.ceil(now_us / SECOND_US + end) for end in (ends.p50_s, ends.p90_s))
    created_s = row.created_at // SECOND_US
    holds = next((hours for hours in WINDOW_HOURS if p90 is not None and created_s + hours * 3600 >= p90), None)
    return Outlook(p50, p90, expires_at, p90 is None or p90 > expires_at, holds, measured)
