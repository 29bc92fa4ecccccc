"""When a time window is open. Pure: instants are UTC microseconds since 1970, given by the caller.

A window is a rule about the wall clock: its days are the days on which it starts, an end before the start lies on the
next day, and a start equal to the end stands for the whole day. Instants are only ever turned from UTC into local time,
never back, so that neither an hour that is skipped nor one that comes twice is ambiguous. What follows on the days the
clocks change: minutes that do not exist are inside nothing, and minutes that come twice are inside twice.

Source: batches.md 1.15, rules 73 to 76.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

from frontend.batches.scheduling import zones

MINUTE_US: Final = 60_000_000
DAY_MINUTES: Final = 1440
DAY_US: Final = DAY_MINUTES * MINUTE_US
HORIZON_DAYS: Final = 400
"""How far ahead is looked by default: a year and what is left of the longest window."""
MAX_HORIZON_DAYS: Final = 3660
_THURSDAY: Final = 3
"""Weekday of 1 January 1970."""
_REACH_US: Final = 28 * 60 * MINUTE_US
"""More than any offset from UTC, and more than any change of one: how far a local day may lie from the UTC day."""


@dataclass(frozen=True, slots=True)
class Window:
    """When lines may start.

    Attributes:
        timezone: name of an IANA zone.
        days: weekdays on which the window starts, 0 = Monday; not empty.
        start_minute, end_minute: minutes of the local day, 0 to 1439; the end is excluded.
    """

    timezone: str
    days: frozenset[int]
    start_minute: int
    end_minute: int

    def __post_init__(self) -> None:
        assert self.days and self.days <= frozenset(range(7)), self.days
        assert 0 <= self.start_minute < DAY_MINUTES > self.end_minute >= 0


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """The clocks of a zone change.

    Attributes:
        at_us: the first instant with the new offset.
        before_us, after_us: local time minus UTC; clocks go forward if ``after_us`` is the larger.
    """

    at_us: int
    before_us: int
    after_us: int


class NoteKind(StrEnum):
    """What a change of the clocks does to an interval."""

    SHORTER = "shorter"
    LONGER = "longer"
    OPENS_TWICE = "opens_twice"
    """The interval is one of several pieces of one day's window."""
    SKIPPED = "skipped"
    """Before this interval, a day's window did not open at all."""


