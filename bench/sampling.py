"""Many callers' processor time by stage: samples taken inside the processes (bench/tracing/sampler), and their clocks.

Used by bench/profile.py. A node with the sampler and one without are loaded in turn, so that what sampling costs is
told. Of the sampled one: threads' processor time from the scheduler's own account (/proc/PID/task/TID/schedstat, ns),
user and kernel time from /proc/PID/stat, and the main threads' share of every stage from the samples.

Held against perf's cpu-clock samples of the same frontends (31,000 requests/s): writing to sockets 20 % here and 17 %
there without its Python frames, memory barriers 5 and 4 %, epoll, reading and uvloop 11 and 11 %, the kernel 30 and
34 %.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers import generators, models
from bench.peers.models import Spec
from bench.peers.servers import Running
from bench.stages import stage_of
from bench.timeline import ROOT, NoProfile

SETTLE_S = 1.0
"""Of load before the first mark, and at least as much after the last one."""
WRITE_TIMEOUT_S = 20.0
"""For the processes' samples after the last mark. A process writes when it next uses the processor."""
POLL_S = 0.02
OTHER_THREADS = {"worker": "device thread", "frontend": "other threads"}
SAMPLER = "the sampler itself"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Clock:
    """Processor time that a process has used: by the scheduler's account per thread, and how the kernel splits it."""

    main_ns: int = 0
    others_ns: int = 0
    user_s: float = 0.0
    system_s: float = 0.0

    def __add__(self, other: Clock) -> Clock:
        return Clock(
            self.main_ns + other.main_ns,
            self.others_ns + other.others_ns,
            self.user_s + other.user_s,
            self.system_s + other.system_s,
        )

    def since(self, earlier: Clock) -> Clock:
        """Return the time in between."""
        return Clock(
            self.main_ns - earlier.main_ns,
            self.others_ns - earlier.others_ns,
            self.user_s - earlier.user_s,
            self.system_s - earlier.system_s,
        )


@dataclass
class Samples:
    """What the main threads of one role ran.

    Attributes:
        stacks: nanoseconds by frames from the root, ``function (file)``.
        own_ns: spent on sampling.
    """

    count: int = 0
    own_ns: int = 0
    stacks: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def read(self, text: str) -> None:
        """Add what one process wrote."""
        document = json.loads(text)
        self.count += document["samples"]
        self.own_ns += document["own_ns"]
        for frames, used_ns, _ in document["stacks"]:
            self.stacks[tuple(map(short, frames))] += used_ns


def short(frame: str) -> str:
    """Return ``function (file)`` with the path relative to the repository, of libraries the end of it. Pure."""
    function, _, path = frame.removesuffix(")").rpartition(" (")
    if path.startswith(f"{ROOT}/") and "/site-packages/" not in path:
        return f"{function} ({path.removeprefix(f'{ROOT}/')})"
    parts = path.split("/")
    return f"{function} (.../{'/'.join(parts[-2:])})" if len(parts) > 2 else frame


@dataclass(frozen=True)
class Loaded:
    """One run of load: what the generator saw, and by role what the processes used meanwhile.

    Attributes:
        requests: those that the time was used for, also the ones of a warm-up that the generator does not count.
    """

    sample: generators.Sample
    used: dict[str, Clock]
    requests: float

    def cpu_us(self, role: str) -> float:
        """Return the processor time per request of a role's processes."""
        clock = self.used[role]
        return (clock.main_ns + clock.others_ns) / 1e3 / self.requests


def clock_of(pid: int, proc: Path = Path("/proc")) -> Clock:
    """Return what a process has used so far; nothing if it is gone. Time of threads that have ended is not in it."""
    main_ns = others_ns = 0
    try:
        for task in (proc / str(pid) / "task").iterdir():
            used_ns = int((task / "schedstat").read_text().split()[0])
            if task.name == str(pid):
                main_ns += used_ns
            else:
                others_ns += used_ns
        # The name in brackets may hold anything.
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return Clock()
    return Clock(main_ns, others_ns, int(fields[11]) / _TICKS_PER_S, int(fields[12]) / _TICKS_PER_S)


def roles_of(running: Running) -> dict[int, str]:
    """Return the processes of a node that serve requests, by what they are."""
    found = {}
    for pid in running.members():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        for role in OTHER_THREADS:
            if role.encode() in words:
                found[pid] = role
    return found


