"""Histograms of fixed size: how long requests waited, how many rows dispatches carried."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

_PER_OCTAVE = 4
_FINE_BOUNDS_NS: Final = tuple(round(2 ** (13 + step / _PER_OCTAVE)) for step in range(24 * _PER_OCTAVE + 1))

WAIT_BOUNDS_NS: Final = _FINE_BOUNDS_NS[::_PER_OCTAVE]
"""Upper bounds in ns, one per doubling: from 8 us to 137 s."""
ROW_BOUNDS: Final = tuple(2**power for power in range(13))
"""Upper bounds in rows: 1, 2, 4 ... 4096."""
_MAX_UNCOUNTED: Final = 512
"""Waits kept before they are counted: done at once it takes a twentieth of the time (40 us for all)."""


class WaitHistogram:
    """Queue waits, four buckets per doubling: a quantile is off by a tenth at most, between 8 us and 137 s."""

    __slots__ = ("_counted", "_sum_ns", "_uncounted")

    def __init__(self) -> None:
        self._counted = np.zeros(len(_FINE_BOUNDS_NS) + 1, np.int64)
        self._uncounted: list[int] = []
        self._sum_ns = 0

    @property
    def sum_ns(self) -> int:
        """Sum of all waits."""
        self._count()
        return self._sum_ns

    def observe(self, waits_ns: Iterable[int]) -> None:
        """Count waits; a negative one, of a request stamped later than the decision was, counts as 0."""
        self._uncounted += waits_ns
        if len(self._uncounted) >= _MAX_UNCOUNTED:
            self._count()

    def quantile_ns(self, fraction: float) -> int:
        """Return the wait that ``fraction`` of requests did not exceed, interpolated in its bucket; 0 if none."""
        counts = self._count()
        wanted = fraction * sum(counts)
        below = 0
        for index, count in enumerate(counts):
            if count and below + count >= wanted:
                low = _FINE_BOUNDS_NS[index - 1] if index else 0
                high = _FINE_BOUNDS_NS[min(index, len(_FINE_BOUNDS_NS) - 1)]
                return round(low + (high - low) * (wanted - below) / count)
            below += count
        return 0

    def counts(self) -> tuple[int, ...]:
        """Return the counts per bucket of ``WAIT_BOUNDS_NS``, then of longer waits."""
        counts = self._count()
        starts = range(1, len(_FINE_BOUNDS_NS), _PER_OCTAVE)
        octaves = [sum(counts[start : start + _PER_OCTAVE]) for start in starts]
        return (counts[0], *octaves, counts[-1])

    def _count(self) -> list[int]:
        """Sort what was not counted yet into its buckets; return all counts."""
        if self._uncounted:
            waits_ns = np.array([wait_ns if wait_ns > 0 else 0 for wait_ns in self._uncounted], np.int64)
            buckets = np.searchsorted(_FINE_BOUNDS_NS, waits_ns)
            self._counted += np.bincount(buckets, minlength=len(self._counted))
            self._sum_ns += int(waits_ns.sum())
            self._uncounted.clear()
        counts: list[int] = self._counted.tolist()
        return counts
