"""What happened on a route: gate edges and minutes, kept for some days."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Final

from frontend.batches.store.route_rows import EdgeRow, MinuteRow
from frontend.batches.store.transaction import Bulk, ColumnType, Database, Op, clock, columns_of, query, sql
from frontend.batches.store.watch_protocol import EDGES_LIMIT, EXPLAIN_KEEP_US, MINUTE_US, PRUNE_LIMIT

HOURS: Final = 24
EDGE: Final = columns_of(EdgeRow)
MINUTE: Final = columns_of(MinuteRow)
TEXT: Final = frozenset({"route_id", "process_id", "reason", "metrics_error", "why"})
SECONDS: Final = frozenset({"line_s_sum", "line_s_sq_sum"})

ADD_EDGES: Final = (
    f"INSERT INTO batch_route_edges ({EDGE}) SELECT d.{EDGE.replace(', ', ', d.')} FROM {{rows}} WHERE true"
)


def _merged(name: str) -> str:
    """Return how an existing minute's column takes a new value in."""
    old, new = f"batch_route_minutes.{name}", f"excluded.{name}"
    if name == "cap":
        return f"{name} = {new}"
    if name.endswith("_max"):
        return f"{name} = CASE WHEN {new} > {old} THEN {new} ELSE {old} END"
    return f"{name} = {old} + {new}"


ADD_MINUTES: Final = (
    f"INSERT INTO batch_route_minutes ({MINUTE}) SELECT d.{MINUTE.replace(', ', ', d.')} FROM {{rows}} WHERE true"
    " ON CONFLICT (route_id, minute) DO UPDATE SET " + ", ".join(_merged(name) for name in MINUTE.split(", ")[2:])
)


class ExplainOps:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def add_edges(self, rows: Sequence[EdgeRow]) -> None:
        if not rows:
            return

        def op() -> Op[None]:
            now = yield from clock()
            yield _bulk(ADD_EDGES, EDGE, [(row.route_id, row.at or now, *astuple(row)[2:]) for row in rows])

        await self._db.write(op)

    async def edges(self, route_id: str, since_us: int, until_us: int, limit: int = EDGES_LIMIT) -> tuple[EdgeRow, ...]:
        def op() -> Op[tuple[EdgeRow, ...]]:
            newest_first = "ORDER BY at DESC, seq DESC LIMIT CAST(:limit AS BIGINT)"
            rows = yield from sql(
                f"SELECT {EDGE} FROM batch_route_edges WHERE route_id = :route AND at >= :since AND at < :until"
                f" {newest_first}",
                route=route_id,
                since=since_us,
                until=until_us,
                limit=limit,
            )
            if len(rows) < limit:
                rows = rows + (
                    yield from sql(
                        f"SELECT {EDGE} FROM batch_route_edges WHERE route_id = :route AND at < :since {newest_first}",
                        route=route_id,
                        since=since_us,
                        limit=1,
                    )
                )
            return tuple(EdgeRow(*row) for row in reversed(rows))

        return await self._db.read(op)

    async def add_minutes(self, rows: Sequence[MinuteRow]) -> None:
        # In one order, so that two processes never wait in a circle; one row per statement and minute (PostgreSQL).
        by_place: dict[tuple[str, int], list[MinuteRow]] = {}
        for row in rows:
            by_place.setdefault((row.route_id, row.minute), []).append(row)

        def op() -> Op[None]:
            places = sorted(by_place)
            for turn in range(max(map(len, by_place.values()), default=0)):
                now_added = [by_place[place][turn] for place in places if turn < len(by_place[place])]
                yield _bulk(ADD_MINUTES, MINUTE, [astuple(row) for row in now_added])

        if rows:
            await self._db.write(op)

    async def minutes(self, route_id: str, since_us: int, until_us: int) -> tuple[MinuteRow, ...]:
        rows = await query(
            self._db,
            f"SELECT {MINUTE} FROM batch_route_minutes WHERE route_id = :route AND minute >= :first AND minute < :end"
            " ORDER BY minute",
            route=route_id,
            first=_minute_from(since_us),
            end=_minute_from(until_us),
        )
        return tuple(MinuteRow(*row) for row in rows)

    async def open_share(self, route_id: str, since_us: int) -> tuple[float | None, ...]:
        rows = await query(
            self._db,
            "SELECT (minute / 60) % 24 AS hour, CAST(sum(open_us) AS BIGINT), CAST(sum(observed_us) AS BIGINT)"
            " FROM batch_route_minutes WHERE route_id = :route AND minute >= :first GROUP BY (minute / 60) % 24",
            route=route_id,
            first=_minute_from(since_us),
        )
        shares = {int(row[0]): row[1] / row[2] for row in rows if row[2]}
        return tuple(shares.get(hour) for hour in range(HOURS))

    async def prune(self, keep_us: int = EXPLAIN_KEEP_US) -> int:
        def op() -> Op[int]:
            oldest = (yield from clock()) - keep_us
            edges = yield from sql(
                "DELETE FROM batch_route_edges WHERE seq IN (SELECT seq FROM batch_route_edges WHERE at < :oldest"
                f" ORDER BY at LIMIT {PRUNE_LIMIT}) RETURNING 1",
                oldest=oldest,
            )
            minutes = yield from sql(
                "DELETE FROM batch_route_minutes WHERE (route_id, minute) IN (SELECT route_id, minute"
                f" FROM batch_route_minutes WHERE minute < :oldest ORDER BY minute LIMIT {PRUNE_LIMIT}) RETURNING 1",
                oldest=oldest // MINUTE_US,
            )
            return len(edges) + len(minutes)

        return await self._db.write(op)


def _minute_from(at_us: int) -> int:
    """Return the first minute that begins at or after a moment."""
    return -(-at_us // MINUTE_US)


def _bulk(text: str, names: str, rows: Sequence[tuple[object, ...]]) -> Bulk:
    columns = zip(names.split(", "), zip(*rows, strict=True), strict=True)
    return Bulk(text, {name: (_kind(name), list(values)) for name, values in columns})


def _kind(name: str) -> ColumnType:
    return "text" if name in TEXT else "float8" if name in SECONDS else "bigint"
