"""Where a request's microseconds go, per stage, from real runs of a node.

    .venv/bin/python bench/profile.py [--model mlp_a] [--seconds 5] [--interpreted]

Two measurements, since one caller and many see different costs:

1. One caller, HTTP binary (bench/timeline.py): the way of a request from milestone to milestone, wake-ups and waiting
   included. There are two ways: most clients send requests that repeat an earlier one in all but their tensors'
   elements, which is recognised; others are parsed, decoded and checked. The sources run as they are here, since
   functions that are compiled call each other past what could note them.
2. Many callers: the processor time of each process per request, divided among stages. Of the compiled hot path, which
   is what users run, by Linux perf (bench/recording.py), with the kernel's work by what it was called for. Where there
   is no perf or nothing is compiled, or with --interpreted, of the sources as they are, by samples of what each
   process's main thread ran, taken inside it (bench/sampling.py): system calls count for the Python function that made
   them, and what the event loop does by itself (epoll, socket reads) is a stage of its own.

A milestone whose function is not passed is named, and its stage is part of the next. Writes
bench/results/profile_MODEL.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Not the script's own directory: a module named profile there hides the standard library's.
sys.path[0:1] = [str(ROOT)]

from bench import recording
from bench.compare_peers import machine, take_precedence
from bench.peers import generators, models, processes, servers
from bench.peers.models import Spec
from bench.profile_report import text_of
from bench.sampling import under_load
from bench.timeline import latencies, observed, timeline

FORMATS = ("v2bin", "v2json", "grpc")
PARTS = ("caller", "callers")
WARM_UP_S = 1


def all_under_load(
    home: Path, path: Path, spec: Spec, formats: list[str], concurrency: int, seconds: int
) -> list[dict[str, Any]]:
    """Measure many callers in every format: a node without and one with the sampler in turn."""
    folder = home / "samples"
    folder.mkdir()
    plain = servers.start(servers.TWO_FRONTENDS, home / "plain", path, spec)
    try:
        sampled = servers.start(observed({"RINGSERVE_SAMPLE": folder}), home / "sampled", path, spec)
        try:
            found = []
            for number, form in enumerate(formats):
                for running in (plain, sampled):
                    generators.run(running, models.payload(spec, form), concurrency, WARM_UP_S)
                found.append(under_load(plain, sampled, folder, number, spec, form, concurrency, seconds))
            return found
        finally:
            sampled.stop()
    finally:
        plain.stop()


def one_caller(home: Path, path: Path, spec: Spec, seconds: int) -> dict[str, Any]:
    """Measure one caller, and how long it waits for what users run; leaves the environment set to the sources."""
    compiled = {}
    if servers.served_tree() != ROOT:
        compiled = latencies(servers.TWO_FRONTENDS, home, path, spec, seconds)
    # Only of what is interpreted can functions be replaced.
    os.environ["RINGSERVE_COMPILED"] = "0"
    found = timeline(home, path, spec, seconds)
    for way, p50_us in compiled.items():
        found[way]["client_compiled_p50_us"] = p50_us
    return found


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(models.MODELS), default="mlp_a")
    parser.add_argument("--seconds", type=int, default=5, choices=range(1, 121), metavar="1..120")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--interpreted", action="store_true", help="many callers too: the sources as they are")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: both")
    parser.add_argument("--urgent", action="store_true", help="run ahead of the machine's other work; needs root")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    arguments = parser.parse_args()
    if arguments.urgent:
        take_precedence()
    if arguments.interpreted:
        os.environ["RINGSERVE_COMPILED"] = "0"
    elif "callers" in arguments.parts and (lacking := recording.missing()):
        print(f"profile: the sources as they are, since {lacking}", file=sys.stderr)
        os.environ["RINGSERVE_COMPILED"] = "0"
    spec = models.MODELS[arguments.model]
    processes.adopt_orphans()
    result: dict[str, Any] = {"machine": machine(), "model": spec.name}
    with tempfile.TemporaryDirectory(prefix="ringserve-profile-") as folder:
        home = Path(folder)
        path = models.write(spec, home / "models" / spec.name)
        if "callers" in arguments.parts:
            measure = all_under_load if os.environ.get("RINGSERVE_COMPILED") == "0" else recording.all_recorded
            result["under_load"] = measure(
                home, path, spec, arguments.formats, arguments.concurrency, arguments.seconds
            )
        if "caller" in arguments.parts:
            result["timeline"] = one_caller(home, path, spec, arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"profile_{spec.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(text_of(result))


if __name__ == "__main__":
    main()
