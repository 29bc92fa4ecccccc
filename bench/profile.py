"""Where a request's microseconds go, per stage, from real runs of a node.

    .venv/bin/python bench/profile.py [--model mlp_a] [--seconds 5]

Two measurements, since one caller and many see different costs:

1. One caller, HTTP binary (bench/timeline.py): the way of a request from milestone to milestone, wake-ups and waiting
   included. There are two ways: most clients send requests that repeat an earlier one in all but their tensors'
   elements, which is recognised; others are parsed, decoded and checked.
2. Many callers (bench/sampling.py): the processor time of each process per request, divided among stages by samples of
   what its main thread ran, taken inside the process by the processor time it uses. System calls count for the Python
   function that made them; what the event loop does by itself (epoll, socket reads) is a stage of its own.

The hot path runs interpreted here, so that its functions can be told apart. A milestone whose function is not passed is
named, and its stage is part of the next. Writes bench/results/profile_MODEL.json.
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

from bench.compare_peers import machine, take_precedence
from bench.peers import generators, models, processes, servers
from bench.peers.models import Spec
from bench.sampling import under_load
from bench.timeline import observed, timeline

FORMATS = ("v2bin", "v2json", "grpc")
WARM_UP_S = 1
WAY_TITLES = {"repeat": "a request that repeats", "ordinary": "a request that does not"}


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


def text_of(result: dict[str, Any]) -> str:
    """Render the result as Markdown."""
    lines: list[str] = []
    for name, way in result["timeline"].items():
        lines += [
            f"**{result['model']}, one caller, HTTP binary, {WAY_TITLES[name]}**: {way['requests']} requests; client "
            f"p50 {way['client_untraced_p50_us']:.0f} us ({way['client_p50_us']:.0f} us while tracing), of which "
            f"{way['server_p50_us']:.0f} us lie between the first and the last milestone.",
            "", "| stage | p50 us | p90 us |", "|---|---|---|",
        ]  # fmt: skip
        lines += [f"| {row['stage']} | {row['p50_us']} | {row['p90_us']} |" for row in way["stages"]]
        outside = way["client_p50_us"] - way["server_p50_us"]
        lines += [f"| client, kernel, event loops before and after | {outside:.1f} | |", ""]
        lines += [f"- milestone not passed: {place}" for place in way["missing"]]
    for run in result["under_load"]:
        lines += [
            "",
            f"**{result['model']}, {run['concurrency']} callers, {run['format']}**: {run['per_s']:.0f}/s "
            f"({run['per_s_sampled']:.0f}/s while sampling), {run['errors']} errors",
        ]
        for role, row in run["roles"].items():
            lines += [
                "",
                f"{role}: {row['cpu_us_unsampled']} us of processor a request; while sampling {row['cpu_us']} us, of "
                f"them {row['user_us']} user and {row['system_us']} kernel; {row['samples']} samples",
                "", "| stage | us |", "|---|---|",
            ]  # fmt: skip
            lines += [f"| {name} | {used_us} |" for name, used_us in row["stages_us"].items()]
            costly = ", ".join(f"{name} {used_us}" for name, used_us in row["functions_us"].items())
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
    # Only what is interpreted can be sampled and traced by function.
    os.environ["RINGSERVE_COMPILED"] = "0"
    if arguments.urgent:
        take_precedence()
    spec = models.MODELS[arguments.model]
    processes.adopt_orphans()
    result: dict[str, Any] = {"machine": machine(), "model": spec.name}
    with tempfile.TemporaryDirectory(prefix="ringserve-profile-") as folder:
        home = Path(folder)
        path = models.write(spec, home / "models" / spec.name)
        result["timeline"] = timeline(home, path, spec, arguments.seconds)
        result["under_load"] = all_under_load(
            home, path, spec, arguments.formats, arguments.concurrency, arguments.seconds
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"profile_{spec.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(text_of(result))


if __name__ == "__main__":
    main()
