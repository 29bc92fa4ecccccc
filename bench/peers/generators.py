"""Load from programs that favour nobody: wrk for HTTP/1.1, h2load for gRPC. Closed loop, one thread each.

Both send the same bytes over and over and look at no body: answers are checked before the load. wrk counts statuses
other than 2xx and 3xx; h2load likewise, which for gRPC says little (errors come with status 200), so a gRPC run is
followed by one checked call.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.peers import install, probe, processes
from bench.peers.models import Payload
from bench.peers.servers import Running

SCRIPT = Path(__file__).with_name("post.lua")
EXTRA_TIMEOUT_S = 30.0
CALIBRATION_S = 0.1
H2LOAD_WARM_UP_MS = 300


class LoadFailed(Exception):
    """A generator gave no result; the text says what it said."""


@dataclass(frozen=True)
class Sample:
    """One run of load.

    Attributes:
        errors: answers that were no success, broken connections and time-outs.
        server_cores: processor time of the server's processes per second.
        other_cores: of everything on the machine but server and generator: how much the run was disturbed.
        speed: turns of a Python loop just before, in millions a second: how fast the machine was then.
    """

    requests: int
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    errors: int
    what_errors: str = ""
    server_cores: float = 0.0
    client_cores: float = 0.0
    other_cores: float = 0.0
    speed: float = 0.0

    @property
    def per_s(self) -> float:
        """Answered well, per second."""
        return max(0, self.requests - self.errors) / self.seconds


def run(running: Running, payload: Payload, concurrency: int, seconds: int) -> Sample:
    """Load a server with ``concurrency`` callers, each with a connection of its own.

    Raises:
        LoadFailed: the generator gave no result.
        NotInstalled: there is no generator.
    """
    generator = _h2load if payload.format == "grpc" else _wrk
    with tempfile.TemporaryDirectory(prefix="ringserve-load-") as folder:
        body = Path(folder, "body")
        body.write_bytes(payload.body)
        speed = machine_speed()
        started_ns = time.monotonic_ns()
        before = (processes.busy_seconds(), processes.cpu_seconds(running.members()), _child_seconds())
        sample = generator(running, payload, body, concurrency, seconds)
        after = (processes.busy_seconds(), processes.cpu_seconds(running.members()), _child_seconds())
        wall_s = (time.monotonic_ns() - started_ns) / 1e9
    busy, server, client = ((late - early) / wall_s for early, late in zip(before, after, strict=True))
    return Sample(
        sample.requests, sample.seconds, sample.p50_ms, sample.p90_ms, sample.p99_ms, sample.errors, sample.what_errors,
        round(server, 2), round(client, 2), round(max(0.0, busy - server - client), 2), speed,
    )  # fmt: skip


def machine_speed() -> float:
    """Return how fast a core is at the moment; hosts that are shared swing by half."""
    end = time.perf_counter() + CALIBRATION_S
    turns = 0
    while time.perf_counter() < end:
        for _ in range(1000):
            turns += 1
    return round(turns / CALIBRATION_S / 1e6, 1)


def _wrk(running: Running, payload: Payload, body: Path, concurrency: int, seconds: int) -> Sample:
    plan = running.plan
    command = [
        install.program("wrk"), "--threads", "1", "--connections", str(concurrency), "--duration", f"{seconds}s",
        "--latency", "--timeout", "10s", "--script", str(SCRIPT),
        f"http://127.0.0.1:{plan.http_port}{plan.paths[payload.format]}",
    ]  # fmt: skip
    environment = {
        "WRK_BODY": str(body),
        "WRK_TYPE": payload.content_type,
        "WRK_HEADER_BYTES": str(payload.header_bytes or ""),
    }
    return parse_wrk(_output(running, command, environment, seconds))


def parse_wrk(text: str) -> Sample:
    """Read what post.lua printed."""
    found = re.search(r"^RESULT (\{.*\})$", text, re.MULTILINE)
    if found is None:
        raise LoadFailed(f"wrk gave no result: {text[-300:]!r}")
    result = json.loads(found[1])
    parts = {name: result[name] for name in ("refused", "broken", "timeouts")}
    told = ", ".join(f"{count} {name}" for name, count in parts.items() if count)
    return Sample(
        result["requests"], result["seconds"], result["p50_us"] / 1e3, result["p90_us"] / 1e3, result["p99_us"] / 1e3,
        sum(parts.values()), told,
    )  # fmt: skip


def caused(sample: Sample, form: str) -> float:
    """Return the requests that a server has answered for a sample: h2load does not count those of its warm-up."""
    warm_up_s = H2LOAD_WARM_UP_MS / 1e3 if form == "grpc" else 0.0
    return sample.requests * (1 + warm_up_s / sample.seconds)


def _h2load(running: Running, payload: Payload, body: Path, concurrency: int, seconds: int) -> Sample:
    log = body.with_name("log")
    command = [
        install.program("h2load"), "--clients", str(concurrency), "--max-concurrent-streams", "1", "--threads", "1",
        "--duration", str(seconds), "--warm-up-time", f"{H2LOAD_WARM_UP_MS}ms", "--data", str(body),
        "--log-file", str(log),
        "--header", "content-type: application/grpc", "--header", "te: trailers",
        f"http://127.0.0.1:{running.plan.grpc_port}{probe.GRPC_PATH}",
    ]  # fmt: skip
    text = _output(running, command, {}, seconds)
    return parse_h2load(text, log.read_text() if log.exists() else "", seconds)


def parse_h2load(text: str, log: str, seconds: float) -> Sample:
    """Read h2load's summary and its log: start, status and microseconds of every request, in columns."""
    counts = re.search(r"^requests: (\d+) total, .* (\d+) done, (\d+) succeeded, (\d+) failed", text, re.MULTILINE)
    times = np.array([float(line.split("\t")[2]) for line in log.splitlines() if line.count("\t") == 2])
    if counts is None or not len(times):
        raise LoadFailed(f"h2load gave no result: {text[-300:]!r}")
    done, failed = int(counts[2]), int(counts[4])
    p50, p90, p99 = (float(value) / 1e3 for value in np.percentile(times, [50, 90, 99]))
    return Sample(done + failed, seconds, p50, p90, p99, failed, f"{failed} failed" if failed else "")


def _output(running: Running, command: list[str], environment: dict[str, str], seconds: float) -> str:
    if running.namespace_pid is not None:
        command = ["nsenter", f"--net=/proc/{running.namespace_pid}/ns/net", *command]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | environment, timeout=seconds + EXTRA_TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise LoadFailed(f"{Path(command[0]).name} did not end in time") from error
    if done.returncode:
        raise LoadFailed(f"{Path(command[0]).name} ended with {done.returncode}: {(done.stderr or done.stdout)[-300:]}")
    return done.stdout


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
