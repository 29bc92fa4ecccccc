"""How many CPUs this process may really use, and how many frontends follow from that."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

MAX_AUTO_FRONTENDS = 4
"""More frontends than this only help hook-heavy models; whoever has those sets ``frontends``."""


def auto_frontends(cpus: int) -> int:
    """Return the default number of frontends: all CPUs but the worker's, within 1..MAX_AUTO_FRONTENDS."""
    return max(1, min(MAX_AUTO_FRONTENDS, cpus - 1))


def usable_cpus() -> int:
    """Return the CPUs of this process after affinity and control-group quota, at least 1.

    A container's quota does not show in ``os.cpu_count``; sizing by the host makes processes fight for a few CPUs.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = quota_cpus(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def quota_cpus(membership: Path, root: Path) -> float | None:
    """Return the smallest CPU quota of a process's control groups, in CPUs, or None without one.

    Args:
        membership: ``/proc/PID/cgroup``.
        root: where the control-group file system is mounted; version 2, or version 1 with a ``cpu`` directory.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            quotas += _walk(root, group, _version2)
        elif "cpu" in controllers.split(","):
            quotas += _walk(root / "cpu", group, _version1) or _walk(root / controllers, group, _version1)
    return min(quotas, default=None)


def _walk(root: Path, group: str, read: Callable[[Path], float | None]) -> list[float]:
    """Return the quotas from a group up to the root: any ancestor may be the one that limits."""
    directory = root / group.lstrip("/")
    found = []
    while True:
        quota = read(directory)
        if quota is not None:
            found.append(quota)
        if directory == root or root not in directory.parents:
            return found
        directory = directory.parent


def _version2(directory: Path) -> float | None:
    try:
        quota, period = (directory / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _version1(directory: Path) -> float | None:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((directory / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None
