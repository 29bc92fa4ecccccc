"""Real runner processes that are killed, stopped and cut off from their database at random instants.

Whatever happens: no line reaches the upstream twice, none is lost, counts equal files, every batch ends. A run is one
seed; a failing one is repeated with its number in SEEDS.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from frontend.batches.settings import BatchesSettings
from frontend.batches.store.rows import SchedulingRow
from frontend.gateway_settings import BatchSettings, GatewayModel, GatewaySettings, RouteSettings
from postgres_server import PostgresServer, fresh_database, running_server
from runner_process import RunnerProcess
from runner_world import RunnerWorld
from store_world import world_of
from stub_upstream import Say, Seen, StubUpstream, completion

pytestmark = pytest.mark.process

LINES = 500
END_S = 30.0
SEEDS = range(200)
SAMPLE = range(3)
LEASE_S = 1.0


def runner_process(world: RunnerWorld, endpoint: str, log: Path) -> RunnerProcess:
    """Return a runner on a store and an upstream, not started."""
    route = RouteSettings(
        id="R", kind="vllm", endpoint=endpoint, addresses=("127.0.0.1",), failures_to_open=1000
    )  # fmt: skip
    settings = BatchesSettings(
        name="batches0",
        run_dir=str(world.directory),
        gateway=GatewaySettings(
            enabled=True,
            development=True,
            state_dir=str(world.directory.parent),
            store=world.world.place if world.world.kind == "postgresql" else "",
            models=(GatewayModel(name="m", routes=(route,)),),
            batches=BatchSettings(workers=16, lease_seconds=LEASE_S, lease_renew_seconds=LEASE_S / 4),
        ),
    )
    return RunnerProcess(settings, log)


@contextmanager
def surroundings(
    kind: Literal["sqlite", "postgresql"], place: str, directory: Path
) -> Iterator[tuple[RunnerWorld, StubUpstream]]:
    with StubUpstream() as upstream, world_of(kind, place) as world:
        runners = RunnerWorld(world, directory / "files")
        world.run(runners.prepare())
        upstream.default = answer
        yield runners, upstream
        world.run(runners.objects.close())


def answer(seen: Seen) -> Say:
    """Answer a line after a moment; every 50th fails."""
    text = seen.json["messages"][0]["content"]
    number = int(text[1:])
    if number % 50 == 49:
        return Say(422, body={"error": {"message": "no", "type": "x", "param": None, "code": "no"}})
    return Say(body=completion("m", text), delay_s=(number % 7) / 2000)


def judge(runners: RunnerWorld, upstream: StubUpstream, batch_id: str, log: Path) -> Counter[str]:
    """Wait for the batch's end and assert what must hold; return the error codes."""
    try:
        batch = runners.world.run(runners.store.batches.get(None, batch_id))
        assert batch is not None
        done = runners.world.run(runners.ended(batch, END_S))
    except TimeoutError:
        raise AssertionError(f"the batch did not end; the runner's log:\n{log.read_text()[-4000:]}") from None
    sent = Counter(call.json["messages"][0]["content"] for call in upstream.calls)
    assert max(sent.values(), default=0) <= 1, "a line reached the upstream twice"
    listed = Counter(one["custom_id"] for one in [*done.output, *done.errors])
    assert len(listed) == LINES and max(listed.values()) == 1, "every line is listed once"
    assert done.batch.state == "completed"
    assert (done.batch.request_completed, done.batch.request_failed) == (len(done.output), len(done.errors))
    codes = Counter(done.codes.values())
    assert set(codes) <= {"422", "result_unavailable"}
    # A line that succeeded was sent; one that was never sent can only have been interrupted before.
    assert {f"t{one['custom_id'][1:]}" for one in done.output} <= set(sent)
    return codes


def tormented(
    runners: RunnerWorld, upstream: StubUpstream, seed: int, server: PostgresServer | None, log: Path
) -> None:
    """Run one batch while its runner, or its database, is killed again and again; then let it end."""
    rng = random.Random(seed)
    batch = runners.world.run(runners.batch(LINES))
    runner = runner_process(runners, upstream.url, log)
    runner.start()
    kills = 0
    try:
        for _ in range(rng.randrange(1, 5)):
            reached = len(upstream.calls) + rng.randrange(0, 150)
            upstream_wait(upstream, min(reached, LINES - 120), log)
            runners.world.run(asyncio.sleep(rng.random() * 0.05))
            kind = rng.choice(["runner", "runner", "connections", "server"]) if server else "runner"
            if kind == "connections":
                assert server is not None
                server.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                           " AND backend_type = 'client backend'")  # fmt: skip
            elif kind == "server":
                assert server is not None
                server.stop_hard()
                server.start()
            else:
                kills += 1
                runner.kill()
                runner.start()
        codes = judge(runners, upstream, batch.id, log)
        assert codes["result_unavailable"] <= 16 * max(1, kills), "a kill costs at most the lines that ran"
    finally:
        runner.kill()


def upstream_wait(upstream: StubUpstream, calls: int, log: Path) -> None:
    try:
        upstream.wait(lambda stub: len(stub.calls) >= calls, END_S)
    except AssertionError as error:
        raise AssertionError(f"the batch stalled: {error}; the runner's log:\n{log.read_text()[-6000:]}") from None


