"""Gateway processes and their live requests."""

from __future__ import annotations

from typing import Final

from frontend.batches.store.protocol import INFLIGHT_FRESH_US
from frontend.batches.store.transaction import Bulk, Database, Op, clock, execute, sql

FORGET_US: Final = 3600 * 1_000_000
"""A process silent for an hour is removed by the next heartbeat of another."""

KEEP_LIVE: Final = (
    "INSERT INTO route_inflight (route_id, process_id, live, updated_at)"
    " SELECT d.route_id, :process, d.live, CAST(:now AS BIGINT) FROM {rows} WHERE true"
    " ON CONFLICT (route_id, process_id) DO UPDATE SET live = excluded.live, updated_at = excluded.updated_at"
)


class ProcessOps:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def heartbeat(self, process_id: str, live: dict[str, int]) -> None:
        def op() -> Op[None]:
            now = yield from clock()
            yield from sql(
                "INSERT INTO gateway_processes (process_id, started_at, heartbeat_at) VALUES (:process, :now, :now)"
                " ON CONFLICT (process_id) DO UPDATE SET heartbeat_at = excluded.heartbeat_at",
                process=process_id,
                now=now,
            )
            yield from sql(
                "DELETE FROM route_inflight WHERE process_id = :process AND route_id NOT IN :routes[text]",
                process=process_id,
                routes=list(live),
            )
            if live:
                yield Bulk(
                    KEEP_LIVE,
                    {"route_id": ("text", list(live)), "live": ("bigint", list(live.values()))},
                    {"process": process_id, "now": now},
                )
            yield from sql("DELETE FROM gateway_processes WHERE heartbeat_at <= :oldest", oldest=now - FORGET_US)

        await self._db.write(op)

    async def live_elsewhere(self, process_id: str) -> dict[str, int]:
        def op() -> Op[dict[str, int]]:
            now = yield from clock()
            rows = yield from sql(
                "SELECT route_id, CAST(sum(live) AS BIGINT) FROM route_inflight WHERE process_id <> :process"
                " AND updated_at > :oldest AND updated_at <= :newest GROUP BY route_id",
                process=process_id,
                oldest=now - INFLIGHT_FRESH_US,
                newest=now + INFLIGHT_FRESH_US,
            )
            return {row[0]: int(row[1]) for row in rows if row[1]}

        return await self._db.read(op)

    async def leave(self, process_id: str) -> None:
        await execute(self._db, "DELETE FROM gateway_processes WHERE process_id = :process", process=process_id)
