"""What the API asks about batches."""

from __future__ import annotations

from typing import Any, Final

from engines.errors import NotFound
from frontend.batches.store.audit_ops import add_audit
from frontend.batches.store.errors import ActiveBatchLimit, BatchNotCancellable, IdempotencyConflict
from frontend.batches.store.file_ops import commit_file, cursor, visible_input
from frontend.batches.store.protocol import IDEMPOTENCY_US
from frontend.batches.store.route_rows import AuditRow
from frontend.batches.store.rows import SECOND_US, BatchRow, Idempotency, NewBatch, OutcomeCount, Page
from frontend.batches.store.transaction import Database, Op, clock, columns_of, query, sql

BATCH: Final = columns_of(BatchRow)
OUTCOME_GROUPS: Final = 20
ACTIVE: Final = "completed_at IS NULL AND cancel_requested_at IS NULL"
"""Holds a job slot: a cancel request frees it at once."""

INSERT_BATCH: Final = (
    "INSERT INTO batches (id, workspace_id, api_key_id, user_id, mode, endpoint, public_model, state, status_detail,"
    " input_file_id, work_file_id, completion_window_hours, retry_limit, request_total, metadata,"
    " output_expires_after_seconds, created_at, expires_at) VALUES (:id, :workspace_id, :api_key_id, :user_id,"
    " 'gateway', :endpoint, :public_model, 'queued', 'validating', :input_file_id, :work_file_id, :window_hours,"
    f" :retry_limit, :request_total, :metadata, :output_expires_after, :created_at, :expires_at) RETURNING {BATCH}"
)


class BatchOps:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def create(
        self, batch: NewBatch, *, active_limit: int, idempotency: Idempotency | None = None
    ) -> tuple[BatchRow, bool]:
        return await self._db.write(lambda: _create(batch, active_limit, idempotency))

    async def find_idempotent(self, workspace_id: str, idempotency: Idempotency) -> BatchRow | None:
        def op() -> Op[BatchRow | None]:
            return (yield from _idempotent(workspace_id, idempotency, (yield from clock())))

        return await self._db.read(op)

    async def get(self, workspace_id: str | None, batch_id: str) -> BatchRow | None:
        return await self._db.read(lambda: find_batch(workspace_id, batch_id))

    async def list_batches(
        self,
        workspace_id: str | None,
        limit: int,
        *,
        after: str | None = None,
        offset: int = 0,
        active: bool | None = None,
        api_key_id: str | None = None,
    ) -> Page[BatchRow]:
        ended = {None: "", True: " AND completed_at IS NULL", False: " AND completed_at IS NOT NULL"}[active]
        # A condition that may be absent is left out: with it, neither database would use the index.
        owner = "" if workspace_id is None else " AND workspace_id = :workspace"
        key = "" if api_key_id is None else " AND api_key_id = :key"

        def op() -> Op[Page[BatchRow]]:
            start_at, start_id = yield from cursor("batches", workspace_id, after)
            start = "" if start_at is None else " AND (created_at, id) < (:start_at, :start_id)"
            values: dict[str, Any] = {
                "workspace": workspace_id, "key": api_key_id, "start_at": start_at, "start_id": start_id,
                "limit": limit + 1, "offset": offset,
            }  # fmt: skip
            rows = yield from sql(
                f"SELECT {BATCH} FROM batches WHERE 1 = 1{owner}{key}{ended}{start}"
                " ORDER BY created_at DESC, id DESC LIMIT CAST(:limit AS BIGINT) OFFSET CAST(:offset AS BIGINT)",
                lock="",
                **values,
            )
            return Page(tuple(BatchRow(*row) for row in rows[:limit]), len(rows) > limit)

        return await self._db.read(op)

    async def cancel(self, workspace_id: str | None, batch_id: str, audit: AuditRow | None = None) -> BatchRow:
        def op() -> Op[BatchRow]:
            now = yield from clock()
            yield from sql("SELECT 1 FROM batches WHERE id = :id", id=batch_id, lock="FOR UPDATE")
            batch = yield from find_batch(workspace_id, batch_id)
            if batch is None:
                raise NotFound(f"no batch {batch_id!r}")
            if batch.finished:
                raise BatchNotCancellable(f"batch {batch_id!r} is {batch.state} and cannot be cancelled")
            if batch.cancel_requested_at is not None:
                return batch
            rows = yield from sql(
                "UPDATE batches SET cancel_requested_at = :now, status_detail = CASE status_detail"
                f" WHEN 'finalizing' THEN 'finalizing' ELSE 'cancelling' END WHERE id = :id RETURNING {BATCH}",
                now=now,
                id=batch_id,
            )
            if audit is not None:
                yield from add_audit(audit)
            return BatchRow(*rows[0])

        return await self._db.write(op)

    async def active_count(self, workspace_id: str) -> int:
        return await self._db.read(lambda: _active_count(workspace_id))

    async def outcomes(self, batch_id: str) -> tuple[OutcomeCount, ...]:
        rows = await query(
            self._db,
            "SELECT state, error_code, count(*) AS lines FROM batch_lines WHERE batch_id = :id"
            f" GROUP BY state, error_code ORDER BY lines DESC, state, error_code LIMIT {OUTCOME_GROUPS}",
            id=batch_id,
        )
        return tuple(OutcomeCount(*row) for row in rows)


