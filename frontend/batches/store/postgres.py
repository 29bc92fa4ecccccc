"""The store in PostgreSQL 15 or newer, for any number of processes on any number of machines.

Theory of operation
    Rule W2: claims of a route are serialised by a transaction advisory lock, taken first, under READ COMMITTED, so that
    every statement after it sees what the previous holder committed. Time is the database's ``clock_timestamp()``, read
    after the lock: ``now()`` would be the moment before the wait, and machines disagree.

    A connection that breaks before COMMIT was sent has changed nothing: the operation is made again on another one. If
    it breaks during COMMIT nobody knows; that alone is told to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal

import asyncpg

from engines.errors import AlreadyExists, ServingError
from frontend.batches.store.errors import RuleBroken, SchemaMismatch, StoreUnavailable
from frontend.batches.store.migrate import (
    MIGRATION_TABLE,
    READ_APPLIED,
    Migration,
    Part,
    check_current,
    migrations,
    missing_parts,
)
from frontend.batches.store.sql_store import SqlStore
from frontend.batches.store.transaction import Ask, Bulk, MakeOp, Now, Row, Sql, T

Connection = Any  # the driver ships no types

POOL_CONNECTIONS: Final = 8
CONNECT_TIMEOUT_S: Final = 5.0
COMMAND_TIMEOUT_S: Final = 30.0
ACQUIRE_TIMEOUT_S: Final = 10.0
MAX_TRIES: Final = 5
"""Of one operation, after deadlocks or connections that broke before COMMIT."""
RETRY_PAUSE_S: Final = 0.02
OLDEST_SERVER: Final = 150000

NOW_SQL: Final = "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)"
# MATERIALIZED: the lock is waited for before the outer query reads the clock.
LOCK_SQL: Final = (
    "WITH held AS MATERIALIZED (SELECT pg_advisory_xact_lock(hashtextextended($1, 0)))"
    " SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT) FROM held"
)
MIGRATION_LOCK: Final = "ringserve migrate"

IDLE_IN_TRANSACTION_MS: Final = "5000"

_VALUE = re.compile(r"(NOT )?IN :(\w+)\[(text|bigint)\]|(?<![:\w]):(\w+)")
_BROKEN = (
    asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError, OSError,
    # What asyncpg says when a connection that broke in the middle of a statement is given back to the pool.
    asyncpg.InternalClientError,
)  # fmt: skip
_BEATEN = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)


def postgres_store(url: str, password_env: str = "", *, clock_offset_us: int = 0) -> SqlStore:
    """Return a store over the database at a ``postgresql://`` URL; ``password_env`` names the password's variable."""
    return SqlStore(PostgresDatabase(url, password_env, clock_offset_us))


