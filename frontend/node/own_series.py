"""The node's own figures: which processes run, since when, how often they were started again, when they last beat."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

from frontend.node.fleet import Fleet
from frontend.node.keeper import Keeper
from frontend.version import hot_path, own_version
from worker.channel.series import Series


def own_series(fleet: Fleet, keepers: Sequence[Keeper], *, ready: bool, dropped: int) -> list[Series]:
    """Return what the node knows of its processes; the dead are shown as down, never left out."""
    now_ns = time.monotonic_ns()
    rows = [
        Series(
            name="ringserve_build_info", kind="gauge", help="Version of this node; always 1.", value=1,
            labels={"version": own_version(), "python": platform.python_version(), "hot_path": hot_path()},
        ),
        Series(
            name="ringserve_ready", kind="gauge", help="Whether the node can answer requests (1 or 0).",
            value=ready,
        ),
        Series(
            name="ringserve_series_dropped_total", kind="counter",
            help="Series of processes that could not be exposed.", value=dropped,
        ),
    ]  # fmt: skip
    managed = {keeper.name: keeper for keeper in keepers}
    for keeper in keepers:
        up = fleet.named(keeper.name) is not None
        rows += [
            Series(
                name="ringserve_process_up", kind="gauge", help="Whether the process runs (1 or 0).",
                labels={"process": keeper.name, "role": keeper.role}, value=up,
            ),
            Series(
                name="ringserve_process_restarts_total", kind="counter",
                help="Times the node started the process again.",
                labels={"process": keeper.name}, value=keeper.restarts,
            ),
        ]  # fmt: skip
    for member in fleet.members.values():
        labels = {"process": member.name, "role": member.role}
        if member.name not in managed:
            rows.append(Series(
                name="ringserve_process_up", kind="gauge", help="Whether the process runs (1 or 0).",
                labels=labels, value=1,
            ))  # fmt: skip
        rows.append(Series(
            name="ringserve_process_start_time_seconds", kind="gauge",
            help="When the process was started, in Unix seconds.", labels=labels, value=member.started_at,
        ))  # fmt: skip
        if member.pulse is not None and member.pulse.heartbeat_ns:
            rows.append(Series(
                name="ringserve_process_heartbeat_age_seconds", kind="gauge",
                help="Seconds since the process's loop last came round.",
                labels=labels, value=max(0, now_ns - member.pulse.heartbeat_ns) / 1e9,
            ))  # fmt: skip
    return rows
