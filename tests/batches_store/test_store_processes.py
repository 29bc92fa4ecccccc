"""Real processes on one database, killed at random: no line is sent twice, every batch ends, counts are true."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from postgres_server import running_server
from store_world import World, migrate, world_of

ROOT = Path(__file__).parents[2]
LEASE_S = 1.0
DEADLINE_S = 120


class Runners:
    """Keeps N runner processes alive under fresh names until they end by themselves."""

    def __init__(self, place: str, log: Path, count: int) -> None:
        self._place, self._log = place, log
        self._number = 0
        self.processes = [self._start() for _ in range(count)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._number += 1
        command = [
            sys.executable, str(ROOT / "tests" / "store_runner.py"), self._place, f"runner-{self._number}",
            str(self._log), str(LEASE_S),
        ]  # fmt: skip
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})

    def kill(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].wait()
        self.processes[index] = self._start()

    def join(self) -> list[int]:
        return [process.wait(DEADLINE_S) for process in self.processes]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def lines_logged(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def wait_for_lines(log: Path, count: int, runners: Runners) -> None:
    """Return when so many lines were sent (or all runners ended)."""
    tick = threading.Event()
    while lines_logged(log) < count and any(process.poll() is None for process in runners.processes):
        tick.wait(0.005)


def check_everything(world: World, log: Path, batches: list[str], lines: int) -> None:
    sent = Counter(tuple(line.split()[:2]) for line in log.read_text().splitlines())
    assert [line for line, times in sent.items() if times > 1] == [], "sent twice"
    for batch_id in batches:
        row = world.run(world.store.batches.get(None, batch_id))
        assert row is not None
        assert (row.state, row.settled_at is not None) == ("completed", True)
        counts = world.run(world.store.runner.line_counts(batch_id))
        assert (counts.claimed, counts.running) == (lines, 0)
        assert (row.request_completed, row.request_failed) == (counts.succeeded, counts.interrupted)
        never_sent = [n for n in range(lines) if (batch_id, str(n)) not in sent]
        # A runner that was killed between its claim and the send.
        assert len(never_sent) <= counts.interrupted


@pytest.mark.process
@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_killed_runners_send_no_line_twice_and_lose_none(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place = request.getfixturevalue("postgres_url") if kind == "postgresql" else str(tmp_path / "store.sqlite3")
    draw = random.Random(11)
    log = tmp_path / "sent"
    lines = 60
    with world_of("postgresql" if kind == "postgresql" else "sqlite", place) as world:
        batches = [world.batch(world.workspace().id, lines).id for _ in range(3)]
        runners = Runners(place, log, 3 if kind == "postgresql" else 2)
        try:
            for sent in (20, 60, 110):
                wait_for_lines(log, sent, runners)
                runners.kill(draw.randrange(len(runners.processes)))
            assert set(runners.join()) == {0}
        finally:
            runners.stop()
        check_everything(world, log, batches, lines)


@pytest.mark.process
def test_database_that_crashes_costs_nothing(tmp_path: Path) -> None:
    """PostgreSQL is cut off in the middle, twice; runners ask again with the same executions."""
    log = tmp_path / "sent"
    lines = 60
    with running_server() as server:
        import asyncio

        asyncio.run(migrate(server.url()))
        with world_of("postgresql", server.url()) as world:
            batches = [world.batch(world.workspace().id, lines).id for _ in range(2)]
        runners = Runners(server.url(), log, 2)
        try:
            for sent in (30, 80):
                wait_for_lines(log, sent, runners)
                server.stop_hard()
                server.start()
            assert set(runners.join()) == {0}
        finally:
            runners.stop()
        with world_of("postgresql", server.url()) as world:
            check_everything(world, log, batches, lines)
