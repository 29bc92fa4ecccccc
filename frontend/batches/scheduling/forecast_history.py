"""What the last days of a route say about the next ones: line times, and the share of its slots' time it got. Pure.

Two measures of a share are there. While lines waited throughout, what ran says it best: it counts what gates, pauses
and the claiming itself cost, and that running lines go on behind a closed gate. Else the time with open gates stands
in.
Minutes outside the time window count for neither: the calendar says when it opens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from frontend.batches.scheduling.forecast_state import DAY_S, LineTimes, PastDay, is_weekend
from frontend.batches.store.route_rows import MinuteRow

MINUTE_US: Final = 60_000_000
RECENT_LINES: Final = 200
"""Line times come from the newest minutes that hold so many lines: prompts and servers change."""
MIN_OBSERVED_US: Final = 5 * MINUTE_US
"""An hour watched for less says nothing."""
MIN_PRESSED_US: Final = 10 * MINUTE_US
MIN_PRESSED_LINES: Final = 10
"""An hour's lines are taken as its share only if there are so many, over so long a time under pressure."""
MAX_SPELL_S: Final = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class History:
    """A route's past, as the forecast takes it."""

    times: LineTimes
    days: tuple[PastDay, ...]
    spell_s: float


@dataclass(slots=True)
class _Hour:
    observed_us: int = 0
    open_us: int = 0
    pressed_us: int = 0
    pressed_lines: int = 0
    slot_s: float = 0.0
    line_s: float = 0.0

    def share(self) -> float | None:
        if self.observed_us < MIN_OBSERVED_US:
            return None
        if self.pressed_us >= MIN_PRESSED_US and self.pressed_lines >= MIN_PRESSED_LINES:
            return min(1.0, self.line_s / self.slot_s)
        return min(1.0, self.open_us / self.observed_us)


def history(rows: Sequence[MinuteRow], in_window: Callable[[int], bool] = lambda minute: True) -> History:
    """Return what a route's minutes say, oldest first as the store gives them.

    Args:
        in_window: whether the time window, as it is set now, was open in a minute (since 1970).
    """
    inside = [row for row in rows if row.observed_us > 0 and in_window(row.minute)]
    return History(line_times(rows), past_days(inside), spell_s(inside))


def line_times(rows: Sequence[MinuteRow]) -> LineTimes:
    """Return mean and deviation of the newest lines' seconds; all zero if there is none."""
    lines, total, squares = 0, 0.0, 0.0
    for row in reversed(rows):
        lines += row.lines_done
        total += row.line_s_sum
        squares += row.line_s_sq_sum
        if lines >= RECENT_LINES:
            break
    if not lines:
        return LineTimes(0, 0.0, 0.0)
    mean = total / lines
    return LineTimes(lines, mean, math.sqrt(max(0.0, squares / lines - mean**2)))


def past_days(rows: Sequence[MinuteRow]) -> tuple[PastDay, ...]:
    """Return the UTC days somebody watched the route on, oldest first; ``rows`` are inside its window."""
    hours: dict[int, _Hour] = {}
    for index, row in enumerate(rows):
        hour = hours.setdefault(row.minute // 60, _Hour())
        hour.observed_us += row.observed_us
        hour.open_us += row.open_us
        # Lines waited at its start and still do in the next: they did throughout. The last minute of a batch did not.
        after = rows[index + 1] if index + 1 < len(rows) else None
        if row.queued_max > 0 and after is not None and after.minute == row.minute + 1 and after.queued_max > 0:
            hour.pressed_us += MINUTE_US
            hour.pressed_lines += row.lines_done
            hour.slot_s += 60.0 * max(1, row.cap)
            hour.line_s += row.line_s_sum
    days: dict[int, list[float | None]] = {}
    for number, hour in hours.items():
        share = hour.share()
        if share is not None:
            days.setdefault(number // 24, [None] * 24)[number % 24] = share
    return tuple(PastDay(is_weekend(day), tuple(days[day])) for day in sorted(days))


def spell_s(rows: Sequence[MinuteRow]) -> float:
    """Return the correlation time of the route's being open, from minute to minute; 0 if it never closes."""
    shares = {row.minute: min(1.0, row.open_us / row.observed_us) for row in rows}
    if len(shares) < 3:
        return 0.0
    mean = sum(shares.values()) / len(shares)
    variance = sum((share - mean) ** 2 for share in shares.values()) / len(shares)
    pairs = [(share - mean) * (shares[minute + 1] - mean) for minute, share in shares.items() if minute + 1 in shares]
    if variance <= 0.0 or not pairs:
        return 0.0
    correlation = sum(pairs) / len(pairs) / variance
    if correlation <= 0.0:
        return 0.0
    return MAX_SPELL_S if correlation >= 1.0 else min(MAX_SPELL_S, -60.0 / math.log(correlation))


def closed_for(rows: Sequence[MinuteRow], now_minute: int) -> float:
    """Return for how many seconds up to now no gate was open, whenever somebody looked in the last minutes."""
    closed = 0
    for row in reversed(rows):
        if row.minute < now_minute - closed - 2 or row.open_us > 0:
            break
        closed = now_minute - row.minute + 1
    return min(closed * 60.0, float(DAY_S))
