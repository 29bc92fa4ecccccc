"""What other settings of a route would mean: its past judged again, and the outlooks of the batches that want it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_forecaster import forecaster, in_s, measured, waiting

from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.scheduling.settings_past import MINUTE_US, as_if, counting, same_gates
from frontend.batches.store.route_rows import MinuteRow
from frontend.batches.store.rows import BatchRow, Demand, SchedulingRow
from store_world import World

DAY = 24 * 60
NIGHT = SchedulingRow(
    "R", 2, window_timezone="UTC", window_days=127, window_start_minute=22 * 60, window_end_minute=6 * 60
)
OPEN = SchedulingRow("R", 2)
MINUTES = st.builds(
    MinuteRow, st.just("R"), st.integers(0, 3 * DAY), live_max=st.integers(0, 6), queued_max=st.integers(0, 9),
    open_us=st.integers(0, MINUTE_US), observed_us=st.just(MINUTE_US),
)  # fmt: skip
ROWS = st.lists(MINUTES, max_size=40, unique_by=lambda row: row.minute)
THRESHOLDS = st.none() | st.integers(1, 6)


@given(rows=ROWS, cap=st.integers(1, 256), threshold=THRESHOLDS)
def test_more_lines_at_once_leave_the_past_as_it_was(rows: list[MinuteRow], cap: int, threshold: int | None) -> None:
    old = replace(NIGHT, yield_live_threshold=threshold)
    assert as_if(rows, old, replace(old, max_concurrency=cap)) == counting(rows, old)
    assert same_gates(old, replace(old, max_concurrency=cap))


@given(rows=ROWS)
def test_minutes_outside_either_window_say_nothing(rows: list[MinuteRow]) -> None:
    early = replace(NIGHT, window_start_minute=20 * 60, window_end_minute=23 * 60)
    expected = [row for row in rows if row.minute % DAY // 60 == 22]
    assert as_if(rows, NIGHT, early) == expected == as_if(rows, early, NIGHT)
    assert as_if(rows, NIGHT, OPEN) == counting(rows, NIGHT)


@given(rows=ROWS, old=THRESHOLDS, new=THRESHOLDS)
def test_a_threshold_is_judged_by_the_most_live_calls_of_each_minute(
    rows: list[MinuteRow], old: int | None, new: int | None
) -> None:
    before, after = replace(OPEN, yield_live_threshold=old), replace(OPEN, yield_live_threshold=new)
    for row, then in zip(rows, as_if(rows, before, after), strict=True):
        if old == new:
            assert then == row
        elif new is not None and row.live_max >= new:
            assert then.open_us == 0
        else:
            assert then.open_us == (row.observed_us if old is not None and row.live_max >= old else row.open_us)
    if (new or 99) > (old or 99):
        opened = sum(row.open_us for row in as_if(rows, before, after))
        assert opened >= sum(row.open_us for row in rows if row.live_max < (new or 99) and row.live_max < (old or 99))


@pytest.mark.parametrize(("old", "new", "open_us"), [(None, 10, [40, 0]), (10, 30, [40, 0]), (10, None, [40, 9])])
def test_a_gate_that_stays_closed_for_longer_closes_minutes_with_calls(
    old: int | None, new: int | None, open_us: list[int]
) -> None:
    rows = [
        MinuteRow("R", 1, live_max=0, open_us=40, observed_us=60),
        MinuteRow("R", 2, live_max=1, open_us=9, observed_us=60),
    ]
    before, after = (replace(OPEN, yield_live_threshold=1, reopen_after_s=seconds) for seconds in (old, new))
    assert [row.open_us for row in as_if(rows, before, after)] == open_us


def test_settings_of_before_a_change_say_nothing() -> None:
    rows = [MinuteRow("R", minute, observed_us=MINUTE_US) for minute in range(10)]
    since = replace(OPEN, updated_at=5 * MINUTE_US)
    assert [row.minute for row in as_if(rows, since, replace(NIGHT, updated_at=9 * MINUTE_US))] == [4, 5, 6, 7, 8, 9]


# From a store


def both(world: World, row: SchedulingRow, batch: BatchRow) -> tuple[Outlook, Outlook]:
    return world.run(forecaster(world).with_settings(row))[batch.id]


def test_twice_as_many_lines_at_once_take_half_as_long(world: World) -> None:
    measured(world)
    batch, other = (world.running_batch(world.workspace().id, lines) for lines in (200, 40))
    waiting(world, batch, Demand("R", 200, None, True))
    waiting(world, other, Demand("S", 40, None, True))
    made = forecaster(world)
    found = world.run(made.with_settings(SchedulingRow("R", 4)))
    assert found.keys() == {batch.id}, "of the batches that want this route"
    now, then = found[batch.id]
    assert now == world.run(made.of(batch.id))
    assert in_s(world, now.eta_p50) == pytest.approx(1000, rel=0.1)
    assert in_s(world, then.eta_p50) == pytest.approx(500, rel=0.1)
    assert world.run(world.store.scheduling.settings("R")) is None, "nothing is saved"
    assert world.run(made.with_settings(SchedulingRow("T", 4))) == {}


def test_a_window_that_is_still_to_open_is_waited_for(world: World) -> None:
    measured(world)
    batch = world.running_batch(world.workspace().id, 200)
    waiting(world, batch, Demand("R", 200, None, True))
    minute = world.run(world.store.now_us()) // MINUTE_US % DAY
    later = replace(NIGHT, window_start_minute=(minute + 120) % DAY, window_end_minute=(minute + 360) % DAY)
    now, then = both(world, later, batch)
    assert in_s(world, now.eta_p50) == pytest.approx(1000, rel=0.1)
    assert in_s(world, then.eta_p50) == pytest.approx(2 * 3600 + 1000, abs=200)
    assert (now.at_risk, then.at_risk) == (False, False)


def test_a_threshold_that_live_traffic_reaches_all_the_time_makes_it_late(world: World) -> None:
    measured(world)
    now_minute = world.run(world.store.now_us()) // MINUTE_US
    busy = [MinuteRow("R", now_minute - ago, live_max=3 if ago % 10 else 0) for ago in range(20)]
    world.run(world.store.explain.add_minutes(busy))
    batch = world.running_batch(world.workspace().id, 200)
    waiting(world, batch, Demand("R", 200, None, True))
    now, then = both(world, SchedulingRow("R", 2, yield_live_threshold=2), batch)
    assert in_s(world, then.eta_p50) > 2 * in_s(world, now.eta_p50)
    same = both(world, SchedulingRow("R", 2, yield_live_threshold=4), batch)[1]
    assert in_s(world, same.eta_p50) == pytest.approx(in_s(world, now.eta_p50), rel=0.1)


def test_a_batch_of_two_routes_waits_for_the_other_as_before(world: World) -> None:
    measured(world)
    measured(world, "S", line_s=100.0)
    batch = world.running_batch(world.workspace().id, 40)
    waiting(world, batch, Demand("R", 20, None, True), Demand("S", 20, None, True))
    now, then = both(world, SchedulingRow("R", 8), batch)
    assert in_s(world, then.eta_p50) == pytest.approx(in_s(world, now.eta_p50), rel=0.05)
