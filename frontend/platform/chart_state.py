"""From a route's explain log to what a chart shows. Pure; times are microseconds since 1970.

An edge says what holds from then on, but only while somebody looks: gates are asked when a batch wants the route. When
somebody looked is known by the minute, so a state lasts until the next edge or until the looking ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from frontend.batches.store.route_rows import EdgeRow, MinuteRow
from frontend.batches.store.watch_protocol import MINUTE_US
from frontend.platform.read_models import CapChange, ChartPoint, ChartView, EdgeView, GateSpan, GateState, Reading

MAX_POINTS: Final = 1500
_STEPS: Final = (1, 2, 5, 10, 15, 20, 30, 60)
WATCH_REACH_US: Final = MINUTE_US
"""A minute is written down when it is over, so the one under way counts with the one before."""


def chart(route_id: str, edges: Sequence[EdgeRow], minutes: Sequence[MinuteRow], from_us: int, to_us: int) -> ChartView:
    """Return the chart of a route.

    Args:
        edges: in order; the first may lie before ``from_us`` and says what held then.
        minutes: in order.
    """
    span_minutes = max(1, -(-(to_us - from_us) // MINUTE_US))
    step = next((step for step in _STEPS if span_minutes <= step * MAX_POINTS), _STEPS[-1])
    inside = [edge for edge in edges if from_us <= edge.at < to_us]
    return ChartView(
        route_id=route_id,
        from_us=from_us,
        to_us=to_us,
        step_minutes=step,
        spans=tuple(_spans(edges, _watched(minutes, inside, from_us, to_us), from_us, to_us)),
        points=tuple(_points(minutes, step)),
        edges=tuple(map(edge_view, inside)),
        caps=tuple(CapChange(edge.at, edge.cap, edge.why) for edge in inside if edge.why and edge.cap is not None),
    )


def edge_view(edge: EdgeRow) -> EdgeView:
    """Return an edge as people see it."""
    numbers = (edge.metrics_waiting, edge.metrics_running, edge.metrics_kv_cache_permille)
    read = edge.metrics_error is not None or any(number is not None for number in numbers)
    reading = Reading(edge.at, edge.metrics_error is None, *numbers, edge.metrics_error) if read else None
    return EdgeView(edge.at, edge.process_id, edge.reason, edge.live_in_flight, reading, edge.cap, edge.why)


def _watched(
    minutes: Iterable[MinuteRow], edges: Iterable[EdgeRow], from_us: int, to_us: int
) -> list[tuple[int, int]]:  # fmt: skip
    """Return when somebody looked, as stretches in order that do not touch."""
    starts = {minute.minute * MINUTE_US for minute in minutes if minute.observed_us > 0}
    starts |= {edge.at // MINUTE_US * MINUTE_US for edge in edges}
    found: list[tuple[int, int]] = []
    for start_us in sorted(starts):
        begin, end = max(start_us, from_us), min(start_us + MINUTE_US + WATCH_REACH_US, to_us)
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def _spans(
    edges: Sequence[EdgeRow], watched: Sequence[tuple[int, int]], from_us: int, to_us: int
) -> Iterator[GateSpan]:  # fmt: skip
    """Yield stretches of one state that cover [from, to)."""
    # A change of the cap says nothing about the gates.
    gates = [edge for edge in edges if edge.why is None and edge.at < to_us]
    times = [edge.at for edge in gates]
    begins = [begin for begin, _ in watched]
    cuts = sorted({from_us, to_us, *(at for at in times if at > from_us), *(at for pair in watched for at in pair)})
    joined: GateSpan | None = None
    for begin, end in pairwise(cuts):
        stretch, last = bisect_right(begins, begin) - 1, bisect_right(times, begin) - 1
        state: GateState = "unwatched"
        reason = None
        if stretch >= 0 and begin < watched[stretch][1] and last >= 0:
            reason = gates[last].reason
            state = "open" if reason is None else "closed"
        if joined is not None and (joined.state, joined.reason) == (state, reason):
            joined = GateSpan(joined.from_us, end, state, reason)
            continue
        if joined is not None:
            yield joined
        joined = GateSpan(begin, end, state, reason)
    if joined is not None:
        yield joined


def _points(minutes: Iterable[MinuteRow], step: int) -> Iterator[ChartPoint]:
    """Yield one point for every ``step`` minutes in which there is a row."""
    current: ChartPoint | None = None
    for row in minutes:
        at_us = row.minute // step * step * MINUTE_US
        if current is not None and current.at_us == at_us:
            current = ChartPoint(
                at_us,
                max(current.live_max, row.live_max),
                max(current.running_max, row.running_max),
                max(current.queued_max, row.queued_max),
                row.cap,
                current.lines_done + row.lines_done,
                current.overloads + row.overloads,
            )
            continue
        if current is not None:
            yield current
        current = ChartPoint(
            at_us, row.live_max, row.running_max, row.queued_max, row.cap, row.lines_done, row.overloads
        )
    if current is not None:
        yield current
