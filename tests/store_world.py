"""A database with movable time, and short ways to fill it: what every test of the store stands on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from frontend.batches.store.postgres import PostgresDatabase
from frontend.batches.store.rows import (
    SECOND_US,
    BatchRow,
    ClaimBatch,
    ClaimGroup,
    ClaimLine,
    ClaimResult,
    FileRow,
    FinishLine,
    NewBatch,
    NewFile,
    WorkspaceRow,
    WrittenFile,
)
from frontend.batches.store.sql_store import SqlStore
from frontend.batches.store.sqlite import SqliteDatabase, wall_clock_us

T = TypeVar("T")
SHA = "0" * 64
LEASE_US = 60 * SECOND_US


class World:
    """One database, seen through any number of stores (each stands for a process), with one movable clock."""

    def __init__(self, kind: Literal["sqlite", "postgresql"], place: str) -> None:
        self.kind = kind
        self.place = place
        self.offset_us = 0
        self._runner = asyncio.Runner()
        self._databases: list[SqliteDatabase | PostgresDatabase] = []
        self._numbers = itertools.count()
        self.store = self.open()

    def open(self) -> SqlStore:
        """Return a further started store on the same database."""
        database: SqliteDatabase | PostgresDatabase
        if self.kind == "sqlite":
            database = SqliteDatabase(Path(self.place), lambda: wall_clock_us() + self.offset_us)
        else:
            database = PostgresDatabase(self.place, clock_offset_us=self.offset_us)
            if not self._databases:
                self.run(migrate(self.place))
        store = SqlStore(database)
        self.run(store.start())
        self._databases.append(database)
        return store

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def advance(self, seconds: float) -> None:
        """Move every store's clock, forwards or backwards."""
        self.offset_us += round(seconds * SECOND_US)
        for database in self._databases:
            if isinstance(database, PostgresDatabase):
                database.clock_offset_us = self.offset_us

    def sql(self, text: str, **values: Any) -> list[Any]:
        """Run a statement past all operations, as a mistaken program or person would."""
        from frontend.batches.store.transaction import execute

        return [tuple(row) for row in self.run(execute(self._databases[0], text, **values))]

    def close(self) -> None:
        for database in self._databases:
            self.run(database.close())
        self._runner.close()

    # Filling

    def number(self) -> int:
        return next(self._numbers)

    def workspace(self, name: str | None = None) -> WorkspaceRow:
        name = name or f"w{self.number()}"
        return self.run(self.store.keys.create_workspace(f"ws_{name}", name))

    def file(self, workspace_id: str, size: int = 10, **changes: Any) -> FileRow:
        new = {
            "id": f"file-{self.number():032x}", "workspace_id": workspace_id, "purpose": "user_file",
            "api_purpose": "batch", "filename": "a.jsonl", "content_type": "application/jsonl", "storage_path": "x",
        } | changes  # fmt: skip
        self.run(self.store.files.insert(NewFile(**new)))
        return self.run(self.store.files.commit(WrittenFile(new["id"], size, SHA)))

    def new_batch(self, workspace_id: str, lines: int, batch_id: str | None = None, **changes: Any) -> NewBatch:
        """Return a valid create whose files exist."""
        batch_id = batch_id or f"batch_{self.number():032x}"
        work_id = f"file-work-{batch_id}"
        self.run(
            self.store.files.insert(
                NewFile(work_id, workspace_id, "batch_input", None, "work", "application/jsonl", "work")
            )
        )
        new = {
            "id": batch_id, "workspace_id": workspace_id, "api_key_id": "key", "endpoint": "/v1/chat/completions",
            "public_model": "m", "work_file": WrittenFile(work_id, 10, SHA), "completion_window_hours": 24,
            "retry_limit": 0, "request_total": lines,
        } | changes  # fmt: skip
        if "input_file_id" not in new:
            new["input_file_id"] = self.file(workspace_id).id
        return NewBatch(**new)

    def batch(self, workspace_id: str, lines: int, batch_id: str | None = None, **changes: Any) -> BatchRow:
        """Create a batch."""
        new = self.new_batch(workspace_id, lines, batch_id, **changes)
        return self.run(self.store.batches.create(new, active_limit=10_000))[0]

    def running_batch(
        self, workspace_id: str, lines: int, runner: str = "r1", batch_id: str | None = None, **changes: Any
    ) -> BatchRow:
        """Create a batch that a runner has begun."""
        batch = self.batch(workspace_id, lines, batch_id, **changes)
        taken = self.run(self.store.runner.take(runner, LEASE_US, 1000))
        assert batch.id in {one.batch.id for one in taken}
        assert self.run(self.store.runner.begin(runner, batch.id))
        return batch

    # Lines

    def claim(
        self,
        batch: BatchRow,
        lines: Sequence[int],
        *,
        cap: int = 100,
        runner: str = "r1",
        route: str = "R",
        waiting: int | None = None,
        attempt: int = 1,
        store: SqlStore | None = None,
    ) -> list[ClaimResult]:
        """Ask for lines, in a group of their own; the execution of line n at attempt a is ``BATCH/n/a``."""
        group = ClaimGroup(
            route,
            cap,
            (
                ClaimBatch(
                    batch.id,
                    batch.workspace_id,
                    waiting if waiting is not None else len(lines),
                    tuple(ClaimLine(line, execution(batch, line, attempt), attempt) for line in lines),
                ),
            ),
        )
        result = self.run((store or self.store).runner.turn(runner, [], [group]))
        return list(result.claimed[0][0])

    def finish(
        self, batch: BatchRow, line: int, *, ok: bool = True, attempt: int = 1, record: bytes | None = b"{}",
        runner: str = "r1", store: SqlStore | None = None,
    ) -> bool:  # fmt: skip
        """End one line."""
        end = FinishLine(
            batch.id, line, execution(batch, line, attempt), "succeeded" if ok else "failed",
            200 if ok else 502, None if ok else "upstream_unavailable", record,
        )  # fmt: skip
        return self.run((store or self.store).runner.turn(runner, [end], [])).finished[0]

    def states(self, batch: BatchRow) -> dict[int, str]:
        return {line.line_no: line.state for line in self.run(self.store.runner.lines(batch.id, -1, 50_000))}

    def get(self, batch: BatchRow) -> BatchRow:
        found = self.run(self.store.batches.get(None, batch.id))
        assert found is not None
        return found


def execution(batch: BatchRow, line: int, attempt: int = 1) -> str:
    return f"{batch.id}/{line}/{attempt}"


async def migrate(url: str) -> list[int]:
    database = PostgresDatabase(url)
    await database.open()
    try:
        return [one.version for one in await database.migrate()]
    finally:
        await database.close()


@contextmanager
def world_of(kind: Literal["sqlite", "postgresql"], place: str) -> Iterator[World]:
    world = World(kind, place)
    try:
        yield world
    finally:
        world.close()
