"""Ends batches that nobody runs any more: their window is over or they were cancelled, and no runner is alive.

Every process that serves the API sweeps, so a batch ends within a minute of its window even if its runner never comes
back. A live runner's batches are not touched: their leases hold.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from typing import Final

from frontend.batches.objects import ObjectCorrupt, ObjectMissing, Objects
from frontend.batches.periodic import Periodic
from frontend.batches.runner.finalize import Files, finalize
from frontend.batches.runner.job import Stop
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import BatchRow
from frontend.batches.work_file import WorkFile, open_work_file

log = logging.getLogger("batches")

SWEEP_S: Final = 30.0
LEASE_US: Final = 60_000_000
AT_ONCE: Final = 4


class ExpirySweeper:
    """Sweeps every ``interval_s`` between ``start`` and ``close``; any number of processes may.

    Attributes:
        ended: batches that were ended here, by their state.
    """

    def __init__(self, store: Store, objects: Objects, retention_days: int, interval_s: float = SWEEP_S) -> None:
        self._store = store
        self.ended: Counter[str] = Counter()
        self._files = Files(store, objects, retention_days)
        self._id = "sweeper-" + secrets.token_hex(8)
        self._sweeping = Periodic("batches.sweep", self.sweep, interval_s, at_once=False)

    async def start(self) -> None:
        """Begin; the store need not be open yet."""
        self._sweeping.start()

    async def close(self) -> None:
        """Stop; a batch that was being ended is ended by the next one to come."""
        await self._sweeping.close()

    async def sweep(self) -> int:
        """End what can be ended now; return how many. Raises: StoreUnavailable, StorageUnavailable."""
        ended = 0
        while taken := await self._store.runner.take(self._id, LEASE_US, AT_ONCE, expired_only=True):
            for one in taken:
                try:
                    ended += await self._end(one.batch)
                finally:
                    # Harmless after a batch has ended; another may try at once where this one could not.
                    await self._store.runner.release_batches(self._id, [one.batch.id])
        return ended

    async def _end(self, batch: BatchRow) -> bool:
        if not batch.finished:
            stop = Stop.CANCELLED if batch.cancel_requested_at is not None else Stop.EXPIRED
            ended = await finalize(self._files, self._id, batch.id, await self._work(batch), stop)
            if ended is None:
                return False
            self.ended[ended.state] += 1
            log.info("batch.swept batch=%s state=%s", batch.id, ended.state)
        return await self._store.runner.settle(self._id, batch.id)

    async def _work(self, batch: BatchRow) -> WorkFile | None:
        if batch.work_file_id is None:
            return None
        file = await self._store.files.get_internal(batch.work_file_id)
        if file is None or file.storage_path is None:
            return None
        try:
            return await open_work_file(self._files.objects, file.storage_path, file.bytes)
        except (ObjectMissing, ObjectCorrupt) as error:
            log.error("batch.input_lost batch=%s error=%s", batch.id, error)
            return None
