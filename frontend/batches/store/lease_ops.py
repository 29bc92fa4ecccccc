"""Leases: who runs a batch, how it is taken over, how it ends. Every write checks the owner in its WHERE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from frontend.batches.job_state import IllegalTransition
from frontend.batches.store.batch_ops import BATCH, find_batch
from frontend.batches.store.file_ops import commit_file, delete_files
from frontend.batches.store.rows import BatchRow, LeaseState, TakenBatch, TerminalState, WrittenFile
from frontend.batches.store.transaction import Op, clock, sql

OWNED: Final = "id = :batch AND runner_id = :runner AND settled_at IS NULL"


def acquire_runner(runner_id: str, lease_us: int, *, locked: bool) -> Op[bool]:
    """Take the one runner lease of a SQLite file; ``locked``: this process has the host's lock.

    Then a holder that had the lock is dead. One that took an expired lease while a stopped process still had the lock
    is not: its row says so.
    """
    now = yield from clock()
    rows = yield from sql("SELECT runner_id, lease_until, locked FROM runner_lease")
    if rows and rows[0][0] != runner_id:
        if rows[0][1] > now and not (locked and rows[0][2]):
            return False
        # Only the holder may run batches, so whoever has a lease on one is not running it any more.
        yield from sql(
            "UPDATE batches SET runner_lease_until = :now WHERE settled_at IS NULL AND runner_id IS NOT NULL"
            " AND runner_id <> :runner AND runner_lease_until > :now",
            now=now,
            runner=runner_id,
        )
    yield from sql(
        "INSERT INTO runner_lease (single, runner_id, lease_until, locked) VALUES (1, :runner, :until, :locked)"
        " ON CONFLICT (single) DO UPDATE SET runner_id = excluded.runner_id, lease_until = excluded.lease_until,"
        " locked = excluded.locked",
        runner=runner_id,
        until=now + lease_us,
        locked=int(locked),
    )
    return True


def release_runner(runner_id: str) -> Op[None]:
    """Give back the runner lease and all batch leases."""
    yield from sql("DELETE FROM runner_lease WHERE runner_id = :runner", runner=runner_id)
    yield from sql(
        "UPDATE batches SET runner_id = NULL, runner_lease_until = NULL WHERE runner_id = :runner"
        " AND settled_at IS NULL",
        runner=runner_id,
    )


def take(runner_id: str, lease_us: int, limit: int, expired_only: bool) -> Op[tuple[TakenBatch, ...]]:
    """Lease free batches, oldest first; what a dead runner left running becomes ``interrupted``."""
    now = yield from clock()
    only = " AND (expires_at <= :now OR cancel_requested_at IS NOT NULL)" if expired_only else ""
    rows = yield from sql(
        f"SELECT {BATCH} FROM batches WHERE settled_at IS NULL"
        " AND (runner_id IS NULL OR (runner_lease_until <= :now AND runner_id <> :runner))"
        f"{only} ORDER BY created_at, id LIMIT CAST(:limit AS BIGINT)",
        lock="FOR UPDATE SKIP LOCKED",
        now=now,
        runner=runner_id,
        limit=limit,
    )
    taken = []
    for row in rows:
        taken.append((yield from _take_one(BatchRow(*row), runner_id, now, now + lease_us)))  # noqa: PERF401 (a comprehension cannot yield)
    return tuple(taken)


def _take_one(batch: BatchRow, runner_id: str, now: int, lease_until: int) -> Op[TakenBatch]:
    running = unkept = 0
    if not batch.finished and batch.in_progress_at is not None:
        interrupt = (
            "UPDATE batch_lines SET state = 'interrupted', error_code = 'interrupted', finished_at ="
            " coalesce(finished_at, :now) WHERE batch_id = :batch"
        )
        running = len((yield from sql(f"{interrupt} AND state = 'running' RETURNING line_no", batch=batch.id, now=now)))
        # The answer was counted as completed, but nobody kept it: completed must equal the lines of the output file.
        unkept = len(
            (
                yield from sql(
                    f"{interrupt} AND state = 'succeeded' AND segment IS NULL AND NOT EXISTS"
                    " (SELECT 1 FROM batch_records WHERE batch_records.batch_id = batch_lines.batch_id"
                    " AND batch_records.line_no = batch_lines.line_no) RETURNING line_no",
                    batch=batch.id,
                    now=now,
                )
            )
        )
    rows = yield from sql(
        "UPDATE batches SET runner_id = :runner, runner_lease_until = :until,"
        " request_completed = request_completed - :unkept, request_failed = request_failed + :unkept + :running"
        f" WHERE id = :batch RETURNING {BATCH}",
        runner=runner_id,
        until=lease_until,
        running=running,
        unkept=unkept,
        batch=batch.id,
    )
    return TakenBatch(BatchRow(*rows[0]), batch.runner_id is not None, running + unkept)


def renew(runner_id: str, batch_ids: Sequence[str], lease_us: int) -> Op[dict[str, LeaseState]]:
    """Extend leases; absent or someone else's ones answer ``owned`` False."""
    now = yield from clock()
    rows = yield from sql(
        "UPDATE batches SET runner_lease_until = :until WHERE id IN :ids[text] AND runner_id = :runner"
        " AND settled_at IS NULL RETURNING id, cancel_requested_at, expires_at",
        until=now + lease_us,
        ids=list(batch_ids),
        runner=runner_id,
    )
    states = dict.fromkeys(batch_ids, LeaseState(False, False, False))
    states |= {row[0]: LeaseState(True, row[1] is not None, row[2] <= now) for row in rows}
    return states


