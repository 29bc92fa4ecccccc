"""The chart of a route: what is drawn where, and a table that says the same."""

from __future__ import annotations

import re
from itertools import pairwise
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.platform.pages import chart
from frontend.platform.pages.chart import HOUR_US, LEFT, MINUTE_US, RIGHT, Drawing, draw
from frontend.platform.read_models import CapChange, ChartPoint, ChartView, GateSpan

UTC = ZoneInfo("UTC")
NOON_US = 1_795_780_800_000_000  # 27 Nov 2026, 12:00 UTC
STATES = st.sampled_from(
    [
        ("open", None),
        ("unwatched", None),
        ("closed", "outside_window"),
        ("closed", "live_traffic"),
        ("closed", "new_one"),
    ]
)


def point(minute: int, live: int = 0, running: int = 0, cap: int = 4, done: int = 0, step: int = 1) -> ChartPoint:
    return ChartPoint(NOON_US + minute * step * MINUTE_US, live, running, 0, cap, done, 0)


def view(
    spans: list[tuple[float, str, str | None]],
    points: list[ChartPoint] | None = None,
    hours: float = 24,
    caps: tuple[CapChange, ...] = (),
    step: int = 1,
) -> ChartView:
    """Return a chart that begins at noon; spans by their length in hours."""
    made, at = [], NOON_US
    for length, state, reason in spans:
        end = at + round(length * HOUR_US)
        made.append(GateSpan(at, end, state, reason))  # type: ignore[arg-type]
        at = end
    to_us = max(at, NOON_US + round(hours * HOUR_US)) if not made else at
    return ChartView("R", NOON_US, to_us, step, tuple(made), tuple(points or ()), (), caps)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.floats(0.01, 5), STATES), min_size=1, max_size=30))
def test_bars_cover_the_whole_time_in_order(parts: list[tuple[float, tuple[str, str | None]]]) -> None:
    drawing = draw(view([(length, *state) for length, state in parts]), UTC, None)
    assert drawing.bars[0].x == LEFT
    assert abs(drawing.bars[-1].x + drawing.bars[-1].width - RIGHT) < 1
    for one, other in pairwise(drawing.bars):
        assert abs(one.x + one.width - other.x) < 1
    assert abs(sum(share.percent for share in drawing.shares) - 100) < 1
    assert len(drawing.rows) == len(parts)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.floats(0.001, 0.2), STATES), min_size=1, max_size=8))
def test_a_flapping_gate_is_drawn_in_slots(parts: list[tuple[float, tuple[str, str | None]]]) -> None:
    parts = (parts * 500)[:450]
    drawn = view([(length, *state) for length, state in parts])
    merged = chart.per_slot(drawn.spans, MINUTE_US)
    assert (merged[0].from_us, merged[-1].to_us) == (drawn.from_us, drawn.to_us)
    assert all(one.to_us == other.from_us for one, other in pairwise(merged))
    assert all(span.to_us % MINUTE_US == 0 for span in merged[:-1])
    drawing = draw(drawn, UTC, None)
    assert len(drawing.bars) <= chart.MAX_SPANS + 1
    assert len(drawing.rows) == chart.MAX_ROWS
    assert drawing.rows_left_out == len(parts) - chart.MAX_ROWS


def test_a_minute_is_what_held_longest_in_it() -> None:
    spans = view(
        [(0.6 / 60, "open", None), (0.4 / 60, "closed", "live_traffic"), (1 / 60, "closed", "live_traffic")]
    ).spans
    assert [(span.state, span.reason) for span in chart.per_slot(spans, MINUTE_US)] == [
        ("open", None),
        ("closed", "live_traffic"),
    ]


def test_why_did_nothing_run_at_three_has_an_answer() -> None:
    drawing = draw(view([(10, "open", None), (8, "closed", "outside_window"), (6, "open", None)]), UTC, None)
    newest, night, _ = drawing.rows
    assert (night.starts, night.ends, night.length, night.state) == (
        "Fri 22:00", "Sat 06:00", "8 h", "Outside its time window",
    )  # fmt: skip
    assert newest.ends == "now"
    assert [bar.title for bar in drawing.bars][1] == "Fri 22:00–06:00, 8 h: Outside its time window"
    assert drawing.bars[1].label == "Outside its time window"
    assert "outside its time window 8 h" in drawing.summary


def test_a_reason_of_a_newer_process_is_shown_as_it_is() -> None:
    drawing = draw(view([(24, "closed", "price_too_high")]), UTC, None)
    assert (drawing.bars[0].look, drawing.rows[0].state) == ("other", "price_too_high")


