"""The fast gRPC server against the one on grpcio, alternating in one run, over a serving double.

``fast`` recognises calls that repeat, ``ordinary`` is the same server for those that do not.

    .venv/bin/python bench/grpc_servers.py [--passes 5] [--seconds 2]

Load: h2load (nghttp2), which costs little enough not to be what is measured, and real grpc.aio clients with --clients.
Server on CPU 0, load on CPU 1. Rates are told as median and range of the passes, ratios as median and range of the
ratios within a pass: the machine's speed cancels there. CPU per request is the server's, from its own accounts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Instead of this folder: files in it may be called like modules of the standard library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import uvloop

from bench import load
from frontend.kserve.proto import message_class

KINDS = ("fast", "ordinary", "grpcio")
LOADS = {"c1": (1, 1), "c16": (4, 4), "c64": (8, 8)}
"""h2load's connections, and streams of each."""
PATH = "/inference.GRPCInferenceService/ModelInfer"


@contextmanager
def server(kind: str, cpu: int) -> Iterator[tuple[int, int]]:
    """Run a server; yield its port and process id."""
    script = Path(__file__).with_name("grpc_double.py")
    command = [sys.executable, str(script), kind, "--cpu", str(cpu)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        yield int(process.stdout.readline()), process.pid
        process.stdin.close()


def cpu_s(pid: int) -> float:
    """Return what a process has used of its CPUs."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def body_file(folder: Path, elements: int) -> Path:
    """Write one framed request."""
    message: Any = message_class("ModelInferRequest")(model_name="echo")
    values = np.random.default_rng(1).random((1, elements), np.float32)
    message.inputs.add(name="x", datatype="FP32", shape=values.shape)
    message.raw_input_contents.append(values.tobytes())
    data = message.SerializeToString()
    file = folder / f"{elements}.grpc"
    file.write_bytes(b"\0" + len(data).to_bytes(4, "big") + data)
    return file


def h2load(port: int, body: Path, clients: int, streams: int, seconds: float) -> dict[str, float]:
    """Run h2load for a time; return requests per s and latencies."""
    command = [
        "taskset", "-c", "1", "h2load", f"http://127.0.0.1:{port}{PATH}", "-c", str(clients), "-m", str(streams),
        "-t", "1", "-D", f"{seconds * 1000:.0f}ms", "-d", str(body), "-H", "te: trailers",
        "-H", "content-type: application/grpc",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counted = re.search(r"requests: (\d+) total.*?(\d+) succeeded, (\d+) failed", done.stdout)
    rate = re.search(r"finished in [^,]*, ([\d.]+) req/s", done.stdout)
    assert counted and rate, done.stdout
    if int(counted[3]) or not int(counted[2]):
        raise RuntimeError(done.stdout)
    return {"per_s": float(rate[1]), "requests": int(counted[2])}


def clients(port: int, concurrency: int, seconds: float) -> dict[str, float]:
    """Let real grpc.aio clients call; return calls per s."""
    inputs = {"x": ("FP32", np.random.default_rng(1).random((1, 64), np.float32))}

    async def run() -> dict[str, Any]:
        senders = await load.grpc_senders("127.0.0.1", port, "echo", inputs, concurrency)
        return (await load.closed_loop(senders, seconds, warm_up_s=0.3)).summary()

    summary = uvloop.run(run())
    if summary["errors"]:
        raise RuntimeError(str(summary))
    return {"per_s": summary["ok_per_s"], "requests": summary["ok_per_s"] * seconds, "p50_ms": summary["p50_ms"]}


def one_pass(name: str, body: Path, seconds: float) -> dict[str, dict[str, float]]:
    """Measure the servers once under one load."""
    found = {}
    for kind in KINDS:
        with server(kind, 0) as (port, pid):
            before = cpu_s(pid)
            if name.startswith("grpc.aio"):
                figures = clients(port, int(name.rpartition("c")[2]), seconds)
            else:
                figures = h2load(port, body, *LOADS[name.split()[-1]], seconds)
            figures["cpu_us"] = (cpu_s(pid) - before) * 1e6 / max(figures["requests"], 1)
            found[kind] = figures
    return found


def spread(values: list[float], digits: int = 1) -> str:
    """Return median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", default="", help="write all figures to this file")
    arguments = parser.parse_args()
    if shutil.which("h2load") is None:
        parser.error("h2load is needed (Debian: nghttp2-client)")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        os.nice(-10)  # neighbours on a shared machine would be measured instead; children inherit it
    names = ["h2load c1", "h2load c16", "h2load c64", "h2load 1MiB c1", "grpc.aio c1", "grpc.aio c16"]
    results: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        small, large = body_file(Path(folder), 64), body_file(Path(folder), 1 << 18)
        for _ in range(arguments.passes):
            for name in names:
                results[name].append(one_pass(name, large if "MiB" in name else small, arguments.seconds))
    for name, passes in results.items():
        ratios = "; ".join(
            f"{kind} x{spread([one[kind]['per_s'] / one['grpcio']['per_s'] for one in passes], 2)}"
            for kind in KINDS
            if kind != "grpcio"
        )
        rates = "; ".join(f"{kind} {spread([one[kind]['per_s'] for one in passes], 0)}/s" for kind in KINDS)
        costs = "; ".join(f"{kind} {spread([one[kind]['cpu_us'] for one in passes])} us" for kind in KINDS)
        print(f"{name}: {ratios}; {rates}; CPU {costs}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
