"""Whether and when a failed line is sent again. Pure; opt-in per batch.

A retry is a new execution with all that a new line needs: gates, turn, worker permit. Only failures that may pass are
retried: overload, an upstream that cannot be reached or broke off, a timeout. What an upstream answered otherwise is
the line's result.
"""

from __future__ import annotations

from typing import Final

from frontend.batches.runner.timings import Timings, ns

RETRYABLE: Final = frozenset({429, 502, 503, 504})
MAX_ATTEMPTS: Final = 3


def retry_at_ns(
    status: int | None, attempts: int, retry_limit: int, now_ns: int, jitter: float, times: Timings
) -> int | None:
    """Return when the line may be sent again, None if never.

    Args:
        attempts: made so far, this failure included.
        jitter: 0 to 1; spreads lines that failed together.
    """
    if status not in RETRYABLE or attempts > min(retry_limit, MAX_ATTEMPTS - 1):
        return None
    return now_ns + ns(times.retry_base_s**attempts * (1.0 + times.retry_jitter * jitter))
