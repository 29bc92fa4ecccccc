"""When a process that ended is started again: at once after a good life, later and later after bad ones.

Two back-offs, because two things go wrong. A process that never comes up is broken by its surroundings (a bad model
file, no memory) and will most likely fail again, so the waits grow to half a minute. One that came up and was then lost
may have met a single bad request or the kernel's memory killer; its callers wait for it, so those waits stay short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BASE_DELAY_NS = 100_000_000
MAX_START_DELAY_NS = 30_000_000_000
MAX_LOSS_DELAY_NS = 1_000_000_000
STABLE_NS = 30_000_000_000
"""A process that was up for this long has had a good life."""
MAX_HISTORY = 16
"""Lives worth remembering: by then both delays have reached their limits."""


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a process; ``up_ns`` is when it first said that it works, None if it never did."""

    started_ns: int
    up_ns: int | None
    ended_ns: int


def next_restart(history: Sequence[Life], now_ns: int) -> int:
    """Return when the process should start again, at least ``now_ns``.

    delay = BASE * 2**(n - 1), n = lives in a row, latest first, that ended the same bad way as the last one
    """
    if not history:
        return now_ns
    last = history[-1]
    if last.up_ns is not None and last.ended_ns - last.up_ns >= STABLE_NS:
        return now_ns
    failed_start = last.up_ns is None
    in_a_row = 0
    for life in reversed(history):
        good = life.up_ns is not None and life.ended_ns - life.up_ns >= STABLE_NS
        if good or (life.up_ns is None) is not failed_start:
            break
        in_a_row += 1
    limit_ns = MAX_START_DELAY_NS if failed_start else MAX_LOSS_DELAY_NS
    return max(now_ns, last.ended_ns + min(limit_ns, BASE_DELAY_NS << (in_a_row - 1)))
