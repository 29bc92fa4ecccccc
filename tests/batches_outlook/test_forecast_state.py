"""The forecast against what then happens: lines in the fair order, one by one, through windows and gates that close."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.scheduling.forecast_state import (
    DAY_S,
    HOUR_S,
    Demand,
    LineTimes,
    PastDay,
    RouteWorld,
    forecast,
    is_weekend,
    last_starts,
)
from frontend.batches.store.claim_state import Contender, RouteView, fair_first

NOW_S = 1_780_300_800.0
"""A Monday, 08:00 UTC."""
MINUTE_S = 60


@dataclass
class Gates:
    """Minutes in which lines may start: a window and a Markov chain whose share depends on the hour and the day."""

    rng: random.Random
    hourly: list[float]
    busy_days: float
    window: tuple[int, int] | None
    closed_minutes: float = 8.0
    minutes: list[bool] = field(default_factory=list)
    _state: bool = True
    _level: float = 1.0

    def is_open(self, minute: int) -> bool:
        """``minute``: from now."""
        while len(self.minutes) <= minute:
            self.minutes.append(self._next(len(self.minutes)))
        return self.minutes[minute]

    def _next(self, minute: int) -> bool:
        since_epoch = int(NOW_S) // 60 + minute
        if since_epoch % 1440 == 0 or minute == 0:
            self._level = self.rng.uniform(1 - self.busy_days, 1.0)
        share = max(0.02, min(1.0, self.hourly[since_epoch // 60 % 24] * self._level))
        to_open = 1 / self.closed_minutes
        to_closed = 0.0 if share >= 1.0 else min(1.0, to_open * (1 - share) / share)
        self._state = self.rng.random() >= to_closed if self._state else self.rng.random() < to_open
        return self._state and self.in_window(minute)

    def in_window(self, minute: int) -> bool:
        if self.window is None:
            return True
        at = (int(NOW_S) // 60 + minute) % 1440
        begin, end = self.window
        return begin <= at < end if begin < end else at >= begin or at < end

    def past_days(self, count: int) -> tuple[PastDay, ...]:
        """Return what somebody saw who looked at the same process on earlier days."""
        days = []
        for day in range(count):
            past = Gates(self.rng, self.hourly, self.busy_days, None, self.closed_minutes)
            start = (DAY_S - int(NOW_S) % DAY_S) // 60
            shares = [sum(past.is_open(start + hour * 60 + m) for m in range(60)) / 60 for hour in range(24)]
            weekend = is_weekend(int(NOW_S) // DAY_S - 1 - day)
            days.append(PastDay(weekend, tuple(shares)))
        return tuple(days)


def simulate(
    demands: list[Demand], cap: int, weights: dict[str, int], line_s: dict[str, list[float]], gates: Gates
) -> dict[str, float]:
    """Return when each batch ends if the route runs its lines in the fair order."""
    view = RouteView({}, {d.batch_id: Contender(d.batch_id, d.workspace_id, i, None, d.waiting)
                          for i, d in enumerate(demands)}, {}, weights)  # fmt: skip
    left = {d.batch_id: d.waiting for d in demands}
    running: list[tuple[float, str, str]] = []
    ended: dict[str, float] = {}
    clock_s, claims = 0.0, 0
    while view.contenders or running:
        while len(running) < cap and view.contenders and gates.is_open(int(clock_s // MINUTE_S)):
            first = view.contenders[fair_first(view)]
            claims += 1
            view.take_turn(first.workspace_id)
            view.start(first.workspace_id, first.batch_id)
            view.turns[first.workspace_id] = first.last_claim_at = claims
            left[first.batch_id] -= 1
            if not left[first.batch_id]:
                del view.contenders[first.batch_id]
            heapq.heappush(running, (clock_s + line_s[first.batch_id].pop(), first.workspace_id, first.batch_id))
        minute_end = (clock_s // MINUTE_S + 1) * MINUTE_S
        waits_for_gate = view.contenders and len(running) < cap
        if running and not (waits_for_gate and running[0][0] > minute_end):
            clock_s, workspace, batch = heapq.heappop(running)
            view.running[workspace, batch] -= 1
            view.running_of_workspace[workspace] -= 1
            ended[batch] = clock_s
        else:
            clock_s = minute_end
    return ended


@dataclass
class Trial:
    demands: list[Demand]
    world: RouteWorld
    weights: dict[str, int]
    ended: dict[str, float]


def trial(seed: int) -> Trial:
    """Return a random route, its batches, what the past says about it, and when they really ended."""
    rng = random.Random(seed)
    cap = rng.choice((1, 1, 2, 3, 4, 8))
    mean_s, ratio = rng.choice((2.0, 10.0, 60.0, 300.0)), rng.choice((0.0, 0.3, 0.6, 1.0))
    hourly = [rng.uniform(0.2, 1.0) for _ in range(24)] if rng.random() < 0.7 else [1.0] * 24
    window = rng.choice((None, None, (19 * 60, 7 * 60), (9 * 60, 17 * 60), (12 * 60, 12 * 60 + 90)))
    gates = Gates(rng, hourly, rng.choice((0.0, 0.4)), window)
    workspaces = rng.randint(1, 4)
    demands = [
        Demand(f"batch_{i}", f"ws_{rng.randrange(workspaces)}", "R", int(2 ** rng.uniform(0, 8)))
        for i in range(rng.randint(1, 6))
    ]

    def line() -> float:
        if not ratio:
            return mean_s
        spread = (1 + ratio**2) ** 0.5
        return mean_s * rng.lognormvariate(-math.log(spread), math.log(1 + ratio**2) ** 0.5)

    measured = [line() for _ in range(rng.choice((20, 100, 1000)))]
    mean = sum(measured) / len(measured)
    sd = (sum((one - mean) ** 2 for one in measured) / len(measured)) ** 0.5
    intervals = None
    if window is not None:
        opened = [m for m in range(22 * 1440) if gates.in_window(m)]
        intervals = tuple(_runs(opened))
    past = gates.past_days(rng.choice((3, 14)))
    share = sum(sum(one or 0.0 for one in day.shares) for day in past) / 24 / len(past)
    world = RouteWorld(
        cap, LineTimes(len(measured), mean, sd), intervals, past, spell_s=60.0 * gates.closed_minutes * share
    )
    line_s = {}
    for demand in demands:
        drift = rng.lognormvariate(0.0, 0.05)
        line_s[demand.batch_id] = [line() * drift for _ in range(demand.waiting)]
    weights = {"ws_0": rng.choice((2, 3, 5))} if rng.random() < 0.3 else {}
    return Trial(demands, world, weights, simulate(demands, cap, weights, line_s, gates))


def _runs(minutes: list[int]) -> list[tuple[float, float]]:
    found: list[list[int]] = []
    for minute in minutes:
        if found and found[-1][1] == minute:
            found[-1][1] = minute + 1
        else:
            found.append([minute, minute + 1])
    return [(float(begin * 60), float(end * 60)) for begin, end in found]


def _calibration(seeds: range) -> tuple[float, float]:
    """Return the shares of batches that ended by their p50 and by their p90, every route counting the same."""
    shares = []
    for seed in seeds:
        made = trial(seed)
        ends = forecast(made.demands, {"R": made.world}, made.weights, NOW_S)
        held = []
        for batch_id, ended in made.ended.items():
            p50, p90 = ends[batch_id].p50_s, ends[batch_id].p90_s
            held.append((p50 is None or ended <= p50 + 1e-6, p90 is None or ended <= p90 + 1e-6))
        shares.append([sum(one) / len(held) for one in zip(*held, strict=True)])
    return sum(s[0] for s in shares) / len(shares), sum(s[1] for s in shares) / len(shares)


def test_p50_and_p90_are_what_they_say() -> None:
    half, nearly = _calibration(range(60))
    assert 0.35 <= half <= 0.65, (half, nearly)
    assert 0.82 <= nearly <= 0.97, (half, nearly)


@pytest.mark.slow
def test_p50_and_p90_are_what_they_say_over_many_worlds() -> None:
    half, nearly = _calibration(range(1000, 1600))
    assert 0.45 <= half <= 0.68, (half, nearly)
    assert 0.86 <= nearly <= 0.97, (half, nearly)


WAITING = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=6)


@settings(deadline=None)
@given(waiting=WAITING, cap=st.integers(1, 6))
def test_the_fluid_starts_last_lines_when_the_fair_order_does(waiting: list[tuple[int, int]], cap: int) -> None:
    demands = [Demand(f"b{i}", f"w{ws}", "R", lines) for i, (ws, lines) in enumerate(waiting)]
    rng = random.Random(cap)
    line_s = {d.batch_id: [rng.uniform(0.9, 1.1) for _ in range(d.waiting)] for d in demands}
    starts = _starts(demands, cap, line_s)
    fluid = last_starts(demands, {})
    for demand in demands:
        # Slots and turns are whole: a batch is off by at most one line of each batch, and what runs at once.
        assert abs(fluid[demand.batch_id].starts - starts[demand.batch_id]) <= len(demands) * 2 + cap, demands


def _starts(demands: list[Demand], cap: int, line_s: dict[str, list[float]]) -> dict[str, int]:
    """Return by batch how many lines have started when its last one does."""
    order: list[str] = []

    class Written(dict[str, list[float]]):
        def __getitem__(self, batch_id: str) -> list[float]:
            order.append(batch_id)
            return super().__getitem__(batch_id)

    simulate(demands, cap, {}, Written(line_s), Gates(random.Random(0), [1.0] * 24, 0.0, None))
    return {batch_id: max(i + 1 for i, one in enumerate(order) if one == batch_id) for batch_id in order}


@settings(deadline=None)
@given(waiting=WAITING, weights=st.dictionaries(st.sampled_from(("w0", "w1", "w2", "w3")), st.integers(1, 100)))
def test_every_line_starts_once_whatever_the_weights(waiting: list[tuple[int, int]], weights: dict[str, int]) -> None:
    demands = [Demand(f"b{i}", f"w{ws}", "R", lines) for i, (ws, lines) in enumerate(waiting)]
    found = last_starts(demands, weights)
    assert max(one.starts for one in found.values()) == pytest.approx(sum(d.waiting for d in demands))
    assert all(d.waiting - 1e-6 <= found[d.batch_id].starts and 0 < found[d.batch_id].share <= 1 for d in demands)


def test_a_workspace_of_weight_three_gets_three_of_four_starts() -> None:
    found = last_starts([Demand("a", "one", "R", 300), Demand("b", "two", "R", 300)], {"one": 3})
    assert found["a"].starts == pytest.approx(400)
    assert found["b"].starts == pytest.approx(600)


def test_weekends_are_saturdays_and_sundays() -> None:
    for day in range(20_000, 20_030):
        assert is_weekend(day) == (datetime.fromtimestamp(day * DAY_S, UTC).weekday() >= 5)


STEADY = LineTimes(1000, 10.0, 0.0)


def _one(world: RouteWorld, waiting: int = 100, running: int = 0) -> tuple[float | None, float | None]:
    ends = forecast([Demand("b", "w", "R", waiting, running)], {"R": world}, {}, NOW_S)["b"]
    return ends.p50_s, ends.p90_s


def test_steady_lines_on_an_open_route_take_lines_by_cap() -> None:
    p50, p90 = _one(RouteWorld(2, STEADY))
    assert p50 == pytest.approx(500, rel=0.03)
    assert p90 == pytest.approx(500, rel=0.1)


def test_nothing_ends_on_a_route_that_never_opens() -> None:
    assert _one(RouteWorld(2, STEADY, intervals=())) == (None, None)
    assert forecast([], {}, {}, NOW_S) == {}


def test_running_lines_end_though_nothing_may_start() -> None:
    p50, p90 = _one(RouteWorld(2, STEADY, intervals=()), waiting=0, running=2)
    assert p50 == pytest.approx(10, rel=0.05)
    assert p90 is not None and p50 is not None and p90 >= p50


def test_a_window_that_opens_later_shifts_the_end_and_a_short_one_spreads_it_over_nights() -> None:
    opens_in_2_h = ((2.0 * HOUR_S, 22.0 * DAY_S),)
    assert _one(RouteWorld(2, STEADY, opens_in_2_h))[0] == pytest.approx(2 * HOUR_S + 500, rel=0.03)
    nights = tuple((day * DAY_S + 2.0 * HOUR_S, day * DAY_S + 2.0 * HOUR_S + 300) for day in range(21))
    assert _one(RouteWorld(2, STEADY, nights))[0] == pytest.approx(DAY_S + 2 * HOUR_S + 200, rel=0.03)
    assert _one(RouteWorld(2, STEADY, nights), waiting=60 * 25)[1] is None


def test_half_of_the_open_time_takes_twice_as_long() -> None:
    day = PastDay(False, (0.5,) * 24)
    p50, p90 = _one(RouteWorld(1, STEADY, days=(day,) * 14), waiting=1000)
    assert p50 == pytest.approx(20_000, rel=0.1)
    assert p90 is not None and p90 > 20_000


def test_a_closure_of_unknown_cause_is_expected_to_last_as_long_again() -> None:
    p50, p90 = _one(RouteWorld(2, STEADY, closed_for_s=600.0))
    assert p50 == pytest.approx(500 + 600, rel=0.15)
    assert p90 == pytest.approx(500 + 9 * 600, rel=0.35)


@settings(deadline=None, max_examples=30)
@given(cap=st.integers(1, 16), waiting=st.integers(1, 500), ratio=st.floats(0.0, 2.0), mean=st.floats(0.01, 100.0))
def test_p50_comes_before_p90_and_the_same_question_has_the_same_answer(
    cap: int, waiting: int, ratio: float, mean: float
) -> None:
    world = RouteWorld(cap, LineTimes(20, mean, mean * ratio))
    p50, p90 = _one(world, waiting)
    assert (p50, p90) == _one(world, waiting)
    assert p50 is not None and p90 is not None and 0 < p50 <= p90


@settings(deadline=None, max_examples=30)
@given(cap=st.integers(1, 16), waiting=st.integers(1, 300))
def test_more_slots_and_fewer_lines_are_never_later(cap: int, waiting: int) -> None:
    p50 = _one(RouteWorld(cap, STEADY), waiting)[0]
    assert p50 is not None
    sooner, later = _one(RouteWorld(cap + 1, STEADY), waiting)[0], _one(RouteWorld(cap, STEADY), waiting + 50)[0]
    assert sooner is not None and later is not None and sooner <= p50 + 10.5 and p50 <= later


def test_a_batch_ends_when_its_slowest_route_does() -> None:
    demands = [Demand("b", "w", "fast", 10), Demand("b", "w", "slow", 10)]
    routes = {"fast": RouteWorld(2, STEADY), "slow": RouteWorld(2, LineTimes(1000, 1000.0, 0.0))}
    ends = forecast(demands, routes, {}, NOW_S)["b"]
    assert ends.p50_s == pytest.approx(5000, rel=0.07)


def test_a_thousand_batches_are_forecast_at_once() -> None:
    demands = [Demand(f"b{i}", f"w{i % 100}", "R", 50) for i in range(1000)]
    ends = forecast(demands, {"R": RouteWorld(8, LineTimes(500, 2.0, 1.0))}, {}, NOW_S)
    last = max(one.p50_s or 0.0 for one in ends.values())
    assert last == pytest.approx(50_000 * 2.0 / 8, rel=0.05)
