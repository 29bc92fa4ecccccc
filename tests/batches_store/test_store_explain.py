"""The explain log on both databases: edges, minutes, shares of open time, and their end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontend.batches.store.errors import RuleBroken
from frontend.batches.store.route_rows import EdgeRow, MinuteRow
from frontend.batches.store.watch_protocol import EXPLAIN_KEEP_US, MINUTE_US
from store_world import World

HOUR_US = 3600 * 1_000_000


def edge(at: int, reason: str | None = None, route: str = "R") -> EdgeRow:
    return EdgeRow(route, at, "p1", reason)


def test_edges_come_back_as_they_were_in_order(world: World) -> None:
    explain = world.store.explain
    full = EdgeRow("R", 50, "p2", "server_busy", 3, 4, 5, 913, None, 8, "overload")
    failed = EdgeRow("R", 60, "p1", "metrics_unavailable", None, None, None, None, "http_status", 2, None)
    world.run(explain.add_edges([edge(40), full]))
    world.run(explain.add_edges([edge(50, "live_traffic"), failed, edge(55, route="S")]))
    world.run(explain.add_edges([]))
    assert world.run(explain.edges("R", 0, 100)) == (edge(40), full, edge(50, "live_traffic"), failed)
    assert world.run(explain.edges("S", 0, 100)) == (edge(55, route="S"),)
    assert world.run(explain.edges("T", 0, 100)) == ()


def test_edges_of_a_window_begin_with_what_held_before_it(world: World) -> None:
    explain = world.store.explain
    world.run(explain.add_edges([edge(at, "outside_window" if at % 20 else None) for at in range(10, 100, 10)]))
    assert [one.at for one in world.run(explain.edges("R", 30, 60))] == [20, 30, 40, 50]
    assert [one.at for one in world.run(explain.edges("R", 31, 31))] == [30]
    assert [one.at for one in world.run(explain.edges("R", 0, 20))] == [10]
    # Too many: the newest, and then nothing from before the window.
    assert [one.at for one in world.run(explain.edges("R", 30, 100, limit=3))] == [70, 80, 90]
    assert [one.at for one in world.run(explain.edges("R", 30, 60, limit=3))] == [30, 40, 50]


def test_edge_without_a_time_is_stamped_by_the_store(world: World) -> None:
    before = world.run(world.store.now_us())
    world.run(world.store.explain.add_edges([edge(0, "server_busy")]))
    (row,) = world.run(world.store.explain.edges("R", before, before + HOUR_US))
    assert before <= row.at <= world.run(world.store.now_us())
    for broken in (EdgeRow("R", 1, "p", "Not a code"), EdgeRow("R", 1, "p", None, cap=257), EdgeRow("R", 1, "p", "")):
        with pytest.raises(RuleBroken):
            world.run(world.store.explain.add_edges([edge(2), broken]))
    assert len(world.run(world.store.explain.edges("R", 0, 10))) == 0


minute_rows = st.builds(
    MinuteRow,
    route_id=st.sampled_from(["R", "S"]),
    minute=st.integers(100, 103),
    live_max=st.integers(0, 9),
    running_max=st.integers(0, 9),
    queued_max=st.integers(0, 9),
    cap=st.integers(0, 256),
    open_us=st.integers(0, MINUTE_US),
    observed_us=st.integers(0, MINUTE_US),
    lines_done=st.integers(0, 50),
    line_s_sum=st.integers(0, 500).map(lambda quarter: quarter / 4),
    line_s_sq_sum=st.integers(0, 500).map(float),
    overloads=st.integers(0, 3),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(st.lists(st.lists(minute_rows, max_size=6), max_size=4))
def test_minutes_merge_however_processes_add_them(world: World, adds: list[list[MinuteRow]]) -> None:
    world.sql("DELETE FROM batch_route_minutes")
    for rows in adds:
        world.run(world.store.explain.add_minutes(rows))
    for route in ("R", "S"):
        expected = []
        for minute in range(100, 104):
            of_minute = [row for rows in adds for row in rows if (row.route_id, row.minute) == (route, minute)]
            if of_minute:
                most = [
                    max(getattr(row, name) for row in of_minute) for name in ("live_max", "running_max", "queued_max")
                ]
                added = [
                    sum(getattr(row, name) for row in of_minute)
                    for name in ("open_us", "observed_us", "lines_done", "line_s_sum", "line_s_sq_sum", "overloads")
                ]
                expected.append(MinuteRow(route, minute, *most, of_minute[-1].cap, *added))
        assert list(world.run(world.store.explain.minutes(route, 100 * MINUTE_US, 104 * MINUTE_US))) == expected


def test_minutes_of_a_window_begin_within_it(world: World) -> None:
    explain = world.store.explain
    world.run(explain.add_minutes([MinuteRow("R", minute) for minute in (10, 12, 11, 14)]))
    for since, until, wanted in (
        (11 * MINUTE_US, 14 * MINUTE_US, [11, 12]),
        (11 * MINUTE_US + 1, 14 * MINUTE_US + 1, [12, 14]),
        (0, 11 * MINUTE_US, [10]),
        (15 * MINUTE_US, 99 * MINUTE_US, []),
    ):
        assert [row.minute for row in world.run(explain.minutes("R", since, until))] == wanted


def test_open_share_is_by_utc_hour_and_knows_what_nobody_saw(world: World) -> None:
    explain = world.store.explain
    day = 1440 * 20_000
    rows = [
        MinuteRow("R", day + 3 * 60, open_us=30, observed_us=60),
        MinuteRow("R", day + 3 * 60 + 59, open_us=0, observed_us=60),
        MinuteRow("R", day + 1440 + 3 * 60, open_us=60, observed_us=60),
        MinuteRow("R", day + 23 * 60, open_us=0, observed_us=60),
        MinuteRow("R", day + 5 * 60, open_us=0, observed_us=0),
        MinuteRow("S", day + 5 * 60, open_us=9, observed_us=9),
    ]
    world.run(explain.add_minutes(rows))
    share = world.run(explain.open_share("R", day * MINUTE_US))
    assert len(share) == 24
    assert {hour: value for hour, value in enumerate(share) if value is not None} == {3: 0.5, 23: 0.0}
    later = world.run(explain.open_share("R", (day + 1440) * MINUTE_US))
    assert {hour: value for hour, value in enumerate(later) if value is not None} == {3: 1.0}
    assert world.run(explain.open_share("T", 0)) == (None,) * 24


def test_explain_log_is_kept_for_fifteen_days(world: World) -> None:
    explain = world.store.explain
    now = world.run(world.store.now_us())
    old, kept = now - EXPLAIN_KEEP_US - HOUR_US, now - EXPLAIN_KEEP_US + HOUR_US
    for at in (old, kept):
        world.run(explain.add_edges([edge(at), edge(at, route="S")]))
        world.run(explain.add_minutes([MinuteRow("R", at // MINUTE_US), MinuteRow("S", at // MINUTE_US)]))
    assert world.run(explain.prune()) == 4
    assert world.run(explain.prune()) == 0
    assert [row.at for row in world.run(explain.edges("R", 0, now))] == [kept]
    assert [row.minute for row in world.run(explain.minutes("S", 0, now))] == [kept // MINUTE_US]
    world.advance(30 * 24 * 3600)
    assert world.run(explain.prune()) == 4


def test_prune_takes_a_bounded_number_of_rows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.batches.store.explain_ops.PRUNE_LIMIT", 3)
    world.run(world.store.explain.add_edges([edge(at) for at in range(1, 8)]))
    world.run(world.store.explain.add_minutes([MinuteRow("R", minute) for minute in range(1, 5)]))
    assert [world.run(world.store.explain.prune()) for _ in range(4)] == [6, 4, 1, 0]
