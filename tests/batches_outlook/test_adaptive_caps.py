"""Adaptive caps of several runners on one store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from frontend.batches.periodic import Periodic
from frontend.batches.runner.limits import StoredLimits
from frontend.batches.scheduling.adaptive import LEASE_US, LOOK_S, WINDOW_S, AdaptiveCaps
from frontend.batches.scheduling.adaptive_state import CLEAN_WINDOWS
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.route_rows import RouteCap, RouteCount
from frontend.batches.store.rows import SECOND_US, SchedulingRow
from store_world import World

BOUNDS_S = tuple(0.005 * 1.2**power for power in range(63))
ROW = SchedulingRow("R", 16, min_concurrency=2)


class StubLive:
    """Provides ``LiveLatencies``."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)

    def latency_counts(self, route_id: str) -> tuple[int, ...]:
        return tuple(self.counts)

    @property
    def latency_bounds_s(self) -> tuple[float, ...]:
        return BOUNDS_S

    def calls(self, count: int, seconds: float) -> None:
        self.counts[next(i for i, bound in enumerate(BOUNDS_S) if seconds <= bound)] += count


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


class Site:
    """Runners of an installation, whose clocks move together, and what runs on its one route."""

    def __init__(self, world: World, runners: int = 1, row: SchedulingRow = ROW) -> None:
        self.world = world
        self.clock = Clock()
        self.live = StubLive()
        self.waiting = 1000
        self.running: int | None = None
        self.row = row
        self.runners = [self.runner(f"r{number}") for number in range(runners)]

    def runner(self, name: str) -> AdaptiveCaps:
        made = AdaptiveCaps(name, self.world.open(), self.live, clock_ns=self.clock)
        made.rows = lambda: [self.row, SchedulingRow("fixed", 4)]
        made.counts = lambda: [RouteCount("R", self.waiting, 1, self.cap if self.running is None else self.running)]
        return made

    @property
    def cap(self) -> int:
        return self.runners[0].cap(self.row)

    def window(self, during: Callable[[], None] = lambda: None) -> int:
        """Let a window pass; return the cap after it."""
        self.look()
        during()
        for _ in range(int(WINDOW_S / LOOK_S)):
            self.clock.ns += int(LOOK_S * 1e9)
            self.world.advance(LOOK_S)
            self.look()
        return self.cap

    def look(self) -> None:
        for one in self.runners:
            self.world.run(one.look())

    def stored(self) -> dict[str, int]:
        return {cap.route_id: cap.cap for cap in self.world.run(self.world.store.scheduling.caps())}

    def edges(self) -> list[tuple[int | None, str | None]]:
        now = self.world.run(self.world.store.now_us())
        found = self.world.run(self.world.store.explain.edges("R", now - 86_400 * SECOND_US, now + SECOND_US))
        return [(edge.cap, edge.why) for edge in found]


def test_it_begins_at_the_least_grows_after_clean_windows_and_stops_at_the_most(world: World) -> None:
    site = Site(world, row=SchedulingRow("R", 5, min_concurrency=2))
    assert site.cap == 2
    caps = [site.window() for _ in range(CLEAN_WINDOWS * 5)]
    assert caps[CLEAN_WINDOWS - 1] == 3
    assert caps[-1] == max(caps) == 5
    assert site.stored() == {"R": 5}
    assert site.edges() == [(3, "clean_windows"), (4, "clean_windows"), (5, "clean_windows")]


def test_a_route_of_fixed_cap_stays_as_it_is(world: World) -> None:
    site = Site(world)
    assert site.runners[0].cap(SchedulingRow("fixed", 4)) == 4
    site.runners[0].overload("fixed")
    site.window()
    assert site.runners[0].cap(SchedulingRow("fixed", 4)) == 4


def test_an_overload_halves_it_and_says_so(world: World) -> None:
    world.run(world.store.scheduling.put_cap(RouteCap("R", 12, "clean_windows")))
    site = Site(world)
    site.look()
    assert site.cap == 12
    assert site.window(lambda: site.runners[0].overload("R")) == 6
    assert site.edges() == [(6, "overload")]
    site.running = 12
    assert site.window(lambda: site.runners[0].overload("R")) == 6, "lines of before"
    figures = {one.labels["reason"]: one.value for one in site.runners[0].series()}
    assert figures["overload"] == 1