def find_batch(workspace_id: str | None, batch_id: str) -> Op[BatchRow | None]:
    """Return a batch, of one workspace or (None) of any."""
    rows = yield from sql(
        f"SELECT {BATCH} FROM batches WHERE id = :id"
        " AND (CAST(:workspace AS TEXT) IS NULL OR workspace_id = :workspace)",
        id=batch_id,
        workspace=workspace_id,
    )
    return BatchRow(*rows[0]) if rows else None


def _create(batch: NewBatch, active_limit: int, idempotency: Idempotency | None) -> Op[tuple[BatchRow, bool]]:
    now = yield from clock()
    # Creates of a workspace go one by one: the limit and the idempotency key are decided on what the last one left.
    if not (yield from sql("SELECT 1 FROM workspaces WHERE id = :id", id=batch.workspace_id, lock="FOR UPDATE")):
        raise NotFound(f"no workspace {batch.workspace_id!r}")
    if idempotency is not None:
        first = yield from _idempotent(batch.workspace_id, idempotency, now)
        if first is not None:
            return first, False
    # The store may have done this already and lost the connection before saying so.
    again = yield from find_batch(batch.workspace_id, batch.id)
    if again is not None:
        return again, False
    active = yield from _active_count(batch.workspace_id)
    if active >= active_limit:
        raise ActiveBatchLimit(f"the workspace has {active} unfinished batches; the limit is {active_limit}")
    yield from visible_input(batch.workspace_id, batch.input_file_id)
    if batch.work_file is not None:
        yield from commit_file(batch.work_file, now)
    rows = yield from sql(
        INSERT_BATCH,
        id=batch.id,
        workspace_id=batch.workspace_id,
        api_key_id=batch.api_key_id,
        user_id=batch.user_id,
        endpoint=batch.endpoint,
        public_model=batch.public_model,
        input_file_id=batch.input_file_id,
        work_file_id=batch.work_file.file_id if batch.work_file else None,
        window_hours=batch.completion_window_hours,
        retry_limit=batch.retry_limit,
        request_total=batch.request_total,
        metadata=batch.metadata,
        output_expires_after=batch.output_expires_after_seconds,
        created_at=now,
        expires_at=now + batch.completion_window_hours * 3600 * SECOND_US,
    )
    if idempotency is not None:
        yield from sql("DELETE FROM idempotency_keys WHERE created_at <= :oldest", oldest=now - IDEMPOTENCY_US)
        yield from sql(
            "INSERT INTO idempotency_keys (workspace_id, key, body_sha256, batch_id, created_at)"
            " VALUES (:workspace, :key, :body, :batch, :now)",
            workspace=batch.workspace_id,
            key=idempotency.key,
            body=idempotency.body_sha256,
            batch=batch.id,
            now=now,
        )
    return BatchRow(*rows[0]), True


def _idempotent(workspace_id: str, idempotency: Idempotency, now: int) -> Op[BatchRow | None]:
    rows = yield from sql(
        "SELECT body_sha256, batch_id FROM idempotency_keys"
        " WHERE workspace_id = :workspace AND key = :key AND created_at > :oldest",
        workspace=workspace_id,
        key=idempotency.key,
        oldest=now - IDEMPOTENCY_US,
    )
    if not rows:
        return None
    body, batch_id = rows[0]
    if body != idempotency.body_sha256:
        raise IdempotencyConflict("this Idempotency-Key was used with another request; use a new one")
    return (yield from find_batch(workspace_id, batch_id))


def _active_count(workspace_id: str) -> Op[int]:
    rows = yield from sql(
        f"SELECT count(*) FROM batches WHERE workspace_id = :workspace AND {ACTIVE}", workspace=workspace_id
    )
    return int(rows[0][0])
