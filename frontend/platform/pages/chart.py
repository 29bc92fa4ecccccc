"""The picture of a route's last hours: what is drawn where, and the same as rows of a table. Pure.

Three bands share one time axis: the gate (open, closed and why, nobody looked), live requests in flight, batch lines
running under their cap. Each point shows the most that was seen in its minutes. Units of the drawing are the SVG's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from zoneinfo import ZoneInfo

from frontend.platform import words
from frontend.platform.pages import wording
from frontend.platform.read_models import ChartPoint, ChartView, GateSpan, GateState

MINUTE_US: Final = 60_000_000
HOUR_US: Final = 60 * MINUTE_US
LEFT: Final = 44.0
WIDTH: Final = 1000.0
RIGHT: Final = WIDTH - 8.0
GATE_TOP, GATE_BOTTOM = 8.0, 36.0
LIVE_TOP, LIVE_BOTTOM = 66.0, 132.0
LINES_TOP, LINES_BOTTOM = 166.0, 232.0
AXIS_Y: Final = 252.0
HEIGHT: Final = 262.0
MAX_SPANS: Final = 320
"""With more changes of the gate than that, so many slots are drawn: each as what held longest in it."""
MAX_POINTS: Final = 480
"""Of a staircase, two units apart; with more, neighbours are drawn as one, the most of them."""
MAX_ROWS: Final = 200
MIN_LABEL_WIDTH: Final = 7.0
"""Per character: a span gets its name written in it only if it fits."""
OPEN: Final = "open"
UNWATCHED: Final = "unwatched"
_KNOWN: Final = frozenset({"outside_window", "live_traffic", "server_busy", "metrics_unavailable"})


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of the gate. ``look`` names its colour and pattern, ``label`` is empty where it would not fit."""

    x: float
    width: float
    look: str
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """A quantity over time. ``limit_y`` None: no limit, or one far above everything that happened."""

    top: float
    bottom: float
    most: int
    areas: tuple[str, ...]
    limit_path: str
    limit_label: str
    limit_y: float | None


@dataclass(frozen=True, slots=True)
class Share:
    """How long the gate was in one state."""

    look: str
    name: str
    length: str
    percent: float


@dataclass(frozen=True, slots=True)
class Row:
    """A span of the gate in the table that says the same as the picture."""

    from_us: int
    to_us: int
    starts: str
    ends: str
    length: str
    state: str
    look: str
    live_most: str
    lines_most: str
    lines_done: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """All of it. ``summary`` is the picture in a sentence."""

    bars: tuple[Bar, ...]
    hours: tuple[Tick, ...]
    live: Band
    lines: Band
    shares: tuple[Share, ...]
    rows: tuple[Row, ...]
    rows_left_out: int
    caps: tuple[tuple[str, str], ...]
    summary: str
    zone: str
    observed: bool


