"""When batches will end: a simulation of what waits, forward, many times over. Pure; times are seconds from now.

Theory of operation
    1. The fair order decides how many lines start on a route before a batch's last one does. It shares starts, whatever
       they take, so that number needs no clock: a fluid of lines flows to every workspace by its weight, and within one
       to every batch alike (``last_starts``).
    2. A route with c slots ends c lines per mean line time while it may start new ones. How long that takes is drawn
       ``DRAWS`` times: the mean itself is known from finitely many lines, and sums of lines scatter (``route_ends``).
    3. Open time becomes wall-clock time through the window calendar and the share of its slots' time that the route
       really got at that hour, which is drawn from whole past days, so that quiet days stay quiet days.
    4. A batch ends when its last lines on all its routes have: the latest of them, draw by draw.

Draws use fixed seeds: a forecast moves when what it is made from moves, never by itself.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DRAWS: Final = 256
HOUR_S: Final = 3600
DAY_S: Final = 24 * HOUR_S
HORIZON_S: Final = 21 * DAY_S
"""Three of the longest completion windows; what ends later ends 'never'."""
DRIFT: Final = 0.05
"""Relative deviation of a batch's mean line time from its route's: batches differ."""
DAYS_SPREAD: Final = 0.6
"""Deviation (log odds) of the open share from what a single past day showed; shrinks with the root of the days."""
MIN_DAYS: Final = 3
"""With fewer past days of the kind (weekday, weekend), any past day may be drawn."""
_THURSDAY: Final = 3
"""Weekday of day 0."""
MAX_TAIL_LINES: Final = 48
"""Last lines of a batch that are drawn one by one."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Lines of one batch on one route: ``waiting`` to start, ``running`` now."""

    batch_id: str
    workspace_id: str
    route_id: str
    waiting: int
    running: int = 0


@dataclass(frozen=True, slots=True)
class LineTimes:
    """How long lines of a route take, from ``lines`` finished ones."""

    lines: int
    mean_s: float
    sd_s: float


@dataclass(frozen=True, slots=True)
class PastDay:
    """Which share (0 to 1) of its slots' time a route got, per UTC hour of one day; None = nobody looked."""

    weekend: bool
    shares: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class RouteWorld:
    """What a route offers from now on.

    Attributes:
        cap: lines at once.
        intervals: when the window is open, as (from, to), ascending and disjoint; None = always.
        closed_for_s: how long a gate other than the window has kept the route closed so far, 0 if none does. It lasts
            as long again in half of the draws: that is all one knows of a fault whose cause one cannot see.
        spell_s: for how long the route's being open tells about its being open later (correlation time): what it gets
            in less than an hour scatters by that.
    """

    cap: int
    times: LineTimes
    intervals: tuple[tuple[float, float], ...] | None = None
    days: tuple[PastDay, ...] = ()
    closed_for_s: float = 0.0
    spell_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LastStart:
    """A batch on a route: how many lines have started there when its last one does, and its share of them then."""

    starts: float
    share: float


@dataclass(frozen=True, slots=True)
class Ends:
    """When a batch has ended in half and in nine tenths of the draws; None = not within the horizon."""

    p50_s: float | None
    p90_s: float | None


def forecast(
    demands: Sequence[Demand], routes: Mapping[str, RouteWorld], weights: Mapping[str, int], now_s: float
) -> dict[str, Ends]:
    """Return when each batch ends; ``now_s`` (Unix) places the hours of the day.

    Every demand's route must be in ``routes``; a workspace without a weight has 1.
    """
    by_route: dict[str, list[Demand]] = {}
    for demand in demands:
        by_route.setdefault(demand.route_id, []).append(demand)
    latest: dict[str, Floats] = {}
    for route_id in sorted(by_route):
        seed = zlib.crc32(route_id.encode())
        for batch_id, ends in route_ends(routes[route_id], by_route[route_id], weights, now_s, seed).items():
            known = latest.get(batch_id)
            latest[batch_id] = ends if known is None else np.maximum(known, ends)
    return {batch_id: _quantiles(ends) for batch_id, ends in latest.items()}


def last_starts(demands: Sequence[Demand], weights: Mapping[str, int]) -> dict[str, LastStart]:
    """Return for each batch that has lines waiting when the fair order starts its last one, in starts on the route."""
    batches: dict[str, list[Demand]] = {}
    for demand in sorted(demands, key=lambda demand: (demand.waiting, demand.batch_id), reverse=True):
        if demand.waiting > 0:
            batches.setdefault(demand.workspace_id, []).append(demand)
    weight = {workspace: max(1, weights.get(workspace, 1)) for workspace in batches}
    # The level is how many starts a workspace of weight 1 has had.
    events = [(left[-1].waiting * len(left) / weight[workspace], workspace) for workspace, left in batches.items()]
    heapq.heapify(events)
    total_weight = float(sum(weight.values()))
    found: dict[str, LastStart] = {}
    level = starts = 0.0
    while events:
        reached, workspace = heapq.heappop(events)
        starts += (reached - level) * total_weight
        level = reached
        left = batches[workspace]
        done = left.pop()
        found[done.batch_id] = LastStart(starts, weight[workspace] / total_weight / (len(left) + 1))
        if left:
            heapq.heappush(
                events, (level + (left[-1].waiting - done.waiting) * len(left) / weight[workspace], workspace)
            )
        else:
            total_weight -= weight[workspace]
    return found


