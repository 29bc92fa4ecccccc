"""The store in one SQLite file: all writes of the process on one thread, reads on others.

Theory of operation
    Rule W1: SQLite lets one connection write at a time, and its own waiting is unfair. So a process queues its writes
    in one line: the writer thread takes everything that waits, runs it inside one ``BEGIN IMMEDIATE`` with a savepoint
    per operation, commits once, and only then answers. An operation that raises rolls back to its savepoint. Readers
    use WAL snapshots and never wait for the writer.

    Several processes on one file are correct (``busy_timeout``) but not fairly served; the runner lease keeps all but
    one of them from running batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import queue
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from engines.errors import AlreadyExists, ServingError
from frontend.batches.store.errors import RuleBroken, SchemaMismatch, StoreUnavailable
from frontend.batches.store.migrate import migrate_sqlite
from frontend.batches.store.protocol import Clock
from frontend.batches.store.sql_store import SqlStore
from frontend.batches.store.transaction import Bulk, MakeOp, Now, Row, Sql, T

BUSY_TIMEOUT_S: Final = 10.0
READERS: Final = 2
GROUP_LIMIT: Final = 256
"""Operations in one commit: bounds how long the first of them waits for the last."""
OLDEST_SQLITE: Final = (3, 38, 0)
"""STRICT tables and RETURNING; below, the schema does not load."""

_LIST = re.compile(r"IN :(\w+)\[(?:text|bigint)\]")
_ROWS = re.compile(r"\s+FROM \{rows\}|, \{rows\}")
_COLUMN = re.compile(r"\bd\.(\w+)")


def sqlite_store(path: Path, *, clock: Clock | None = None) -> SqlStore:
    """Return a store over the file, made and migrated by ``start``."""
    return SqlStore(SqliteDatabase(path, clock or wall_clock_us))


def wall_clock_us() -> int:
    return time.time_ns() // 1000


@functools.lru_cache(maxsize=512)
def spell(text: str) -> str:
    """Return a portable statement as SQLite reads it."""
    text = _LIST.sub(r"IN (SELECT value FROM json_each(:\1))", text)
    return _COLUMN.sub(r":\1", _ROWS.sub("", text)) if "{rows}" in text else text


@dataclass(slots=True)
class _Job:
    """A queued operation and where its answer goes; ``answer`` runs on the caller's loop."""

    make: MakeOp[Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    value: Any = None
    error: BaseException | None = None


class SqliteDatabase:
    """One SQLite file; see the module's theory of operation."""

    kind: Literal["sqlite"] = "sqlite"
    one_writer = True

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._open_readers: list[sqlite3.Connection] = []
        self._closing = False
        self._runner_lock: int | None = None

    async def start(self) -> None:
        """Open the file (made if absent, readable by its owner only), migrate it, start the threads."""
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            needed = ".".join(map(str, OLDEST_SQLITE))
            raise SchemaMismatch(f"this Python brings SQLite {sqlite3.sqlite_version}; the store needs {needed}")
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer = threading.Thread(
            target=self._write_loop, args=(asyncio.get_running_loop(), opened), name="store-writer", daemon=True
        )
        self._writer.start()
        try:
            await opened
        except BaseException:
            # Also where nobody waits any more, as after an interrupt: it may have opened the file and wait for work.
            self._jobs.put(None)
            self._writer.join()
            self._writer = None
            # It may have ended before it got to that: the next start must not meet it.
            self._jobs = queue.SimpleQueue()
            raise
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")

    async def close(self) -> None:
        """Finish what is queued, then close every connection; harmless when repeated or never started."""
        self._closing = True
        if self._writer is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._writer.join)
            self._writer = None
        if self._readers is not None:
            await asyncio.to_thread(self._readers.shutdown)
            self._readers = None
        while self._open_readers:
            self._open_readers.pop().close()
        self.drop_runner_lock()

    def hold_runner_lock(self) -> bool:
        """Take the host's lock for running batches, or keep it; the kernel frees it when the process dies."""
        if self._runner_lock is None:
            descriptor = os.open(f"{self.path}.runner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._runner_lock = descriptor
        return True

    def drop_runner_lock(self) -> None:
        if self._runner_lock is not None:
            os.close(self._runner_lock)
            self._runner_lock = None

    async def write(self, make: MakeOp[T]) -> T:
        if self._closing or self._writer is None:
            raise StoreUnavailable("the store is closed")
        loop = asyncio.get_running_loop()
        job = _Job(make, loop, loop.create_future())
        self._jobs.put(job)
        value: T = await job.future
        return value

    async def read(self, make: MakeOp[T]) -> T:
        if self._readers is None:
            raise StoreUnavailable("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, make)

    # On the reader threads

    def _read(self, make: MakeOp[T]) -> T:
        try:
            connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
            if connection is None:
                connection = self._local.connection = connect(self.path)
                self._open_readers.append(connection)
                connection.execute("PRAGMA query_only = 1")
            connection.execute("BEGIN")
            try:
                return run(connection, make, self._clock)
            finally:
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise foreseen(error) from error

    # On the writer thread

    def _write_loop(self, loop: asyncio.AbstractEventLoop, opened: asyncio.Future[None]) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            connection = connect(self.path)
        except (OSError, sqlite3.Error) as error:
            refused = StoreUnavailable(f"{self.path}: {error}")
            _tell(loop, opened, refused)
            return
        with contextlib.closing(connection):
            try:
                connection.execute("PRAGMA journal_mode = WAL").fetchone()
                migrate_sqlite(connection, self._clock)
            except ServingError as error:
                _tell(loop, opened, error)
                return
            except sqlite3.Error as error:
                _tell(loop, opened, StoreUnavailable(f"{self.path}: {error}"))
                return
            _tell(loop, opened, None)
            while (first := self._jobs.get()) is not None:
                group, ended = self._gather(first)
                self._commit(connection, group)
                _answer(group)
                if ended:
                    break

    def _gather(self, first: _Job) -> tuple[list[_Job], bool]:
        """Return everything that waits, and whether the end of the queue was among it."""
        group = [first]
        while len(group) < GROUP_LIMIT:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return group, False
            if job is None:
                return group, True
            group.append(job)
        return group, False

    def _commit(self, connection: sqlite3.Connection, group: list[_Job]) -> None:
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job in group:
                if len(group) == 1:
                    job.value = run(connection, job.make, self._clock)
                else:
                    self._run_within(connection, job)
            connection.execute("COMMIT")
        except BaseException as error:
            reason = foreseen(error) if isinstance(error, sqlite3.Error) else error
            for job in group:
                job.error = job.error or reason
            # A failed BEGIN or COMMIT has rolled back by itself or not at all: either way nothing may stay open.
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _run_within(self, connection: sqlite3.Connection, job: _Job) -> None:
        """Run one of several operations; its failure alone does not undo the others."""
        connection.execute("SAVEPOINT operation")
        try:
            job.value = run(connection, job.make, self._clock)
        except Exception as error:
            if not connection.in_transaction:
                raise
            job.error = foreseen(error) if isinstance(error, sqlite3.Error) else error
            connection.execute("ROLLBACK TO operation")
        connection.execute("RELEASE operation")


def _tell(loop: asyncio.AbstractEventLoop, opened: asyncio.Future[None], error: ServingError | None) -> None:
    """Say whether the file could be opened, to whoever still waits for it."""

    def tell() -> None:
        if opened.done():
            return
        if error is None:
            opened.set_result(None)
        else:
            opened.set_exception(error)

    # RuntimeError: the loop is closed.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(tell)


def _answer(group: list[_Job]) -> None:
    """Wake all callers of a group, with one call per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in group:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, jobs in by_loop.items():
        # RuntimeError: the loop of a caller that went away is closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, jobs)


def _resolve(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.value)


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection in autocommit mode: transactions are only the ones we begin."""
    connection = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    connection.execute("PRAGMA foreign_keys = ON")
    # FULL: a claim that a power cut takes back would be sent a second time.
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def run(connection: sqlite3.Connection, make: MakeOp[T], clock: Callable[[], int]) -> T:
    """Drive an operation to its end inside the transaction that is open."""
    operation = make()
    try:
        ask = next(operation)
        while True:
            try:
                rows: list[Row]
                if isinstance(ask, Now):
                    rows = [(clock(),)]
                elif isinstance(ask, Sql):
                    rows = connection.execute(spell(ask.text), _values(ask.values)).fetchall()
                else:
                    rows = _run_bulk(connection, ask)
            except sqlite3.IntegrityError as error:
                ask = operation.throw(foreseen(error))
            else:
                ask = operation.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        operation.close()


def _run_bulk(connection: sqlite3.Connection, ask: Bulk) -> list[Row]:
    text = spell(ask.text)
    names = list(ask.columns)
    same = _values(ask.values)
    rows: list[Row] = []
    for values in zip(*(column for _, column in ask.columns.values()), strict=True):
        rows += connection.execute(text, {**same, **dict(zip(names, values, strict=True))})
    return rows


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in values.items()}


def foreseen(error: sqlite3.Error) -> ServingError:
    """Return our own class for a failure of the database."""
    if isinstance(error, sqlite3.IntegrityError):
        if error.sqlite_errorname in ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY"):
            return AlreadyExists(str(error))
        return RuleBroken(str(error))
    return StoreUnavailable(f"SQLite: {error}")