@dataclass(frozen=True, slots=True)
class Note:
    """Why an interval is not what the window's words say.

    Attributes:
        day: the local day, counted from 1 January 1970, on which the window starts that is meant.
        difference_us: actual minus usual length of that day's window.
    """

    kind: NoteKind
    change: Change
    day: int
    difference_us: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of time in which the window is open throughout.

    Attributes:
        opens_us: its first instant, or the one that was asked from if it was open already.
        closes_us: the first instant after it; None if it is open at the end of the horizon.
        already_open: it had begun before the instant that was asked from.
    """

    opens_us: int
    closes_us: int | None
    already_open: bool
    notes: tuple[Note, ...] = ()


def is_open(window: Window, at_us: int) -> bool:
    """Return whether a line may start at this instant.

    Raises:
        UnknownZone: the zone has vanished from the zone files.
    """
    local_us = at_us + zones.offset_us(window.timezone, at_us)
    day, of_day_us = divmod(local_us, DAY_US)
    minute = of_day_us // MINUTE_US
    today, yesterday = _starts_on(window, day), _starts_on(window, day - 1)
    start, end = window.start_minute, window.end_minute
    if start == end:
        return today
    if start < end:
        return today and start <= minute < end
    return (today and minute >= start) or (yesterday and minute < end)


def intervals(window: Window, from_us: int, count: int, horizon_days: int = HORIZON_DAYS) -> tuple[Interval, ...]:
    """Return the next ``count`` intervals in which the window is open, in order; the first may have begun already.

    Fewer are returned if the horizon ends before. The work is bounded by the horizon: about 2 us for each of its days.

    Raises:
        UnknownZone: the zone has vanished from the zone files.
    """
    found: list[Interval] = []
    until_us = from_us + min(horizon_days, MAX_HORIZON_DAYS) * DAY_US
    since_us = from_us
    for opens_us, closes_us in _merged(window, from_us - 1, until_us):
        if len(found) == count:
            break
        # One microsecond before tells an interval that had begun from one that begins at this instant.
        already = opens_us < from_us
        if closes_us <= from_us:
            continue
        end_us = None if closes_us >= until_us else closes_us
        one = Interval(max(opens_us, from_us), end_us, already)
        found.append(replace(one, notes=_notes(window, since_us, one)) if end_us is not None else one)
        since_us = closes_us
    return tuple(found)


def next_change(window: Window, at_us: int, horizon_days: int = HORIZON_DAYS) -> int | None:
    """Return the first instant after ``at_us`` at which an open window closes or a closed one opens.

    None if there is none within the horizon.
    """
    for interval in intervals(window, at_us, 1, horizon_days):
        return interval.closes_us if interval.opens_us == at_us else interval.opens_us
    return None


def clock_changes(timezone: str, from_us: int, until_us: int) -> Iterator[Change]:
    """Yield when the clocks change, ``from_us`` excluded and ``until_us`` included.

    Two changes within a day that undo each other are not seen; no zone has had that since 1970.
    """
    at_us, offset = from_us, zones.offset_us(timezone, from_us)
    while at_us < until_us:
        later_us = min(at_us + DAY_US, until_us)
        other = zones.offset_us(timezone, later_us)
        if other != offset:
            changed_us = _first_with_another_offset(timezone, at_us, later_us, offset)
            # More than one change may lie in the step: what counts is the offset right after this one.
            other, later_us = zones.offset_us(timezone, changed_us), changed_us
            yield Change(changed_us, offset, other)
        at_us, offset = later_us, other


def _first_with_another_offset(timezone: str, low_us: int, high_us: int, offset: int) -> int:
    """Return the first whole second above ``low_us`` whose offset is not ``offset``; the one of ``high_us`` is not."""
    low, high = low_us // zones.SECOND_US, -(-high_us // zones.SECOND_US)
    while high - low > 1:
        middle = (low + high) // 2
        if zones.offset_us(timezone, middle * zones.SECOND_US) == offset:
            low = middle
        else:
            high = middle
    return high * zones.SECOND_US


def _starts_on(window: Window, day: int) -> bool:
    return (day + _THURSDAY) % 7 in window.days


def _of_day(window: Window, day: int) -> tuple[int, int]:
    """Return start and end of the window that starts on a local day, in local microseconds."""
    midnight_us = day * DAY_US
    if window.start_minute == window.end_minute:
        return midnight_us, midnight_us + DAY_US
    over = DAY_US if window.end_minute < window.start_minute else 0
    return midnight_us + window.start_minute * MINUTE_US, midnight_us + over + window.end_minute * MINUTE_US


def _pieces(window: Window, from_us: int, until_us: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, day) of open stretches in order, cut at every midnight of UTC and change of the clocks."""
    at_us, offset = from_us, zones.offset_us(window.timezone, from_us)
    while at_us < until_us:
        later_us = min((at_us // DAY_US + 1) * DAY_US, until_us)
        after = zones.offset_us(window.timezone, later_us)
        if after != offset:
            later_us = _first_with_another_offset(window.timezone, at_us, later_us, offset)
            after = zones.offset_us(window.timezone, later_us)
        # Within [at, later) local time runs evenly, so that local stretches can be moved to UTC and cut to size.
        for day in range((at_us + offset) // DAY_US - 1, (later_us - 1 + offset) // DAY_US + 1):
            if _starts_on(window, day):
                start_us, end_us = _of_day(window, day)
                start_us, end_us = max(start_us - offset, at_us), min(end_us - offset, later_us)
                if start_us < end_us:
                    yield start_us, end_us, day
        at_us, offset = later_us, after


def _merged(window: Window, from_us: int, until_us: int) -> Iterator[tuple[int, int]]:
    """Yield open stretches in order, those that touch as one."""
    opens_us = closes_us = from_us
    for start_us, end_us, _ in _pieces(window, from_us, until_us):
        if start_us > closes_us:
            if opens_us < closes_us:
                yield opens_us, closes_us
            opens_us = start_us
        closes_us = end_us
    if opens_us < closes_us:
        yield opens_us, closes_us


def _notes(window: Window, since_us: int, interval: Interval) -> tuple[Note, ...]:
    """Return what changes of the clocks between the end of the interval before and the end of this one did to it."""
    assert interval.closes_us is not None
    found: dict[tuple[int, NoteKind], Note] = {}
    # Where one has begun already, what happened in it before is told as well.
    first_us = since_us - DAY_US - _REACH_US if interval.already_open else since_us - 1
    for change in clock_changes(window.timezone, first_us, interval.closes_us):
        local_days = [(change.at_us + offset) // DAY_US for offset in (change.before_us, change.after_us)]
        for day in range(min(local_days) - 1, max(local_days) + 2):
            note = _note(window, day, change, interval) if _starts_on(window, day) else None
            if note is not None:
                found.setdefault((note.day, note.kind), note)
    return tuple(found.values())


def _note(window: Window, day: int, change: Change, interval: Interval) -> Note | None:
    """Return what one change did to the window of one day, if that is part of the interval or would lie before it."""
    start_us, end_us = _of_day(window, day)
    mine = [piece for piece in _pieces(window, start_us - _REACH_US, end_us + _REACH_US) if piece[2] == day]
    actual_us = sum(end - start for start, end, _ in mine)
    breaks = sum(later[0] != earlier[1] for earlier, later in pairwise(mine))
    difference_us = actual_us - (end_us - start_us)
    assert interval.closes_us is not None
    if not mine:
        passed = change.at_us <= interval.opens_us
        return Note(NoteKind.SKIPPED, change, day, difference_us) if passed else None
    if not any(start < interval.closes_us and interval.opens_us < end for start, end, _ in mine):
        return None
    if breaks:
        return Note(NoteKind.OPENS_TWICE, change, day, difference_us)
    if difference_us:
        return Note(NoteKind.SHORTER if difference_us < 0 else NoteKind.LONGER, change, day, difference_us)
    return None
