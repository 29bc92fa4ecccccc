"""Where a request's microseconds go, per stage, from real runs of a node.

    .venv/bin/python bench/profile.py [--model mlp_a] [--seconds 5]

Two measurements, since one caller and many see different costs:

1. One caller, HTTP binary: the way of a request as a timeline. Every process notes on the one monotonic clock when it
   passes a milestone (bench/tracing); requests do not overlap, so each stage's time is the difference of two moments,
   wake-ups and waiting included. Noting costs time too: the client's latency without it is told beside it.
2. Many callers: the processor time of each process per request (from /proc), divided among stages by py-spy's samples
   of what the process was running. System calls count for the Python function that made them; what the event loop does
   outside Python (epoll, socket reads and writes that it makes by itself) is a stage of its own.

A milestone whose function is gone is named, and its stage is part of the next. Writes bench/results/profile.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRACING = ROOT / "bench" / "tracing"
# Not the script's own directory: a module named profile there hides the standard library's.
sys.path[0:1] = [str(ROOT)]

import numpy as np
import uvloop

from bench import load
from bench.compare_peers import machine, take_precedence
from bench.peers import generators, models, processes, servers
from bench.peers.models import Spec
from bench.peers.servers import Plan, Running
from bench.stages import WAITING, stage_of
from bench.tracing.milestones import MILESTONES

SAMPLES_PER_S = 100
SAMPLING_DELAY_S = 1.0
FEWEST_REQUESTS = 100
FORMATS = ("v2bin", "v2json", "grpc")


class NoProfile(Exception):
    """A measurement gave nothing to tell; the text says why."""


def timelines(events: dict[int, np.ndarray]) -> tuple[list[int], np.ndarray]:
    """Return the milestones that were passed and, for every request, the moments it passed them. Pure.

    Args:
        events: sorted nanoseconds by milestone number, of all processes together.

    Raises:
        NoProfile: no request passed the first milestone.
    """
    present = [number for number in range(len(MILESTONES)) if len(events.get(number, ()))]
    if not present or present[0] != 0:
        raise NoProfile(f"nobody passed {MILESTONES[0].place}")
    starts = events[0]
    ends = np.append(starts[1:], np.iinfo(np.int64).max)
    moments = [starts]
    for number in present[1:]:
        found = events[number]
        at = np.searchsorted(found, moments[-1], side="left")
        moments.append(np.where(at < len(found), found[np.minimum(at, len(found) - 1)], np.iinfo(np.int64).max))
    table = np.stack(moments, axis=1)
    return present, table[(table[:, -1] < ends) & (table[:, -1] < np.iinfo(np.int64).max)]


def stages(present: list[int], table: np.ndarray) -> list[dict[str, Any]]:
    """Return the stages with their microseconds; a missing milestone's stage joins the next one. Pure."""
    spans = np.diff(table, axis=1) / 1e3
    found = []
    for index, (before, number) in enumerate(itertools.pairwise(present)):
        names = [MILESTONES[missing].stage for missing in range(before + 1, number + 1)]
        p50, p90 = np.percentile(spans[:, index], [50, 90])
        found.append({"stage": " + ".join(names), "p50_us": round(float(p50), 2), "p90_us": round(float(p90), 2)})
    return found


def read_events(folder: Path) -> dict[int, np.ndarray]:
    """Return what the processes noted, by milestone."""
    pieces = [np.fromfile(file, np.int64).reshape(-1, 2) for file in folder.iterdir()]
    if not pieces:
        return {}
    every = np.concatenate(pieces)
    return {number: np.sort(every[every[:, 1] == number, 0]) for number in range(len(MILESTONES))}


def one_caller(running: Running, spec: Spec, seconds: float) -> dict[str, Any]:
    """Return latencies of a closed loop with one connection."""
    payload = models.payload(spec, "v2bin")
    headers = {"Inference-Header-Content-Length": str(payload.header_bytes)}
    request = load.http_request(running.plan.paths["v2bin"], payload.body, headers)

    async def measure() -> dict[str, Any]:
        senders = await load.http_senders("127.0.0.1", running.plan.http_port, request, 1)
        return (await load.closed_loop(senders, seconds)).summary()

    return uvloop.run(measure())


