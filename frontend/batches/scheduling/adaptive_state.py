"""How many lines a route may run at once when that is a range: one more after clean windows, half when it hurts. Pure.

Rule, per window
    * More lines ran than the cap allows: it was lowered, and what is seen still comes from before. Not judged.
    * The upstream answered 429 or 503, or live calls are slow: the cap is halved, not below the least.
    * Clean, and the cap was used up with lines waiting: one more, after ``CLEAN_WINDOWS`` of these in a row.
    * Clean, but the cap was not what held lines back: nothing is learned.

Against flapping: a cap that hurt is a ceiling. It is tried again only after a probation, which doubles every time that
goes wrong, up to ``MAX_PROBATION`` windows; once it has stood the same probation it is a ceiling no more.

Live calls are slow when significantly more than 5 % of them take longer than the baseline's p95 and the allowed share
on top. The baseline is what they take while no line runs. Until that was seen, what they take with no more lines than
the least stands in: that many are allowed in any case.

Source: batches.md section 2, idea 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

CLEAN_WINDOWS: Final = 2
FIRST_PROBATION: Final = 6
MAX_PROBATION: Final = 96
"""Windows: 1 minute and 16 minutes at 10 s each."""
BEYOND: Final = 0.05
"""Share of calls beyond the 95th percentile."""
MIN_CALLS: Final = 20
SIGNIFICANT: Final = 3.0
"""Standard deviations of the number of slow calls, were the latency as without lines."""
MAX_BASELINE_CALLS: Final = 2000.0
"""The baseline forgets: what it holds is scaled down to this."""
MAX_JUDGED_CALLS: Final = 500.0


class Why(StrEnum):
    """Why a cap changed; the explain log shows it."""

    CLEAN = "clean_windows"
    OVERLOAD = "overload"
    LATENCY = "live_latency"
    SETTINGS = "settings"


@dataclass(frozen=True, slots=True)
class Range:
    """What the operator allows: lines at once, and by how much live p95 may rise over its baseline."""

    least: int
    most: int
    share_percent: int

    def __post_init__(self) -> None:
        assert 1 <= self.least <= self.most and self.share_percent > 0, self


@dataclass(frozen=True, slots=True)
class Seen:
    """One window as it was.

    Attributes:
        running: most lines at once.
        waiting: lines waited throughout while the cap was used up.
        overloads: answers 429 and 503 to batch lines.
        slow: live calls are significantly slower than without lines.
    """

    running: int
    waiting: bool = False
    overloads: int = 0
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Cap:
    """The cap in force, and what it has been through.

    Attributes:
        clean: windows in a row that speak for more.
        ceiling: the lowest cap known to hurt.
        probation: clean windows that it takes to try the ceiling again.
        trying: windows still to be clean on the ceiling before it is one no more.
    """

    lines: int
    clean: int = 0
    ceiling: int | None = None
    probation: int = FIRST_PROBATION
    trying: int = 0


def fitted(cap: Cap, allowed: Range) -> Cap:
    """Return the cap within the range, which may have been set anew."""
    lines = max(allowed.least, min(allowed.most, cap.lines))
    return cap if lines == cap.lines else Cap(lines)


def moved(cap: Cap, lines: int) -> Cap:
    """Return the cap as another process has set it: what it lowered had hurt there."""
    if lines < cap.lines:
        return Cap(lines, 0, cap.lines, cap.probation)
    return cap if lines == cap.lines else replace(cap, lines=lines, clean=0)


def after(cap: Cap, seen: Seen, allowed: Range) -> tuple[Cap, Why | None]:
    """Return the cap after one window, and why it changed if it did."""
    within = fitted(cap, allowed)
    if within is not cap:
        return within, Why.SETTINGS
    if seen.running > cap.lines:
        return replace(cap, clean=0), None
    if seen.overloads or seen.slow:
        return _lowered(cap, allowed, Why.OVERLOAD if seen.overloads else Why.LATENCY)
    if not seen.waiting or seen.running < cap.lines:
        return cap, None
    return _raised(replace(cap, clean=cap.clean + 1), allowed)


def _lowered(cap: Cap, allowed: Range, why: Why) -> tuple[Cap, Why | None]:
    again = cap.ceiling is not None and cap.lines >= cap.ceiling
    probation = min(MAX_PROBATION, cap.probation * 2) if again else cap.probation
    lines = max(allowed.least, cap.lines // 2)
    return Cap(lines, 0, cap.lines, probation, 0), why if lines != cap.lines else None


def _raised(cap: Cap, allowed: Range) -> tuple[Cap, Why | None]:
    if cap.trying:
        left = cap.trying - 1
        if left:
            return replace(cap, trying=left), None
        cap = replace(cap, trying=0, ceiling=None, probation=FIRST_PROBATION)
    if cap.lines >= allowed.most:
        return replace(cap, clean=0), None
    tries = cap.ceiling is not None and cap.lines + 1 >= cap.ceiling
    if cap.clean < (cap.probation if tries else CLEAN_WINDOWS):
        return cap, None
    return replace(cap, lines=cap.lines + 1, clean=0, trying=cap.probation if tries else 0), Why.CLEAN


@dataclass(slots=True)
class Latencies:
    """Live calls of one route by how long they took, with and without lines; counts per bucket of ``bounds_s``."""

    bounds_s: Sequence[float]
    quiet: list[float]
    least: list[float]
    loaded: list[float]

    @classmethod
    def empty(cls, bounds_s: Sequence[float]) -> Latencies:
        buckets = len(bounds_s) + 1
        return cls(bounds_s, [0.0] * buckets, [0.0] * buckets, [0.0] * buckets)

    def add(self, counts: Sequence[int], running: int, allowed: Range) -> None:
        """Take the calls that ended in one window with so many lines at most."""
        if running == 0:
            _merge(self.quiet, counts, MAX_BASELINE_CALLS)
            return
        if running <= allowed.least:
            _merge(self.least, counts, MAX_BASELINE_CALLS)
        _merge(self.loaded, counts, MAX_JUDGED_CALLS)

    def forget_loaded(self) -> None:
        """The cap changed: what was seen before belongs to another one."""
        self.loaded = [0.0] * len(self.loaded)

    def limit_s(self, allowed: Range) -> float | None:
        """Return what calls may take; None while there is no baseline."""
        for baseline in (self.quiet, self.least):
            if sum(baseline) >= MIN_CALLS:
                return quantile_s(self.bounds_s, baseline, 1.0 - BEYOND) * (1 + allowed.share_percent / 100)
        return None

    def slow(self, allowed: Range) -> bool:
        """Return whether live calls are slower with lines than they may be."""
        limit = self.limit_s(allowed)
        calls = sum(self.loaded)
        if limit is None or calls < MIN_CALLS:
            return False
        expected = calls * BEYOND
        deviation: float = (expected * (1 - BEYOND)) ** 0.5
        return beyond(self.bounds_s, self.loaded, limit) > expected + SIGNIFICANT * deviation + 1


def quantile_s(bounds_s: Sequence[float], counts: Sequence[float], share: float) -> float:
    """Return a quantile of a histogram, straight within a bucket; the last bound for what lies beyond it."""
    wanted = sum(counts) * share
    before = 0.0
    for index, bound in enumerate(bounds_s):
        if before + counts[index] >= wanted and counts[index]:
            low = bounds_s[index - 1] if index else 0.0
            return low + (bound - low) * (wanted - before) / counts[index]
        before += counts[index]
    return bounds_s[-1]


def beyond(bounds_s: Sequence[float], counts: Sequence[float], limit_s: float) -> float:
    """Return how many calls took longer than ``limit_s``, straight within a bucket."""
    found = counts[-1]
    for index, bound in enumerate(bounds_s):
        low = bounds_s[index - 1] if index else 0.0
        if bound > limit_s:
            found += counts[index] * min(1.0, (bound - limit_s) / (bound - low))
    return found


def _merge(into: list[float], counts: Sequence[int], most: float) -> None:
    total = sum(into) + sum(counts)
    scale = min(1.0, most / total) if total else 1.0
    for index, count in enumerate(counts):
        into[index] = (into[index] + count) * scale
