"""On whose behalf a batch's lines run: its key, looked up again while the batch runs, so that revocation acts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from frontend.batches.runner.job import Job
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import BatchRow
from frontend.openai.principal import Principal, Role

LOOKUPS_AT_ONCE: Final = 16


async def principal_of(store: Store, batch: BatchRow) -> Principal | None:
    """Return who a batch's lines run for, None if its key was revoked. Raises: StoreUnavailable."""
    key = await store.keys.key(batch.api_key_id)
    if key is None or key.revoked_at is not None or key.workspace_id != batch.workspace_id:
        return None
    return Principal(batch.workspace_id, key.id, Role(key.role), batch.user_id)


async def refresh(store: Store, jobs: Sequence[Job]) -> bool:
    """Look the keys of all jobs up again; return whether one was revoked. Raises: StoreUnavailable."""
    by_key: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        if job.principal is not None:
            by_key.setdefault((job.batch.api_key_id, job.batch.workspace_id), []).append(job)
    turn = asyncio.Semaphore(LOOKUPS_AT_ONCE)

    async def look(of_key: list[Job]) -> bool:
        async with turn:
            principal = await principal_of(store, of_key[0].batch)
        if principal is None:
            for job in of_key:
                job.principal = None
        return principal is None

    return any(await asyncio.gather(*map(look, by_key.values())))
