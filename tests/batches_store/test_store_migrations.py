"""Schema changes: once, in order, together, and never by a program that is too old."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any, Literal

import asyncpg
import pytest

from frontend.batches.store import sqlite
from frontend.batches.store.errors import RuleBroken, SchemaMismatch, StoreUnavailable
from frontend.batches.store.migrate import (
    Migration,
    check_current,
    check_not_newer,
    migrate_sqlite,
    migrations,
    missing_parts,
)
from frontend.batches.store.postgres import PostgresDatabase, postgres_store
from frontend.batches.store.rows import ClaimResult, FinishLine
from frontend.batches.store.sqlite import SqliteDatabase, connect, sqlite_store, wall_clock_us
from frontend.batches.store.transaction import query
from store_world import execution, migrate, world_of

KNOWN = (Migration(1, "before", ""), Migration(2, "before", ""), Migration(2, "after", ""))


def test_numbers_have_no_gap_and_both_databases_have_the_same() -> None:
    lists = [[(one.version, one.part) for one in migrations(dialect)] for dialect in ("sqlite", "postgresql")]
    assert lists[0] == lists[1]
    assert sorted({version for version, _ in lists[0]}) == list(range(1, lists[0][-1][0] + 1))
    assert all((version, "before") in lists[0] for version, _ in lists[0])


def test_missing_parts_run_in_order_and_after_only_when_asked() -> None:
    assert [(one.version, one.part) for one in missing_parts(set(), KNOWN, ("before",))] == [
        (1, "before"),
        (2, "before"),
    ]
    applied = {(1, "before"), (2, "before")}
    assert missing_parts(applied, KNOWN, ("before",)) == ()
    assert missing_parts(applied, KNOWN, ("before", "after")) == KNOWN[2:]
    check_current(applied, KNOWN)


def test_older_and_newer_databases_are_told_apart() -> None:
    with pytest.raises(SchemaMismatch, match="has schema 1, this program needs 2: run 'ringserve migrate'"):
        check_current({(1, "before")}, KNOWN)
    with pytest.raises(SchemaMismatch, match="has schema 0"):
        check_current(set(), KNOWN)
    # While processes are replaced, the next version's additions are there already.
    check_not_newer({(1, "before"), (2, "before"), (3, "before")}, KNOWN)
    for beyond in ((3, "after"), (4, "before")):
        with pytest.raises(SchemaMismatch, match="run a newer ringserve"):
            check_not_newer({(1, "before"), beyond}, KNOWN)


def test_sqlite_migrates_when_opened_and_again_does_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state" / "store.sqlite3"
    with world_of("sqlite", str(path)) as world:
        workspace = world.workspace()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    connection = connect(path)
    assert migrate_sqlite(connection, wall_clock_us) == ()
    connection.close()
    with world_of("sqlite", str(path)) as world:
        assert world.run(world.store.keys.workspaces()) == (workspace,)


def test_sqlite_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    with world_of("sqlite", str(path)) as world:
        world.sql("INSERT INTO schema_migrations VALUES (99, 'before', 1)")
    store = sqlite_store(path)
    with pytest.raises(SchemaMismatch, match="99"):
        asyncio.run(store.start())


def test_unusable_sqlite_files_are_named(tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(b"not a database at all, but long enough to be read as a header" * 100)
    for path in (junk, tmp_path):
        store = sqlite_store(path)
        with pytest.raises(StoreUnavailable, match=str(path)):
            asyncio.run(store.start())


def test_failed_migration_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Migration(1, "before", "CREATE TABLE half (a);\nCREATE TABLE half (a);\n")
    monkeypatch.setattr("frontend.batches.store.migrate.migrations", lambda dialect: (broken,))
    connection = connect(tmp_path / "store.sqlite3")
    with pytest.raises(sqlite3.OperationalError):
        migrate_sqlite(connection, wall_clock_us)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    connection.close()


def test_postgresql_wants_migrate_first_and_runs_it_once(postgres_url: str) -> None:
    store = postgres_store(postgres_url)
    with pytest.raises(SchemaMismatch, match="ringserve migrate"):
        asyncio.run(store.start())

    async def at_once() -> list[list[int]]:
        return await asyncio.gather(*(migrate(postgres_url) for _ in range(4)))

    ran = asyncio.run(at_once())
    expected = [one.version for one in migrations("postgresql") if one.part == "before"]
    assert sorted(ran) == [[], [], [], expected]


def test_postgresql_of_a_newer_program_is_refused(postgres_url: str) -> None:
    with world_of("postgresql", postgres_url) as world:
        world.sql("INSERT INTO schema_migrations VALUES (99, 'before', 1)")
    with pytest.raises(SchemaMismatch, match="99"):
        asyncio.run(postgres_store(postgres_url).start())
    with pytest.raises(SchemaMismatch, match="99"):
        asyncio.run(migrate(postgres_url))


def test_w2_another_default_isolation_is_refused(postgres_url: str) -> None:
    """Rule 43: it can be changed per database or role."""
    with world_of("postgresql", postgres_url) as world:
        name = postgres_url.rpartition("/")[2]
        world.sql(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'")
    with pytest.raises(SchemaMismatch, match="repeatable read"):
        asyncio.run(postgres_store(postgres_url).start())


def test_database_that_may_forget_commits_is_refused(postgres_url: str) -> None:
    with world_of("postgresql", postgres_url) as world:
        world.sql(f"ALTER DATABASE {postgres_url.rpartition('/')[2]} SET synchronous_commit = off")
    with pytest.raises(SchemaMismatch, match="synchronous_commit"):
        asyncio.run(postgres_store(postgres_url).start())


def test_no_postgresql_there_is_told(postgres_url: str) -> None:
    for url in (postgres_url + "_none", "postgresql://tester@127.0.0.1:1/x"):
        with pytest.raises(StoreUnavailable, match="cannot connect"):
            asyncio.run(postgres_store(url).start())


@pytest.mark.parametrize(
    "error", [TimeoutError(), asyncpg.InterfaceError("connection is closed"), asyncpg.QueryCanceledError("too slow")]
)
def test_a_server_that_goes_while_it_is_looked_at_is_told(
    postgres_url: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        database = PostgresDatabase(postgres_url)
        await database.open()
        await database.migrate()
        await database.close()

        async def goes(connection: object) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr("frontend.batches.store.postgres._check_server", goes)
            with pytest.raises(StoreUnavailable, match="PostgreSQL: "):
                await database.start()
        await database.start()
        await database.close()

    asyncio.run(scenario())


def test_an_interrupt_while_sqlite_opens_ends_at_once_and_it_may_open_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(database: SqliteDatabase, *, opens: bool) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: failures.append(context))
        migrate, reached, go_on = sqlite.migrate_sqlite, asyncio.Event(), threading.Event()

        def slowly(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(reached.set)
            go_on.wait()
            if not opens:
                raise SchemaMismatch("too old")
            return migrate(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(sqlite, "migrate_sqlite", slowly)
            opening = asyncio.create_task(database.start())
            await reached.wait()
            opening.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await opening
        await database.start()
        await database.close()

    failures: list[dict[str, Any]] = []
    for opens in (True, False):
        asyncio.run(scenario(SqliteDatabase(tmp_path / f"{opens}.sqlite3", wall_clock_us), opens=opens))
    assert not failures


def test_password_comes_from_its_variable(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "secret-word")

    async def ask() -> list[object]:
        database = PostgresDatabase(postgres_url, "STORE_PASSWORD")
        await database.open()
        rows = await query(database, "SELECT 1")
        await database.close()
        return [tuple(row) for row in rows]

    assert asyncio.run(ask()) == [(1,)]


def test_0002_keeps_what_was_there_and_what_the_release_before_goes_on_writing(
    kind: Literal["sqlite", "postgresql"], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes are replaced one by one: its statements name columns, so they must go on working."""
    settings = (
        "INSERT INTO deployment_batch_scheduling (route_id, max_concurrency, updated_at, updated_by)"
        " VALUES ('R', {0}, 1, 'k') ON CONFLICT (route_id) DO UPDATE SET max_concurrency = excluded.max_concurrency"
    )
    turn = (
        "INSERT INTO batch_route_turns (route_id, workspace_id, last_claim_at) VALUES ('R', 'ws_a', {0})"
        " ON CONFLICT (route_id, workspace_id) DO UPDATE SET last_claim_at = excluded.last_claim_at"
    )
    workspace = "INSERT INTO workspaces (id, name, kind, created_at) VALUES ('ws_{0}', '{0}', 'team', 1)"
    with monkeypatch.context() as before:
        for module in ("migrate", "postgres"):
            before.setattr(f"frontend.batches.store.{module}.migrations", lambda dialect: migrations(dialect)[:1])
        with world_of(kind, place) as world:
            for text in (workspace.format("a"), settings.format(4), turn.format(7)):
                world.sql(text)
            assert world.sql("SELECT version, part FROM schema_migrations") == [(1, "before")]
    with world_of(kind, place) as world:
        for text in (workspace.format("b"), settings.format(5), turn.format(8)):
            world.sql(text)
        row = world.run(world.store.scheduling.settings("R"))
        assert row is not None
        assert (row.max_concurrency, row.min_concurrency, row.latency_share_percent) == (5, None, None)
        assert world.run(world.store.scheduling.weights()) == {}
        assert world.sql("SELECT last_claim_at, turn_pass, turn_base FROM batch_route_turns") == [(8, 0, 0)]
        assert {one.id for one in world.run(world.store.keys.workspaces())} == {"ws_a", "ws_b"}