def draw(view: ChartView, zone: ZoneInfo, yield_threshold: int | None) -> Drawing:
    """Return the drawing of a chart, its times on the wall clock of ``zone``."""
    points, step_us = thinned(view)
    scale = _Scale(view.from_us, view.to_us, step_us)
    spans = view.spans
    if len(spans) > MAX_SPANS:
        spans = per_slot(spans, -(-(view.to_us - view.from_us) // MAX_SPANS))
    live = _band(points, scale, LIVE_TOP, LIVE_BOTTOM, lambda point: point.live_max)
    if yield_threshold is not None:
        live = _with_level(live, scale, yield_threshold, f"pause at {wording.number(yield_threshold)}")
    lines = _band(points, scale, LINES_TOP, LINES_BOTTOM, lambda point: point.running_max, _most_cap(points))
    lines = _with_caps(lines, points, scale)
    shares = _shares(view)
    rows = _rows(view, zone)
    return Drawing(
        bars=tuple(_bar(span, scale, zone) for span in spans if span.to_us > span.from_us),
        hours=_hours(view, scale, zone),
        live=live,
        lines=lines,
        shares=shares,
        rows=tuple(rows),
        rows_left_out=max(0, len(view.spans) - MAX_ROWS),
        caps=tuple((_clock(change.at_us, view, zone), f"{change.cap}: {change.why}") for change in view.caps[-50:]),
        summary=_summary(view, shares),
        zone=zone.key,
        observed=any(span.state != UNWATCHED for span in view.spans) or bool(view.points),
    )


def thinned(view: ChartView) -> tuple[Sequence[ChartPoint], int]:
    """Return at most ``MAX_POINTS`` points, give or take one, and how long one stands for."""
    own_us = view.step_minutes * MINUTE_US
    step_us = own_us * max(1, -(-(view.to_us - view.from_us) // (own_us * MAX_POINTS)))
    if step_us == own_us:
        return view.points, own_us
    found: list[ChartPoint] = []
    for point in view.points:
        at_us = point.at_us - point.at_us % step_us
        if found and found[-1].at_us == at_us:
            last = found.pop()
            live, running = max(last.live_max, point.live_max), max(last.running_max, point.running_max)
            found.append(ChartPoint(at_us, live, running, 0, point.cap, 0, 0))
        else:
            found.append(ChartPoint(at_us, point.live_max, point.running_max, 0, point.cap, 0, 0))
    return found, step_us


def per_slot(spans: Sequence[GateSpan], slot_us: int) -> tuple[GateSpan, ...]:
    """Return the spans at a coarser resolution: each slot is what held longest in it."""
    weight: dict[int, Counter[tuple[GateState, str | None]]] = {}
    for span in spans:
        at_us = span.from_us
        while at_us < span.to_us:
            slot = at_us // slot_us
            end_us = min(span.to_us, (slot + 1) * slot_us)
            weight.setdefault(slot, Counter())[(span.state, span.reason)] += end_us - at_us
            at_us = end_us
    merged: list[GateSpan] = []
    first_us, last_us = spans[0].from_us, spans[-1].to_us
    for slot in sorted(weight):
        (state, reason), _ = weight[slot].most_common(1)[0]
        start_us, end_us = max(first_us, slot * slot_us), min(last_us, (slot + 1) * slot_us)
        if merged and (merged[-1].state, merged[-1].reason, merged[-1].to_us) == (state, reason, start_us):
            start_us = merged.pop().from_us
        merged.append(GateSpan(start_us, end_us, state, reason))
    return tuple(merged)


def look_of(span: GateSpan) -> str:
    """Return the name of a span's colour and pattern."""
    if span.state != "closed":
        return span.state
    return span.reason if span.reason in _KNOWN and span.reason else "other"


def name_of(span: GateSpan) -> str:
    """Return what a span is called."""
    if span.state == OPEN:
        return "Open"
    if span.state == UNWATCHED:
        return "No batch waiting"
    return words.reason_text(span.reason) or "Closed"


class _Scale:
    """Instants to horizontal places; ``step_us`` is what one point stands for."""

    def __init__(self, from_us: int, to_us: int, step_us: int) -> None:
        self._from_us = from_us
        self.step_us = step_us
        self._per_us = (RIGHT - LEFT) / max(1, to_us - from_us)

    def x(self, at_us: int) -> float:
        return min(RIGHT, max(LEFT, LEFT + (at_us - self._from_us) * self._per_us))


def _bar(span: GateSpan, scale: _Scale, zone: ZoneInfo) -> Bar:
    x, end = scale.x(span.from_us), scale.x(span.to_us)
    name = name_of(span)
    # At least a hair, so that a short closing can be seen at all.
    width = max(end - x, 0.6)
    label = name if span.state != UNWATCHED and len(name) * MIN_LABEL_WIDTH + 12 <= width else ""
    return Bar(_round(x), _round(width), look_of(span), label, f"{_range(span, zone)}: {name}")


def _range(span: GateSpan, zone: ZoneInfo) -> str:
    start, end = wording.local(span.from_us, zone), wording.local(span.to_us, zone)
    return f"{start:%a %H:%M}–{end:%H:%M}, {wording.duration(span.to_us - span.from_us)}"


def _hours(view: ChartView, scale: _Scale, zone: ZoneInfo) -> tuple[Tick, ...]:
    """Return the full hours of the wall clock, at most thirteen of them labelled."""
    length_hours = max(1, (view.to_us - view.from_us) // HOUR_US)
    step = next((step for step in (1, 2, 3, 6, 12, 24) if length_hours / step <= 13), 48)
    ticks = []
    at = wording.local(view.from_us - view.from_us % (15 * MINUTE_US), zone)
    at_us = view.from_us - view.from_us % (15 * MINUTE_US)
    while at_us <= view.to_us:
        if at_us >= view.from_us and at.minute == 0 and at.hour % min(step, 24) == 0:
            midnight = at.hour == 0
            ticks.append(Tick(_round(scale.x(at_us)), f"{at:%a} {at.day}" if midnight else f"{at:%H:%M}", midnight))
        at_us += 15 * MINUTE_US
        at = wording.local(at_us, zone)
    return tuple(ticks)


def _most_cap(points: Iterable[ChartPoint]) -> int:
    return max((point.cap for point in points), default=0)


def _band(
    points: Sequence[ChartPoint],
    scale: _Scale,
    top: float,
    bottom: float,
    value: Callable[[ChartPoint], int],
    at_least: int = 0,
) -> Band:
    most = max([value(point) for point in points] + [at_least, 1])
    areas = tuple(_area(run, scale, top, bottom, most, value) for run in _runs(points, scale.step_us))
    return Band(top, bottom, most, areas, "", "", None)


def _runs(points: Sequence[ChartPoint], step_us: int) -> list[list[ChartPoint]]:
    """Return the points in stretches without a missing one."""
    runs: list[list[ChartPoint]] = []
    for point in points:
        if runs and point.at_us - runs[-1][-1].at_us <= step_us:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _area(
    run: Sequence[ChartPoint], scale: _Scale, top: float, bottom: float, most: int, value: Callable[[ChartPoint], int]
) -> str:
    """Return the path of a filled staircase: a corner only where the value changes."""
    path = [f"M{_round(scale.x(run[0].at_us))} {_round(bottom)}"]
    now: int | None = None
    for point in run:
        if value(point) != now:
            now = value(point)
            path.append(f"H{_round(scale.x(point.at_us))}V{_round(_y(now, most, top, bottom))}")
    path.append(f"H{_round(scale.x(run[-1].at_us + scale.step_us))}V{_round(bottom)}Z")
    return "".join(path)


def _y(value: float, most: int, top: float, bottom: float) -> float:
    return bottom - (bottom - top) * min(value, most) / most


def _with_level(band: Band, scale: _Scale, level: int, label: str) -> Band:
    """Return the band with a limit that is the same all the time."""
    if level > band.most:
        # Out of the picture: the scale is for what happened. The label still says it.
        return Band(band.top, band.bottom, band.most, band.areas, "", label, None)
    y = _round(_y(level, band.most, band.top, band.bottom))
    return Band(band.top, band.bottom, band.most, band.areas, f"M{LEFT} {y}H{RIGHT}", label, y)


def _with_caps(band: Band, points: Sequence[ChartPoint], scale: _Scale) -> Band:
    """Return the band with the cap that was in force, which may have moved."""
    path = []
    now: int | None = None
    for run in _runs(points, scale.step_us):
        path.append(f"M{_round(scale.x(run[0].at_us))} {_round(_y(run[0].cap, band.most, band.top, band.bottom))}")
        now = run[0].cap
        for point in run:
            if point.cap != now:
                now = point.cap
                path.append(f"H{_round(scale.x(point.at_us))}V{_round(_y(now, band.most, band.top, band.bottom))}")
        path.append(f"H{_round(scale.x(run[-1].at_us + scale.step_us))}")
    if now is None:
        return band
    y = _round(_y(now, band.most, band.top, band.bottom))
    return Band(band.top, band.bottom, band.most, band.areas, "".join(path), f"limit {now}", y)


def _shares(view: ChartView) -> tuple[Share, ...]:
    length: Counter[tuple[str, str]] = Counter()
    for span in view.spans:
        length[(look_of(span), name_of(span))] += span.to_us - span.from_us
    whole = max(1, view.to_us - view.from_us)
    order = {OPEN: 0, UNWATCHED: 2}
    return tuple(
        Share(look, name, wording.duration(us), round(100 * us / whole, 1))
        for (look, name), us in sorted(length.items(), key=lambda item: (order.get(item[0][0], 1), -item[1]))
        if us > 0
    )


def _rows(view: ChartView, zone: ZoneInfo) -> list[Row]:
    """Return the newest spans, newest first, each with the most that happened within it."""
    rows = []
    points = list(view.points)
    step_us = view.step_minutes * MINUTE_US
    for span in reversed(view.spans[-MAX_ROWS:]):
        inside = []
        while points and points[-1].at_us + step_us > span.from_us:
            inside.append(points.pop())
        if inside and inside[-1].at_us < span.from_us:
            points.append(inside[-1])  # minutes in which the gate changed belong to both
        rows.append(
            Row(
                from_us=span.from_us,
                to_us=span.to_us,
                starts=_clock(span.from_us, view, zone),
                ends="now" if span.to_us >= view.to_us else _clock(span.to_us, view, zone),
                length=wording.duration(span.to_us - span.from_us),
                state=name_of(span),
                look=look_of(span),
                live_most=_most(inside, lambda point: point.live_max),
                lines_most=_most(inside, lambda point: point.running_max),
                lines_done=wording.number(sum(point.lines_done for point in inside)) if inside else "–",
            )
        )
    return rows


def _most(points: Sequence[ChartPoint], value: Callable[[ChartPoint], int]) -> str:
    return wording.number(max(map(value, points))) if points else "–"


def _clock(at_us: int, view: ChartView, zone: ZoneInfo) -> str:
    """Return an instant as ``Mon 03:00``; with the date where the chart is longer than a week."""
    at = wording.local(at_us, zone)
    long = view.to_us - view.from_us > timedelta(days=6).total_seconds() * 1e6
    return f"{at.day} {at:%b %H:%M}" if long else f"{at:%a %H:%M}"


def _summary(view: ChartView, shares: Sequence[Share]) -> str:
    length = wording.duration(view.to_us - view.from_us)
    states = ", ".join(f"{share.name[0].lower()}{share.name[1:]} {share.length}" for share in shares)
    live = max((point.live_max for point in view.points), default=0)
    lines = max((point.running_max for point in view.points), default=0)
    done = sum(point.lines_done for point in view.points)
    return (
        f"Last {length}: {states or 'nothing recorded'}. At most {wording.count(live, 'live request')} in flight and "
        f"{wording.count(lines, 'batch line')} running; {wording.count(done, 'line')} finished."
    )


def _round(value: float) -> float:
    return round(value, 2)
