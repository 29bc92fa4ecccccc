"""Time windows against a scan of every minute: worked examples, any zone, any window, every change of the clocks."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_scan import DAYS, Span, is_inside, scan, text, us, window

from frontend.batches.scheduling import zones
from frontend.batches.scheduling.window_state import (
    DAY_US,
    MINUTE_US,
    Window,
    clock_changes,
    intervals,
    is_open,
    next_change,
)

LONDON, NEW_YORK, LORD_HOWE, CAIRO = "Europe/London", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo"

# zone, days, times, the UTC span that is scanned, what is open in it
ROWS: list[tuple[str, str, str, Span, list[Span]]] = [
    (LONDON, "mon-fri", "19:00-07:00", ("2026-06-01 00:00", "2026-06-09 12:00"), [
        ("2026-06-01 18:00", "2026-06-02 06:00"), ("2026-06-02 18:00", "2026-06-03 06:00"),
        ("2026-06-03 18:00", "2026-06-04 06:00"), ("2026-06-04 18:00", "2026-06-05 06:00"),
        ("2026-06-05 18:00", "2026-06-06 06:00"), ("2026-06-08 18:00", "2026-06-09 06:00"),
    ]),
    (LONDON, "sat", "22:00-06:00", ("2026-03-28 00:00", "2026-03-30 00:00"),
     [("2026-03-28 22:00", "2026-03-29 05:00")]),
    (LONDON, "sat", "22:00-06:00", ("2026-10-24 00:00", "2026-10-26 00:00"),
     [("2026-10-24 21:00", "2026-10-25 06:00")]),
    (LONDON, "sun", "01:00-02:00", ("2026-03-28 00:00", "2026-03-31 00:00"), []),
    (LONDON, "sun", "00:30-01:30", ("2026-03-28 00:00", "2026-03-31 00:00"),
     [("2026-03-29 00:30", "2026-03-29 01:00")]),
    (LONDON, "sun", "01:30-02:30", ("2026-03-28 00:00", "2026-03-31 00:00"),
     [("2026-03-29 01:00", "2026-03-29 01:30")]),
    (LONDON, "sun", "01:00-02:00", ("2026-10-24 00:00", "2026-10-27 00:00"),
     [("2026-10-25 00:00", "2026-10-25 02:00")]),
    (LONDON, "sun", "01:30-02:30", ("2026-10-24 00:00", "2026-10-27 00:00"),
     [("2026-10-25 00:30", "2026-10-25 01:00"), ("2026-10-25 01:30", "2026-10-25 02:30")]),
    (LONDON, "sun", "00:00-00:00", ("2026-03-28 00:00", "2026-03-31 00:00"),
     [("2026-03-29 00:00", "2026-03-29 23:00")]),
    (LONDON, "sun", "00:00-00:00", ("2026-10-24 00:00", "2026-10-27 00:00"),
     [("2026-10-24 23:00", "2026-10-26 00:00")]),
    (LONDON, "sun", "19:00-19:00", ("2026-06-06 00:00", "2026-06-09 00:00"),
     [("2026-06-06 23:00", "2026-06-07 23:00")]),
    (NEW_YORK, "mon-fri", "19:00-07:00", ("2026-10-30 12:00", "2026-11-03 18:00"),
     [("2026-10-30 23:00", "2026-10-31 11:00"), ("2026-11-03 00:00", "2026-11-03 12:00")]),
    (NEW_YORK, "sat", "19:00-07:00", ("2026-10-31 12:00", "2026-11-02 12:00"),
     [("2026-10-31 23:00", "2026-11-01 12:00")]),
    (NEW_YORK, "sat", "19:00-07:00", ("2026-03-07 12:00", "2026-03-09 12:00"),
     [("2026-03-08 00:00", "2026-03-08 11:00")]),
    (NEW_YORK, "sun", "02:00-03:00", ("2026-03-07 00:00", "2026-03-16 00:00"),
     [("2026-03-15 06:00", "2026-03-15 07:00")]),
    (NEW_YORK, "sun", "01:45-01:15", ("2026-10-31 12:00", "2026-11-03 00:00"),
     [("2026-11-01 05:45", "2026-11-01 06:00"), ("2026-11-01 06:45", "2026-11-02 06:15")]),
    ("Asia/Kolkata", "mon-sun", "22:30-05:30", ("2026-05-01 12:00", "2026-05-03 12:00"),
     [("2026-05-01 17:00", "2026-05-02 00:00"), ("2026-05-02 17:00", "2026-05-03 00:00")]),
    (LORD_HOWE, "sat", "20:00-06:00", ("2026-04-04 00:00", "2026-04-06 00:00"),
     [("2026-04-04 09:00", "2026-04-04 19:30")]),
    (LORD_HOWE, "sat", "20:00-06:00", ("2026-10-03 00:00", "2026-10-05 00:00"),
     [("2026-10-03 09:30", "2026-10-03 19:00")]),
    (LORD_HOWE, "sun", "02:00-02:30", ("2026-10-03 00:00", "2026-10-06 00:00"), []),
    (CAIRO, "fri", "00:00-01:00", ("2026-04-22 00:00", "2026-04-26 00:00"), []),
    (CAIRO, "fri", "00:00-02:00", ("2026-04-22 00:00", "2026-04-26 00:00"),
     [("2026-04-23 22:00", "2026-04-23 23:00")]),
    ("Asia/Kathmandu", "mon", "00:00-00:01", ("2026-05-02 00:00", "2026-05-06 00:00"),
     [("2026-05-03 18:15", "2026-05-03 18:16")]),
    ("UTC", "mon-fri", "09:00-17:00", ("2026-05-31 00:00", "2026-06-02 00:00"),
     [("2026-06-01 09:00", "2026-06-01 17:00")]),
    # A day that a zone left out when it changed sides of the date line.
    ("Pacific/Apia", "fri", "00:00-00:00", ("2011-12-28 00:00", "2012-01-02 00:00"), []),
    ("Pacific/Apia", "fri", "20:00-06:00", ("2011-12-28 00:00", "2012-01-02 00:00"),
     [("2011-12-30 10:00", "2011-12-30 16:00")]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("zone", "days", "times", "span", "expected"), ROWS, ids=[f"{row[0]} {row[1]} {row[2]} {row[3][0]}" for row in ROWS]
)
def test_rule_76_every_row_minute_by_minute(zone: str, days: str, times: str, span: Span, expected: list[Span]) -> None:
    asked = window(zone, days, times)
    from_us, until_us = map(us, span)
    assert [(text(opens), text(closes)) for opens, closes in scan(asked, from_us, until_us)] == expected
    for at_us in range(from_us, until_us, MINUTE_US):
        inside = any(us(opens) <= at_us < us(closes) for opens, closes in expected)
        assert is_open(asked, at_us) == inside, text(at_us)
        assert is_open(asked, at_us + MINUTE_US - 1) == inside, "seconds are dropped"
    found = [one for one in intervals(asked, from_us, 20, 30) if one.opens_us < until_us]
    assert [(text(one.opens_us), text(one.closes_us)) for one in found] == expected


@pytest.mark.parametrize(
    ("at", "inside"),
    [
        ("2026-06-06 18:30", False), ("2026-06-07 12:00", False), ("2026-06-08 05:00", False),
        ("2026-06-08 18:00", True),
    ],
)  # fmt: skip
def test_rule_76_probes_of_a_weekday_night(at: str, inside: bool) -> None:
    assert is_open(window(LONDON, "mon-fri", "19:00-07:00"), us(at)) == inside


@pytest.mark.parametrize(
    ("at", "inside"),
    [
        ("2026-06-01 08:59", False), ("2026-06-01 09:00", True), ("2026-06-01 16:59", True),
        ("2026-06-01 17:00", False), ("2026-06-06 12:00", False),
    ],
)  # fmt: skip
def test_acceptance_13_office_hours(at: str, inside: bool) -> None:
    assert is_open(window("UTC", "mon-fri", "09:00-17:00"), us(at)) == inside


# Properties

ZONES = sorted(zones.names())
MINUTES = st.integers(0, 1439)
WINDOWS = st.builds(
    Window,
    st.sampled_from(ZONES),
    st.frozensets(st.integers(0, 6), min_size=1),
    MINUTES | st.sampled_from([0, 60, 90, 120, 1439]),
    MINUTES | st.sampled_from([0, 60, 90, 120, 1439]),
)
FROM_1970 = st.integers(0, us("2037-12-31 00:00") // 1_000_000)
CHANGING = [zone for zone in ZONES if next(clock_changes(zone, us("2026-01-01 00:00"), us("2027-01-01 00:00")), None)]


@given(WINDOWS, FROM_1970)
@settings(max_examples=1500, deadline=None)
def test_rule_74_any_window_at_any_second(asked: Window, at_s: int) -> None:
    assert is_open(asked, at_s * 1_000_000) == is_inside(asked, datetime.fromtimestamp(at_s, UTC))


@given(WINDOWS, FROM_1970, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_rule_74_intervals_are_what_a_scan_finds(asked: Window, at_s: int, days: int) -> None:
    # Within a day of the minute: zones had offsets with seconds until 1972.
    from_us = (at_s // 60 * 60 + 4 * 365 * 86_400) * 1_000_000
    check_intervals(asked, from_us, days)


@given(st.data(), WINDOWS, st.integers(-30, 30), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_rule_75_intervals_around_changes_of_the_clocks(
    data: st.DataObject, drawn: Window, hours: int, which: int
) -> None:
    zone = data.draw(st.sampled_from(CHANGING))
    changes = list(clock_changes(zone, us("2026-01-01 00:00"), us("2028-01-01 00:00")))
    at_us = changes[which % len(changes)].at_us
    asked = Window(zone, drawn.days, drawn.start_minute, drawn.end_minute)
    check_intervals(asked, at_us + hours * 60 * MINUTE_US, 2)


def check_intervals(asked: Window, from_us: int, days: int) -> None:
    until_us = from_us + days * DAY_US
    scanned = scan(asked, from_us, until_us)
    found = intervals(asked, from_us, 1000, days)
    assert [(one.opens_us, one.closes_us or until_us) for one in found] == scanned
    assert [one.already_open for one in found if one.opens_us == from_us] in (
        [],
        [is_inside(asked, datetime.fromtimestamp(from_us // 1_000_000 - 1, UTC))],
    )
    edges = [at for span in scanned for at in span if from_us < at < until_us]
    at_us, stepped = from_us, []
    while (changed := next_change(asked, at_us, days)) is not None and changed < until_us:
        stepped.append(changed)
        at_us = changed
    assert stepped == edges


@given(WINDOWS, FROM_1970)
@settings(max_examples=100, deadline=None)
def test_intervals_stand_apart_and_in_order(asked: Window, at_s: int) -> None:
    found = intervals(asked, at_s * 1_000_000, 14)
    assert found, "a window opens at least once a year"
    for one in found:
        assert one.closes_us is None or one.opens_us < one.closes_us
        assert is_open(asked, one.opens_us)
        assert one.closes_us is None or (not is_open(asked, one.closes_us) and is_open(asked, one.closes_us - 1))
    for earlier, later in pairwise(found):
        assert earlier.closes_us is not None and earlier.closes_us < later.opens_us
        assert not later.already_open


def test_a_window_of_every_whole_day_never_closes() -> None:
    always = window(LONDON, "mon-sun", "07:30-07:30")
    (one,) = intervals(always, us("2026-06-01 12:00"), 14)
    assert (one.closes_us, one.already_open, one.notes) == (None, True, ())
    assert next_change(always, us("2026-06-01 12:00")) is None


# Cases


def check_bg_02(zone: str, lookups: list[int], windows: list[Window]) -> None:
    for change in clock_changes(zone, us("2026-01-01 00:00"), us("2028-01-01 00:00")):
        for quarter in range(-8, 9):
            now_us = change.at_us + quarter * 15 * MINUTE_US
            for drawn in windows:
                asked = Window(zone, drawn.days, drawn.start_minute, drawn.end_minute)
                before = len(lookups)
                first = next_change(asked, now_us, 30)
                assert len(lookups) - before < 200, "the search is bounded"
                if first is None:
                    continue
                assert first > now_us
                assert is_open(asked, first) != is_open(asked, now_us)
                then = next_change(asked, first, 30)
                assert then is None or (then > first and is_open(asked, then) == is_open(asked, now_us))


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the instants whose offset was asked for: the work of a search, whatever the machine's speed."""
    seen: list[int] = []
    real = zones.offset_us

    def counting(name: str, at_us: int) -> int:
        seen.append(at_us)
        return real(name, at_us)

    monkeypatch.setattr(zones, "offset_us", counting)
    return seen


