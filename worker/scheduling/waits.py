"""Histograms of fixed size: how long requests waited, how many rows dispatches carried."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

_PER_OCTAVE = 4
_FINE_BOUNDS_NS: Final = tuple(round(2 ** (13 + step / _PER_OCTAVE)) for step in range(24 * _PER_OCTAVE + 1))

WAIT_BOUNDS_NS: Final = _FINE_BOUNDS_NS[::_PER_OCTAVE]
"""Upper bounds in ns, one per doubling: from 8 us to 137 s."""
ROW_BOUNDS: Final = tuple(2**power for power in range(13))
"""Upper bounds in rows: 1, 2, 4 ... 4096."""


class WaitHistogram:
    """Queue waits, four buckets per doubling: a quantile is off by a tenth at most, between 8 us and 137 s."""

    __slots__ = ("_counts", "sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * (len(_FINE_BOUNDS_NS) + 1)
        self.sum_ns = 0

    def observe(self, wait_ns: int) -> None:
        """Count one wait."""
        self._counts[bisect_left(_FINE_BOUNDS_NS, wait_ns)] += 1
        self.sum_ns += wait_ns

    def quantile_ns(self, fraction: float) -> int:
        """Return the wait that ``fraction`` of requests did not exceed, interpolated in its bucket; 0 if none."""
        wanted = fraction * sum(self._counts)
        below = 0
        for index, count in enumerate(self._counts):
            if count and below + count >= wanted:
                low = _FINE_BOUNDS_NS[index - 1] if index else 0
                high = _FINE_BOUNDS_NS[min(index, len(_FINE_BOUNDS_NS) - 1)]
                return round(low + (high - low) * (wanted - below) / count)
            below += count
        return 0

    def counts(self) -> tuple[int, ...]:
        """Return the counts per bucket of ``WAIT_BOUNDS_NS``, then of longer waits."""
        starts = range(1, len(_FINE_BOUNDS_NS), _PER_OCTAVE)
        octaves = [sum(self._counts[start : start + _PER_OCTAVE]) for start in starts]
        return (self._counts[0], *octaves, self._counts[-1])