def test_slow_live_calls_halve_it_and_a_quiet_baseline_is_what_they_are_held_against(world: World) -> None:
    site = Site(world)
    world.run(world.store.scheduling.put_cap(RouteCap("R", 8, "clean_windows")))
    site.running = 0
    for _ in range(3):
        site.window(lambda: site.live.calls(40, 0.2))
    site.running = None
    assert site.window(lambda: site.live.calls(60, 0.2)) == 8
    assert site.window(lambda: site.live.calls(60, 0.6)) == 4
    assert site.edges()[-1] == (4, "live_latency")


def test_without_waiting_lines_it_does_not_grow(world: World) -> None:
    site = Site(world)
    site.waiting = 0
    assert [site.window() for _ in range(6)] == [2] * 6
    assert site.stored() == {}


def test_two_runners_that_see_one_overload_halve_once_and_both_know(world: World) -> None:
    world.run(world.store.scheduling.put_cap(RouteCap("R", 16, "clean_windows")))
    site = Site(world, runners=2)

    def both() -> None:
        for one in site.runners:
            one.overload("R")

    assert site.window(both) == 8
    assert [one.cap(ROW) for one in site.runners] == [8, 8]
    assert site.edges() == [(8, "overload")]


def test_only_one_raises_and_any_lowers(world: World) -> None:
    site = Site(world, runners=3)
    for _ in range(CLEAN_WINDOWS * 2):
        site.window()
    assert site.stored() == {"R": 4}
    site.look()
    assert [one.cap(ROW) for one in site.runners] == [4, 4, 4]
    for _ in range(CLEAN_WINDOWS):
        site.window(lambda: site.runners[2].overload("R"))
    site.look()
    assert [one.cap(ROW) for one in site.runners] == [2, 2, 2]
    assert site.edges()[-1] == (2, "overload")


def test_a_raise_that_crosses_an_overload_is_halved_too(world: World) -> None:
    world.run(world.store.scheduling.put_cap(RouteCap("R", 8, "clean_windows")))
    site = Site(world)
    site.look()
    site.runners[0].overload("R")
    put_cap = site.runners[0]._store.scheduling.put_cap

    async def late(cap: RouteCap, expected: int | None = None) -> RouteCap:
        if expected == 8:
            await world.store.scheduling.put_cap(RouteCap("R", 12, "clean_windows"))
        return await put_cap(cap, expected)

    site.runners[0]._store.scheduling.put_cap = late
    assert site.window() == 6
    assert site.stored() == {"R": 6}


def test_another_raises_when_the_one_is_killed(world: World) -> None:
    site = Site(world, runners=2)
    site.window()
    site.runners = site.runners[1:]
    world.advance(LEASE_US / SECOND_US)
    for _ in range(CLEAN_WINDOWS + 1):
        site.window()
    assert site.cap >= 3


def test_a_new_range_holds_at_once_and_a_restart_goes_on_where_it_was(world: World) -> None:
    world.run(world.store.scheduling.put_cap(RouteCap("R", 12, "clean_windows")))
    site = Site(world)
    site.look()
    site.row = SchedulingRow("R", 6, min_concurrency=3)
    assert site.cap == 6
    site.window()
    assert site.stored() == {"R": 6}
    assert site.edges() == [(6, "settings")]
    site.runners = [site.runner("again")]
    assert site.cap == 3, "nothing is known yet"
    site.look()
    assert site.cap == 6


def test_a_route_that_adapts_no_more_is_forgotten(world: World) -> None:
    site = Site(world)
    site.look()
    site.row = SchedulingRow("R", 6)
    site.look()
    assert site.cap == 6
    assert not site.runners[0]._routes


def test_limits_answer_with_it(world: World) -> None:
    site = Site(world)
    world.run(world.store.scheduling.put_settings(ROW, None))
    world.run(world.store.scheduling.put_cap(RouteCap("R", 9, "clean_windows")))
    limits = StoredLimits(world.store, 2, site.runners[0])
    world.run(limits.refresh())
    assert limits.cap("R") == 2
    site.look()
    assert limits.cap("R") == 9
    assert limits.cap("other") == 2


def test_a_store_that_is_away_changes_nothing_and_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(world)
    caps = site.runners[0]
    looks = 0

    async def away() -> None:
        nonlocal looks
        looks += 1
        raise StoreUnavailable("gone")

    monkeypatch.setattr(caps, "_store", SimpleNamespace(scheduling=SimpleNamespace(caps=away)))
    monkeypatch.setattr(caps, "_looking", Periodic("batches.caps", caps.look, 0.001))

    async def scenario() -> None:
        caps.start()
        for _ in range(3000):
            if looks >= 3:
                break
            await asyncio.sleep(0.01)
        await caps.close()
        await caps.close()

    world.run(scenario())
    assert looks >= 3
    assert site.cap == 2