SOME_WINDOWS = [
    window("UTC", "mon-sun", "02:00-03:00"), window("UTC", "sun", "01:30-02:30"), window("UTC", "sat", "22:00-02:15"),
    window("UTC", "sun", "00:00-00:00"), window("UTC", "mon wed fri", "23:45-00:15"),
    window("UTC", "mon-sun", "00:00-23:59"),
]  # fmt: skip


@pytest.mark.parametrize("zone", [LONDON, NEW_YORK, LORD_HOWE, CAIRO, "Africa/Casablanca", "America/Nuuk"])
def test_bg_02_no_search_runs_for_ever(zone: str, lookups: list[int]) -> None:
    check_bg_02(zone, lookups, SOME_WINDOWS)


@pytest.mark.slow
def test_bg_02_in_every_zone(lookups: list[int]) -> None:
    for zone in CHANGING:
        check_bg_02(zone, lookups, SOME_WINDOWS)
        lookups.clear()


def test_bg_02_a_year_ahead_costs_a_few_lookups_a_day(lookups: list[int]) -> None:
    assert next_change(window(LONDON, "mon-sun", "00:00-00:00"), us("2026-01-01 00:00")) is None
    assert len(lookups) < 1000


def test_bg_04_a_window_opens_once_on_the_day_of_change() -> None:
    asked = window("Europe/Berlin", "mon-sun", "10:00-12:00")
    now_us, opened, was = us("2026-10-24 12:00"), [], False
    planned_us = next_change(asked, now_us)
    while now_us < us("2026-10-26 00:00"):
        inside = is_open(asked, now_us)
        if inside and not was:
            opened.append(text(now_us))
            assert now_us == planned_us, "what was planned before the change still holds"
        if inside != was:
            planned_us = next_change(asked, now_us)
        was = inside
        now_us += MINUTE_US
    assert opened == ["2026-10-25 09:00"]