def timeline(home: Path, path: Path, spec: Spec, seconds: float) -> dict[str, Any]:
    """Measure one caller's stages; the client's latency with and without tracing besides."""
    running = servers.start(servers.PEERS[servers.OURS], home, path, spec)
    try:
        plain = one_caller(running, spec, seconds)
    finally:
        running.stop()
    folder = home / "trace"
    folder.mkdir()
    running = servers.start(_traced(folder), home, path, spec)
    try:
        traced = one_caller(running, spec, seconds)
    finally:
        running.stop()
    present, table = timelines(read_events(folder))
    if len(table) < FEWEST_REQUESTS:
        raise NoProfile(f"only {len(table)} requests passed every milestone")
    total = (table[:, -1] - table[:, 0]) / 1e3
    missing = [MILESTONES[n].place for n in range(len(MILESTONES)) if n not in present]
    return {
        "requests": len(table), "stages": stages(present, table), "missing": missing,
        "server_p50_us": round(float(np.median(total)), 1), "client_p50_us": round(traced["p50_ms"] * 1e3, 1),
        "client_untraced_p50_us": round(plain["p50_ms"] * 1e3, 1),
    }  # fmt: skip


def _traced(folder: Path) -> servers.Peer:
    """Return our server as a peer that notes milestones."""
    ours = servers.PEERS[servers.OURS]

    def plan(home: Path, model_file: Path, spec: Spec) -> Plan:
        made = ours.plan(home, model_file, spec)
        made.environment["PYTHONPATH"] = os.pathsep.join((str(TRACING), str(ROOT)))
        made.environment["RINGSERVE_TRACE"] = str(folder)
        return made

    return servers.Peer(ours.name, "", ours.formats, plan)


