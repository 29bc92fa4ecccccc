"""Demand, gate signals, settings and the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, Final

from engines.errors import NotFound
from frontend.batches.store.audit_ops import add_audit
from frontend.batches.store.batch_ops import BATCH
from frontend.batches.store.claim_ops import route_view
from frontend.batches.store.claim_state import fair_order
from frontend.batches.store.errors import SettingsChanged
from frontend.batches.store.protocol import FRESH_US
from frontend.batches.store.route_rows import AuditRow, RouteCap, RouteCount, SignalRow
from frontend.batches.store.rows import (
    BatchRow,
    Demand,
    SchedulingRow,
    WaitRow,
)
from frontend.batches.store.transaction import Bulk, Database, Op, Row, clock, columns_of, query, sql

WAIT: Final = columns_of(WaitRow)
SETTINGS: Final = columns_of(SchedulingRow)
SIGNAL: Final = columns_of(SignalRow)
AUDIT: Final = columns_of(AuditRow)
CAP: Final = columns_of(RouteCap)
FRESH: Final = "updated_at > :oldest AND updated_at <= :newest"

PUBLISH: Final = (
    "INSERT INTO batch_route_waits (route_id, batch_id, workspace_id, waiting_lines, reason, ready, since, updated_at)"
    " SELECT d.route_id, :batch, :workspace, d.waiting_lines, d.reason, d.ready, CAST(:now AS BIGINT),"
    " CAST(:now AS BIGINT) FROM {rows} WHERE true ON CONFLICT (route_id, batch_id) DO UPDATE SET"
    " waiting_lines = excluded.waiting_lines, reason = excluded.reason, ready = excluded.ready,"
    " updated_at = excluded.updated_at"
)
PUT_SETTINGS: Final = (
    f"INSERT INTO deployment_batch_scheduling ({SETTINGS}) VALUES (:" + SETTINGS.replace(", ", ", :") + ")"
    " ON CONFLICT (route_id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in SETTINGS.split(", ")[1:])
    + " WHERE CAST(:expected AS BIGINT) IS NULL OR deployment_batch_scheduling.updated_at = :expected"
    " RETURNING route_id"
)
PUT_CAP: Final = (
    f"INSERT INTO deployment_batch_caps ({CAP}) VALUES (:{CAP.replace(', ', ', :')})"
    " ON CONFLICT (route_id) DO UPDATE SET cap = excluded.cap, why = excluded.why, changed_at = excluded.changed_at"
    " WHERE CAST(:expected AS BIGINT) IS NULL OR deployment_batch_caps.cap = :expected"
    f" RETURNING {CAP}"
)
KEPT: Final = frozenset({"live_in_flight"} | {name for name in SIGNAL.split(", ") if name.startswith("metrics_")})
METRICS: Final = tuple(name for name in SIGNAL.split(", ") if name.startswith("metrics_"))
"""Readings belong together: a reading that failed has an error and no values, so they are kept or replaced as one."""


class SchedulingOps:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def publish_waits(
        self, runner_id: str, batch_id: str, demands: Sequence[Demand], *, legitimate: bool
    ) -> None:
        def op() -> Op[None]:
            now = yield from clock()
            owner = yield from sql(
                "SELECT workspace_id FROM batches WHERE id = :batch AND runner_id = :runner AND completed_at IS NULL",
                batch=batch_id,
                runner=runner_id,
                lock="FOR SHARE" if not legitimate else "FOR NO KEY UPDATE",
            )
            if not owner:
                return
            yield from sql(
                "DELETE FROM batch_route_waits WHERE batch_id = :batch AND route_id NOT IN :routes[text]",
                batch=batch_id,
                routes=[demand.route_id for demand in demands],
            )
            if demands:
                yield Bulk(
                    PUBLISH,
                    {
                        "route_id": ("text", [demand.route_id for demand in demands]),
                        "waiting_lines": ("bigint", [demand.waiting_lines for demand in demands]),
                        "reason": ("text", [demand.reason for demand in demands]),
                        "ready": ("bigint", [int(demand.ready) for demand in demands]),
                    },
                    {"batch": batch_id, "workspace": owner[0][0], "now": now},
                )
            if legitimate:
                yield from sql("UPDATE batches SET last_waited_at = :now WHERE id = :batch", now=now, batch=batch_id)

        await self._db.write(op)

    async def fresh_waits(self, route_id: str | None = None) -> tuple[WaitRow, ...]:
        def op() -> Op[tuple[WaitRow, ...]]:
            now = yield from clock()
            only = "" if route_id is None else " AND route_id = :route"
            rows = yield from sql(
                f"SELECT {WAIT} FROM batch_route_waits WHERE {FRESH}{only} ORDER BY route_id",
                oldest=now - FRESH_US,
                newest=now + FRESH_US,
                route=route_id,
            )
            by_route: dict[str, list[WaitRow]] = {}
            for row in rows:
                by_route.setdefault(row[0], []).append(_wait(row))
            ordered: list[WaitRow] = []
            for route, waits in by_route.items():
                view = yield from route_view(route, now, [], ready_only=False)
                places = {batch_id: place for place, batch_id in enumerate(fair_order(view))}
                # On PostgreSQL each statement sees its own moment: a batch that ended in between waits no more.
                still = [wait for wait in waits if wait.batch_id in places]
                ordered += sorted(still, key=lambda wait: places[wait.batch_id])
            return tuple(ordered)

        return await self._db.read(op)

    async def route_counts(self) -> tuple[RouteCount, ...]:
        def op() -> Op[tuple[RouteCount, ...]]:
            now = yield from clock()
            waiting = yield from sql(
                f"SELECT route_id, sum(waiting_lines), count(*) FROM batch_route_waits WHERE {FRESH} GROUP BY route_id",
                oldest=now - FRESH_US,
                newest=now + FRESH_US,
            )
            running = yield from sql(
                "SELECT route_id, count(*) FROM batch_lines WHERE state = 'running' GROUP BY route_id"
            )
            lines = {str(row[0]): int(row[1]) for row in running}
            demand = {str(row[0]): (int(row[1]), int(row[2])) for row in waiting}
            return tuple(
                RouteCount(route, *demand.get(route, (0, 0)), lines.get(route, 0)) for route in sorted(lines | demand)
            )

        return await self._db.read(op)

    async def running_by_batch(self, batch_ids: Sequence[str]) -> dict[str, int]:
        rows = await query(
            self._db,
            "SELECT batch_id, count(*) FROM batch_lines WHERE state = 'running' AND batch_id IN :ids[text]"
            " GROUP BY batch_id",
            ids=list(batch_ids),
        )
        return {row[0]: int(row[1]) for row in rows}

    async def running_on_route(self, batch_id: str) -> dict[str, int]:
        rows = await query(
            self._db,
            "SELECT route_id, count(*) FROM batch_lines WHERE state = 'running' AND batch_id = :batch"
            " GROUP BY route_id",
            batch=batch_id,
        )
        return {row[0]: int(row[1]) for row in rows}

    async def settings(self, route_id: str) -> SchedulingRow | None:
        rows = await query(
            self._db, f"SELECT {SETTINGS} FROM deployment_batch_scheduling WHERE route_id = :route", route=route_id
        )
        return SchedulingRow(*rows[0]) if rows else None

    async def all_settings(self) -> tuple[SchedulingRow, ...]:
        rows = await query(self._db, f"SELECT {SETTINGS} FROM deployment_batch_scheduling ORDER BY route_id")
        return tuple(SchedulingRow(*row) for row in rows)

    async def put_settings(
        self, row: SchedulingRow, audit: AuditRow | None, *, expected: int | None = None
    ) -> SchedulingRow:
        def op() -> Op[SchedulingRow]:
            # Later than what it replaces, also if the clock stepped back: the time is what tells versions apart.
            stored = replace(row, updated_at=max((yield from clock()), (expected or 0) + 1))
            if not (yield from sql(PUT_SETTINGS, **_named(SETTINGS, stored), expected=expected)):
                raise SettingsChanged(f"the settings of route {row.route_id!r} were changed by somebody else")
            if audit is not None:
                yield from add_audit(audit)
            return stored

        return await self._db.write(op)

    async def put_cap(self, cap: RouteCap, expected: int | None = None) -> RouteCap:
        def op() -> Op[RouteCap]:
            now = yield from clock()
            rows = yield from sql(PUT_CAP, **_named(CAP, replace(cap, changed_at=now)), expected=expected)
            if not rows:
                rows = yield from sql(
                    f"SELECT {CAP} FROM deployment_batch_caps WHERE route_id = :route", route=cap.route_id
                )
            return RouteCap(*rows[0])

        return await self._db.write(op)

    async def caps(self) -> tuple[RouteCap, ...]:
        rows = await query(self._db, f"SELECT {CAP} FROM deployment_batch_caps ORDER BY route_id")
        return tuple(RouteCap(*row) for row in rows)

    async def set_weight(self, workspace_id: str, weight: int, audit: AuditRow | None) -> None:
        def op() -> Op[None]:
            rows = yield from sql(
                "UPDATE workspaces SET batch_weight = :weight WHERE id = :id RETURNING id",
                weight=weight,
                id=workspace_id,
            )
            if not rows:
                raise NotFound(f"no workspace {workspace_id!r}")
            if audit is not None:
                yield from add_audit(audit)

        await self._db.write(op)

    async def weights(self) -> dict[str, int]:
        rows = await query(self._db, "SELECT id, batch_weight FROM workspaces WHERE batch_weight <> 1 ORDER BY id")
        return {row[0]: int(row[1]) for row in rows}

    async def put_signal(self, signal: SignalRow) -> None:
        kept = KEPT if signal.metrics_checked_at is None else KEPT - set(METRICS)

        def op() -> Op[None]:
            stored = replace(signal, checked_at=(yield from clock()))
            values = _named(SIGNAL, stored)
            values["metrics_ok"] = None if signal.metrics_ok is None else int(signal.metrics_ok)
            changes = ", ".join(
                f"{name} = coalesce(excluded.{name}, deployment_batch_signals.{name})"
                if name in kept
                else f"{name} = excluded.{name}"
                for name in SIGNAL.split(", ")[1:]
            )
            yield from sql(
                f"INSERT INTO deployment_batch_signals ({SIGNAL}) VALUES (:{SIGNAL.replace(', ', ', :')})"
                f" ON CONFLICT (route_id) DO UPDATE SET {changes}",
                **values,
            )

        await self._db.write(op)

    async def signals(self) -> tuple[SignalRow, ...]:
        rows = await query(self._db, f"SELECT {SIGNAL} FROM deployment_batch_signals ORDER BY route_id")
        return tuple(_signal(row) for row in rows)

    async def stalled(self, window_us: int) -> tuple[BatchRow, ...]:
        def op() -> Op[tuple[BatchRow, ...]]:
            limit = (yield from clock()) - window_us
            rows = yield from sql(
                f"SELECT {BATCH} FROM batches WHERE completed_at IS NULL"
                " AND coalesce(last_progress_at, in_progress_at, created_at) <= :limit"
                " AND coalesce(last_waited_at, 0) <= :limit ORDER BY created_at, id",
                limit=limit,
            )
            return tuple(BatchRow(*row) for row in rows)

        return await self._db.read(op)

    async def audit(self, row: AuditRow) -> None:
        await self._db.write(lambda: add_audit(row))

    async def audit_log(
        self, limit: int, before_seq: int | None = None, *, action: str | None = None, subject: str | None = None
    ) -> tuple[AuditRow, ...]:
        rows = await query(
            self._db,
            f"SELECT {AUDIT} FROM audit_log WHERE (CAST(:before AS BIGINT) IS NULL OR seq < :before)"
            " AND (CAST(:action AS TEXT) IS NULL OR action = :action)"
            " AND (CAST(:subject AS TEXT) IS NULL OR subject = :subject)"
            " ORDER BY seq DESC LIMIT CAST(:limit AS BIGINT)",
            before=before_seq,
            action=action,
            subject=subject,
            limit=limit,
        )
        return tuple(AuditRow(*row) for row in rows)


def _named(columns: str, row: Any) -> dict[str, Any]:
    """Return a row's values by column."""
    return dict(zip(columns.split(", "), astuple(row), strict=True))


def _wait(row: Row) -> WaitRow:
    wait = WaitRow(*row)
    return replace(wait, ready=bool(wait.ready))


def _signal(row: Row) -> SignalRow:
    signal = SignalRow(*row)
    return signal if signal.metrics_ok is None else replace(signal, metrics_ok=bool(signal.metrics_ok))
