"""The load test of claims: what its upstream notes, and one small run of everything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.batch_claims import RouteSeen
from postgres_server import postgres_server

__all__ = ["postgres_server"]

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "batch_claims.py"
END_S = 300


def test_idle_time_of_a_route_is_its_longest_between_calls() -> None:
    seen = RouteSeen()
    for at_s, begins in ((1, True), (2, True), (3, False), (9, False), (11, True), (12, False), (12.5, True)):
        (seen.begin if begins else seen.end)(at_s)
    assert (seen.longest_idle_s, seen.most, seen.calls, seen.now) == (2, 2, 4, 1)


@pytest.mark.slow
@pytest.mark.process
def test_small_load_runs_to_its_end_within_its_caps(postgres_server: object, tmp_path: Path) -> None:
    """``postgres_server``: skipped where there is none; the program starts its own."""
    saved = tmp_path / "figures.json"
    command = [
        sys.executable, str(PROGRAM), "--batches", "6", "--lines", "20", "--processes", "2", "--cap", "4",
        "--latency-ms", "20", "--settle-s", "0", "--idle-s", "2", "--save", str(saved),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S)
    assert done.returncode == 0, done.stderr[-3000:]
    (figures,) = json.loads(saved.read_text())
    assert figures["most_in_flight_on_a_route"] <= 4
    assert figures["claims"] > 0 and figures["lines_per_s"] > 0
