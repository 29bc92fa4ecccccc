"""How many lines of batches a route may run at once, and with which priority hint: settings, remembered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from frontend.batches.scheduling.effective_caps import EffectiveCaps, FixedCaps
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import SchedulingRow


class RouteLimits(Protocol):
    """Answers from memory; ``refresh`` renews it."""

    def cap(self, route_id: str) -> int:
        """Return how many lines may run at once now, at least 1."""
        ...

    def priority(self, route_id: str) -> int | None: ...

    async def refresh(self) -> None:
        """Raises: StoreUnavailable; what was known stays."""


class StoredLimits:
    """Provides ``RouteLimits`` from the store; a route without settings of its own runs ``default_cap`` lines.

    Args:
        caps: what adapts ``max_concurrency`` of routes that allow it.
    """

    def __init__(self, store: Store, default_cap: int, caps: EffectiveCaps | None = None) -> None:
        self._store = store
        self._default = default_cap
        self._caps = caps or FixedCaps()
        self._rows: dict[str, SchedulingRow] = {}

    def row(self, route_id: str) -> SchedulingRow | None:
        """Return a route's settings; None if it has the defaults."""
        return self._rows.get(route_id)

    def rows(self) -> Iterable[SchedulingRow]:
        """Return the settings of every route that has its own."""
        return self._rows.values()

    def cap(self, route_id: str) -> int:
        row = self._rows.get(route_id)
        return self._default if row is None else max(1, self._caps.cap(row))

    def priority(self, route_id: str) -> int | None:
        row = self._rows.get(route_id)
        return None if row is None else row.priority

    async def refresh(self) -> None:
        self._rows = {row.route_id: row for row in await self._store.scheduling.all_settings()}
