"""Removes the bytes of files that are gone: deleted, expired, never committed, or left by dead writers."""

from __future__ import annotations

import logging
import random
from typing import Final

from frontend.batches.objects import Objects, StorageUnavailable
from frontend.batches.periodic import Periodic
from frontend.batches.store.protocol import Store

log = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 60.0
SWEEP_ROWS: Final = 500
"""Rows per question to the store."""
ABANDONED_SECONDS: Final = 24 * 3600
"""A row whose file is not committed by then never will be: uploads and validations end long before."""


class Sweeper:
    """Sweeps every ``SWEEP_SECONDS``; any number of processes may, also at once."""

    def __init__(self, store: Store, objects: Objects) -> None:
        self._store = store
        self._objects = objects
        # First a while, and not the same for all: processes start together, and the store may not be open yet.
        self._sweeping = Periodic(
            "files.sweep", self._sweep, lambda: SWEEP_SECONDS * (0.5 + random.random()), at_once=False
        )

    async def start(self) -> None:
        """Begin; the store need not be open yet."""
        self._sweeping.start()

    async def close(self) -> None:
        """Stop; idempotent."""
        await self._sweeping.close()

    async def sweep(self) -> int:
        """Remove what can go now; return how many objects. Raises: StoreUnavailable, StorageUnavailable."""
        removed = 0
        while True:
            rows = await self._store.files.to_sweep(SWEEP_ROWS, ABANDONED_SECONDS * 1_000_000)
            gone: list[str] = []
            failure: StorageUnavailable | None = None
            for row in rows:
                if row.storage_path is None:
                    continue
                try:
                    await self._objects.delete(row.storage_path)
                except StorageUnavailable as error:
                    failure = error
                    break
                gone.append(row.id)
            if gone:
                await self._store.files.mark_swept(gone)
            removed += len(gone)
            if failure is not None:
                raise failure
            if len(rows) < SWEEP_ROWS:
                break
        return removed + await self._objects.sweep_temporary(ABANDONED_SECONDS)

    async def _sweep(self) -> None:
        if removed := await self.sweep():
            log.info("files.swept objects=%s", removed)
