"""What the audit log keeps of a change: the values, and in words what they were and are. Pure.

No row holds an address: a metrics URL says where a server stands inside the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from frontend.batches.scheduling.plain_words import OFF, InWords, in_words
from frontend.batches.store.rows import SchedulingRow

SETTINGS_UPDATED: Final = "batch_scheduling.updated"
WEIGHT_UPDATED: Final = "batch_weight.updated"
BATCH_CANCELLED: Final = "batch.cancelled"
Difference = Mapping[str, Mapping[str, str]]
"""``before`` and ``after`` by the name of what changed, as people read it."""


def settings_details(before: SchedulingRow, after: SchedulingRow) -> dict[str, Any]:
    """Return what is kept of new settings (rule 80), and how they differ from those they replace."""
    details: dict[str, Any] = {
        "max_concurrency": after.max_concurrency,
        "yield_live_threshold": after.yield_live_threshold,
        "server_metrics": after.metrics_url is not None,
        "priority": after.priority,
        "window": after.window_timezone is not None,
    }
    if after.reopen_after_s is not None:
        details["reopen_after_s"] = after.reopen_after_s
    if after.min_concurrency is not None:
        details["min_concurrency"] = after.min_concurrency
        details["latency_share_percent"] = after.latency_share_percent
    details["changes"] = difference(before, after)
    return details


def difference(before: SchedulingRow, after: SchedulingRow) -> Difference:
    """Return what differs between two settings of a route."""
    old, new = in_words(before), in_words(after)
    found = {
        name: {"before": getattr(old, name), "after": getattr(new, name)}
        for name in InWords.__slots__
        if getattr(old, name) != getattr(new, name)
    }
    if "metrics_url" in found:
        found["metrics_url"] = _without_address(before, after)
    return found


def weight_details(before: int, after: int) -> dict[str, Any]:
    """Return what is kept of a new weight."""
    changes = {} if before == after else {"weight": {"before": str(before), "after": str(after)}}
    return {"weight": after, "changes": changes}


def _without_address(before: SchedulingRow, after: SchedulingRow) -> dict[str, str]:
    if before.metrics_url is None:
        return {"before": OFF, "after": "Set"}
    return {"before": "Set", "after": OFF if after.metrics_url is None else "Another address"}
