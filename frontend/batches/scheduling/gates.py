"""The gates of a route in their order: time window, live traffic, load of its server. Only starts are held back.

Cheapest first, and none behind a closed one is asked: the window costs nothing, live traffic a look into shared memory,
the server a reading that was fetched before. A route's gates are the same for every batch, so they are evaluated once
per pass.

Source: batches.md 1.5, steps 2 to 5 of rule 17.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from frontend.batches.runner.gates import Ask, Reason
from frontend.batches.scheduling import load_limits, window_state
from frontend.batches.scheduling.load_limits import ReadError, Reading
from frontend.batches.scheduling.reopening import LiveTraffic, Reopening
from frontend.batches.scheduling.settings_document import window_of
from frontend.batches.scheduling.zones import UnknownZone
from frontend.batches.store.rows import SchedulingRow

log = logging.getLogger("batches")


class Rows(Protocol):
    """Scheduling settings, from memory."""

    def row(self, route_id: str) -> SchedulingRow | None: ...


class LoadReader(Protocol):
    def reading(self, url: str) -> Reading | None:
        """Return the latest reading without waiting, None if there is none yet; starts a fetch if one is due."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the gates of a route say, and what they were told.

    Attributes:
        reason: the first closed gate, None if all are open.
        live: None if live traffic was not looked at.
        reading, error: None if the server's load was not looked at.
        pending: the first reading is on its way; closed meanwhile, which is no news for anybody.
        reopens_us: Unix time at which the live gate opens if nobody calls; None unless nothing else keeps it closed.
    """

    reason: Reason | None
    live: int | None = None
    reading: Reading | None = None
    error: ReadError | None = None
    pending: bool = False
    reopens_us: int | None = None


def evaluate(
    route_id: str,
    row: SchedulingRow | None,
    now_us: int,
    now_ns: int,
    live: LiveTraffic,
    load: LoadReader,
    reopening: Reopening,
) -> Evaluation:
    """Return what a route's gates say. Starts a fetch of the load if one is due.

    Args:
        now_us: Unix time in microseconds, for time windows.
        now_ns: CLOCK_MONOTONIC, for how long something lasts.
    """
    window = None if row is None else window_of(row)
    if window is not None and not _is_open(window, now_us):
        return Evaluation(Reason.OUTSIDE_WINDOW)
    # Also without a threshold: people want to see it.
    count = live.count(route_id)
    reopens_ns = None if row is None else reopening.reopens_ns(row, count, now_ns)
    threshold = None if row is None else row.yield_live_threshold
    if threshold is not None and (count is None or count >= threshold):
        return Evaluation(Reason.LIVE_TRAFFIC, count)
    if reopens_ns is not None:
        return Evaluation(Reason.LIVE_TRAFFIC, count, reopens_us=now_us + (reopens_ns - now_ns) // 1000)
    if row is None or row.metrics_url is None:
        return Evaluation(None, count)
    reading = load.reading(row.metrics_url)
    if reading is None:
        return Evaluation(Reason.METRICS_UNAVAILABLE, count, pending=True)
    found = load_limits.judge(row, reading)
    return Evaluation(found.reason, count, reading, found.error)


def _is_open(window: window_state.Window, now_us: int) -> bool:
    try:
        return window_state.is_open(window, now_us)
    except UnknownZone as error:
        # Its hours cannot be told, so none of them is taken for open.
        log.error("batches.window_unknown error=%s", error)
        return False


class RouteGates:
    """Provides ``Gate`` for the route-wide steps; used on one event loop.

    Args:
        reopening: shared with whoever else looks at the same traffic.
        note: told every evaluation: route, what it said, the monotonic time.
        wake: called when a route may have opened.
        now_us: Unix time in microseconds.
    """

    def __init__(
        self,
        rows: Rows,
        live: LiveTraffic,
        load: LoadReader,
        reopening: Reopening | None = None,
        note: Callable[[str, Evaluation, int], None] = lambda route_id, found, now_ns: None,
        wake: Callable[[], None] = lambda: None,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._rows = rows
        self._live = live
        self._load = load
        self._reopening = reopening or Reopening(live)
        self._note = note
        self.wake = wake
        self._now_us = now_us
        self._pass_ns = -1
        self._of_pass: dict[str, Reason | None] = {}
        self._yielding: dict[str, int] = {}

    def closed(self, ask: Ask) -> Reason | None:
        """See ``Gate``."""
        if ask.now_ns != self._pass_ns:
            self._pass_ns = ask.now_ns
            self._of_pass.clear()
        elif ask.route_id in self._of_pass:
            return self._of_pass[ask.route_id]
        row = self._rows.row(ask.route_id)
        found = evaluate(ask.route_id, row, self._now_us(), ask.now_ns, self._live, self._load, self._reopening)
        self._of_pass[ask.route_id] = found.reason
        if found.reason is Reason.LIVE_TRAFFIC:
            self._yielding[ask.route_id] = ask.now_ns
        else:
            self._yielding.pop(ask.route_id, None)
        if not found.pending:
            self._note(ask.route_id, found, ask.now_ns)
        return found.reason

    def look(self, now_ns: int, asked_within_ns: int) -> None:
        """Wake the runner if live traffic on a route that yields to it has gone; cheap enough for twenty a second."""
        for route_id, asked_ns in list(self._yielding.items()):
            if now_ns - asked_ns > asked_within_ns:
                # Nobody waits for it any more.
                del self._yielding[route_id]
                continue
            row = self._rows.row(route_id)
            if row is None or self._has_gone(row, now_ns):
                del self._yielding[route_id]
                self.wake()

    def _has_gone(self, row: SchedulingRow, now_ns: int) -> bool:
        threshold, count = row.yield_live_threshold, self._live.count(row.route_id)
        if threshold is None:
            return True
        return count is not None and count < threshold and self._reopening.reopens_ns(row, count, now_ns) is None
