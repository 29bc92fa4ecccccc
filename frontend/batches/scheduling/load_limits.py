"""Whether a server has room for lines of batches: its reading against the limits of a route. Pure.

Source: batches.md 1.5, rules 17 (steps 4 and 5), 18 and 20.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from frontend.batches.runner.gates import Reason
from frontend.batches.store.rows import SchedulingRow


class ReadError(StrEnum):
    """Why there is no reading."""

    NOT_APPROVED = "not_approved"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    HTTP_STATUS = "http_status"
    TOO_LARGE = "too_large"
    INVALID_BODY = "invalid_body"
    MISSING_METRIC = "missing_metric"
    """Only of a judgement: the page was read, but a gauge that has a limit is not on it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What came of one fetch.

    Attributes:
        checked_at_us: end of the fetch, Unix microseconds, for people and the store.
        read_ns: the same on the monotonic clock; its age is counted from here.
        error: None if the page was read.
    """

    checked_at_us: int
    read_ns: int
    error: ReadError | None = None
    waiting: int | None = None
    running: int | None = None
    kv_cache_permille: int | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """A reading against a route's limits.

    Attributes:
        reason: why nothing may start, None if the server has room.
        error: why the reading cannot be used, None if it can.
    """

    reason: Reason | None
    error: ReadError | None = None


OPEN: Final = Judgement(None)


def judge(row: SchedulingRow, reading: Reading) -> Judgement:
    """Return whether a server has room. What cannot be read counts as busy: blindness is never taken for idleness."""
    if reading.error is not None:
        return Judgement(Reason.METRICS_UNAVAILABLE, reading.error)
    pairs = list(_limited(row, reading))
    # All of them before any is compared: the reason must not depend on which gauge is looked at first.
    if any(value is None for _, value in pairs):
        return Judgement(Reason.METRICS_UNAVAILABLE, ReadError.MISSING_METRIC)
    if any(value is not None and value > limit for limit, value in pairs):
        return Judgement(Reason.SERVER_BUSY)
    return OPEN


def _limited(row: SchedulingRow, reading: Reading) -> Iterator[tuple[int, int | None]]:
    """Yield limit and value of every gauge that has a limit, in the unit of the value."""
    if row.metrics_max_waiting is not None:
        yield row.metrics_max_waiting, reading.waiting
    if row.metrics_max_running is not None:
        yield row.metrics_max_running, reading.running
    if row.metrics_max_kv_cache_percent is not None:
        yield row.metrics_max_kv_cache_percent * 10, reading.kv_cache_permille
