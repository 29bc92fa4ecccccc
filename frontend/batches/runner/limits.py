"""How many lines of batches a route may run at once, and with which priority hint: settings, remembered."""

from __future__ import annotations

from typing import Protocol

from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import SchedulingRow


class RouteLimits(Protocol):
    """Answers from memory; ``refresh`` renews it."""

    def cap(self, route_id: str) -> int:
        """Return ``max_concurrency``, at least 1."""
        ...

    def priority(self, route_id: str) -> int | None: ...

    async def refresh(self) -> None:
        """Raises: StoreUnavailable; what was known stays."""


class StoredLimits:
    """Provides ``RouteLimits`` from the store; a route without settings of its own runs ``default_cap`` lines."""

    def __init__(self, store: Store, default_cap: int) -> None:
        self._store = store
        self._default = max(1, default_cap)
        self._rows: dict[str, SchedulingRow] = {}

    def cap(self, route_id: str) -> int:
        row = self._rows.get(route_id)
        return self._default if row is None else row.max_concurrency

    def priority(self, route_id: str) -> int | None:
        row = self._rows.get(route_id)
        return None if row is None else row.priority

    async def refresh(self) -> None:
        self._rows = {row.route_id: row for row in await self._store.scheduling.all_settings()}
