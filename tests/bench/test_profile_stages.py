"""Where a request's time goes: milestones to stages, samples to microseconds, and names that still exist."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import idle, load, profile_report, sampling, stages, timeline
from bench.idle import Footprint
from bench.peers import models, servers
from bench.sampling import Clock, Samples
from bench.tracing.milestones import ORDINARY, PLACES, REPEAT, WAYS, Milestone

ROOT = Path(__file__).resolve().parents[2]
TRACING = ROOT / "bench" / "tracing"


def events_of(way: tuple[Milestone, ...], *requests: dict[int, int]) -> dict[int, np.ndarray]:
    """Return events in which each request passes milestones of a way at given microseconds."""
    found: dict[int, list[int]] = {}
    for request in requests:
        for number, at_us in request.items():
            milestone = way[number]
            found.setdefault(PLACES.index((milestone.place, milestone.leave)), []).append(at_us * 1000)
    return {place: np.array(sorted(moments)) for place, moments in found.items()}


# One caller


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_stages_are_differences_and_a_missing_milestone_joins_the_next(way: tuple[Milestone, ...]) -> None:
    events = events_of(way, {0: 0, 1: 10, 3: 30}, {0: 100, 1: 110, 3: 140})
    present, table = timeline.timelines(events, way)
    assert present == [0, 1, 3]
    rows = timeline.stages(way, present, table)
    assert [row["stage"] for row in rows] == [way[1].stage, f"{way[2].stage} + {way[3].stage}"]
    assert [row["p50_us"] for row in rows] == [10.0, 25.0]


def test_a_request_that_misses_a_milestone_is_left_out() -> None:
    events = events_of(ORDINARY, {0: 0, 1: 10, 2: 20}, {0: 100, 2: 120}, {0: 200, 1: 210, 2: 220})
    _, table = timeline.timelines(events, ORDINARY)
    assert (table[:, 0] // 1000).tolist() == [0, 200]


def test_requests_of_two_ways_are_told_apart() -> None:
    whole = [{number: start + number for number in range(len(way))} for way, start in ((REPEAT, 0), (ORDINARY, 1000))]
    events = events_of(REPEAT, whole[0])
    for place, moments in events_of(ORDINARY, whole[1]).items():
        events[place] = np.sort(np.append(events.get(place, np.empty(0, np.int64)), moments))
    for way, start_us in ((REPEAT, 0), (ORDINARY, 1000)):
        present, table = timeline.timelines(events, way)
        assert len(present) == len(way)
        assert (table[:, 0] // 1000).tolist() == [start_us]


def test_no_request_at_all_is_said() -> None:
    with pytest.raises(timeline.NoProfile, match="nobody passed"):
        timeline.timelines({}, REPEAT)


@pytest.mark.parametrize("place", sorted({place for place, _ in PLACES}))
def test_every_milestone_exists(place: str) -> None:
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(found, name), f"{place} is gone: name its successor in bench/tracing/milestones.py"
        found = getattr(found, name)
    assert callable(found)


@pytest.mark.parametrize("place", sorted({place for place, _ in PLACES if "." in place.partition(":")[2]}))
def test_every_milestone_is_where_the_tracer_replaces_it(place: str) -> None:
    """A method that is inherited, or overridden, would be noted for the wrong class or not at all."""
    module, _, path = place.partition(":")
    owner, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), owner)
    assert name in vars(found)
    assert not any(name in vars(derived) for derived in found.__subclasses__())


def test_the_tracer_notes_calls_and_keeps_results(tmp_path: Path) -> None:
    program = (
        "import os\nfrom engines.bundle.signature import Signature\n"
        "from worker.dispatch import Dispatcher\n"
        "try: Dispatcher.execute(None)\nexcept AttributeError: print('raised', flush=True)\nos._exit(0)"
    )
    environment = {"PYTHONPATH": f"{TRACING}:{ROOT}", "RINGSERVE_TRACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "raised\n"
    events = timeline.read_events(tmp_path)
    assert len(events[PLACES.index(("worker.dispatch:Dispatcher.execute", False))]) == 1


# Many callers

SPINNING = """
import os, sys, time
folder, role = sys.argv[1:]

