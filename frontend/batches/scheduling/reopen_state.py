"""How long the live gate of a route stays closed after its live traffic has gone, learned from its gaps. Pure.

Lines that start in the gap between two calls still run when the next call comes. So where the operator allows it, the
gate waits for longer than callers lately stayed away between calls: what is longer is no gap any more. Where callers
are dense that is a few hundredths of a second, and the limit holds only where they are sparse.

Simulated: ``bench/results/reopening.md``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

GAPS: Final = 100
"""Remembered: the longest of so many is exceeded by about one gap in a hundred."""
MIN_GAPS: Final = 3
"""Until so many are known, the limit holds."""
MARGIN: Final = 1.5
"""Times the longest gap: of gaps without memory, one in 800 is longer then, instead of one in 100."""


@dataclass(slots=True)
class Absence:
    """Live traffic of one route, as it comes and goes; nanoseconds of one monotonic clock.

    Attributes:
        there: traffic was at the threshold when it was looked at last.
        left_ns: when it was there last, None if never.
        gaps_ns: how long it stayed away each time before it came back; longer than the limit is not a gap.
    """

    there: bool = False
    left_ns: int | None = None
    gaps_ns: deque[int] = field(default_factory=lambda: deque(maxlen=GAPS))

    def saw(self, there: bool, moved_ns: int | None, now_ns: int, limit_ns: int) -> None:
        """Take what is there now.

        Args:
            moved_ns: when a call last came or went, if every single one counts; what came and went since the last look
                is told by this alone.
            limit_ns: the longest that the gate may stay closed.
        """
        # A time to come is of before the machine started again.
        moved_ns = moved_ns if moved_ns is not None and moved_ns <= now_ns else None
        was_there, left_ns = self.there, self.left_ns
        came = there or (moved_ns is not None and (left_ns is None or moved_ns > left_ns))
        if not was_there and came and left_ns is not None:
            gap_ns = (moved_ns if moved_ns is not None and moved_ns > left_ns else now_ns) - left_ns
            if 0 <= gap_ns <= limit_ns:
                self.gaps_ns.append(gap_ns)
        self.there = there
        if there:
            self.left_ns = now_ns
        elif moved_ns is not None:
            self.left_ns = moved_ns if left_ns is None else max(left_ns, moved_ns)

    def hold_ns(self, limit_ns: int) -> int:
        """Return for how long traffic must stay away before the gate opens."""
        if len(self.gaps_ns) < MIN_GAPS:
            return limit_ns
        return min(limit_ns, int(max(self.gaps_ns) * MARGIN))

    def reopens_ns(self, now_ns: int, limit_ns: int) -> int | None:
        """Return when the gate opens if nobody calls until then; None if it is open as far as this goes."""
        if self.left_ns is None:
            return None
        at_ns = self.left_ns + self.hold_ns(limit_ns)
        return at_ns if at_ns > now_ns else None
