"""Transactions as generators: an operation yields statements and is sent their rows; a database carries it out.

Theory of operation
    Every operation of the store is written once. It knows no driver, no clock and no thread: it yields ``Sql``,
    ``Bulk`` or ``Now`` and returns its result. SQLite drives it on its writer thread, PostgreSQL on a pooled
    connection; both hold one transaction around it, so an operation that raises has changed nothing, and one that was
    beaten by a deadlock is simply made again.

    The statements are portable but for four marks that each database spells its own way:
        :name           a value
        IN :name[text]  a list of values (``text`` or ``bigint``)
        {rows} as d     in ``Bulk``: one row per position of its columns, as ``d.column``
        lock            a row lock clause that SQLite, with its single writer, leaves out
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")

Row = Sequence[Any]
ColumnType = Literal["text", "bigint", "float8", "bytea"]


@dataclass(frozen=True, slots=True)
class Sql:
    """One statement; answers its rows (``RETURNING`` for writes)."""

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)
    lock: str = ""


@dataclass(frozen=True, slots=True)
class Bulk:
    """One statement over many rows: ``... FROM {rows} WHERE ...`` with ``d.column``; answers all rows in order.

    ``columns`` maps a name to its type and its values; all have one length. ``values`` are the same for every row.
    """

    text: str
    columns: Mapping[str, tuple[ColumnType, Sequence[Any]]]
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Now:
    """The store's time, read after waiting for the named lock (held to the end of the transaction)."""

    lock: str | None = None


Ask = Sql | Bulk | Now
Op = Generator[Ask, list[Row], T]
MakeOp = Callable[[], Op[T]]


class Database(Protocol):
    """Carries operations out.

    ``one_writer``: all writes of this process are in one line, so that a combined operation costs no concurrency.
    """

    @property
    def one_writer(self) -> bool: ...

    def hold_runner_lock(self) -> bool:
        """Take or keep the host's lock for running batches; False while another process has it."""

    def drop_runner_lock(self) -> None: ...

    async def write(self, make: MakeOp[T]) -> T:
        """Run the operation in one transaction, again from its start after a deadlock."""

    async def read(self, make: MakeOp[T]) -> T:
        """Run an operation that only reads."""


def sql(text: str, /, lock: str = "", **values: Any) -> Op[list[Row]]:
    """Yield one statement."""
    return (yield Sql(text, values, lock))


def clock(lock: str | None = None) -> Op[int]:
    """Yield for the time in microseconds, after the lock if one is named."""
    rows = yield Now(lock)
    return int(rows[0][0])


async def query(db: Database, text: str, /, **values: Any) -> list[Row]:
    """Read the rows of one statement."""
    return await db.read(lambda: sql(text, **values))


async def execute(db: Database, text: str, /, **values: Any) -> list[Row]:
    """Write with one statement."""
    return await db.write(lambda: sql(text, **values))


def columns_of(row_type: type, table: str = "") -> str:
    """Return the column list of a row class, in the order of its fields."""
    prefix = f"{table}." if table else ""
    return ", ".join(prefix + column.name for column in fields(row_type))


def insert_of(table: str, names: Sequence[str]) -> str:
    """Return ``INSERT INTO table (names) VALUES (:names)``."""
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(':' + name for name in names)})"