def burn():
    end_ns = time.thread_time_ns() + 120_000_000
    while time.thread_time_ns() < end_ns:
        pass

for number in range(2):
    os.mkdir(f"{folder}/{number}")
    open(f"{folder}/{number}/begin", "w").close()
    burn()
    open(f"{folder}/{number}/end", "w").close()
    while not os.path.exists(f"{folder}/{number}/{os.getpid()}"):
        pass
"""


def spin(folder: Path, role: str, program: str = SPINNING) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": f"{TRACING}:{ROOT}", "RINGSERVE_SAMPLE": str(folder)}
    command = [sys.executable, "-c", program, str(folder), role]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_process_samples_its_processor_time_between_marks_and_ends_well(tmp_path: Path) -> None:
    done = spin(tmp_path, "worker")
    assert (done.returncode, done.stderr) == (0, "")
    for number in range(2):
        (file,) = (path for path in (tmp_path / str(number)).iterdir() if path.name.isdigit())
        samples = Samples()
        samples.read(file.read_text())
        assert samples.count > 5
        assert 0 < samples.own_ns < 60_000_000
        burnt_ns = sum(used_ns for frames, used_ns in samples.stacks.items() if "burn (<string>)" in frames)
        assert burnt_ns > 40_000_000
        assert burnt_ns > 0.5 * samples.stacks.total()


def test_only_processes_that_serve_requests_are_sampled(tmp_path: Path) -> None:
    program = "import signal, sys; print(signal.getsignal(signal.SIGPROF), signal.getitimer(signal.ITIMER_PROF))"
    assert spin(tmp_path, "supervisor", program).stdout == f"{0} {(0.0, 0.0)}\n"


ENTERING = """
import ctypes, itertools, os, signal, sys
import sampler
seen = []
made = sampler.Sampler(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append((frame.f_code.co_name, made._entering(frame))))
send = ctypes.PyDLL(None).kill
pid = os.getpid()

def inner():
    send(pid, signal.SIGUSR1)
    for _ in range(3):
        pass