def route_ends(
    world: RouteWorld, demands: Sequence[Demand], weights: Mapping[str, int], now_s: float, seed: int
) -> dict[str, Floats]:
    """Return per batch, for each draw, when its lines on this route have ended; infinite beyond the horizon."""
    draw = np.random.default_rng(seed)
    times, cap = world.times, max(1, world.cap)
    ratio = times.sd_s / times.mean_s if times.mean_s > 0 else 0.0
    unsure = np.hypot(ratio / max(1, times.lines) ** 0.5, DRIFT)
    means = times.mean_s * np.exp(draw.normal(0.0, unsure, DRAWS))
    scatter = draw.normal(0.0, 1.0, DRAWS)
    tails = _line_draws(draw, ratio)
    edges, reached = _open_time(world, now_s, draw)
    share = _mean_share(world.days)
    begin = _at(edges, reached, _closure_end(world, share, draw))
    running = sum(demand.running for demand in demands)
    free = max(0, cap - running)
    last = last_starts(demands, weights)
    starting = [demand for demand in demands if demand.batch_id in last]
    finishes = np.array([max(0.0, np.ceil(last[demand.batch_id].starts - 1e-9) - free) for demand in starting])
    # Slots that were empty all start at once: their first lines end together, later than a mixed crowd's.
    early = np.where(finishes > 0, (1.0 - ratio**2) / 2 * (free - 1) / cap, 0.0)
    slots = finishes / cap + early + scatter[:, None] * ratio * finishes**0.5 / cap
    needed = means[:, None] * np.maximum(0.0, slots)
    # Hours were drawn as a whole; within one, closures come in spells.
    rough = (2 * (1 - share) * world.spell_s * np.minimum(needed, share * HOUR_S)) ** 0.5
    needed = np.maximum(0.0, needed + draw.normal(0.0, 1.0, (DRAWS, 1)) * rough - _head_start(world, share, needed))
    started = _when(edges, reached, begin[:, None] + needed)
    found = {
        demand.batch_id: started[:, i] + means * _tail(tails, demand, last[demand.batch_id], cap)
        for i, demand in enumerate(starting)
    }
    for demand in demands:
        if demand.batch_id not in last:
            found[demand.batch_id] = means * tails[:, : max(1, min(demand.running, MAX_TAIL_LINES))].max(axis=1)
    return found


def _tail(tails: Floats, demand: Demand, start: LastStart, cap: int) -> Floats:
    """Return how long after its last start a batch has ended, in mean line times."""
    slots = max(1.0, min(cap * start.share, float(demand.waiting)))
    lines = int(min(demand.waiting + demand.running, 4 * np.ceil(slots), MAX_TAIL_LINES))
    earlier = np.arange(max(1, lines)) / slots
    # The last ``slots`` lines of an idle route start together; of a busy one, one after the other.
    if demand.waiting + demand.running <= slots:
        earlier = np.zeros(max(1, lines))
    return np.asarray(np.maximum(0.0, (tails[:, : len(earlier)] - earlier).max(axis=1)))


def _line_draws(draw: np.random.Generator, ratio: float) -> Floats:
    """Return line times in means: positive, of mean 1, with the measured deviation."""
    spread = np.log1p(ratio**2)
    return np.asarray(draw.lognormal(-spread / 2, spread**0.5, (DRAWS, MAX_TAIL_LINES)))


def _closure_end(world: RouteWorld, share: float, draw: np.random.Generator) -> Floats:
    """Return when the gates other than the window are open first, per draw."""
    part = draw.uniform(0.0, 1.0, DRAWS)
    spells = draw.exponential(1.0, DRAWS) * world.spell_s / share
    if world.closed_for_s > 0:
        return np.minimum(np.maximum(world.closed_for_s * part / (1.0 - part), spells), float(HORIZON_S))
    opens_s = _first_opening(world)
    if not opens_s:
        return np.zeros(DRAWS)
    return np.where(part < 1 - share, opens_s + spells, 0.0)


