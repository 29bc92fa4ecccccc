"""Reads the load of model servers: pinned addresses, nothing followed, one attempt, 2 seconds, 1 MiB.

One fetch per URL at a time; whoever asks meanwhile shares it, and its result, good or bad, holds for 5 seconds. URLs
are checked again at every fetch: settings may be older than the node file that approved their server.

Source: batches.md 1.6, rules 25 to 27.
"""

from __future__ import annotations

from frontend.batches.scheduling.load_limits import Reading


class MetricsReader:
    """Interface under construction: the constructor takes the approved endpoints."""

    def reading(self, url: str) -> Reading | None:
        """Return the latest reading, without waiting; None if there is none yet.

        Starts a fetch if there is none that still holds; while it runs, the one before is returned if it is no older
        than ``HELD_S + DEADLINE_S``.
        """
        raise NotImplementedError

    async def read(self, url: str) -> Reading:
        """Return a reading that still holds, fetched if there is none."""
        raise NotImplementedError
