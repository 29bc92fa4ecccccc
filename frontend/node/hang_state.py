"""Whether a worker or a frontend hangs (rule 24), from what it shows and from when it could last have shown it.

A stopped process (a debugger, a job-control stop, a frozen machine) shows nothing either, yet does not hang: its time
counts from the moment it could run again.
"""

from __future__ import annotations

from dataclasses import dataclass

HANG_FACTOR = 2
"""A device execution may take this many times ``dispatch_timeout_seconds``; so may the loop without coming round."""
MIN_LOOP_LIMIT_NS = 5_000_000_000
"""A loop that waits for work comes round once a second, whatever the timeout of a dispatch is, and later on a machine
that is short of CPUs."""
STALL_NS = 5_000_000_000
"""A loop that has not come round for this long is reported as not ready, long before it counts as hanging."""
MAX_WATCH_GAP_NS = 2_000_000_000
"""The watcher looks every quarter of a second; a longer gap means that the watcher itself could not run."""


@dataclass(slots=True)
class Watch:
    """What the watcher remembers of one process.

    Attributes:
        runnable_since_ns: the process could run without a pause since then, as far as is known.
        looked_ns: when the watcher last looked.
    """

    runnable_since_ns: int
    looked_ns: int

    def look(self, now_ns: int, *, stopped: bool) -> None:
        """Note one look; a stopped process, or a gap in looking, starts the process's time anew."""
        if stopped or now_ns - self.looked_ns > MAX_WATCH_GAP_NS:
            self.runnable_since_ns = now_ns
        self.looked_ns = now_ns


def hang_reason(
    executing_since_ns: int, heartbeat_ns: int, runnable_since_ns: int, now_ns: int, limit_ns: int
) -> str | None:
    """Return why the process counts as hanging, or None; a word of 0 is not judged."""
    loop_limit_ns = max(limit_ns, MIN_LOOP_LIMIT_NS)
    for what, since_ns, most_ns in (
        ("device execution", executing_since_ns, limit_ns),
        ("loop", heartbeat_ns, loop_limit_ns),
    ):
        age_ns = now_ns - max(since_ns, runnable_since_ns)
        if since_ns and age_ns > most_ns:
            return f"{what} without an end for {age_ns / 1e9:.1f} s, limit {most_ns / 1e9:.1f} s"
    return None


def stall_reason(heartbeat_ns: int, now_ns: int, *, stopped: bool) -> str | None:
    """Return why the process does not serve at this moment, or None."""
    if stopped:
        return "is stopped by a signal or a debugger"
    if heartbeat_ns and now_ns - heartbeat_ns > STALL_NS:
        return f"has not come round for {(now_ns - heartbeat_ns) / 1e9:.1f} s"
    return None
