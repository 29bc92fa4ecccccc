"""``scripts/replay`` shows what the tests ran: the same seed ends with the same trace hash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scheduler_sim import random_scenario, simulate

REPLAY = Path(__file__).resolve().parents[2] / "scripts" / "replay"


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(REPLAY), *arguments], capture_output=True, text=True, timeout=60)


def test_replay_of_a_seed_prints_each_event_and_the_hash() -> None:
    done = replay("12")
    lines: list[str] = []
    result = simulate(random_scenario(12), lines.append)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"trace {result.trace_hash}"
    assert [line for line in done.stdout.splitlines() if " ms  " in line] == lines


def test_replay_of_an_unknown_scenario_names_the_known_ones() -> None:
    done = replay("no_such_file")
    assert done.returncode == 1
    assert "no scenario 'no_such_file'" in done.stderr
    assert "bursts_and_cancels" in done.stderr
