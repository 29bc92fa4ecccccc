"""Rows joined for lists and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.batches.store.batch_ops import BATCH
from frontend.batches.store.claim_ops import route_view
from frontend.batches.store.claim_state import fair_order
from frontend.batches.store.protocol import FRESH_US
from frontend.batches.store.route_rows import BatchTotals, PositionRow
from frontend.batches.store.rows import BatchRow, Page
from frontend.batches.store.transaction import Database, Op, clock, query, sql


class ViewOps:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def key_names(self, key_ids: Sequence[str]) -> dict[str, str]:
        rows = await query(self._db, "SELECT id, name FROM api_keys WHERE id IN :ids[text]", ids=list(key_ids))
        return {row[0]: row[1] for row in rows}

    async def positions(self, batch_id: str) -> tuple[PositionRow, ...]:
        return await self._db.read(lambda: _positions(batch_id))

    async def waiting_reasons(self, batch_ids: Sequence[str]) -> dict[str, str]:
        def op() -> Op[dict[str, str]]:
            now = yield from clock()
            rows = yield from sql(
                "SELECT batch_id, reason FROM batch_route_waits WHERE batch_id IN :ids[text] AND reason IS NOT NULL"
                " AND updated_at > :oldest AND updated_at <= :newest AND NOT EXISTS (SELECT 1 FROM batch_lines"
                " WHERE batch_lines.batch_id = batch_route_waits.batch_id AND batch_lines.state = 'running')"
                " ORDER BY batch_id, waiting_lines DESC, route_id",
                ids=list(batch_ids),
                oldest=now - FRESH_US,
                newest=now + FRESH_US,
            )
            reasons: dict[str, str] = {}
            for batch_id, reason in rows:
                reasons.setdefault(batch_id, reason)
            return reasons

        return await self._db.read(op)

    async def ended_since(self, since_us: int) -> tuple[BatchRow, ...]:
        rows = await query(
            self._db,
            f"SELECT {BATCH} FROM batches WHERE state IN ('failed', 'expired') AND completed_at >= :since"
            " ORDER BY completed_at, id",
            since=since_us,
        )
        return tuple(BatchRow(*row) for row in rows)

    async def platform_batches(self, limit: int, *, offset: int = 0, active: bool | None = None) -> Page[BatchRow]:
        ended = {None: "", True: " AND completed_at IS NULL", False: " AND completed_at IS NOT NULL"}[active]
        values: dict[str, Any] = {"limit": limit + 1, "offset": offset}
        rows = await query(
            self._db,
            f"SELECT {BATCH} FROM batches WHERE workspace_id IN (SELECT id FROM workspaces WHERE kind <> 'personal')"
            f"{ended} ORDER BY created_at DESC, id DESC LIMIT CAST(:limit AS BIGINT) OFFSET CAST(:offset AS BIGINT)",
            **values,
        )
        return Page(tuple(BatchRow(*row) for row in rows[:limit]), len(rows) > limit)

    async def personal_totals(self) -> BatchTotals:
        rows = await query(
            self._db,
            "SELECT count(*), coalesce(sum(CASE WHEN completed_at IS NULL THEN 1 ELSE 0 END), 0),"
            " coalesce(sum(request_total), 0), coalesce(sum(request_completed), 0), coalesce(sum(request_failed), 0)"
            " FROM batches WHERE workspace_id IN (SELECT id FROM workspaces WHERE kind = 'personal')",
        )
        return BatchTotals(*(int(value) for value in rows[0]))


def _positions(batch_id: str) -> Op[tuple[PositionRow, ...]]:
    now = yield from clock()
    waits = yield from sql(
        "SELECT route_id, reason, waiting_lines, since FROM batch_route_waits WHERE batch_id = :batch"
        " AND updated_at > :oldest AND updated_at <= :newest",
        batch=batch_id,
        oldest=now - FRESH_US,
        newest=now + FRESH_US,
    )
    counted = yield from sql(
        "SELECT route_id, count(*) FROM batch_lines WHERE state = 'running' AND batch_id = :batch GROUP BY route_id",
        batch=batch_id,
    )
    running = {str(row[0]): int(row[1]) for row in counted}
    waiting = {str(row[0]): row for row in waits}
    positions = []
    for route_id in sorted(running | waiting):
        order = fair_order((yield from route_view(route_id, now, [], ready_only=False))) if route_id in waiting else []
        # On PostgreSQL each statement sees its own moment: it may wait no more.
        if batch_id not in order:
            if route_id in running:
                positions.append(PositionRow(route_id, None, 0, running[route_id], None, 0, None))
            continue
        _, reason, lines, since = waiting[route_id]
        place = order.index(batch_id) + 1
        positions.append(PositionRow(route_id, reason, lines, running.get(route_id, 0), place, len(order), since))
    return tuple(positions)
