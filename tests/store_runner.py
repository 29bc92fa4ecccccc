"""A miniature runner as a process of its own: takes batches, claims, "sends" each line to a log file, finishes.

Usage: python store_runner.py PLACE RUNNER_ID LOG LEASE_SECONDS. It ends when every batch is settled, and goes on after
a database that went away: a test kills it, or the database, whenever it likes.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.postgres import postgres_store
from frontend.batches.store.rows import (
    SECOND_US,
    BatchRow,
    ClaimBatch,
    ClaimGroup,
    ClaimLine,
    ClaimResult,
    FinishLine,
)
from frontend.batches.store.sql_store import SqlStore
from frontend.batches.store.sqlite import sqlite_store

CAP = 5
PAUSE_S = 0.01


class MiniRunner:
    def __init__(self, store: SqlStore, runner_id: str, log: int, lease_us: int) -> None:
        self.store, self.runner_id, self.log, self.lease_us = store, runner_id, log, lease_us
        self.mine: dict[str, BatchRow] = {}
        self.pending: list[FinishLine] = []

    async def run(self) -> None:
        while True:
            try:
                if not await self.store.runner.acquire(self.runner_id, self.lease_us):
                    await asyncio.sleep(PAUSE_S)
                elif await self.turn():
                    return
            except StoreUnavailable:
                await asyncio.sleep(PAUSE_S)

    async def turn(self) -> bool:
        """Do one round; return whether nothing is left anywhere."""
        runner = self.store.runner
        for taken in await runner.take(self.runner_id, self.lease_us, 3):
            self.mine[taken.batch.id] = taken.batch
        leases = await runner.renew(self.runner_id, list(self.mine), self.lease_us)
        self.mine = {one: batch for one, batch in self.mine.items() if leases[one].owned}
        for batch in list(self.mine.values()):
            await self.work(batch)
        if not self.mine:
            await asyncio.sleep(PAUSE_S)
            page = await self.store.batches.list_batches(None, 1000)
            return all(row.settled_at is not None for row in page.rows)
        return False

    async def work(self, batch: BatchRow) -> None:
        runner = self.store.runner
        await runner.begin(self.runner_id, batch.id)
        claimed = set(await runner.claimed_lines(batch.id))
        left = [line for line in range(batch.request_total) if line not in claimed]
        lines = tuple(ClaimLine(line, os.urandom(8).hex()) for line in left[:3])
        group = ClaimGroup("R", CAP, (ClaimBatch(batch.id, batch.workspace_id, max(1, len(left)), lines),))
        finish, self.pending = self.pending, []
        try:
            result = await runner.turn(self.runner_id, finish, [group] if lines else [])
        except StoreUnavailable:
            self.pending = finish
            # The claim may have been made: the same executions ask again, once the database is back.
            result = await self.again(finish, [group] if lines else [])
            self.pending = []
        answers = result.claimed[0][0] if lines else ()
        for line, answer in zip(lines, answers, strict=True):
            if answer is ClaimResult.CLAIMED:
                os.write(self.log, f"{batch.id} {line.line_no} {self.runner_id}\n".encode())
                self.pending.append(
                    FinishLine(batch.id, line.line_no, line.execution_id, "succeeded", 200, None, b"{}")
                )
        counts = await runner.line_counts(batch.id)
        if not left and not counts.running and not self.pending:
            await runner.mark_finalizing(self.runner_id, batch.id, "o", "e")
            await runner.finalize(self.runner_id, batch.id, "completed")
            await runner.settle(self.runner_id, batch.id)
            self.mine.pop(batch.id, None)

    async def again(self, finish: list[FinishLine], claim: list[ClaimGroup]):  # type: ignore[no-untyped-def]
        while True:
            await asyncio.sleep(PAUSE_S)
            try:
                return await self.store.runner.turn(self.runner_id, finish, claim)
            except StoreUnavailable:
                continue


async def main(place: str, runner_id: str, log: str, lease_s: float) -> None:
    random.seed(runner_id)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    store = postgres_store(place) if place.startswith("postgresql:") else sqlite_store(Path(place))
    while True:
        try:
            await store.start()
            break
        except StoreUnavailable:
            await asyncio.sleep(PAUSE_S)
    await MiniRunner(store, runner_id, descriptor, round(lease_s * SECOND_US)).run()
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
