"""Signals, edges and samples of gates: what is written when, and what an outage of the store costs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from frontend.batches.runner.gates import Ask, Reason
from frontend.batches.scheduling import signals
from frontend.batches.scheduling.gates import Evaluation, RouteGates
from frontend.batches.scheduling.load_limits import Reading
from frontend.batches.scheduling.samples import GAP_US, Samples
from frontend.batches.scheduling.signals import Signals
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.protocol import Store
from frontend.batches.store.route_rows import EdgeRow, MinuteRow, RouteCount, SignalRow
from frontend.batches.store.rows import SchedulingRow

SECOND_NS = 1_000_000_000
SECOND_US = 1_000_000
YIELDING = Evaluation(Reason.LIVE_TRAFFIC, 3)
OPEN = Evaluation(None, 0)
OUTSIDE = Evaluation(Reason.OUTSIDE_WINDOW)


class Written:
    """Stands for a store: keeps what is written, fails while ``away``."""

    def __init__(self) -> None:
        self.away = False
        self.signals: list[SignalRow] = []
        self.edges: list[EdgeRow] = []
        self.minutes: list[MinuteRow] = []
        self.scheduling = self.explain = self

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("away")

    async def put_signal(self, row: SignalRow) -> None:
        self._check()
        self.signals.append(row)

    async def add_edges(self, rows: list[EdgeRow]) -> None:
        self._check()
        self.edges += rows

    async def add_minutes(self, rows: list[MinuteRow]) -> None:
        self._check()
        self.minutes += rows

    @property
    def store(self) -> Store:
        return cast("Store", self)


def made(written: Written, clock: dict[str, int] | None = None) -> Signals:
    at = clock or {"us": 5}
    return Signals("p", written.store, lambda route: 4, lambda: at["us"])


def write(found: Signals, now_ns: int) -> None:
    try:
        asyncio.run(found.write(now_ns))
        asyncio.run(found.write_edges())
    except StoreUnavailable:
        pass


def test_rule_22_an_edge_is_written_at_once_and_the_rest_every_5_s() -> None:
    written = Written()
    found = made(written)
    for tenth in range(120):
        now_ns = tenth * SECOND_NS // 10
        found.note("R", OPEN if tenth < 30 else YIELDING, now_ns)
        write(found, now_ns)
    assert [row.paused_reason for row in written.signals] == [None, "live_traffic", "live_traffic"]
    assert [(edge.reason, edge.live_in_flight, edge.cap) for edge in written.edges] == [
        (None, 0, 4), ("live_traffic", 3, 4),
    ]  # fmt: skip
    assert found.pauses[Reason.LIVE_TRAFFIC] == 1


def test_rule_22_a_gate_that_flaps_writes_five_times_a_second_at_most() -> None:
    written = Written()
    found = made(written)
    for hundredth in range(100):
        found.note("R", YIELDING if hundredth % 2 else OPEN, hundredth * SECOND_NS // 100)
        write(found, hundredth * SECOND_NS // 100)
    assert len(written.signals) == 5
    assert len(written.edges) == 100 and found.pauses[Reason.LIVE_TRAFFIC] == 50


def test_rule_22_nobody_asks_so_nothing_is_written() -> None:
    written = Written()
    found = made(written)
    found.note("R", YIELDING, 0)
    for second in range(60):
        write(found, second * SECOND_NS)
    assert len(written.signals) == 1


def test_rule_22_what_was_not_read_is_left_as_it_was() -> None:
    written = Written()
    found = made(written)
    reading = Reading(7, 7, waiting=3, running=1, kv_cache_permille=200)
    found.note("R", Evaluation(Reason.SERVER_BUSY, 0, reading), 0)
    write(found, 0)
    found.note("R", OUTSIDE, SECOND_NS)
    write(found, SECOND_NS)
    first, second = written.signals
    assert (first.live_in_flight, first.metrics_ok, first.metrics_waiting, first.metrics_checked_at) == (0, True, 3, 7)
    assert second == SignalRow("R", "outside_window")


def test_an_outage_costs_no_edge() -> None:
    written = Written()
    written.away = True
    found = made(written)
    for second, evaluation in enumerate((OUTSIDE, OPEN, YIELDING)):
        found.note("R", evaluation, second * SECOND_NS)
        write(found, second * SECOND_NS)
    written.away = False
    write(found, 10 * SECOND_NS)
    assert [edge.reason for edge in written.edges] == ["outside_window", None, "live_traffic"]
    assert [row.paused_reason for row in written.signals] == ["live_traffic"]
    assert found.pauses == {**dict.fromkeys(signals.PAUSES, 0), Reason.OUTSIDE_WINDOW: 1, Reason.LIVE_TRAFFIC: 1}


@given(
    looks=st.lists(st.tuples(st.integers(0, 3 * SECOND_US), st.booleans()), min_size=1, max_size=40),
    outages=st.sets(st.integers(0, 39)),
)
def test_samples_add_up_whatever_the_store_does(looks: list[tuple[int, bool]], outages: set[int]) -> None:
    written = Written()
    clock = {"us": 1_000_000 * SECOND_US}
    samples = Samples(written.store, lambda route: 2, lambda: clock["us"])
    open_us = observed_us = 0
    was_open: bool | None = None
    for number, (passed_us, is_open) in enumerate(looks):
        clock["us"] += passed_us
        if was_open is not None and 0 < passed_us <= GAP_US:
            observed_us += passed_us
            open_us += passed_us if was_open else 0
        was_open = is_open
        samples.note("R", Evaluation(None if is_open else Reason.LIVE_TRAFFIC, number))
        samples.line("R", 2.0)
        samples.counts([RouteCount("R", 5, 1, number)])
        written.away = number in outages
        try:
            asyncio.run(samples.write())
        except StoreUnavailable:
            assert written.away
    written.away = False
    samples.overload("R")
    asyncio.run(samples.write())
    rows = written.minutes
    assert sum(row.open_us for row in rows) == open_us and sum(row.observed_us for row in rows) == observed_us
    assert (sum(row.lines_done for row in rows), sum(row.overloads for row in rows)) == (len(looks), 1)
    assert sum(row.line_s_sum for row in rows) == 2.0 * len(looks)
    assert sum(row.line_s_sq_sum for row in rows) == 4.0 * len(looks)
    assert max(row.live_max for row in rows) == max(row.running_max for row in rows) == len(looks) - 1
    assert {row.cap for row in rows} == {2}


class Surroundings:
    """What gates look at, as plain values; counts who is asked."""

    def __init__(self) -> None:
        self.settings: dict[str, SchedulingRow] = {}
        self.live: int | None = 0
        self.moved: int | None = None
        self.latest: Reading | None = Reading(1, 1, waiting=0)
        self.asked: list[str] = []

    def row(self, route_id: str) -> SchedulingRow | None:
        return self.settings.get(route_id)

    def count(self, route_id: str) -> int | None:
        self.asked.append("live")
        return self.live

    def moved_ns(self, route_id: str) -> int | None:
        return self.moved

    def reading(self, url: str) -> Reading | None:
        self.asked.append("load")
        return self.latest


def full_row(**changes: Any) -> SchedulingRow:
    """Return a row with every gate; its window is Mondays."""
    values: dict[str, Any] = {
        "yield_live_threshold": 2, "metrics_url": "u", "metrics_max_waiting": 0, "window_timezone": "UTC",
        "window_days": 1, "window_start_minute": 0, "window_end_minute": 0,
    }  # fmt: skip
    return SchedulingRow("R", **(values | changes))


MONDAY_US = 4 * 86_400 * SECOND_US
TUESDAY_US = MONDAY_US + 86_400 * SECOND_US


def test_rule_17_order_and_none_behind_a_closed_gate_is_asked() -> None:
    world = Surroundings()
    world.settings["R"] = full_row()
    now = {"us": TUESDAY_US, "ns": 0}
    gates = RouteGates(world, world, world, now_us=lambda: now["us"])

    def closed() -> tuple[Reason | None, list[str]]:
        now["ns"] += 1
        world.asked.clear()
        return gates.closed(Ask("b", "w", "R", now["ns"])), list(world.asked)

    world.live, world.latest = 5, Reading(1, 1, waiting=9)
    assert closed() == (Reason.OUTSIDE_WINDOW, [])
    now["us"] = MONDAY_US
    assert closed() == (Reason.LIVE_TRAFFIC, ["live"])
    world.live = None
    assert closed() == (Reason.LIVE_TRAFFIC, ["live"]), "what cannot be told is not taken for nothing"
    world.live = 1
    assert closed() == (Reason.SERVER_BUSY, ["live", "load"])
    world.latest = Reading(1, 1)
    assert closed() == (Reason.METRICS_UNAVAILABLE, ["live", "load"])
    world.latest = None
    assert closed() == (Reason.METRICS_UNAVAILABLE, ["live", "load"])
    world.latest = Reading(1, 1, waiting=0)
    assert closed() == (None, ["live", "load"])
    world.settings["R"] = full_row(window_timezone="No/Where")
    assert closed() == (Reason.OUTSIDE_WINDOW, [])


def test_a_route_is_looked_at_once_per_pass() -> None:
    world = Surroundings()
    world.settings["R"] = full_row()
    noted: list[str] = []
    note = lambda route, found, now_ns: noted.append(route)  # noqa: E731
    gates = RouteGates(world, world, world, note=note, now_us=lambda: MONDAY_US)
    for now_ns in (1, 1, 1, 2, 2):
        gates.closed(Ask("b", "w", "R", now_ns))
        gates.closed(Ask("c", "w", "S", now_ns))
    assert noted == ["R", "S", "R", "S"]


def test_lines_start_again_as_soon_as_live_traffic_has_gone() -> None:
    world = Surroundings()
    world.settings["R"] = full_row()
    woken: list[None] = []
    gates = RouteGates(world, world, world, wake=lambda: woken.append(None), now_us=lambda: MONDAY_US)
    world.live = 2
    gates.closed(Ask("b", "w", "R", 1))
    gates.look(2, 100)
    assert not woken
    world.live = 1
    gates.look(3, 100)
    gates.look(4, 100)
    assert len(woken) == 1
    world.live = 2
    gates.closed(Ask("b", "w", "R", 5))
    world.live = 0
    gates.look(500, 100)
    assert len(woken) == 1, "nobody waits for it any more"