def test_0004_lets_claims_of_an_older_database_be_given_back(
    kind: Literal["sqlite", "postgresql"], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran before may be given back after; the statements of the release before go on working."""
    with monkeypatch.context() as before:
        for module in ("migrate", "postgres"):
            before.setattr(f"frontend.batches.store.{module}.migrations", lambda dialect: migrations(dialect)[:3])
        with world_of(kind, place) as world:
            batch = world.running_batch(world.workspace().id, 4, retry_limit=1)
            world.claim(batch, [0, 1, 2])
            world.finish(batch, 1, ok=False)
            world.claim(batch, [1], attempt=2)
            with pytest.raises(RuleBroken):
                world.sql("DELETE FROM batch_lines WHERE line_no = 0")
            assert world.sql("SELECT max(version) FROM schema_migrations") == [(3,)]
    with world_of(kind, place) as world:
        lines = [
            FinishLine(batch.id, line, execution(batch, line, attempt), "failed", 502, "upstream_unreachable", b"{}")
            for line, attempt in ((0, 1), (1, 2))
        ]
        assert world.run(world.store.runner.give_back("r1", lines)) == (True, True)
        assert world.states(batch) == {1: "failed", 2: "running"}
        assert world.finish(batch, 2)
        assert world.claim(batch, [1], attempt=2) == [ClaimResult.CLAIMED]
        assert world.claim(batch, [3]) == [ClaimResult.CLAIMED]


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store.sqlite3") if kind == "sqlite" else str(request.getfixturevalue("postgres_url"))
