"""How much of the machine goes to others while something is measured, as far as they can be in its way.

Those are processes that do not descend from this one and are not less important (``nice``), and other machines on the
same host (stolen time). What is less important gives way and costs little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One process; ``used_s`` is the processor time of it and of children that have ended."""

    parent: int
    nice: int
    used_s: float


class OtherWork:
    """Between making it and ``share``."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._before = processes(PROC)
        self._stolen_s = stolen_s(PROC)

    def share(self) -> float:
        """Return the processor time of others as a share of all cores, 0 to 1."""
        passed_s = time.monotonic() - self._began_s
        used_s = others_s(self._before, processes(PROC), os.getpid()) + stolen_s(PROC) - self._stolen_s
        return used_s / (passed_s * (os.cpu_count() or 1))


def others_s(before: Mapping[int, Process], after: Mapping[int, Process], root: int) -> float:
    """Return the seconds that processes used in between which neither descend from ``root`` nor give way to it."""
    ours = {root}
    grows = True
    while grows:
        more = {pid for pid, one in after.items() if one.parent in ours} - ours
        ours |= more
        grows = bool(more)
    found_s = 0.0
    for pid, one in after.items():
        if pid not in ours and one.nice <= after[root].nice:
            found_s += max(0.0, one.used_s - (before[pid].used_s if pid in before else 0.0))
    return found_s


def processes(proc: Path) -> dict[int, Process]:
    """Return every process that is there."""
    found = {}
    for path in proc.glob("[0-9]*/stat"):
        try:
            # The name may hold anything, brackets too.
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(path.parent.name)] = Process(int(fields[1]), int(fields[16]), sum(map(int, fields[11:15])) / TICKS)
    return found


def stolen_s(proc: Path) -> float:
    """Return the seconds that other machines have taken from this one since its start."""
    return int((proc / "stat").read_text().split(maxsplit=9)[8]) / TICKS
