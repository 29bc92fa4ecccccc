"""Numbered schema changes, each in a part that runs before new code is rolled out and one that runs after.

A *before* part only adds: the previous release keeps working on it, so that processes can be replaced one by one. An
*after* part takes away what the previous release needed. SQLite has one host and runs both when it is opened;
PostgreSQL runs them by ``ringserve migrate`` and ``ringserve migrate --after``. Running them again changes nothing, and
concurrent runs wait for one another.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Final, Literal

from frontend.batches.store.errors import SchemaMismatch

Dialect = Literal["sqlite", "postgresql"]
Part = Literal["before", "after"]

MIGRATION_TABLE: Final = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    version INTEGER NOT NULL,
    part TEXT NOT NULL CHECK (part IN ('before', 'after')),
    applied_at BIGINT NOT NULL,
    PRIMARY KEY (version, part)
)
"""
READ_APPLIED: Final = "SELECT version, part FROM schema_migrations"

_NAME = re.compile(r"(\d{4})_(before|after)\.(sqlite|postgresql)\.sql")


@dataclass(frozen=True, slots=True, order=True)
class Migration:
    """One script; ``version`` counts from 1 without gaps."""

    version: int
    part: Part
    script: str


def migrations(dialect: Dialect) -> tuple[Migration, ...]:
    """Return the scripts of this program for one database, in the order they run."""
    found = []
    for entry in resources.files("frontend.batches.store.migrations").iterdir():
        match = _NAME.fullmatch(entry.name)
        if match and match[3] == dialect:
            part: Part = "before" if match[2] == "before" else "after"
            found.append(Migration(int(match[1]), part, entry.read_text(encoding="utf-8")))
    return tuple(sorted(found, key=lambda migration: (migration.version, migration.part == "after")))


def check_not_newer(applied: Collection[tuple[int, str]], known: Collection[Migration]) -> None:
    """Raise SchemaMismatch if a newer program changed the database beyond what this one understands.

    The *before* part of the next version is understood: it only adds.
    """
    newest = max(migration.version for migration in known)
    beyond = [(version, part) for version, part in applied if version > newest + (part == "before")]
    if beyond:
        raise SchemaMismatch(
            f"the database has schema {max(beyond)[0]}, this program knows {newest}: run a newer ringserve"
        )


def check_current(applied: Collection[tuple[int, str]], known: Collection[Migration]) -> None:
    """Raise SchemaMismatch unless the database is what this program needs."""
    check_not_newer(applied, known)
    missing = [one.version for one in known if one.part == "before" and (one.version, one.part) not in applied]
    if missing:
        have = max((version for version, part in applied if part == "before"), default=0)
        raise SchemaMismatch(
            f"the database has schema {have}, this program needs {max(missing)}: run 'ringserve migrate'"
        )


def missing_parts(
    applied: Collection[tuple[int, str]], known: Collection[Migration], parts: Collection[Part]
) -> tuple[Migration, ...]:
    """Return the scripts still to run, in order. Raises: SchemaMismatch for a newer database."""
    check_not_newer(applied, known)
    return tuple(one for one in known if one.part in parts and (one.version, one.part) not in applied)


def migrate_sqlite(connection: sqlite3.Connection, clock: Callable[[], int]) -> tuple[Migration, ...]:
    """Bring a SQLite file to this program's schema in one transaction; return what ran."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(MIGRATION_TABLE)
        applied = {(version, part) for version, part in connection.execute(READ_APPLIED)}
        todo = missing_parts(applied, migrations("sqlite"), ("before", "after"))
        for migration in todo:
            for statement in _statements(migration.script):
                connection.execute(statement)
            connection.execute(
                "INSERT INTO schema_migrations VALUES (?, ?, ?)", (migration.version, migration.part, clock())
            )
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    return todo


def _statements(script: str) -> Iterator[str]:
    """Split a script; ``executescript`` would commit our transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    assert not statement.strip(), "a migration ends in the middle of a statement"