# Between two calls out of C, as from an event loop, the signal waits for the entry of the second one's function.
calls = itertools.starmap(send, [(pid, signal.SIGUSR1)])
list(map(lambda sent: None, calls))
inner()
print(seen)
"""


def test_the_entry_of_a_function_is_told_from_its_body(tmp_path: Path) -> None:
    done = spin(tmp_path, "test", ENTERING)
    assert done.stderr == ""
    assert ast.literal_eval(done.stdout) == [("<lambda>", True), ("inner", False)]


def test_samples_of_several_processes_add_up_under_short_names() -> None:
    stack = [["run (/usr/lib/python3/asyncio/runners.py)", f"check ({ROOT}/frontend/kserve/checks.py)"], 30, 2]
    library = [[f"take ({ROOT}/.venv/lib/python3/site-packages/numpy/core.py)"], 5, 1]
    samples = Samples()
    for _ in range(2):
        samples.read(json.dumps({"samples": 3, "own_ns": 7, "stacks": [stack, library]}))
    assert (samples.count, samples.own_ns) == (6, 14)
    assert samples.stacks == Counter(
        {
            ("run (.../asyncio/runners.py)", "check (frontend/kserve/checks.py)"): 60,
            ("take (.../numpy/core.py)",): 10,
        }
    )


def test_the_rows_of_a_role_add_up_to_its_processor_time() -> None:
    loop = "run (frontend/process.py)"
    samples = Samples(9, 100, Counter({(loop, "check (frontend/kserve/checks.py)"): 300, (loop,): 600}))
    found = sampling.shares("worker", Clock(20_000, 5_000, 1.5e-5, 1e-5), 10, samples)
    assert found["stages_us"] == {
        stages.LOOP: 1.2, "checks": 0.6, "device thread": 0.5, sampling.SAMPLER: 0.2,
    }  # fmt: skip
    assert found["cpu_us"] == 2.5 == sum(found["stages_us"].values())
    assert (found["user_us"], found["system_us"], found["samples"]) == (1.5, 1.0, 9)
    assert found["functions_us"] == {loop: 1.2, "check (frontend/kserve/checks.py)": 0.6}
    with pytest.raises(sampling.NoProfile, match="no samples"):
        sampling.shares("worker", Clock(), 10, Samples())


def test_clocks_are_read_by_thread(tmp_path: Path) -> None:
    for task, used_ns in ((7, 100), (8, 20), (9, 3)):
        (tmp_path / "7" / "task" / str(task)).mkdir(parents=True)
        (tmp_path / "7" / "task" / str(task) / "schedstat").write_text(f"{used_ns} 5 6\n")
    fields = ["S", *map(str, range(4, 53))]
    (tmp_path / "7" / "stat").write_text(f"7 (odd ) name) {' '.join(fields)}\n")
    ticks = os.sysconf("SC_CLK_TCK")
    now = sampling.clock_of(7, tmp_path)
    assert now == Clock(100, 23, 14 / ticks, 15 / ticks)
    assert (now + now).since(now) == now
    assert sampling.clock_of(8, tmp_path) == Clock()
    assert sampling.clock_of(os.getpid()).main_ns > 0


def test_marks_wait_for_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SETTLE_S", 0.0)
    monkeypatch.setattr(sampling, "WRITE_TIMEOUT_S", 0.0)
    marks = sampling.Marks(tmp_path, 0, [1, 2], 0.0)
    marks.start()
    (tmp_path / "0" / "1").write_text("one")
    with pytest.raises(sampling.NoProfile, match=r"\[2\] gave no samples"):
        marks.texts()
    (tmp_path / "0" / "2").write_text("two")
    assert marks.texts() == {1: "one", 2: "two"}
    assert {"begin", "end"} < {path.name for path in (tmp_path / "0").iterdir()}


# A real node

ROUNDS = 200


def ask(node: servers.Running, spec: models.Spec, way: str, count: int) -> None:
    """Send requests one after another over one connection."""
    make = timeline.request_maker(node, spec, way)

    async def send() -> None:
        connection = await load.connect("127.0.0.1", node.plan.http_port)
        for _ in range(count):
            status, body = await connection.call(make())
            assert status == 200, body
        assert connection.transport is not None
        connection.transport.close()

    asyncio.run(send())


def test_requests_of_either_way_pass_all_its_milestones_and_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A milestone that still exists, but that requests no longer pass, would only be named by the next profile."""
    monkeypatch.setenv("RINGSERVE_COMPILED", "0")
    spec = models.MODELS["mlp_a"]
    path = models.write(spec, tmp_path / "models" / spec.name)
    traces, samples = tmp_path / "traces", tmp_path / "samples"
    for folder in (traces, samples / "0"):
        folder.mkdir(parents=True)
    (samples / "0" / "begin").touch()
    node = servers.start(
        timeline.observed({"RINGSERVE_TRACE": traces, "RINGSERVE_SAMPLE": samples}), tmp_path, path, spec
    )
    try:
        roles = sampling.roles_of(node)
        for way in WAYS:
            for _ in range(4):
                ask(node, spec, way, 200)
        (samples / "0" / "end").touch()
        for _ in range(ROUNDS):
            if all((samples / "0" / str(pid)).exists() for pid in roles):
                break
            # A process writes when it uses the processor.
            ask(node, spec, "repeat", 50)
    finally:
        node.stop()
    events = timeline.read_events(traces)
    for name, way in WAYS.items():
        present, table = timeline.timelines(events, way)
        assert [way[number].place for number in range(len(way)) if number not in present] == [], name
        assert len(table) >= timeline.FEWEST_REQUESTS, name
    assert sorted(roles.values()) == ["frontend", "frontend", "worker"]
    for role in ("frontend", "worker"):
        found = Samples()
        for pid in (pid for pid in roles if roles[pid] == role):
            found.read((samples / "0" / str(pid)).read_text())
        assert any(stages.stage_of(frames) != stages.LOOP for frames in found.stacks), role