def test_bg_13_a_window_follows_the_clock_wherever_it_steps() -> None:
    asked = window("UTC", "mon-fri", "09:00-17:00")
    start_us = us("2026-06-01 09:00")
    steps = {0: True, -90_000_000: False, 60 * MINUTE_US: True, -DAY_US: False, 7 * 60 * MINUTE_US: True}
    for step_us, inside in steps.items():
        assert is_open(asked, start_us + step_us) == inside
        changed = next_change(asked, start_us + step_us)
        assert changed is not None and changed > start_us + step_us


def test_bg_11_zones_are_there_without_zone_files_of_the_system() -> None:
    code = """
import zoneinfo
from frontend.batches.scheduling import window_state, zones
assert zoneinfo.TZPATH == ()
berlin = window_state.Window("Europe/Berlin", frozenset(range(7)), 600, 720)
at_us = 1792918800_000000
print(window_state.is_open(berlin, at_us), zones.offset_us("Europe/Berlin", at_us) // 60_000_000)
"""
    environ = {**os.environ, "PYTHONTZPATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["True", "60"]


# Zones


def test_every_listed_zone_can_be_loaded() -> None:
    assert len(ZONES) > 500
    for name in ZONES:
        assert isinstance(zones.zone(name), ZoneInfo)


@pytest.mark.parametrize(
    "name",
    ["", "Mars/Olympus", "localtime", "posix/UTC", "../UTC", "/etc/passwd", "europe/london", "UTC\0", "zone.tab"],
)
def test_what_is_no_zone_is_refused(name: str) -> None:
    with pytest.raises(zones.UnknownZone):
        zones.zone(name)


def test_a_zone_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(zones.UnknownZone, match="did you mean Europe/London"):
        zones.zone("europe/london")


@pytest.mark.parametrize("zone", ["Europe/London", "Africa/Casablanca", "Asia/Kolkata"])
def test_changes_of_the_clocks_are_found_to_the_second(zone: str) -> None:
    changes = list(clock_changes(zone, us("2026-01-01 00:00"), us("2028-01-01 00:00")))
    for change in changes:
        assert zones.offset_us(zone, change.at_us) == change.after_us != change.before_us
        assert zones.offset_us(zone, change.at_us - 1) == change.before_us
    assert len(changes) == (0 if zone == "Asia/Kolkata" else 4)


def test_days_are_in_order() -> None:
    # 4 June 2026 is a Thursday.
    assert is_open(Window("UTC", frozenset({DAYS.index("thu")}), 0, 0), us("2026-06-04 00:00"))
