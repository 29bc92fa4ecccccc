"""The seam between the adaptive cap and whoever claims lines: how many lines a route may run at once, now."""

from __future__ import annotations

from typing import Protocol

from frontend.batches.store.rows import SchedulingRow


class EffectiveCaps(Protocol):
    """Answers from memory."""

    def cap(self, row: SchedulingRow) -> int:
        """Return the cap in force: ``max_concurrency``, or within [min, max] what is adapted for the route."""
        ...

    def overload(self, route_id: str) -> None:
        """A batch line got 429 or 503 from the route's upstream."""
        ...


class FixedCaps:
    """Provides ``EffectiveCaps`` where nothing adapts."""

    def cap(self, row: SchedulingRow) -> int:
        return row.max_concurrency

    def overload(self, route_id: str) -> None:
        """Nothing changes for it."""


class LiveLatencies(Protocol):
    """How long live calls took, on this machine: what the adaptive cap watches."""

    def latency_counts(self, route_id: str) -> tuple[int, ...]:
        """Return how many live calls have ever ended per bucket of ``latency_bounds_s``, and one more for longer."""
        ...

    @property
    def latency_bounds_s(self) -> tuple[float, ...]:
        """Upper bounds of the buckets, ascending."""
        ...