async def _sample(pid: int, seconds: float, output: Path) -> int:
    command = [
        shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "py-spy",
        "record", "--pid", str(pid), "--duration", str(int(seconds)), "--rate", str(SAMPLES_PER_S), "--format", "raw",
        "--full-filenames", "--function", "--nonblocking", "--output", str(output),
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    return await process.wait()


def under_load(running: Running, spec: Spec, form: str, concurrency: int, seconds: int, folder: Path) -> dict[str, Any]:
    """Return each role's processor time per request, by stage, and its costliest functions."""
    roles = roles_of(running)

    def used() -> dict[int, float]:
        return {pid: processes.cpu_seconds({pid: stat}) for pid, stat in running.members().items()}

    async def measure() -> tuple[generators.Sample, list[dict[int, float]], float]:
        loop = asyncio.get_running_loop()
        clocks = [used()]
        work = loop.run_in_executor(
            None, generators.run, running, models.payload(spec, form), concurrency, int(seconds + 2 * SAMPLING_DELAY_S)
        )
        await asyncio.sleep(SAMPLING_DELAY_S)
        clocks.append(used())
        began = time.monotonic()
        await asyncio.gather(*(_sample(pid, seconds, folder / f"{form}-{pid}") for pid in roles))
        clocks.append(used())
        sampled_s = time.monotonic() - began
        sample = await work
        return sample, [*clocks, used()], sampled_s

    sample, clocks, sampled_s = asyncio.run(measure())
    if not sample.requests:
        raise NoProfile(f"{form}: no request was answered")
    found: dict[str, Any] = {"format": form, "concurrency": concurrency, "per_s": round(sample.per_s, 1), "roles": {}}
    for role in sorted(set(roles.values())):
        pids = [pid for pid, name in roles.items() if name == role]
        stacks = Counter[str]()
        for pid in pids:
            file = folder / f"{form}-{pid}"
            stacks.update(parse_stacks(file.read_text() if file.exists() else ""))
        first, begin, end, last = (sum(clock.get(pid, 0.0) for pid in pids) for clock in clocks)
        cpu_us = (last - first) / sample.requests * 1e6
        running_samples = (end - begin) / sampled_s * seconds * SAMPLES_PER_S
        found["roles"][role] = {"cpu_us_per_request": round(cpu_us, 2), **shares(stacks, cpu_us, running_samples)}
    return found


def roles_of(running: Running) -> dict[int, str]:
    """Return the processes of a node that serve requests, by what they are."""
    found = {}
    for pid in running.members():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        for role in ("frontend", "worker"):
            if role.encode() in words:
                found[pid] = role
    return found


def parse_stacks(text: str) -> Counter[str]:
    """Read py-spy's raw format: frames from the root, semicolons between, a count at the end. Pure."""
    found = Counter[str]()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack and count.isdigit():
            found[stack] += int(count)
    return found


def shares(stacks: Counter[str], cpu_us: float, running: float, top: int = 12) -> dict[str, Any]:
    """Divide microseconds among stages, and name the functions in which most of them end. Pure.

    Args:
        running: samples that the processor time used explains; waiting stages lose what is beyond.
    """
    by_stage, by_function = Counter[str](), Counter[str]()
    for stack, count in stacks.items():
        frames = [frame.replace(f"{ROOT}/", "") for frame in stack.split(";")]
        stage = stage_of(frames)
        by_stage[stage] += count
        if stage not in WAITING:
            by_function[frames[-1]] += count
    seen = stacks.total()
    waiting = sum(by_stage[stage] for stage in WAITING)
    taken_off = min(max(0.0, seen - running), waiting)
    left = 1 - taken_off / waiting if waiting else 1.0

    def scaled(count: float, of: float) -> float:
        return round(count / of * cpu_us, 2) if of else 0.0

    by_stage_us = {
        stage: {
            "as_sampled_us": scaled(count, seen),
            "less_waiting_us": scaled(count * (left if stage in WAITING else 1.0), seen - taken_off),
        }
        for stage, count in by_stage.most_common()
    }
    costly = {name: scaled(count, seen) for name, count in by_function.most_common(top)}
    return {"samples": seen, "samples_taken_off": round(taken_off), "stages": by_stage_us, "functions_us": costly}


def text_of(result: dict[str, Any]) -> str:
    """Render the result as Markdown."""
    way = result["timeline"]
    lines = [
        f"**{result['model']}, one caller, HTTP binary**: {way['requests']} requests; client p50 "
        f"{way['client_untraced_p50_us']:.0f} us ({way['client_p50_us']:.0f} us while tracing), of which "
        f"{way['server_p50_us']:.0f} us lie between the first and the last milestone.",
        "", "| stage | p50 us | p90 us |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {row['stage']} | {row['p50_us']} | {row['p90_us']} |" for row in way["stages"]]
    outside = way["client_p50_us"] - way["server_p50_us"]
    lines += [f"| client, kernel, event loops before and after | {outside:.1f} | |", ""]
    lines += [f"- milestone not passed: {place}" for place in way["missing"]]
    for run in result["under_load"]:
        lines += ["", f"**{result['model']}, {run['concurrency']} callers, {run['format']}**: {run['per_s']:.0f}/s"]
        for role, row in run["roles"].items():
            lines += [
                "",
                f"{role}: {row['cpu_us_per_request']} us of processor a request, {row['samples']} samples, "
                f"{row['samples_taken_off']} of them beyond its processor time",
            ]
            lines += ["", "| stage | us as sampled | us less waiting |", "|---|---|---|"]
            lines += [
                f"| {name} | {value['as_sampled_us']} | {value['less_waiting_us']} |"
                for name, value in row["stages"].items()
            ]
            costly = ", ".join(f"{name} {value}" for name, value in row["functions_us"].items())
            lines += ["", f"Own time of functions, us: {costly}"]
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(models.MODELS), default="mlp_a")
    parser.add_argument("--seconds", type=int, default=5, choices=range(1, 121), metavar="1..120")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--urgent", action="store_true", help="run ahead of the machine's other work; needs root")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    arguments = parser.parse_args()
    if arguments.urgent:
        take_precedence()
    spec = models.MODELS[arguments.model]
    processes.adopt_orphans()
    result: dict[str, Any] = {"machine": machine(), "model": spec.name, "under_load": []}
    with tempfile.TemporaryDirectory(prefix="ringserve-profile-") as folder:
        home = Path(folder)
        path = models.write(spec, home / "models" / spec.name)
        result["timeline"] = timeline(home, path, spec, arguments.seconds)
        running = servers.start(servers.PEERS[servers.OURS], home, path, spec)
        try:
            for form in arguments.formats:
                generators.run(running, models.payload(spec, form), arguments.concurrency, 1)
                result["under_load"].append(
                    under_load(running, spec, form, arguments.concurrency, arguments.seconds, home)
                )
        finally:
            running.stop()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"profile_{spec.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(text_of(result))


if __name__ == "__main__":
    main()
