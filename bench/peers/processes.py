"""Process trees from outside: who belongs to a server, what it costs, and its certain end.

Everything is read from /proc. ``adopt_orphans`` makes daemons that a server leaves behind children of this process, so
that they are found and stopped as well.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STOP_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 5.0
POLL_S = 0.05

_libc = ctypes.CDLL(None, use_errno=True)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Stat:
    """One line of /proc/PID/stat, as far as it is needed; ``started`` tells a process from one that reuses its id."""

    pid: int
    state: str
    parent: int
    ticks: int
    started: int


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Between fork and exec of a server: end when this process is killed."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def parse_stat(text: str) -> Stat:
    """Read a stat line; the name in brackets may hold anything."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Stat(
        int(head.split(" ", 1)[0]), fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19])
    )


def all_stats() -> dict[int, Stat]:
    """Return every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = parse_stat(Path("/proc", name, "stat").read_text())
            except OSError:
                continue
            found[stat.pid] = stat
    return found


def tree(root: int) -> dict[int, Stat]:
    """Return a process and its descendants; empty when it is gone."""
    stats = all_stats()
    members = {root} & stats.keys()
    grew = True
    while grew:
        more = {pid for pid, stat in stats.items() if stat.parent in members} - members
        members |= more
        grew = bool(more)
    return {pid: stats[pid] for pid in members}


def cpu_seconds(stats: dict[int, Stat]) -> float:
    """Return the processor time that processes have used."""
    return sum(stat.ticks for stat in stats.values()) / _TICKS_PER_S


def busy_seconds() -> float:
    """Return the processor time that the whole machine has used."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def memory_bytes(pids: list[int], field: str = "Pss") -> int:
    """Return the summed memory of processes; shared pages count once in all with ``Pss``."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    return total


def descriptor_kinds(pids: list[int]) -> Counter[str]:
    """Return how many descriptors processes have open, by kind: ``socket``, ``anon_inode``, ``pipe``, ``file``."""
    found = Counter[str]()
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            kind = target.partition(":")[0]
            found["file" if kind.startswith("/") else kind] += 1
    return found


def mappings(pids: list[int]) -> int:
    """Return how many memory mappings processes have."""
    total = 0
    for pid in pids:
        try:
            total += len(Path(f"/proc/{pid}/maps").read_text().splitlines())
        except OSError:
            continue
    return total


def stop_tree(root: int, members: dict[int, Stat]) -> None:
    """End a server: ask its root, then kill whatever of ``members`` or of its tree is left. Reaps what is ours.

    Args:
        members: processes seen in the tree earlier, for those that no longer hang on the root.
    """
    members = members | tree(root)
    _signal(members.get(root), signal.SIGTERM)
    _wait_gone([members[root]] if root in members else [], STOP_TIMEOUT_S)
    members = members | tree(root)
    _wait_gone(list(members.values()), 1.0)
    # Python's resource trackers last: once nobody else is left they remove the semaphores that the killed have named.
    trackers = [stat for stat in members.values() if _is_tracker(stat.pid)]
    for doomed in ([stat for stat in members.values() if stat not in trackers], trackers):
        for stat in doomed:
            _signal(stat, signal.SIGKILL)
        _wait_gone(list(members.values()), KILL_TIMEOUT_S)


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _same(stat: Stat) -> bool:
    try:
        now = parse_stat(Path(f"/proc/{stat.pid}/stat").read_text())
    except OSError:
        return False
    return now.started == stat.started


def _signal(stat: Stat | None, number: signal.Signals) -> None:
    if stat is not None and _same(stat):
        try:
            os.kill(stat.pid, number)
        except ProcessLookupError:
            return


def _wait_gone(stats: list[Stat], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        for stat in stats:
            try:
                os.waitpid(stat.pid, os.WNOHANG)
            except ChildProcessError:
                continue
        if not any(_same(stat) for stat in stats):
            return
        time.sleep(POLL_S)
