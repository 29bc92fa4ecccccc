"""Every interval and limit of the batch runner in one place, injectable for tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds unless the name says otherwise.

    Attributes:
        tick_s: how often free batches are looked for.
        pass_s: a pass that started nothing is repeated after this, or when a line ends.
        replan_s: how long a waiting lane keeps the route that it was planned for.
        unserved_s: a model that nobody serves fails its lines after this: a restart must not.
        heartbeat_s: demand is published at least this often, below the 10 s within which it counts.
        publish_s: and at most this often for one batch.
        access_s: how long an answer about a batch's key is believed; a revocation acts within 5 s.
        reading_s: how long a reading of a server's load is believed.
        lease_s, renew_s: of batches, and of the right to run batches at all.
        unsent_s: a claimed line whose text cannot be had for this long is given back.
        sweep_s: how often batches are looked for whose window ended with no runner alive.
        segment_lines, segment_bytes: results move from the store into a file of their own at either.
        first_pause_s, longest_pause_s, longest_retry_after_s: after an overload answer of an upstream.
        retry_base_s: the pause before attempt n+1 is ``retry_base_s ** n``, plus up to ``retry_jitter`` of itself.
        outage_first_s, outage_longest_s: between tries of a store or storage that does not answer.
    """

    tick_s: float = 2.0
    pass_s: float = 0.5
    replan_s: float = 10.0
    unserved_s: float = 15.0
    heartbeat_s: float = 3.0
    publish_s: float = 0.25
    access_s: float = 4.0
    reading_s: float = 5.0
    lease_s: float = 60.0
    renew_s: float = 15.0
    unsent_s: float = 5.0
    sweep_s: float = 30.0
    segment_lines: int = 256
    segment_bytes: int = 8 * 1024 * 1024
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    longest_retry_after_s: float = 300.0
    retry_base_s: float = 2.0
    retry_jitter: float = 0.1
    outage_first_s: float = 0.05
    outage_longest_s: float = 2.0


def ns(seconds: float) -> int:
    return int(seconds * 1e9)
