"""Which of a route's past minutes say something about its settings, those in force or others. Pure.

What gates did is known under the settings of then. Of other settings it can be told as far as what was seen can be
judged again: the window always, the live threshold by the most live calls of each minute. What a server would have said
to other load limits was not kept, so there the past stands for the future as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from frontend.batches.scheduling import window_state
from frontend.batches.scheduling.settings_document import window_of
from frontend.batches.scheduling.zones import UnknownZone
from frontend.batches.store.route_rows import MinuteRow
from frontend.batches.store.rows import SchedulingRow

MINUTE_US: Final = 60_000_000


def counting(rows: Sequence[MinuteRow], row: SchedulingRow) -> list[MinuteRow]:
    """Return the minutes since these settings are in force, inside their window."""
    since = [one for one in rows if one.minute * MINUTE_US >= row.updated_at - MINUTE_US]
    window = window_of(row)
    if window is None:
        return since
    try:
        return [one for one in since if window_state.is_open(window, one.minute * MINUTE_US)]
    except UnknownZone:
        return []


def as_if(rows: Sequence[MinuteRow], old: SchedulingRow, new: SchedulingRow) -> list[MinuteRow]:
    """Return a route's minutes as they would have been under other settings: of those alone that can be told.

    Args:
        old: in force since its ``updated_at``.
    """
    # Outside the old window nobody knows what else would have kept the route closed.
    known = counting(counting(rows, old), replace(new, updated_at=0))
    if same_live_gate(old, new):
        return known
    return [_judged_again(row, old.yield_live_threshold, new.yield_live_threshold) for row in known]


def same_live_gate(old: SchedulingRow, new: SchedulingRow) -> bool:
    """Return whether live traffic closes the route under both settings alike, or under the new ones for less long."""
    longer = (new.reopen_after_s or 0) > (old.reopen_after_s or 0)
    return old.yield_live_threshold == new.yield_live_threshold and not longer


def same_gates(old: SchedulingRow, new: SchedulingRow) -> bool:
    """Return whether both settings differ in nothing but how many lines may run, and when the window opens."""
    names = ("metrics_url", "metrics_max_waiting", "metrics_max_running", "metrics_max_kv_cache_percent")
    return same_live_gate(old, new) and all(getattr(old, name) == getattr(new, name) for name in names)


def _judged_again(row: MinuteRow, old: int | None, new: int | None) -> MinuteRow:
    # Without waiting lines a minute is judged by its open time, not by the lines that ran under the old threshold.
    closes = new is not None and row.live_max >= new
    closed = old is not None and row.live_max >= old
    open_us = 0 if closes else row.observed_us if closed else row.open_us
    return replace(row, open_us=open_us, queued_max=0)
