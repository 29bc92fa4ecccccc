"""Lines claimed, executed (by nobody) and recorded per second, as the batch runner asks for them.

One loop turn finishes the last turn's lines with their records and claims the next: ``TURN_LINES`` of ``BATCHES``
batches on ``ROUTES`` routes. Run as a file for figures (``--seconds``, ``--postgres URL`` for a server of your own);
under pytest each store does a few turns for correctness only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import pytest

from frontend.batches.store.rows import BatchRow, ClaimBatch, ClaimGroup, ClaimLine, ClaimResult, FinishLine
from postgres_server import postgres_server, postgres_url, running_server
from store_world import World, execution, world_of

__all__ = ["postgres_server", "postgres_url"]

TURN_LINES = 64
BATCHES = 4
ROUTES = 2
BATCH_LINES = 50_000
RECORD = b'{"n":1,"e":false,"r":{"id":"batch_req_0","custom_id":"x","response":{"body":' + b'"' + b"y" * 1500 + b'"}}}'


async def turns(world: World, batches: list[BatchRow], seconds: float, most: int) -> tuple[int, list[float]]:
    """Run turns for a time; return lines finished and the duration of each turn in ms."""
    runner = world.store.runner
    left = {batch.id: 0 for batch in batches}
    per_batch = TURN_LINES // BATCHES
    finish: list[FinishLine] = []
    durations_ms: list[float] = []
    done = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and len(durations_ms) < most:
        groups = []
        for route in range(ROUTES):
            claims = []
            for batch in batches[route::ROUTES]:
                first = left[batch.id]
                lines = tuple(ClaimLine(n, execution(batch, n)) for n in range(first, first + per_batch))
                claims.append(ClaimBatch(batch.id, batch.workspace_id, BATCH_LINES - first, lines))
            groups.append(ClaimGroup(f"route{route}", 256, tuple(claims)))
        started = time.perf_counter()
        result = await runner.turn("r1", finish, groups)
        durations_ms.append((time.perf_counter() - started) * 1000)
        assert all(result.finished)
        done += len(finish)
        finish = []
        for group, answers in zip(groups, result.claimed, strict=True):
            for claim, given in zip(group.batches, answers, strict=True):
                assert set(given) == {ClaimResult.CLAIMED}
                left[claim.batch_id] += len(given)
                finish += [
                    FinishLine(claim.batch_id, line.line_no, line.execution_id, "succeeded", 200, None, RECORD)
                    for line in claim.lines
                ]
    await runner.turn("r1", finish, [])
    return done + len(finish), durations_ms


def prepare(world: World) -> list[BatchRow]:
    return [world.running_batch(world.workspace().id, BATCH_LINES) for _ in range(BATCHES)]


@pytest.fixture(params=["sqlite", "postgresql"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    kind = request.param
    place = str(tmp_path / "store.sqlite3") if kind == "sqlite" else request.getfixturevalue("postgres_url")
    with world_of(kind, place) as made:
        yield made


def test_turns_record_every_line(world: World) -> None:
    batches = prepare(world)
    done, durations_ms = world.run(turns(world, batches, 60, most=3))
    assert (done, len(durations_ms)) == (3 * TURN_LINES, 3)
    assert sum(world.get(batch).request_completed for batch in batches) == done
    assert sum(len(world.run(world.store.runner.records(batch.id, -1, 1000))) for batch in batches) == done


def measure(name: str, world: World, seconds: float, repeats: int) -> None:
    rates = []
    slowest: list[float] = []
    for _ in range(repeats):
        batches = prepare(world)
        started = time.perf_counter()
        done, durations_ms = world.run(turns(world, batches, seconds, most=BATCH_LINES * BATCHES // TURN_LINES))
        rates.append(done / (time.perf_counter() - started))
        slowest += durations_ms
        for batch in batches:
            world.run(world.store.runner.mark_finalizing("r1", batch.id, "output", "error"))
    spread = statistics.quantiles(slowest, n=100)
    print(
        f"{name:12} {statistics.median(rates):8.0f} lines/s"
        f" ({min(rates):.0f} to {max(rates):.0f}, {repeats} x {seconds:g} s),"
        f" turn of {TURN_LINES} lines: p50 {spread[49]:.1f} ms, p99 {spread[98]:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--postgres", help="an empty database; a temporary server without fsync if not given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, world_of("sqlite", f"{directory}/store.sqlite3") as world:
        measure("sqlite", world, arguments.seconds, arguments.repeats)
    if arguments.postgres:
        with world_of("postgresql", arguments.postgres) as world:
            measure("postgresql", world, arguments.seconds, arguments.repeats)
        return
    with running_server() as server:
        server.sql("ALTER SYSTEM SET fsync = on")
        server.sql("SELECT pg_reload_conf()")
        while server.sql("SHOW fsync") != "on":
            time.sleep(0.1)
        with world_of("postgresql", server.url()) as world:
            measure("postgresql", world, arguments.seconds, arguments.repeats)


if __name__ == "__main__":
    main()