@pytest.mark.parametrize("seed", SAMPLE)
def test_kills_on_sqlite(seed: int, tmp_path: Path) -> None:
    with surroundings("sqlite", str(tmp_path / "store.sqlite3"), tmp_path) as (runners, upstream):
        tormented(runners, upstream, seed, None, tmp_path / "log")


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that these tests may crash."""
    with running_server() as server:
        yield server


@pytest.mark.parametrize("seed", SAMPLE)
def test_kills_on_postgresql(seed: int, tmp_path: Path, own_server: PostgresServer) -> None:
    with (
        fresh_database(own_server) as url,
        surroundings("postgresql", url, tmp_path) as (runners, upstream),
    ):
        tormented(runners, upstream, seed, own_server, tmp_path / "log")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed not in SAMPLE])
def test_many_kills(seed: int, tmp_path: Path, own_server: PostgresServer) -> None:
    """Even seeds on SQLite, odd ones on PostgreSQL."""
    if seed % 2 == 0:
        with surroundings("sqlite", str(tmp_path / "store.sqlite3"), tmp_path) as (runners, upstream):
            tormented(runners, upstream, seed, None, tmp_path / "log")
        return
    with (
        fresh_database(own_server) as url,
        surroundings("postgresql", url, tmp_path) as (runners, upstream),
    ):
        tormented(runners, upstream, seed, own_server, tmp_path / "log")


def test_bf_18_a_runner_stopped_for_longer_than_its_lease(tmp_path: Path, own_server: PostgresServer) -> None:
    """SIGSTOP, another takes over and ends the batch, SIGCONT: nothing that was announced changes."""
    with (
        fresh_database(own_server) as url,
        surroundings("postgresql", url, tmp_path) as (runners, upstream),
    ):
        batch = runners.world.run(runners.batch(LINES))
        first, second = (runner_process(runners, upstream.url, tmp_path / name) for name in ("first", "second"))
        try:
            first.start()
            upstream.wait(lambda stub: len(stub.calls) >= 100)
            first.signal(signal.SIGSTOP)
            second.start()
            judge(runners, upstream, batch.id, tmp_path / "second")
            found = runners.world.run(runners.store.batches.get(None, batch.id))
            assert found is not None
            before = runners.world.run(runners.results(found))
            calls = len(upstream.calls)
            first.signal(signal.SIGCONT)
            after_s = runners.world.run(runners.batch(4, key="key_one"))
            runners.world.run(runners.ended(after_s, END_S))
            assert runners.world.run(runners.store.batches.get(None, batch.id)) == found
            again = runners.world.run(runners.results(found))
            assert (again.output, again.errors) == (before.output, before.errors)
            assert len(upstream.calls) == calls + 4
        finally:
            first.signal(signal.SIGCONT)
            first.kill()
            second.kill()


def test_sigterm_lets_running_lines_end(tmp_path: Path) -> None:
    with surroundings("sqlite", str(tmp_path / "store.sqlite3"), tmp_path) as (runners, upstream):
        batch = runners.world.run(runners.batch(LINES))
        runner = runner_process(runners, upstream.url, tmp_path / "log")
        try:
            runner.start()
            upstream.wait(lambda stub: len(stub.calls) >= 100)
            runner.signal(signal.SIGTERM)
            assert runner.process is not None and runner.process.wait(30) == 0
            counts = runners.world.run(runners.store.runner.line_counts(batch.id))
            assert counts.running == 0 and 100 <= counts.claimed < LINES
            runner.start()
            codes = judge(runners, upstream, batch.id, tmp_path / "log")
            assert codes == {"422": LINES // 50}, "a drain loses nothing"
        finally:
            runner.kill()


NEVER: dict[str, Any] = {
    "window_timezone": "UTC", "window_days": 1 << (time.gmtime().tm_wday + 3) % 7,
    "window_start_minute": 720, "window_end_minute": 780,
}  # fmt: skip
"""A window that no clock is near."""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("lines", [LINES, 5])
def test_kills_behind_a_closed_gate_while_the_server_is_away(
    kind: Literal["sqlite", "postgresql"], lines: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What was claimed and could not be sent runs after the restart, once: with few lines all of them were claimed."""
    with StubUpstream() as reserved:
        port = reserved.port
    place = str(tmp_path / "store.sqlite3") if kind == "sqlite" else request.getfixturevalue("postgres_url")
    with world_of(kind, place) as world:
        runners = RunnerWorld(world, tmp_path / "files")
        world.run(runners.prepare())
        batch = world.run(runners.batch(lines))
        runner = runner_process(runners, f"http://127.0.0.1:{port}/v1", tmp_path / "log")

        def put(**window: Any) -> None:
            world.run(world.store.scheduling.put_settings(SchedulingRow("R", 16, **window), None))

        try:
            for _ in range(2):
                put()
                runner.start()
                world.run(runners.until_waiting(batch, "R", (lines, "route_cooling", False)))
                put(**NEVER)
                world.run(runners.until_waiting(batch, "R", (lines, "outside_window", False)))
                assert world.run(world.store.runner.line_counts(batch.id)).claimed == 0
                found = world.run(world.store.batches.get(None, batch.id))
                assert found is not None and found.last_waited_at is not None, "no stall"
                runner.kill()
            with StubUpstream(port=port) as upstream:
                runner.start()
                runner.wait_ready()
                assert not upstream.calls
                put()
                done = world.run(runners.ended(batch, END_S))
                sent = Counter(call.json["messages"][0]["content"] for call in upstream.calls)
        finally:
            runner.kill()
            world.run(runners.objects.close())
        assert done.batch.state == "completed" and not done.errors
        assert sent == {f"t{index}": 1 for index in range(lines)}
        assert (len(done.output), done.batch.request_completed, done.batch.request_failed) == (lines, lines, 0)
