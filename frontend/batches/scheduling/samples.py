"""What happened on each route, minute by minute: for charts, forecasts and the adaptive cap.

A process adds up what it sees and writes it every few seconds; the store merges what several processes say of the same
minute. What a killed process had not written is lost: these are figures, not the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from frontend.batches.runner.gates import Reason
from frontend.batches.scheduling.gates import Evaluation
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.protocol import Store
from frontend.batches.store.route_rows import MinuteRow, RouteCount
from frontend.batches.store.watch_protocol import MINUTE_US

GAP_US: Final = 2_000_000
"""Of silence after which nobody looked at a route meanwhile."""
MAX_ROWS: Final = 20_000
"""Kept while the store is away: 5 hours of 64 routes. The oldest go."""


@dataclass(slots=True)
class _Minute:
    live_max: int = 0
    running_max: int = 0
    queued_max: int = 0
    open_us: int = 0
    observed_us: int = 0
    lines_done: int = 0
    line_s_sum: float = 0.0
    line_s_sq_sum: float = 0.0
    overloads: int = 0


class Samples:
    """Sums of one process by route and minute; used on one event loop.

    Args:
        cap: lines that a route may run at once now.
        now_us: Unix time in microseconds.
    """

    def __init__(self, store: Store, cap: Callable[[str], int], now_us: Callable[[], int]) -> None:
        self._store = store
        self._cap = cap
        self._now_us = now_us
        self._minutes: dict[tuple[str, int], _Minute] = {}
        self._last: dict[str, tuple[int, Reason | None]] = {}

    def note(self, route_id: str, found: Evaluation) -> None:
        """Take what the gates of a route say now; it held since they were looked at last."""
        now_us = self._now_us()
        minute = self._minute(route_id, now_us)
        if found.live is not None and found.live > minute.live_max:
            minute.live_max = found.live
        since_us, reason = self._last.get(route_id, (0, None))
        self._last[route_id] = (now_us, found.reason)
        passed_us = now_us - since_us
        if 0 < passed_us <= GAP_US:
            minute.observed_us += passed_us
            if reason is None:
                minute.open_us += passed_us

    def silent(self, route_id: str) -> bool:
        """Whether the gates of a route have not been looked at for long enough to be looked at for the samples."""
        last = self._last.get(route_id)
        return last is None or not 0 <= self._now_us() - last[0] < GAP_US // 2

    def line(self, route_id: str, seconds: float) -> None:
        """A line has got its answer."""
        minute = self._minute(route_id, self._now_us())
        minute.lines_done += 1
        minute.line_s_sum += seconds
        minute.line_s_sq_sum += seconds * seconds

    def overload(self, route_id: str) -> None:
        """A line has got 429 or 503."""
        self._minute(route_id, self._now_us()).overloads += 1

    def counts(self, counts: Iterable[RouteCount]) -> None:
        """Take the demand and the running lines of the installation."""
        now_us = self._now_us()
        for count in counts:
            minute = self._minute(count.route_id, now_us)
            minute.running_max = max(minute.running_max, count.running_lines)
            minute.queued_max = max(minute.queued_max, count.waiting_lines)

    async def write(self) -> None:
        """Bring the sums to the store. Raises: StoreUnavailable; they are kept."""
        minutes, self._minutes = self._minutes, {}
        rows = [
            MinuteRow(
                route_id, number, one.live_max, one.running_max, one.queued_max, self._cap(route_id), one.open_us,
                one.observed_us, one.lines_done, one.line_s_sum, one.line_s_sq_sum, one.overloads,
            )
            for (route_id, number), one in minutes.items()
        ]  # fmt: skip
        if not rows:
            return
        try:
            await self._store.explain.add_minutes(rows)
        except StoreUnavailable:
            self._keep(minutes)
            raise

    def _keep(self, minutes: dict[tuple[str, int], _Minute]) -> None:
        for key, new in self._minutes.items():
            old = minutes.setdefault(key, _Minute())
            for name in ("live_max", "running_max", "queued_max"):
                setattr(old, name, max(getattr(old, name), getattr(new, name)))
            for name in ("open_us", "observed_us", "lines_done", "line_s_sum", "line_s_sq_sum", "overloads"):
                setattr(old, name, getattr(old, name) + getattr(new, name))
        newest = sorted(minutes, key=lambda key: key[1])[-MAX_ROWS:]
        self._minutes = {key: minutes[key] for key in newest}

    def _minute(self, route_id: str, now_us: int) -> _Minute:
        key = (route_id, now_us // MINUTE_US)
        minute = self._minutes.get(key)
        if minute is None:
            minute = self._minutes[key] = _Minute()
        return minute
