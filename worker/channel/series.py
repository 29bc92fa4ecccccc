"""Counters as they travel from a process to whoever renders them: plain sums that add up over processes.

A process keeps integers; this is their snapshot. Histograms travel as per-bucket counts (not cumulative), so that
snapshots of several processes, and of ones that have died, can be added.
"""

from __future__ import annotations

import msgspec


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of one metric.

    Attributes:
        name: Prometheus name; counters end in ``_total``.
        kind: ``counter`` | ``gauge`` | ``histogram``.
        help: one sentence with the unit.
        labels: label names and values.
        value: of a counter or gauge.
        bounds: upper bounds of a histogram's buckets, ascending, without +Inf.
        counts: one count per bound, and one more for +Inf.
        sum: of a histogram's observations.
    """

    name: str
    kind: str
    help: str
    labels: dict[str, str] = {}
    value: float = 0.0
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    sum: float = 0.0