def release_batches(runner_id: str, batch_ids: Sequence[str]) -> Op[None]:
    """Clear leases that are this runner's."""
    yield from sql(
        "UPDATE batches SET runner_id = NULL, runner_lease_until = NULL WHERE id IN :ids[text] AND runner_id = :runner"
        " AND settled_at IS NULL",
        ids=list(batch_ids),
        runner=runner_id,
    )


def accept_input(runner_id: str, batch_id: str, work: WrittenFile, total: int, model: str) -> Op[bool]:
    """Record a deferred validation that passed."""
    now = yield from clock()
    rows = yield from sql(
        "UPDATE batches SET work_file_id = coalesce(work_file_id, :work), request_total = :total, public_model = :model"
        f" WHERE {OWNED} AND state = 'queued' AND (work_file_id IS NULL OR work_file_id = :work) RETURNING id",
        batch=batch_id,
        runner=runner_id,
        work=work.file_id,
        total=total,
        model=model,
    )
    if rows:
        yield from commit_file(work, now)
    return bool(rows)


def begin(runner_id: str, batch_id: str) -> Op[bool]:
    """Move a batch to ``in_progress``, or find it there."""
    now = yield from clock()
    rows = yield from sql(
        "UPDATE batches SET state = 'in_progress', status_detail = 'in_progress', in_progress_at ="
        f" coalesce(in_progress_at, :now) WHERE {OWNED} AND state IN ('queued', 'in_progress')"
        " AND status_detail IN ('validating', 'in_progress') AND expires_at > :now RETURNING id",
        batch=batch_id,
        runner=runner_id,
        now=now,
    )
    return bool(rows)


def mark_finalizing(runner_id: str, batch_id: str, output_id: str, error_id: str) -> Op[BatchRow | None]:
    """Reserve the result files; the ids of the first call stay."""
    now = yield from clock()
    rows = yield from sql(
        "UPDATE batches SET status_detail = CASE status_detail WHEN 'cancelling' THEN 'cancelling'"
        " ELSE 'finalizing' END, finalizing_at = coalesce(finalizing_at, :now),"
        " reserved_output_id = coalesce(reserved_output_id, :output),"
        " reserved_error_id = coalesce(reserved_error_id, :error)"
        f" WHERE {OWNED} AND completed_at IS NULL RETURNING {BATCH}",
        batch=batch_id,
        runner=runner_id,
        now=now,
        output=output_id,
        error=error_id,
    )
    if not rows:
        return None
    yield from sql("DELETE FROM batch_route_waits WHERE batch_id = :batch", batch=batch_id)
    return BatchRow(*rows[0])


def finalize(
    runner_id: str,
    batch_id: str,
    state: TerminalState,
    error_code: str | None,
    errors: str | None,
    output: WrittenFile | None,
    error: WrittenFile | None,
    lost_results: int = 0,
) -> Op[BatchRow | None]:
    """End a batch; repeating it answers the ended batch."""
    now = yield from clock()
    owner = yield from sql(
        f"SELECT completed_at FROM batches WHERE {OWNED}", batch=batch_id, runner=runner_id, lock="FOR UPDATE"
    )
    if not owner:
        return None
    if owner[0][0] is not None:
        return (yield from find_batch(None, batch_id))
    counted = yield from sql(
        "SELECT state, count(*) FROM batch_lines WHERE batch_id = :batch GROUP BY state", batch=batch_id
    )
    lines: dict[str, int] = {name: int(number) for name, number in counted}
    if lines.get("running"):
        raise IllegalTransition(f"batch {batch_id!r} cannot end while {lines['running']} of its lines run")
    for written in (output, error):
        if written is not None:
            yield from commit_file(written, now)
    yield from sql("DELETE FROM batch_route_waits WHERE batch_id = :batch", batch=batch_id)
    rows = yield from sql(
        "UPDATE batches SET state = :state, status_detail = :state, completed_at = :now, error_code = :error_code,"
        " errors = :errors, output_file_id = :output, error_file_id = :error, request_completed = :completed,"
        f" request_failed = :failed WHERE id = :batch RETURNING {BATCH}",
        state=state,
        now=now,
        error_code=error_code,
        errors=errors,
        output=output.file_id if output else None,
        error=error.file_id if error else None,
        completed=lines.get("succeeded", 0) - lost_results,
        failed=lines.get("failed", 0) + lines.get("interrupted", 0) + lost_results,
        batch=batch_id,
    )
    return BatchRow(*rows[0])


def settle(runner_id: str, batch_id: str) -> Op[bool]:
    """Let go of an ended batch and of everything that only running it needed."""
    now = yield from clock()
    rows = yield from sql(
        "UPDATE batches SET settled_at = :now, runner_id = NULL, runner_lease_until = NULL"
        f" WHERE {OWNED} AND completed_at IS NOT NULL RETURNING work_file_id",
        now=now,
        batch=batch_id,
        runner=runner_id,
    )
    if not rows:
        return False
    yield from sql("DELETE FROM batch_records WHERE batch_id = :batch", batch=batch_id)
    segments = yield from sql("SELECT file_id FROM batch_segments WHERE batch_id = :batch", batch=batch_id)
    gone = [row[0] for row in segments] + [row[0] for row in rows if row[0] is not None]
    if gone:
        yield from delete_files(gone)
    return True
