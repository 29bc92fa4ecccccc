"""Incidents, and the jobs that one process of an installation does."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Final

from frontend.batches.store.route_rows import IncidentEvent, IncidentRow
from frontend.batches.store.transaction import Database, Op, clock, columns_of, execute, insert_of, query, sql
from frontend.batches.store.watch_protocol import PRUNE_LIMIT

INCIDENT: Final = columns_of(IncidentRow)
UNTOLD: Final = "opened_delivered_at IS NULL OR (resolved_at IS NOT NULL AND resolved_delivered_at IS NULL)"

TAKE_DUTY: Final = (
    "INSERT INTO gateway_duties (name, process_id, lease_until) VALUES (:name, :process, :until)"
    " ON CONFLICT (name) DO UPDATE SET process_id = excluded.process_id, lease_until = excluded.lease_until"
    " WHERE gateway_duties.process_id = excluded.process_id OR gateway_duties.lease_until <= :now"
    # A lease longer than it can be was given before the clock stepped back. Twice as long, since a process that waited
    # here for another's row lock had read the clock before that one.
    " OR gateway_duties.lease_until > :beyond RETURNING name"
)


class AlertOps:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def hold_duty(self, name: str, process_id: str, lease_us: int) -> bool:
        def look() -> Op[bool | None]:
            """Answer without writing; None = only a write can say."""
            now = yield from clock()
            rows = yield from sql("SELECT process_id, lease_until FROM gateway_duties WHERE name = :name", name=name)
            if not rows or not now < rows[0][1] <= now + lease_us:
                return None
            if rows[0][0] != process_id:
                return False
            return True if rows[0][1] > now + lease_us // 2 else None

        def take() -> Op[bool]:
            now = yield from clock()
            until, beyond = now + lease_us, now + 2 * lease_us
            rows = yield from sql(TAKE_DUTY, name=name, process=process_id, now=now, until=until, beyond=beyond)
            return bool(rows)

        known = await self._db.read(look)
        return known if known is not None else await self._db.write(take)

    async def release_duties(self, process_id: str) -> None:
        await execute(self._db, "DELETE FROM gateway_duties WHERE process_id = :process", process=process_id)

    async def open_incident(self, incident: IncidentRow) -> bool:
        def op() -> Op[bool]:
            stored = replace(
                incident,
                opened_at=(yield from clock()),
                resolved_at=None,
                opened_delivered_at=None,
                resolved_delivered_at=None,
            )
            names = INCIDENT.split(", ")
            rows = yield from sql(
                insert_of("batch_incidents", names)
                + " ON CONFLICT (rule, subject) WHERE resolved_at IS NULL DO NOTHING RETURNING id",
                **dict(zip(names, astuple(stored), strict=True)),
            )
            return bool(rows)

        return await self._db.write(op)

    async def resolve(self, rule: str, subject: str, details: str | None = None) -> bool:
        def op() -> Op[bool]:
            now = yield from clock()
            rows = yield from sql(
                "UPDATE batch_incidents SET resolved_at = :now, details = coalesce(CAST(:details AS TEXT), details)"
                " WHERE rule = :rule AND subject = :subject AND resolved_at IS NULL RETURNING id",
                now=now,
                details=details,
                rule=rule,
                subject=subject,
            )
            return bool(rows)

        return await self._db.write(op)

    async def open_incidents(self) -> tuple[IncidentRow, ...]:
        rows = await query(
            self._db, f"SELECT {INCIDENT} FROM batch_incidents WHERE resolved_at IS NULL ORDER BY opened_at, id"
        )
        return tuple(IncidentRow(*row) for row in rows)

    async def incidents(self, limit: int, *, offset: int = 0, resolved: bool = False) -> tuple[IncidentRow, ...]:
        which = " WHERE resolved_at IS NOT NULL" if resolved else ""
        order = "resolved_at DESC" if resolved else "opened_at DESC"
        rows = await query(
            self._db,
            f"SELECT {INCIDENT} FROM batch_incidents{which} ORDER BY {order}, id DESC"
            " LIMIT CAST(:limit AS BIGINT) OFFSET CAST(:offset AS BIGINT)",
            limit=limit,
            offset=offset,
        )
        return tuple(IncidentRow(*row) for row in rows)

    async def undelivered(self, limit: int) -> tuple[tuple[IncidentRow, IncidentEvent], ...]:
        rows = await query(
            self._db,
            f"SELECT {INCIDENT} FROM batch_incidents WHERE {UNTOLD} ORDER BY opened_at, id"
            " LIMIT CAST(:limit AS BIGINT)",
            limit=limit,
        )
        untold: list[tuple[IncidentRow, IncidentEvent]] = []
        for incident in (IncidentRow(*row) for row in rows):
            if incident.opened_delivered_at is None:
                untold.append((incident, "opened"))
            if incident.resolved_at is not None and incident.resolved_delivered_at is None:
                untold.append((incident, "resolved"))
        return tuple(untold[:limit])

    async def mark_delivered(self, incident_id: str, event: IncidentEvent) -> None:
        column = {"opened": "opened_delivered_at", "resolved": "resolved_delivered_at"}[event]

        def op() -> Op[None]:
            now = yield from clock()
            yield from sql(
                f"UPDATE batch_incidents SET {column} = coalesce({column}, :now) WHERE id = :id",
                now=now,
                id=incident_id,
            )

        await self._db.write(op)

    async def prune_incidents(self, keep_us: int) -> int:
        def op() -> Op[int]:
            oldest = (yield from clock()) - keep_us
            rows = yield from sql(
                "DELETE FROM batch_incidents WHERE id IN (SELECT id FROM batch_incidents WHERE opened_at < :oldest"
                f" AND resolved_at < :oldest ORDER BY opened_at, id LIMIT {PRUNE_LIMIT}) RETURNING 1",
                oldest=oldest,
            )
            return len(rows)

        return await self._db.write(op)
