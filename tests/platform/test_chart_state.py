"""From the explain log to a chart: spans against a look at every single minute, and points."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from frontend.batches.store.route_rows import EdgeRow, MinuteRow
from frontend.batches.store.watch_protocol import MINUTE_US
from frontend.platform.chart_state import MAX_POINTS, chart

HOUR = 60
REASONS = (None, "outside_window", "live_traffic", "server_busy")


def minute(number: int, **values: int) -> MinuteRow:
    values.setdefault("observed_us", MINUTE_US)
    return MinuteRow("r", number, **values)


def edge(at: float, reason: str | None, **values: object) -> EdgeRow:
    """Return an edge at a time in minutes."""
    return EdgeRow("r", round(at * MINUTE_US), "p", reason, **values)  # type: ignore[arg-type]


@given(
    edges=st.lists(st.tuples(st.integers(-20, 79), st.sampled_from(REASONS)), max_size=20),
    watched=st.sets(st.integers(0, 59)),
)
def test_spans_say_what_a_look_at_every_minute_says(edges: list[tuple[int, str | None]], watched: set[int]) -> None:
    rows = [edge(at + 0.5, reason) for at, reason in sorted(edges, key=lambda one: one[0])]
    # As the store gives them: those inside, and the last one before.
    inside = [row for row in rows if 0 <= row.at < HOUR * MINUTE_US]
    before = [row for row in rows if row.at < 0][-1:]
    view = chart("r", [*before, *inside], [minute(at) for at in sorted(watched)], 0, HOUR * MINUTE_US)
    assert view.spans[0].from_us == 0 and view.spans[-1].to_us == HOUR * MINUTE_US
    for first, second in zip(view.spans, view.spans[1:], strict=False):
        assert first.to_us == second.from_us and (first.state, first.reason) != (second.state, second.reason)
    looked = watched | {row.at // MINUTE_US for row in inside}
    for half in range(2 * HOUR):
        at_us = half * MINUTE_US // 2
        span = next(one for one in view.spans if one.from_us <= at_us < one.to_us)
        now = half // 2
        last = [row for row in [*before, *inside] if row.at <= at_us][-1:]
        if not ({now, now - 1} & looked) or not last:
            expected: tuple[str, str | None] = ("unwatched", None)
        else:
            expected = ("open", None) if last[0].reason is None else ("closed", last[0].reason)
        assert (span.state, span.reason) == expected, at_us


def test_a_change_of_the_cap_is_no_change_of_the_gates() -> None:
    rows = [edge(1, "live_traffic"), edge(2, None, cap=3, why="clean_window"), edge(3, None)]
    view = chart("r", rows, [minute(at) for at in range(5)], 0, 5 * MINUTE_US)
    assert [(one.state, one.reason) for one in view.spans] == [
        ("unwatched", None), ("closed", "live_traffic"), ("open", None),
    ]  # fmt: skip
    assert [(one.cap, one.why) for one in view.caps] == [(3, "clean_window")]


def test_minutes_in_which_nobody_looked_do_not_count_as_watched() -> None:
    rows = [minute(10, live_max=2, observed_us=0)]
    view = chart("r", [edge(-5, None)], rows, 0, HOUR * MINUTE_US)
    assert [one.state for one in view.spans] == ["unwatched"]


@given(st.integers(1, 14 * 24), st.sets(st.integers(0, 14 * 24 * HOUR - 1), max_size=200))
def test_points_keep_the_most_and_the_sums(hours: int, at: set[int]) -> None:
    rows = [
        minute(number, live_max=number % 7, running_max=number % 5, queued_max=number % 11, cap=2, lines_done=1)
        for number in sorted(at) if number < hours * HOUR
    ]  # fmt: skip
    view = chart("r", [], rows, 0, hours * HOUR * MINUTE_US)
    assert len(view.points) <= MAX_POINTS
    assert sum(point.lines_done for point in view.points) == len(rows)
    assert all(point.at_us % (view.step_minutes * MINUTE_US) == 0 for point in view.points)
    for point in view.points:
        group = [row for row in rows if row.minute // view.step_minutes * view.step_minutes * MINUTE_US == point.at_us]
        assert point.live_max == max(row.live_max for row in group)
        assert point.running_max == max(row.running_max for row in group)
        assert point.queued_max == max(row.queued_max for row in group)


def test_a_reading_of_an_edge_is_told_only_if_there_was_one() -> None:
    rows = [
        edge(1, "outside_window"),
        edge(2, "server_busy", metrics_waiting=3),
        edge(3, "metrics_unavailable", metrics_error="timeout"),
    ]
    none, busy, failed = (one.reading for one in chart("r", rows, [], 0, 5 * MINUTE_US).edges)
    assert none is None and busy is not None and busy.ok and busy.waiting == 3
    assert failed is not None and not failed.ok and failed.error == "timeout" and failed.waiting is None
