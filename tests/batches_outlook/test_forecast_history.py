"""What minutes of a route say about its line times and the share of time it got."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.scheduling.forecast_history import (
    MINUTE_US,
    RECENT_LINES,
    closed_for,
    history,
    line_times,
    past_days,
    spell_s,
)
from frontend.batches.store.route_rows import MinuteRow

MONDAY = 20_605 * 1440
"""1 June 2026, 00:00 UTC, in minutes."""


def minute(
    at: int, share: float = 1.0, lines: int = 0, line_s: float = 10.0, queued: int = 0, cap: int = 2
) -> MinuteRow:
    return MinuteRow(
        "R", at, queued_max=queued, cap=cap, open_us=int(share * MINUTE_US), observed_us=MINUTE_US,
        lines_done=lines, line_s_sum=lines * line_s, line_s_sq_sum=lines * line_s**2,
    )  # fmt: skip


def test_an_hour_has_the_share_of_its_open_time_and_an_unseen_one_none() -> None:
    rows = [minute(MONDAY + at, share=0.25) for at in range(60)] + [minute(MONDAY + 120 + at) for at in range(60)]
    days = past_days(rows)
    assert len(days) == 1
    assert not days[0].weekend
    assert days[0].shares[0] == pytest.approx(0.25)
    assert days[0].shares[1] is None
    assert days[0].shares[2] == 1.0


def test_under_pressure_what_ran_counts_and_not_how_long_gates_were_open() -> None:
    # 4 slots could run 24 lines of 10 s a minute; 18 did, though the gates were open half of the time only.
    rows = [minute(MONDAY + at, share=0.5, lines=18, queued=9, cap=4) for at in range(60)]
    assert past_days(rows)[0].shares[0] == pytest.approx(0.75)


def test_minutes_in_which_lines_ran_out_are_no_measure_of_what_could_run() -> None:
    rows = [minute(MONDAY + at, lines=2, queued=1 if at % 2 else 0) for at in range(60)]
    assert past_days(rows)[0].shares[0] == 1.0


def test_minutes_outside_the_window_say_nothing() -> None:
    rows = [minute(MONDAY + at, share=float(at >= 30)) for at in range(60)]
    assert history(rows, lambda at: at >= MONDAY + 30).days[0].shares[0] == 1.0
    assert history(rows).days[0].shares[0] == 0.5
    assert history(rows, lambda at: False).days == ()


def test_saturday_is_a_weekend() -> None:
    assert past_days([minute(MONDAY + 5 * 1440 + at) for at in range(60)])[0].weekend


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 100)), min_size=1, max_size=100))
def test_line_times_are_those_of_the_newest_lines(groups: list[tuple[int, float]]) -> None:
    rows = [minute(MONDAY + at, lines=lines, line_s=seconds) for at, (lines, seconds) in enumerate(groups)]
    found = line_times(rows)
    newest: list[float] = []
    for lines, seconds in reversed(groups):
        newest += [seconds] * lines
        if len(newest) >= RECENT_LINES:
            break
    mean = sum(newest) / len(newest)
    assert found.lines == len(newest)
    assert found.mean_s == pytest.approx(mean)
    assert found.sd_s == pytest.approx((sum((one - mean) ** 2 for one in newest) / len(newest)) ** 0.5, abs=1e-3 * mean)


def test_without_a_line_there_is_no_time() -> None:
    assert line_times([minute(MONDAY)]).lines == 0
    assert history([]).days == ()


@pytest.mark.parametrize(("closed", "opened"), [(5, 20), (20, 20), (60, 60)])
def test_spells_are_found_again(closed: int, opened: int) -> None:
    rng = random.Random(closed)
    state, rows = True, []
    for at in range(14 * 1440):
        state = rng.random() >= 1 / opened if state else rng.random() < 1 / closed
        rows.append(minute(MONDAY + at, share=float(state)))
    expected = 60 / (1 / closed + 1 / opened)
    assert spell_s(rows) == pytest.approx(expected, rel=0.35)
    assert spell_s([minute(MONDAY + at) for at in range(100)]) == 0.0
    # Closed and open within every minute alike: nothing lasts.
    assert spell_s([minute(MONDAY + at, share=rng.random()) for at in range(2000)]) < 60


def test_how_long_it_is_closed_ends_at_the_last_open_minute_and_at_gaps() -> None:
    rows = [minute(MONDAY, share=0.5), minute(MONDAY + 1, share=0.0), minute(MONDAY + 2, share=0.0)]
    assert closed_for(rows, MONDAY + 2) == 120.0
    assert closed_for(rows, MONDAY + 3) == 180.0
    assert closed_for([*rows, minute(MONDAY + 3)], MONDAY + 3) == 0.0
    assert closed_for(rows, MONDAY + 30) == 0.0, "nobody has looked for long"
    assert closed_for([], MONDAY) == 0.0
