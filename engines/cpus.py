"""How many CPUs this process may use: its affinity mask and its control groups' quota, whichever is less.

A thread pool sized by the machine collapses in a container that has a share of it: the threads take turns on the
quota and are all stopped together once it is spent. ``os.cpu_count()`` knows neither limit.

Source: cgroup v2 ``cpu.max`` ("quota period" in microseconds, or "max"), cgroup v1 ``cpu.cfs_quota_us`` and
``cpu.cfs_period_us`` (quota -1 = none). A parent's limit holds for its children, so the whole path is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MAX_DEPTH = 32
"""Levels of a control group path that are looked at; deeper ones do not occur."""


def available_cpus(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the whole CPUs this process may use, at least 1; a quota of 2.5 CPUs counts as 2."""
    allowed = len(os.sched_getaffinity(0))
    quota = quota_cpus(proc, cgroups)
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def compute_threads(cpus: int) -> int:
    """Return the threads an engine should compute with: one CPU is left to the thread that feeds it."""
    return max(1, cpus - 1)


def quota_cpus(proc: Path, cgroups: Path) -> float | None:
    """Return the smallest CPU quota on this process's control group path, in CPUs; None without a quota."""
    quotas = [quota for folder in _folders(proc, cgroups) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield every control group folder that may hold a limit; inside a container the path may not exist."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    seen: set[Path] = set()
    for line in lines:
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0":
            roots = [cgroups, cgroups / "unified"]
        elif "cpu" in controllers.split(","):
            roots = [cgroups / controllers, cgroups / "cpu"]
        else:
            continue
        relative = PurePosixPath(path.lstrip("/"))
        for root in roots:
            for part in [relative, *relative.parents][:_MAX_DEPTH]:
                folder = root / part
                if folder not in seen:
                    seen.add(folder)
                    yield folder


def _quota_of(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        quota_us, period_us = int(quota), int(period)
    except ValueError:
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None
