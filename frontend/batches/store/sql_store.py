"""Joins a database with the operations that the protocol promises."""

from __future__ import annotations

from typing import Literal, Protocol

from frontend.batches.store.alert_ops import AlertOps
from frontend.batches.store.batch_ops import BatchOps
from frontend.batches.store.explain_ops import ExplainOps
from frontend.batches.store.file_ops import FileOps
from frontend.batches.store.key_ops import KeyOps
from frontend.batches.store.process_ops import ProcessOps
from frontend.batches.store.runner_ops import RunnerOps
from frontend.batches.store.scheduling_ops import SchedulingOps
from frontend.batches.store.transaction import Database, clock, query
from frontend.batches.store.view_ops import ViewOps


class _Driver(Database, Protocol):
    @property
    def kind(self) -> Literal["sqlite", "postgresql"]: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class SqlStore:
    """The ``Store`` over one database."""

    def __init__(self, database: _Driver) -> None:
        self._database = database
        self.kind: Literal["sqlite", "postgresql"] = database.kind
        self.keys = KeyOps(database)
        self.files = FileOps(database)
        self.batches = BatchOps(database)
        self.runner = RunnerOps(database)
        self.scheduling = SchedulingOps(database)
        self.processes = ProcessOps(database)
        self.explain = ExplainOps(database)
        self.alerts = AlertOps(database)
        self.views = ViewOps(database)

    async def start(self) -> None:
        await self._database.start()

    async def close(self) -> None:
        await self._database.close()

    async def now_us(self) -> int:
        return await self._database.read(clock)

    async def ping(self) -> None:
        await query(self._database, "SELECT 1")
