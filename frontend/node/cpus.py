"""How many frontends follow from the CPUs this node may use."""

from __future__ import annotations

from engines.cpus import available_cpus

MAX_AUTO_FRONTENDS = 4
"""More frontends than this only help hook-heavy models; whoever has those sets ``frontends``."""


def auto_frontends(cpus: int) -> int:
    """Return the default number of frontends: all CPUs but the worker's, within 1..MAX_AUTO_FRONTENDS."""
    return max(1, min(MAX_AUTO_FRONTENDS, cpus - 1))


def auto_frontends_here() -> int:
    """Return the default number under this process's affinity and control-group quota."""
    return auto_frontends(available_cpus())
