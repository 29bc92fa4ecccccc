"""Many callers' processor time by stage as the compiled hot path spends it: recorded by Linux ``perf`` from outside.

Used by bench/profile.py. One node as users run it is loaded three times: to warm up, undisturbed for the processor time
that the kernel charges a request with (/proc/PID/stat), and recorded. The recording's clock is the processor time of
every thread (``cpu-clock``), its stacks come from the unwind tables, since neither interpreter nor libraries keep frame
pointers. The undisturbed time is divided as the samples say, so that the rows of a process add up to it.
"""

from __future__ import annotations

import math
import resource
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.peers import generators, models, servers
from bench.peers.models import Spec
from bench.peers.servers import Running
from bench.sampling import SETTLE_S, loaded, roles_of
from bench.stacks import FIELDS, Account, read
from bench.symbols import Symbols, compiled_modules
from bench.timeline import NoProfile

WARM_UP_S = 1
PERIOD_NS = 2_000_000
STACK_BYTES = 8192
"""Of the stack that a sample keeps. Deeper callers are cut off; what is innermost is what counts."""
BUFFER = "16M"
"""By processor. Stacks are copied whole, and perf is one of many that want the processor."""
EXTRA_TIMEOUT_S = 30.0
UNWIND_TIMEOUT_S = 300.0
TOP_FUNCTIONS = 16


def missing() -> str:
    """Return why a compiled node cannot be recorded here, empty if it can."""
    if shutil.which("perf") is None:
        return "perf is not installed (Debian: apt-get install linux-perf)"
    probe = subprocess.run(
        ["perf", "record", "--quiet", "-e", "cpu-clock", "-o", "/dev/null", "--", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if probe.returncode:
        return f"perf may not record: {probe.stderr.strip()[:200]}"
    tree = servers.served_tree()
    return "" if compiled_modules(tree) else f"nothing is compiled in {tree}"


class Recording:
    """Has perf record processes for a while, during a run of load."""

    def __init__(self, file: Path, pids: list[int], seconds: float) -> None:
        self._file = file
        self._pids = pids
        self._seconds = seconds
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._failure = ""

    def start(self) -> None:
        """Begin in the background, SETTLE_S from now."""
        self._thread.start()

    def _run(self) -> None:
        time.sleep(SETTLE_S)
        command = [
            "perf", "record", "--quiet", "-e", "cpu-clock", "-c", str(PERIOD_NS),
            "--call-graph", f"dwarf,{STACK_BYTES}", "-m", BUFFER, "-o", str(self._file),
            "-p", ",".join(map(str, self._pids)), "--", "sleep", str(self._seconds),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self._seconds + EXTRA_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._failure = str(error)
            return
        if done.returncode:
            self._failure = done.stderr.strip()

    def finish(self) -> None:
        """Wait for the end.

        Raises:
            NoProfile: perf recorded nothing.
        """
        self._thread.join()
        if self._failure or not self._file.exists():
            raise NoProfile(f"perf record: {self._failure or 'no file'}")


def accounts(file: Path, roles: dict[int, str], symbols: Symbols) -> tuple[dict[str, Account], float]:
    """Return a recording's samples by role, and the seconds between the first and the last one.

    Raises:
        NoProfile: perf could not read it.
    """
    found: defaultdict[str, Account] = defaultdict(Account)
    first_s, last_s = math.inf, -math.inf
    # Without --no-inline it looks every address up in the libraries' sources, for minutes.
    command = ["perf", "script", "--no-inline", "-i", str(file), "-F", FIELDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watch = threading.Timer(UNWIND_TIMEOUT_S, process.kill)
        watch.start()
        try:
            assert process.stdout is not None and process.stderr is not None
            errors: list[str] = []
            drain = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
            drain.start()
            for stack in read(process.stdout):
                first_s, last_s = min(first_s, stack.at_s), max(last_s, stack.at_s)
                if stack.pid in roles:
                    found[roles[stack.pid]].add(stack, symbols)
            drain.join()
        finally:
            watch.cancel()
    if process.returncode:
        raise NoProfile(f"perf script ended with {process.returncode}: {' '.join(errors)[:300]}")
    if not found:
        raise NoProfile("perf saw no sample")
    return dict(found), last_s - first_s


def all_recorded(
    home: Path, path: Path, spec: Spec, formats: list[str], concurrency: int, seconds: int
) -> list[dict[str, Any]]:
    """Measure many callers in every format, at one node as it is started by default."""
    symbols = Symbols(compiled_modules(servers.served_tree()))
    running = servers.start(servers.PEERS[servers.OURS], home / "recorded", path, spec)
    try:
        return [
            _recorded(running, home / f"{form}.data", symbols, spec, form, concurrency, seconds) for form in formats
        ]
    finally:
        running.stop()


def _recorded(
    running: Running, file: Path, symbols: Symbols, spec: Spec, form: str, concurrency: int, seconds: int
) -> dict[str, Any]:
    generators.run(running, models.payload(spec, form), concurrency, WARM_UP_S)
    span_s = int(seconds + 2 * SETTLE_S)
    client_s = _children_s()
    plain = loaded(running, spec, form, concurrency, span_s)
    client_s = _children_s() - client_s
    roles = roles_of(running)
    recording = Recording(file, list(roles), seconds)
    recording.start()
    run = loaded(running, spec, form, concurrency, span_s)
    recording.finish()
    by_role, recorded_s = accounts(file, roles, symbols)
    file.unlink()
    requests = plain.requests
    found: dict[str, Any] = {
        "format": form, "concurrency": concurrency, "per_s": round(plain.sample.per_s, 1),
        "per_s_recorded": round(run.sample.per_s, 1), "errors": plain.sample.errors + run.sample.errors,
        "client_us": round(client_s * 1e6 / requests, 2), "server_cores": plain.sample.server_cores,
        "client_cores": plain.sample.client_cores, "other_cores": plain.sample.other_cores, "roles": {},
    }  # fmt: skip
    for role, account in sorted(by_role.items()):
        used, while_recorded = plain.used[role], run.used[role]
        cpu_us = (used.user_s + used.system_s) * 1e6 / requests
        recorded_us = (while_recorded.user_s + while_recorded.system_s) * 1e6 / run.requests
        expected = recorded_us * run.sample.per_s * recorded_s * 1e3 / PERIOD_NS
        rows, functions = account.costs_us(cpu_us, TOP_FUNCTIONS)
        found["roles"][role] = {
            "processes": sum(name == role for name in roles.values()), "cpu_us": round(cpu_us, 2),
            "cpu_us_recorded": round(recorded_us, 2), "user_us": round(used.user_s * 1e6 / requests, 2),
            "system_us": round(used.system_s * 1e6 / requests, 2), "samples": account.rows.total(),
            "seen": round(account.rows.total() / max(expected, 1e-9), 3), "stages_us": rows, "functions_us": functions,
        }  # fmt: skip
    return found


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