@functools.lru_cache(maxsize=512)
def spell(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a portable statement as PostgreSQL reads it, and the names of ``$1, $2, ...``."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        name = match[2] or match[4]
        if name not in names:
            names.append(name)
        place = f"${names.index(name) + 1}"
        if match[3] is None:
            return place
        return f"<> ALL({place}::{match[3]}[])" if match[1] else f"= ANY({place}::{match[3]}[])"

    return _VALUE.sub(number, text), tuple(names)


@functools.lru_cache(maxsize=512)
def spell_bulk(text: str, columns: tuple[tuple[str, str], ...]) -> tuple[str, tuple[str, ...]]:
    """Return a bulk statement with its rows as parallel arrays."""
    arrays = ", ".join(f":{name}::{kind}[]" for name, kind in columns)
    names = ", ".join(name for name, _ in columns)
    return spell(text.replace("{rows}", f"unnest({arrays}) AS d ({names})"))


class PostgresDatabase:
    """A pool of connections; see the module's theory of operation."""

    kind: Literal["postgresql"] = "postgresql"
    one_writer = False

    def __init__(self, url: str, password_env: str = "", clock_offset_us: int = 0) -> None:
        self._url = url
        self._password_env = password_env
        self.clock_offset_us = clock_offset_us
        self._pool: Any = None

    async def start(self) -> None:
        """Connect and check version, isolation and schema. Raises: StoreUnavailable, SchemaMismatch."""
        await self.open()
        try:
            async with self._connection() as connection:
                await _check_server(connection)
                check_current(await _applied(connection), migrations("postgresql"))
        except (*_BROKEN, TimeoutError, asyncpg.PostgresError) as error:
            # Between connecting and asking a server may go, or be too slow to answer.
            await self.close()
            raise StoreUnavailable(f"PostgreSQL: {error or type(error).__name__}") from error
        except BaseException:
            await self.close()
            raise

    async def open(self) -> None:
        """Connect without checks, as ``migrate`` needs it. Raises: StoreUnavailable."""
        try:
            self._pool = await asyncpg.create_pool(
                self._url,
                password=os.environ.get(self._password_env) if self._password_env else None,
                min_size=0,
                max_size=POOL_CONNECTIONS,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=COMMAND_TIMEOUT_S,
                server_settings={
                    "application_name": "ringserve",
                    # A process that is stopped or unreachable within a transaction must not keep its locks: nobody
                    # could take its batches over.
                    "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION_MS,
                },
            )
            async with self._connection():
                pass
        except (*_BROKEN, asyncpg.PostgresError, asyncpg.ClientConfigurationError, ValueError) as error:
            await self.close()
            raise StoreUnavailable(f"cannot connect to the PostgreSQL of gateway.store: {error}") from None

    async def close(self) -> None:
        """Close all connections; harmless when repeated or never started."""
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                await asyncio.wait_for(pool.close(), CONNECT_TIMEOUT_S)
            except (TimeoutError, *_BROKEN):
                pool.terminate()

    async def migrate(self, part: Part = "before") -> tuple[Migration, ...]:
        """Run the scripts that are missing, in one transaction; return what ran. Raises: SchemaMismatch."""
        async with self._connection() as connection:
            await _check_server(connection)
            async with connection.transaction(isolation="read_committed"):
                await connection.fetchval(LOCK_SQL, MIGRATION_LOCK)
                await connection.execute(MIGRATION_TABLE)
                rows = await connection.fetch(READ_APPLIED)
                applied = {(int(row[0]), str(row[1])) for row in rows}
                parts: tuple[Part, ...] = ("before",) if part == "before" else ("before", "after")
                todo = missing_parts(applied, migrations("postgresql"), parts)
                for migration in todo:
                    await connection.execute(migration.script)
                    now_us = await connection.fetchval(NOW_SQL)
                    await connection.execute(
                        "INSERT INTO schema_migrations VALUES ($1, $2, $3)", migration.version, migration.part, now_us
                    )
        return todo

    def hold_runner_lock(self) -> bool:
        """Any number of processes may run batches."""
        return True

    def drop_runner_lock(self) -> None: ...

    async def write(self, make: MakeOp[T]) -> T:
        return await self._carry_out(make, writes=True)

    async def read(self, make: MakeOp[T]) -> T:
        return await self._carry_out(make, writes=False)

    def _connection(self) -> AbstractAsyncContextManager[Connection]:
        if self._pool is None:
            raise StoreUnavailable("the store is closed")
        acquired: AbstractAsyncContextManager[Connection] = self._pool.acquire(timeout=ACQUIRE_TIMEOUT_S)
        return acquired

    async def _carry_out(self, make: MakeOp[T], *, writes: bool) -> T:
        for attempt in range(1, MAX_TRIES + 1):
            committing = False
            try:
                async with self._connection() as connection:
                    if not writes:
                        return await self._run(connection, make)
                    # Our own BEGIN and COMMIT: a failure of the last must be told apart from one before it.
                    await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
                    try:
                        result = await self._run(connection, make)
                    except BaseException:
                        # If this fails too, the pool drops the connection, and the first failure is the one to tell.
                        with contextlib.suppress(*_BROKEN, asyncpg.PostgresError):
                            await connection.execute("ROLLBACK")
                        raise
                    committing = True
                    await connection.execute("COMMIT")
                    return result
            except _BEATEN as error:
                if attempt == MAX_TRIES:
                    raise StoreUnavailable(f"PostgreSQL: {error}") from error
            except (*_BROKEN, TimeoutError) as error:
                if committing or attempt == MAX_TRIES or isinstance(error, TimeoutError):
                    raise StoreUnavailable(f"PostgreSQL: {error or type(error).__name__}") from error
            except asyncpg.PostgresError as error:
                raise foreseen(error) from error
            await asyncio.sleep(RETRY_PAUSE_S * attempt)
        raise AssertionError("the last try returns or raises")

    async def _run(self, connection: Connection, make: MakeOp[T]) -> T:
        operation = make()
        try:
            ask = next(operation)
            while True:
                try:
                    rows = await self._fetch(connection, ask)
                except asyncpg.IntegrityConstraintViolationError as error:
                    # The transaction is broken: the operation may translate the error, not go on.
                    operation.throw(foreseen(error))
                    raise
                ask = operation.send(rows)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            operation.close()

    async def _fetch(self, connection: Connection, ask: Ask) -> list[Row]:
        match ask:
            case Now(lock):
                statement = connection.fetchval(NOW_SQL) if lock is None else connection.fetchval(LOCK_SQL, lock)
                return [(int(await statement) + self.clock_offset_us,)]
            case Sql(text, values, lock):
                spelled, names = spell(f"{text} {lock}" if lock else text)
                return list(await connection.fetch(spelled, *_ordered(names, values)))
            case Bulk(text, columns, values):
                kinds = tuple((name, kind) for name, (kind, _) in columns.items())
                spelled, names = spell_bulk(text, kinds)
                arrays = {name: list(column) for name, (_, column) in columns.items()}
                return list(await connection.fetch(spelled, *_ordered(names, {**values, **arrays})))


def _ordered(names: tuple[str, ...], values: Mapping[str, Any]) -> list[Any]:
    return [values[name] for name in names]


async def _applied(connection: Connection) -> set[tuple[int, str]]:
    try:
        rows = await connection.fetch(READ_APPLIED)
    except asyncpg.UndefinedTableError:
        return set()
    return {(int(row[0]), str(row[1])) for row in rows}


async def _check_server(connection: Connection) -> None:
    version = int(await connection.fetchval("SHOW server_version_num"))
    if version < OLDEST_SERVER:
        raise SchemaMismatch(f"PostgreSQL {version // 10000} is too old; the store needs {OLDEST_SERVER // 10000}")
    isolation = await connection.fetchval("SHOW transaction_isolation")
    if isolation != "read committed":
        # A claim that waited for the route's lock would decide on what it saw before the wait.
        raise SchemaMismatch(
            f"default_transaction_isolation is {isolation!r} for this database or role;"
            " the store needs 'read committed'"
        )
    if await connection.fetchval("SHOW synchronous_commit") == "off":
        raise SchemaMismatch(
            "synchronous_commit is off for this database or role; the store needs it on:"
            " a claim that a crash takes back would be sent a second time"
        )
    encoding = await connection.fetchval("SHOW server_encoding")
    if encoding != "UTF8":
        raise SchemaMismatch(f"the database's encoding is {encoding}; the store needs UTF8")


def foreseen(error: asyncpg.PostgresError) -> ServingError:
    """Return our own class for a failure of the database; details may hold row values and are left out."""
    message = str(error.args[0]) if error.args else type(error).__name__
    if isinstance(error, asyncpg.UniqueViolationError):
        return AlreadyExists(message)
    if isinstance(error, (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError)):
        return RuleBroken(message)
    return StoreUnavailable(f"PostgreSQL: {message}")