def loaded(running: Running, spec: Spec, form: str, concurrency: int, seconds: int) -> Loaded:
    """Load a node.

    Raises:
        NoProfile: no request was answered.
    """
    roles = roles_of(running)
    before = {pid: clock_of(pid) for pid in roles}
    sample = generators.run(running, models.payload(spec, form), concurrency, seconds)
    if not sample.requests:
        raise NoProfile(f"{form}: no request was answered")
    used: defaultdict[str, Clock] = defaultdict(Clock)
    for pid, role in roles.items():
        used[role] += clock_of(pid).since(before[pid])
    return Loaded(sample, dict(used), generators.caused(sample, form))


class Marks:
    """Has the samplers of a node count for a while, during a run of load."""

    def __init__(self, folder: Path, number: int, pids: list[int], seconds: float) -> None:
        self._folder = folder / str(number)
        self._pids = pids
        self._seconds = seconds
        self._thread = threading.Thread(target=self._run, name="marks", daemon=True)

    def start(self) -> None:
        """Set the marks in the background; ``seconds`` lie between them, SETTLE_S before the first."""
        self._folder.mkdir(parents=True)
        self._thread.start()

    def _run(self) -> None:
        time.sleep(SETTLE_S)
        (self._folder / "begin").touch()
        time.sleep(self._seconds)
        (self._folder / "end").touch()

    def texts(self) -> dict[int, str]:
        """Return what each process wrote, after the last mark.

        Raises:
            NoProfile: one wrote nothing in time.
        """
        self._thread.join()
        end = time.monotonic() + WRITE_TIMEOUT_S
        while missing := [pid for pid in self._pids if not (self._folder / str(pid)).exists()]:
            if time.monotonic() > end:
                raise NoProfile(f"processes {missing} gave no samples within {WRITE_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        return {pid: (self._folder / str(pid)).read_text() for pid in self._pids}


def under_load(
    plain: Running, sampled: Running, folder: Path, number: int, spec: Spec, form: str, concurrency: int, seconds: int
) -> dict[str, Any]:
    """Return each role's processor time per request, by stage, and its costliest functions.

    Args:
        folder: where the processes of ``sampled`` write, and ``number`` which of its runs this is, from 0.

    Raises:
        NoProfile: no request was answered, or nothing was sampled.
    """
    span_s = int(seconds + 2 * SETTLE_S)
    without = loaded(plain, spec, form, concurrency, span_s)
    roles = roles_of(sampled)
    marks = Marks(folder, number, list(roles), seconds)
    marks.start()
    run = loaded(sampled, spec, form, concurrency, span_s)
    samples: defaultdict[str, Samples] = defaultdict(Samples)
    for pid, text in marks.texts().items():
        samples[roles[pid]].read(text)
    found: dict[str, Any] = {
        "format": form, "concurrency": concurrency, "per_s": round(without.sample.per_s, 1),
        "per_s_sampled": round(run.sample.per_s, 1), "errors": without.sample.errors + run.sample.errors, "roles": {},
    }  # fmt: skip
    for role in sorted(samples):
        found["roles"][role] = {
            "cpu_us_unsampled": round(without.cpu_us(role), 2),
            **shares(role, run.used[role], run.requests, samples[role]),
        }
    return found


def shares(role: str, used: Clock, requests: float, samples: Samples, top: int = 16) -> dict[str, Any]:
    """Divide a role's processor time per request among stages, and name the costliest functions. Pure.

    The main threads' time is divided as the samples say, the sampler's own time included; the rows add up.

    Raises:
        NoProfile: nothing was sampled.
    """
    by_stage, by_function = Counter[str](), Counter[str]()
    for frames, used_ns in samples.stacks.items():
        by_stage[stage_of(frames)] += used_ns
        by_function[frames[-1]] += used_ns
    seen_ns = by_stage.total()
    if not seen_ns:
        raise NoProfile(f"{role}: no samples")
    by_stage[SAMPLER] = samples.own_ns
    scale = used.main_ns / 1e3 / requests / by_stage.total()
    stages = {name: round(used_ns * scale, 2) for name, used_ns in by_stage.items()}
    stages[OTHER_THREADS[role]] = round(used.others_ns / 1e3 / requests, 2)
    return {
        "cpu_us": round((used.main_ns + used.others_ns) / 1e3 / requests, 2),
        "user_us": round(used.user_s * 1e6 / requests, 2), "system_us": round(used.system_s * 1e6 / requests, 2),
        "samples": samples.count,
        "stages_us": dict(sorted(stages.items(), key=lambda row: -row[1])),
        "functions_us": {name: round(used_ns * scale, 2) for name, used_ns in by_function.most_common(top)},
    }  # fmt: skip