# Stages


def test_the_innermost_frame_of_ours_decides() -> None:
    loop = "run (frontend/process.py)"
    assert stages.stage_of([loop, "check (frontend/kserve/checks.py)", "loads (json/decoder.py)"]) == "checks"
    assert stages.stage_of([loop]) == stages.LOOP
    assert stages.stage_of(["main (elsewhere.py)"]) == stages.LOOP
    assert stages.stage_of(["Dispatcher.complete (worker/dispatch.py)"]) == "scatter"
    assert stages.stage_of(["scatter.<locals>.<listcomp> (worker/gather.py)"]) == "scatter"
    assert stages.stage_of(["new (frontend/unheard_of.py)"]) == "frontend/unheard_of.py"


def files_on_the_way() -> Iterator[str]:
    for folder in ("frontend/httpd", "frontend/kserve", "frontend/http2", "frontend/grpc_fast", "worker"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name != "__init__.py":
                yield str(path.relative_to(ROOT))


def test_every_file_on_a_requests_way_has_a_stage() -> None:
    without = [name for name in files_on_the_way() if stages.stage_of([f"any ({name})"]) == name]
    assert sorted(without) == sorted(stages.OFF_THE_PATH), (
        "give a file that requests pass a rule in bench/stages.py, or list it in OFF_THE_PATH"
    )


def test_every_rule_fits_something() -> None:
    names: dict[str, set[str]] = {}
    for folder in ("frontend", "worker", "engines"):
        for file in (ROOT / folder).rglob("*.py"):
            stem = str(file.relative_to(ROOT)).removesuffix(".py")
            defined = (ast.FunctionDef, ast.AsyncFunctionDef)
            names[stem] = {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, defined)}
    for path, function, stage in stages.RULES:
        fitting = [stem for stem in names if re.fullmatch(path, stem)]
        assert fitting, (path, stage)
        found = set[str]().union(*(names[stem] for stem in fitting))
        assert not function or any(re.fullmatch(function, name) for name in found), (path, function, stage)


def test_the_report_shows_every_figure() -> None:
    way = {
        "requests": 5, "stages": [{"stage": "parse HTTP", "p50_us": 1.25, "p90_us": 2.5}], "missing": ["a:b"],
        "server_p50_us": 10.0, "client_p50_us": 14.0, "client_untraced_p50_us": 13.0,
    }  # fmt: skip
    role = {
        "cpu_us_unsampled": 4.5, "cpu_us": 5.5, "user_us": 3.5, "system_us": 2.0, "samples": 77,
        "stages_us": {"checks": 5.25}, "functions_us": {"check (x.py)": 4.75},
    }  # fmt: skip
    run = {
        "format": "v2bin", "concurrency": 64, "per_s": 2000.0, "per_s_sampled": 1900.0, "errors": 0,
        "roles": {"frontend": role},
    }  # fmt: skip
    compiled = way | {"client_compiled_p50_us": 9.0}
    result = {"model": "m", "timeline": {"repeat": compiled, "ordinary": way}, "under_load": [run]}
    text = profile_report.text_of(result)
    for shown in (
        "a request that repeats", "client p50 compiled 9 us, interpreted 13 us (14 us while tracing)",
        "a request that does not**: 5 requests; client p50 interpreted 13 us", "| parse HTTP | 1.25 | 2.5 |",
        "not passed: a:b",
        "| client, kernel, event loops before and after | 4.0 | |", "2000/s (1900/s while sampling)",
        "4.5 us of processor a request; while sampling 5.5 us, of them 3.5 user and 2.0 kernel; 77 samples",
        "| checks | 5.25 |", "check (x.py) 4.75",
    ):  # fmt: skip
        assert shown in text


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
