"""An independent reading of the window rules: every minute is turned into local time by ``datetime`` and looked at."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from frontend.batches.scheduling.window_state import MINUTE_US, Window

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Span = tuple[str, str]


def window(timezone: str, days: str, times: str) -> Window:
    """Return ``window("Europe/London", "mon-fri", "19:00-07:00")``; days are a range or separated by blanks."""
    if "-" in days:
        first, last = map(DAYS.index, days.split("-"))
        numbers = list(range(first, last + 1))
    else:
        numbers = [DAYS.index(day) for day in days.split()]
    start, end = (int(hour) * 60 + int(minute) for hour, minute in (time.split(":") for time in times.split("-")))
    return Window(timezone, frozenset(numbers), start, end)


def us(text: str) -> int:
    """Return ``2026-06-01 18:00`` (UTC) in microseconds."""
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000


def text(at_us: int | None) -> str:
    """Return the reverse."""
    return "never" if at_us is None else f"{datetime.fromtimestamp(at_us // 1_000_000, UTC):%Y-%m-%d %H:%M}"


def is_inside(asked: Window, at: datetime) -> bool:
    """Return rule 74, in its own words."""
    local = at.astimezone(ZoneInfo(asked.timezone))
    day = local.weekday()
    time = local.time().replace(second=0, microsecond=0).isoformat("minutes")
    start, end = (f"{minute // 60:02}:{minute % 60:02}" for minute in (asked.start_minute, asked.end_minute))
    if start == end:
        return day in asked.days
    if start < end:
        return day in asked.days and start <= time < end
    return (day in asked.days and time >= start) or ((day + 6) % 7 in asked.days and time < end)


def scan(asked: Window, from_us: int, until_us: int) -> list[tuple[int, int]]:
    """Return the open stretches within a span, minute by minute; both ends must be whole minutes."""
    assert from_us % MINUTE_US == until_us % MINUTE_US == 0
    at, found = datetime.fromtimestamp(from_us // 1_000_000, UTC), []
    opens_us = None
    for at_us in range(from_us, until_us, MINUTE_US):
        inside = is_inside(asked, at)
        if inside and opens_us is None:
            opens_us = at_us
        elif not inside and opens_us is not None:
            found.append((opens_us, at_us))
            opens_us = None
        at += timedelta(minutes=1)
    return [*found, (opens_us, until_us)] if opens_us is not None else found
