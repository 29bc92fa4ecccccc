"""From rows of the store to what people see of a route. Pure; times are microseconds since 1970."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from frontend.batches.scheduling import zones
from frontend.batches.scheduling.plain_words import days_in_words, notes_in_words
from frontend.batches.scheduling.settings_document import window_of
from frontend.batches.scheduling.window_state import Interval, Window, intervals
from frontend.batches.store.route_rows import MinuteRow, RouteCap, RouteCount, SignalRow
from frontend.batches.store.rows import SECOND_US, SchedulingRow
from frontend.platform.read_models import OpenInterval, Reading, RouteStatus

STALE_US: Final = 30 * SECOND_US
"""A reason nobody has looked at for this long, with nothing queued, is not shown any more (rule 23)."""
PREVIEW_INTERVALS: Final = 14


def route_status(
    settings: SchedulingRow, signal: SignalRow | None, count: RouteCount | None, cap: RouteCap | None, now_us: int
) -> RouteStatus:
    """Return what a route does now."""
    queued = 0 if count is None else count.waiting_lines
    reason = _reason(signal, queued, now_us)
    reopens_at = None if signal is None or reason is None else signal.reopens_at
    adapts = settings.min_concurrency is not None
    return RouteStatus(
        queued_lines=queued,
        waiting_batches=0 if count is None else count.waiting_batches,
        running_lines=0 if count is None else count.running_lines,
        cap=cap_now(settings, cap),
        cap_why=cap.why if cap is not None and adapts else None,
        paused_reason=reason,
        checked_at_us=None if signal is None else signal.checked_at,
        live_in_flight=None if signal is None else signal.live_in_flight,
        metrics=_reading(settings, signal),
        reopens_at_us=reopens_at if reopens_at is not None and reopens_at > now_us else None,
    )


def cap_now(settings: SchedulingRow, cap: RouteCap | None) -> int:
    """Return how many lines may run at once: the setting, or within its range what it was adapted to."""
    if settings.min_concurrency is None or cap is None:
        return settings.max_concurrency if settings.min_concurrency is None else settings.min_concurrency
    return min(max(cap.cap, settings.min_concurrency), settings.max_concurrency)


def _reason(signal: SignalRow | None, queued: int, now_us: int) -> str | None:
    if signal is None or (queued == 0 and signal.checked_at < now_us - STALE_US):
        return None
    return signal.paused_reason


def _reading(settings: SchedulingRow, signal: SignalRow | None) -> Reading | None:
    # A reading of before the signal was switched off would look as if it counted.
    if signal is None or settings.metrics_url is None or signal.metrics_checked_at is None:
        return None
    return Reading(
        checked_at_us=signal.metrics_checked_at,
        ok=bool(signal.metrics_ok),
        waiting=signal.metrics_waiting,
        running=signal.metrics_running,
        kv_cache_permille=signal.metrics_kv_cache_permille,
        error=signal.metrics_error,
    )


def next_intervals(settings: SchedulingRow, from_us: int) -> tuple[OpenInterval, ...] | None:
    """Return when lines may start, from then on; None for any time."""
    window = window_of(settings)
    if window is None:
        return None
    return tuple(open_interval(window, one) for one in intervals(window, from_us, PREVIEW_INTERVALS))


def open_interval(window: Window, interval: Interval) -> OpenInterval:
    """Return an interval with its local times and its notes in words."""
    return OpenInterval(
        opens_us=interval.opens_us,
        closes_us=interval.closes_us,
        opens_local=local_text(window.timezone, interval.opens_us),
        closes_local=None if interval.closes_us is None else local_text(window.timezone, interval.closes_us),
        open_now=interval.already_open,
        note=notes_in_words(interval) or "",
    )


def local_text(timezone: str, at_us: int) -> str:
    """Return a time as clocks on the wall show it, with the zone's abbreviation then."""
    at = datetime.fromtimestamp(at_us // SECOND_US, zones.zone(timezone))
    return f"{days_in_words([at.weekday()])} {at:%Y-%m-%d %H:%M %Z}"


def live_closed_percent(settings: SchedulingRow, minutes: Sequence[MinuteRow]) -> float | None:
    """Return in how many percent of the minutes live traffic reached the threshold at some moment."""
    if settings.yield_live_threshold is None or not minutes:
        return None
    closed = sum(minute.live_max >= settings.yield_live_threshold for minute in minutes)
    return round(100 * closed / len(minutes), 1)
