"""What the batch runner does, over any database."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from frontend.batches.store import claim_ops, give_back_ops, lease_ops, result_ops
from frontend.batches.store.rows import (
    BatchRow,
    ClaimGroup,
    ClaimResult,
    DirectFailure,
    FinishLine,
    LeaseState,
    LineCounts,
    LineRow,
    RecordRow,
    SegmentRow,
    TakenBatch,
    TerminalState,
    TurnResult,
    WrittenFile,
)
from frontend.batches.store.transaction import Database, Op, columns_of, query

LINE = columns_of(LineRow)
SEGMENT = columns_of(SegmentRow)
Claimed = tuple[tuple[ClaimResult, ...], ...]


class RunnerOps:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def acquire(self, runner_id: str, lease_us: int) -> bool:
        if not self._db.one_writer:
            return True
        # A live holder, even a stopped one, keeps the lock; whoever gets it knows that the holder died or let go.
        locked = self._db.hold_runner_lock()
        acquired = await self._db.write(lambda: lease_ops.acquire_runner(runner_id, lease_us, locked=locked))
        if not acquired:
            self._db.drop_runner_lock()
        return acquired

    async def release(self, runner_id: str) -> None:
        await self._db.write(lambda: lease_ops.release_runner(runner_id))
        self._db.drop_runner_lock()

    async def take(
        self, runner_id: str, lease_us: int, limit: int, *, expired_only: bool = False
    ) -> tuple[TakenBatch, ...]:
        return await self._db.write(lambda: lease_ops.take(runner_id, lease_us, limit, expired_only))

    async def renew(self, runner_id: str, batch_ids: Sequence[str], lease_us: int) -> dict[str, LeaseState]:
        return await self._db.write(lambda: lease_ops.renew(runner_id, batch_ids, lease_us))

    async def release_batches(self, runner_id: str, batch_ids: Sequence[str]) -> None:
        await self._db.write(lambda: lease_ops.release_batches(runner_id, batch_ids))

    async def accept_input(
        self, runner_id: str, batch_id: str, work: WrittenFile, request_total: int, model: str
    ) -> bool:
        return await self._db.write(lambda: lease_ops.accept_input(runner_id, batch_id, work, request_total, model))

    async def begin(self, runner_id: str, batch_id: str) -> bool:
        return await self._db.write(lambda: lease_ops.begin(runner_id, batch_id))

    async def turn(self, runner_id: str, finish: Sequence[FinishLine], claim: Sequence[ClaimGroup]) -> TurnResult:
        if self._db.one_writer:

            def op() -> Op[TurnResult]:
                finished = yield from claim_ops.finish(finish)
                claimed = []
                for group in claim:
                    claimed.append((yield from claim_ops.claim(runner_id, group)))  # noqa: PERF401
                return TurnResult(finished, tuple(claimed))

            return await self._db.write(op)
        # Finishes first, on their own: they free the slots, and must not wait for a route's lock while holding lines.
        finished = await self._db.write(lambda: claim_ops.finish(finish)) if finish else ()
        claimed = await asyncio.gather(*(self._claim(runner_id, group) for group in claim))
        return TurnResult(finished, tuple(claimed))

    async def _claim(self, runner_id: str, group: ClaimGroup) -> Claimed:
        return await self._db.write(lambda: claim_ops.claim(runner_id, group))

    async def give_back(self, runner_id: str, lines: Sequence[FinishLine]) -> tuple[bool, ...]:
        return await self._db.write(lambda: give_back_ops.give_back(runner_id, lines))

    async def fail_lines(self, runner_id: str, batch_id: str, lines: Sequence[DirectFailure]) -> tuple[bool, ...]:
        return await self._db.write(lambda: claim_ops.fail_direct(runner_id, batch_id, lines))

    async def claimed_lines(self, batch_id: str) -> tuple[int, ...]:
        rows = await query(
            self._db, "SELECT line_no FROM batch_lines WHERE batch_id = :batch ORDER BY line_no", batch=batch_id
        )
        return tuple(row[0] for row in rows)

    async def lines(self, batch_id: str, after_line: int, limit: int) -> tuple[LineRow, ...]:
        rows = await query(
            self._db,
            f"SELECT {LINE} FROM batch_lines WHERE batch_id = :batch AND line_no > :after"
            " ORDER BY line_no LIMIT CAST(:limit AS BIGINT)",
            batch=batch_id,
            after=after_line,
            limit=limit,
        )
        return tuple(LineRow(*row) for row in rows)

    async def line_counts(self, batch_id: str) -> LineCounts:
        rows = await query(
            self._db, "SELECT state, count(*) FROM batch_lines WHERE batch_id = :batch GROUP BY state", batch=batch_id
        )
        counts = {str(row[0]): int(row[1]) for row in rows}
        return LineCounts(*(counts.get(state, 0) for state in ("running", "succeeded", "failed", "interrupted")))

    async def records(self, batch_id: str, after_line: int, limit: int) -> tuple[RecordRow, ...]:
        return await self._db.read(lambda: result_ops.records(batch_id, after_line, limit))

    async def add_segment(
        self, runner_id: str, batch_id: str, seq: int, written: WrittenFile, line_nos: Sequence[int]
    ) -> bool:
        return await self._db.write(lambda: result_ops.add_segment(runner_id, batch_id, seq, written, line_nos))

    async def segments(self, batch_id: str) -> tuple[SegmentRow, ...]:
        rows = await query(
            self._db, f"SELECT {SEGMENT} FROM batch_segments WHERE batch_id = :batch ORDER BY seq", batch=batch_id
        )
        return tuple(SegmentRow(*row) for row in rows)

    async def mark_finalizing(self, runner_id: str, batch_id: str, output_id: str, error_id: str) -> BatchRow | None:
        return await self._db.write(lambda: lease_ops.mark_finalizing(runner_id, batch_id, output_id, error_id))

    async def finalize(
        self,
        runner_id: str,
        batch_id: str,
        state: TerminalState,
        *,
        error_code: str | None = None,
        errors: str | None = None,
        output: WrittenFile | None = None,
        error: WrittenFile | None = None,
        lost_results: int = 0,
    ) -> BatchRow | None:
        return await self._db.write(
            lambda: lease_ops.finalize(runner_id, batch_id, state, error_code, errors, output, error, lost_results)
        )

    async def settle(self, runner_id: str, batch_id: str) -> bool:
        return await self._db.write(lambda: lease_ops.settle(runner_id, batch_id))