def _head_start(world: RouteWorld, share: float, needed: Floats) -> Floats:
    """Return the open seconds that a route which is open now gets beyond its share: it stays open for a while."""
    if world.closed_for_s > 0 or _first_opening(world) > 0 or not world.spell_s:
        return np.zeros_like(needed)
    return np.asarray((1 - share) * world.spell_s * (1 - np.exp(-needed / (share * world.spell_s))))


def _first_opening(world: RouteWorld) -> float:
    if world.intervals is None:
        return 0.0
    return max(0.0, world.intervals[0][0]) if world.intervals else float(HORIZON_S)


def _mean_share(days: tuple[PastDay, ...]) -> float:
    shares = [share for day in days for share in day.shares if share is not None]
    return max(1e-3, sum(shares) / len(shares)) if shares else 1.0


def _open_time(world: RouteWorld, now_s: float, draw: np.random.Generator) -> tuple[Floats, Floats]:
    """Return (edges, reached): seconds from now, and per draw the open seconds passed by each edge."""
    start = HOUR_S - now_s % HOUR_S
    marks = {0.0, float(HORIZON_S), *np.arange(start, HORIZON_S, HOUR_S).tolist()}
    for interval in world.intervals or ():
        marks.update(min(max(0.0, edge), float(HORIZON_S)) for edge in interval)
    edges = np.array(sorted(marks))
    begins = edges[:-1]
    hours = np.floor((now_s + begins) / HOUR_S).astype(int)
    rates = _shares(world.days, hours, draw)
    if world.intervals is not None:
        opened = np.zeros(len(begins), dtype=bool)
        for begin, end in world.intervals:
            opened |= (begins >= begin) & (begins < end)
        rates = rates * opened
    reached = np.zeros((DRAWS, len(edges)))
    np.cumsum(rates * np.diff(edges), axis=1, out=reached[:, 1:])
    return edges, reached


def _shares(days: tuple[PastDay, ...], hours: NDArray[np.int_], draw: np.random.Generator) -> Floats:
    """Return per draw and segment the share of its slots' time that the route gets; ``hours`` since 1970."""
    known = [day for day in days if any(share is not None for share in day.shares)]
    if not known:
        return np.ones((DRAWS, len(hours)))
    table = _filled(known)
    date = hours // 24
    pick = np.empty((DRAWS, len(hours)), dtype=int)
    for one in np.unique(date):
        weekend = is_weekend(int(one))
        alike = [index for index, day in enumerate(known) if day.weekend == weekend]
        if len(alike) < MIN_DAYS:
            alike = list(range(len(known)))
        pick[:, date == one] = draw.choice(alike, size=(DRAWS, 1))
    shares = table[pick, hours % 24]
    off = np.exp(draw.normal(0.0, DAYS_SPREAD / (1 + len(known)) ** 0.5, (DRAWS, 1)))
    return np.asarray(shares / (shares + (1.0 - shares) * off))


def _filled(days: Sequence[PastDay]) -> Floats:
    """Return shares by day and hour; an hour nobody looked at has the mean of that hour, or of all."""
    table = np.array([[np.nan if share is None else share for share in day.shares] for day in days])
    seen = ~np.isnan(table)
    overall = table[seen].mean()
    counts = seen.sum(axis=0)
    hourly = np.where(counts > 0, np.where(seen, table, 0.0).sum(axis=0) / np.maximum(1, counts), overall)
    # Kept off 0 and 1 at the lower end only: a route that never opened in 14 days may still open.
    return np.maximum(np.where(seen, table, hourly), 1e-3)


def is_weekend(day: int) -> bool:
    """Return whether a day (since 1970, UTC) is a Saturday or Sunday."""
    return (day + _THURSDAY) % 7 >= 5


def _at(edges: Floats, reached: Floats, when: Floats) -> Floats:
    """Return the open seconds passed at ``when``, per draw."""
    return np.array([np.interp(when[i], edges, reached[i]) for i in range(DRAWS)])


def _when(edges: Floats, reached: Floats, needed: Floats) -> Floats:
    """Return when so many open seconds (draws, batches) have passed; at a closed gate: when it opens."""
    found = np.full(needed.shape, np.inf)
    for i in range(DRAWS):
        after = np.searchsorted(reached[i], needed[i], side="right")
        within = after < len(edges)
        end = np.minimum(after, len(edges) - 1)
        before = reached[i, end - 1]
        length = edges[end] - edges[end - 1]
        rate = np.where(within, (reached[i, end] - before) / length, 1.0)
        found[i, within] = (edges[end - 1] + (needed[i] - before) / rate)[within]
    return found


def _quantiles(ends: Floats) -> Ends:
    ordered = np.sort(ends)

    def at(share: float) -> float | None:
        value = float(ordered[int(np.ceil(share * DRAWS)) - 1])
        return value if np.isfinite(value) else None

    return Ends(at(0.5), at(0.9))
