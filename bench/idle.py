"""What a node takes while nobody asks, how long it takes to be ready, and whether it grows under load.

    .venv/bin/python bench/idle.py            1,000,000 requests
    .venv/bin/python bench/idle.py --quick    200,000 requests

Ready: from starting the command until eight right answers in a row, each over a connection of its own. Memory is PSS,
which counts a shared page once, summed over the node's processes. Growth compares the node after the warm-up with the
node at the end, both 2 s after the load has stopped. HTTP from wrk, gRPC from h2load, on mlp_a. Writes
bench/results/idle.json; exit status 1 if a promise was not kept.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from bench.compare_peers import machine, take_precedence
from bench.load import http_request
from bench.peers import generators, models, processes, servers
from bench.peers.servers import Running

REQUESTS, QUICK_REQUESTS = 1_000_000, 200_000
WARM_UP_SHARE = 0.1
CONCURRENCY = 16
CHUNK_S = 5
MAX_CHUNKS = 2_000
SETTLE_S = 2.0
HALF_CLOSED = 100
FORMATS = ("v2bin", "v2json", "grpc")


@dataclass(frozen=True)
class Footprint:
    """What a node holds at one moment.

    Attributes:
        shm_mib: shared memory that its processes have touched, each page once; segments have no name to count.
        kinds: open descriptors by kind, to tell which became more.
    """

    requests: int
    pss_mib: float
    rss_mib: float
    descriptors: int
    mappings: int
    shm_mib: float
    kinds: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """A figure, its limit, and whether it holds."""

    text: str
    value: float
    limit: float

    @property
    def kept(self) -> bool:
        return self.value <= self.limit


def footprint(running: Running, requests: int) -> Footprint:
    """Measure a node now."""
    pids = list(running.members())
    return Footprint(
        requests,
        round(processes.memory_bytes(pids) / 2**20, 2),
        round(processes.memory_bytes(pids, "Rss") / 2**20, 2),
        processes.descriptor_kinds(pids).total(),
        processes.mappings(pids),
        round(processes.memory_bytes(pids, "Pss_Shmem") / 2**20, 2),
        dict(processes.descriptor_kinds(pids)),
    )


def growth(early: Footprint, late: Footprint) -> list[Verdict]:
    """Return how much a node grew. Pure."""
    return [
        Verdict("PSS growth, %", round(100 * (late.pss_mib / early.pss_mib - 1), 2), 1.0),
        Verdict("RSS growth, %", round(100 * (late.rss_mib / early.rss_mib - 1), 2), 1.0),
        Verdict("descriptors more", late.descriptors - early.descriptors, 0),
        Verdict("memory mappings more", late.mappings - early.mappings, 0),
        Verdict("shared memory more, MiB", round(late.shm_mib - early.shm_mib, 2), 0.1),
    ]


def idle_cores(running: Running, seconds: float) -> float:
    """Return the processor time the node takes per second while nobody asks."""
    before = processes.cpu_seconds(running.members())
    time.sleep(seconds)
    return (processes.cpu_seconds(running.members()) - before) / seconds


def half_close(running: Running) -> None:
    """Ask and close for writing at once, over and over: each frontend makes its watch for hang-ups once."""
    payload = models.payload(models.MODELS["mlp_a"], "v2json")
    request = http_request(running.plan.paths["v2json"], payload.body)
    for _ in range(HALF_CLOSED):
        with socket.create_connection(("127.0.0.1", running.plan.http_port), timeout=10) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass


def load(running: Running, requests: int) -> tuple[int, int]:
    """Send at least ``requests``, formats in turn; return how many were answered, and how many of them not well."""
    done = errors = 0
    for number in range(MAX_CHUNKS):
        if done >= requests and number >= len(FORMATS):
            break
        payload = models.payload(models.MODELS["mlp_a"], FORMATS[number % len(FORMATS)])
        sample = generators.run(running, payload, CONCURRENCY, CHUNK_S)
        done += sample.requests
        errors += sample.errors
        print(f"{done} requests, {errors} errors", file=sys.stderr, flush=True)
    return done, errors


def measure(requests: int, idle_s: float) -> dict[str, Any]:
    """Start a node, watch it idle, load it, and judge."""
    spec = models.MODELS["mlp_a"]
    processes.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="ringserve-idle-") as folder:
        path = models.write(spec, Path(folder) / "models" / spec.name)
        running = servers.start(servers.TWO_FRONTENDS, Path(folder), path, spec)
        try:
            time.sleep(SETTLE_S)
            fresh = footprint(running, 0)
            cores = idle_cores(running, idle_s)
            weights_mib = path.stat().st_size / 2**20
            half_close(running)
            warm, warm_errors = load(running, int(requests * WARM_UP_SHARE))
            time.sleep(SETTLE_S)
            early = footprint(running, warm)
            done, errors = load(running, requests)
            time.sleep(SETTLE_S)
            late = footprint(running, warm + done)
        finally:
            running.stop()
    verdicts = [
        Verdict("idle, cores", round(cores, 4), 0.01),
        Verdict("PSS of the fresh node beyond weights, MiB", round(fresh.pss_mib - weights_mib, 1), 250),
        Verdict("ready after, s", round(running.ready_s, 2), 3.0),
        *growth(early, late),
        Verdict("requests answered badly", errors + warm_errors, 0),
    ]
    return {
        "machine": machine(), "frontends": servers.TWO, "idle_s": idle_s,
        "footprints": [asdict(found) for found in (fresh, early, late)],
        "verdicts": [{**asdict(verdict), "kept": verdict.kept} for verdict in verdicts],
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Render the verdicts."""
    lines = ["| figure | measured | limit | kept |", "|---|---|---|---|"]
    lines += [
        f"| {row['text']} | {row['value']} | {row['limit']} | {'yes' if row['kept'] else '**no**'} |"
        for row in result["verdicts"]
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests")
    parser.add_argument("--requests", type=int, help=f"default {REQUESTS}")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--urgent", action="store_true", help="run ahead of the machine's other work; needs root")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    arguments = parser.parse_args()
    if arguments.urgent:
        take_precedence()
    requests = arguments.requests or (QUICK_REQUESTS if arguments.quick else REQUESTS)
    result = measure(requests, arguments.idle_seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "idle.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0 if all(row["kept"] for row in result["verdicts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