def test_staircases_have_corners_only_where_the_value_changes() -> None:
    points = [point(minute, live=2) for minute in range(60)] + [point(minute, live=1) for minute in range(60, 120)]
    (area,) = draw(view([(2, "open", None)], points), UTC, None).live.areas
    assert len(re.findall("[HV]", area)) == 2 * 2 + 2
    assert area.startswith(f"M{LEFT} ")
    assert area.endswith("Z")


def test_minutes_in_which_nobody_looked_are_left_blank() -> None:
    points = [point(0, live=1), point(1, live=1), point(30, live=1)]
    assert len(draw(view([(1, "open", None)], points), UTC, None).live.areas) == 2
    wide = [point(index, live=1, step=5) for index in range(4)]
    assert len(draw(view([(1, "open", None)], wide, step=5), UTC, None).live.areas) == 1


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.sampled_from([24, 72, 168]))
def test_points_closer_than_can_be_seen_are_drawn_as_the_most_of_them(values: list[int], length: int) -> None:
    points = [point(minute, live=values[minute % len(values)]) for minute in range(length * 60)]
    drawn = view([(length, "open", None)], points)
    thin, step_us = chart.thinned(drawn)
    assert len(thin) <= chart.MAX_POINTS + 1
    assert all(one.at_us % step_us == 0 for one in thin)
    assert max(one.live_max for one in thin) == max(values[: length * 60])
    drawing = draw(drawn, UTC, None)
    assert drawing.live.most == max(*values, 1)
    assert len(drawing.live.areas) == 1


def test_the_threshold_is_a_line_where_it_fits_and_words_where_it_does_not() -> None:
    points = [point(minute, live=4) for minute in range(10)]
    inside = draw(view([(1, "open", None)], points), UTC, 2).live
    assert (inside.limit_label, inside.limit_y) == ("pause at 2", (inside.top + inside.bottom) / 2)
    above = draw(view([(1, "open", None)], points), UTC, 100).live
    assert (above.limit_label, above.limit_path, above.most) == ("pause at 100", "", 4)


def test_the_limit_follows_an_adaptive_cap() -> None:
    points = [point(0, cap=4), point(1, cap=4), point(2, cap=2), point(3, cap=2)]
    caps = (CapChange(NOON_US + 2 * MINUTE_US, 2, "overload"),)
    drawing = draw(view([(1, "open", None)], points, caps=caps), UTC, None)
    assert drawing.lines.limit_path.count("V") == 1
    assert drawing.lines.limit_label == "limit 2"
    assert drawing.caps == (("Fri 12:02", "2: overload"),)


def test_rows_say_the_most_that_happened_within_them() -> None:
    points = [point(minute, live=minute % 7, running=3, done=2) for minute in range(30)]
    points += [point(minute, running=1) for minute in range(30, 60)]
    newest, oldest = draw(view([(0.5, "open", None), (0.5, "closed", "live_traffic")], points), UTC, None).rows
    assert (oldest.live_most, oldest.lines_most, oldest.lines_done) == ("6", "3", "60")
    assert (newest.live_most, newest.lines_most, newest.lines_done) == ("0", "1", "0")


def test_nothing_recorded_is_said() -> None:
    assert not draw(view([(24, "unwatched", None)]), UTC, None).observed
    assert draw(view([(24, "open", None)]), UTC, None).observed


def hours(drawing: Drawing) -> list[str]:
    return [tick.label for tick in drawing.hours]


def test_hours_are_those_of_the_zone() -> None:
    whole = view([(24, "open", None)])
    assert hours(draw(whole, UTC, None))[0] == "12:00"
    assert "Sat 28" in hours(draw(whole, UTC, None))
    assert hours(draw(whole, ZoneInfo("America/New_York"), None))[0] == "08:00"
    # Half an hour off: full hours of the wall clock all the same.
    assert all(label.endswith(":00") or " " in label for label in hours(draw(whole, ZoneInfo("Asia/Kolkata"), None)))
    assert len(hours(draw(view([(168, "open", None)]), UTC, None))) <= 14


def test_an_hour_that_comes_twice_is_there_twice() -> None:
    # 1 Nov 2026: New York goes back from 02:00 to 01:00.
    from_us = NOON_US - 26 * 24 * HOUR_US - 10 * HOUR_US
    drawn = ChartView("R", from_us, from_us + 6 * HOUR_US, 1, (GateSpan(from_us, from_us + 6 * HOUR_US, "open", None),),
                      (), (), ())  # fmt: skip
    assert hours(draw(drawn, ZoneInfo("America/New_York"), None)).count("01:00") == 2
