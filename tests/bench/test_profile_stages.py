"""Where a request's time goes: milestones to stages, samples to microseconds, and names that still exist."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench import idle, profile, stages
from bench.idle import Footprint
from bench.tracing.milestones import MILESTONES

ROOT = Path(__file__).resolve().parents[2]


def events_of(*requests: dict[int, int]) -> dict[int, np.ndarray]:
    """Return events in which each request passes milestones at given microseconds."""
    found: dict[int, list[int]] = {}
    for request in requests:
        for number, at_us in request.items():
            found.setdefault(number, []).append(at_us * 1000)
    return {number: np.array(sorted(moments)) for number, moments in found.items()}


def test_stages_are_differences_and_a_missing_milestone_joins_the_next() -> None:
    events = events_of({0: 0, 1: 10, 3: 30}, {0: 100, 1: 110, 3: 140})
    present, table = profile.timelines(events)
    assert present == [0, 1, 3]
    rows = profile.stages(present, table)
    assert [row["stage"] for row in rows] == [
        MILESTONES[1].stage, f"{MILESTONES[2].stage} + {MILESTONES[3].stage}",
    ]  # fmt: skip
    assert [row["p50_us"] for row in rows] == [10.0, 25.0]


def test_a_request_that_misses_a_milestone_is_left_out() -> None:
    events = events_of({0: 0, 1: 10, 2: 20}, {0: 100, 2: 120}, {0: 200, 1: 210, 2: 220})
    _, table = profile.timelines(events)
    assert (table[:, 0] // 1000).tolist() == [0, 200]


def test_no_request_at_all_is_said() -> None:
    with pytest.raises(profile.NoProfile, match="nobody passed"):
        profile.timelines({})


@pytest.mark.parametrize("milestone", MILESTONES, ids=lambda milestone: milestone.place)
def test_every_milestone_exists(milestone) -> None:
    module, _, path = milestone.place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(found, name), f"{milestone.place} is gone: name its successor in bench/tracing/milestones.py"
        found = getattr(found, name)
    assert callable(found)


def test_the_tracer_notes_calls_and_keeps_results(tmp_path: Path) -> None:
    program = (
        "import os\nfrom engines.bundle.signature import Signature\n"
        "from worker.dispatch import Dispatcher\n"
        "try: Dispatcher.execute(None)\nexcept AttributeError: print('raised', flush=True)\nos._exit(0)"
    )
    environment = {"PYTHONPATH": f"{ROOT / 'bench' / 'tracing'}:{ROOT}", "RINGSERVE_TRACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "raised\n"
    entered = next(n for n, m in enumerate(MILESTONES) if m.place.endswith("Dispatcher.execute") and not m.leave)
    events = profile.read_events(tmp_path)
    assert len(events[entered]) == 1


def test_stacks_are_read() -> None:
    assert profile.parse_stacks("a (x.py);b (y.py) 3\nc (z.py) 1\n\nnoise\n") == Counter(
        {"a (x.py);b (y.py)": 3, "c (z.py)": 1}
    )


def test_the_innermost_frame_of_ours_decides() -> None:
    loop = "run (frontend/process.py)"
    assert stages.stage_of([loop, "check (frontend/kserve/checks.py:9)", "loads (json/decoder.py)"]) == "checks"
    assert stages.stage_of([loop]) == stages.LOOP
    assert stages.stage_of(["main (elsewhere.py)"]) == stages.LOOP
    assert stages.stage_of(["complete (worker/dispatch.py)"]) == "scatter"
    assert stages.stage_of(["Dispatcher.complete (worker/dispatch.py:1)"]) == "scatter"
    assert stages.stage_of(["new (frontend/unheard_of.py:3)"]) == "frontend/unheard_of.py"


def test_microseconds_add_up_and_waiting_loses_what_was_not_used() -> None:
    stacks = Counter({"check (frontend/kserve/checks.py)": 30, "run (frontend/process.py)": 70})
    whole = profile.shares(stacks, 10.0, running=100)["stages"]
    assert whole["checks"] == {"as_sampled_us": 3.0, "less_waiting_us": 3.0}
    assert whole[stages.LOOP] == {"as_sampled_us": 7.0, "less_waiting_us": 7.0}
    less = profile.shares(stacks, 10.0, running=50)
    assert less["samples_taken_off"] == 50
    assert less["stages"]["checks"] == {"as_sampled_us": 3.0, "less_waiting_us": 6.0}
    assert less["stages"][stages.LOOP] == {"as_sampled_us": 7.0, "less_waiting_us": 4.0}
    busy = profile.shares(stacks, 10.0, running=10)["stages"]
    assert busy["checks"]["less_waiting_us"] == 10.0
    assert busy[stages.LOOP]["less_waiting_us"] == 0.0
    assert profile.shares(Counter(), 10.0, running=0)["stages"] == {}


def test_growth_is_judged() -> None:
    early = Footprint(10, 100.0, 200.0, 50, 300, 10.0)
    same = {verdict.text: verdict for verdict in idle.growth(early, early)}
    assert all(verdict.kept for verdict in same.values())
    late = Footprint(20, 102.0, 201.0, 51, 300, 10.5)
    grown = {verdict.text: verdict.kept for verdict in idle.growth(early, late)}
    assert grown == {
        "PSS growth, %": False, "RSS growth, %": True, "descriptors more": False, "memory mappings more": True,
        "shared memory more, MiB": False,
    }  # fmt: skip
