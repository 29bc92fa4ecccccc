"""What the store keeps of routes, alerts and the audit log (see rows.py for the conventions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SignalRow:
    """Last gate evaluation of a route by any process; ``checked_at`` is set by the store on write.

    ``reopens_at``: when the live gate opens if nobody calls; None unless that alone holds it."""

    route_id: str
    paused_reason: str | None
    checked_at: int = 0
    live_in_flight: int | None = None
    metrics_checked_at: int | None = None
    metrics_ok: bool | None = None
    metrics_waiting: int | None = None
    metrics_running: int | None = None
    metrics_kv_cache_permille: int | None = None
    metrics_error: str | None = None
    reopens_at: int | None = None


@dataclass(frozen=True, slots=True)
class AuditRow:
    """``details`` is JSON object text without secrets; ``seq`` and ``at`` are set by the store on write."""

    action: str
    workspace_id: str | None
    actor_key_id: str | None
    subject: str
    details: str
    at: int = 0
    seq: int = 0


@dataclass(frozen=True, slots=True)
class RouteCount:
    """Fresh demand and running lines of one route."""

    route_id: str
    waiting_lines: int
    waiting_batches: int
    running_lines: int


@dataclass(frozen=True, slots=True)
class RouteCap:
    """The adaptive cap of a route as every process applies it; ``why`` is a code such as ``clean_window``."""

    route_id: str
    cap: int
    why: str
    changed_at: int = 0


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """A moment at which a route's gates opened or closed, or its cap changed, as one process saw it.

    Attributes:
        at: 0 = the store stamps it on write.
        reason: why the gates are closed from here on; None = open.
        cap: lines at once from here on.
        why: set when the adaptive cap changed: the code of its cause.
    """

    route_id: str
    at: int
    process_id: str
    reason: str | None
    live_in_flight: int | None = None
    metrics_waiting: int | None = None
    metrics_running: int | None = None
    metrics_kv_cache_permille: int | None = None
    metrics_error: str | None = None
    cap: int | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class MinuteRow:
    """What happened on a route within one minute; several processes add to the same row.

    Attributes:
        minute: whole minutes since 1970, UTC.
        live_max, running_max, queued_max: the highest seen.
        cap: the last one written.
        open_us, observed_us: how long the gates were open, of how long somebody looked (summed over processes).
        lines_done, line_s_sum, line_s_sq_sum: lines that ended, the sum of their seconds and of the squares of them.
        overloads: answers 429 and 503.
    """

    route_id: str
    minute: int
    live_max: int = 0
    running_max: int = 0
    queued_max: int = 0
    cap: int = 0
    open_us: int = 0
    observed_us: int = 0
    lines_done: int = 0
    line_s_sum: float = 0.0
    line_s_sq_sum: float = 0.0
    overloads: int = 0


IncidentEvent = Literal["opened", "resolved"]


@dataclass(frozen=True, slots=True)
class IncidentRow:
    """An alert that fired. ``details`` is JSON object text without secrets; the store sets every time on write.

    ``opened_delivered_at``, ``resolved_delivered_at``: when the outside was told (or telling it was given up).
    """

    id: str
    rule: str
    subject: str
    workspace_id: str | None
    summary: str
    details: str
    opened_at: int = 0
    resolved_at: int | None = None
    opened_delivered_at: int | None = None
    resolved_delivered_at: int | None = None


@dataclass(frozen=True, slots=True)
class PositionRow:
    """A batch on one route (rule 69). ``position`` counts from 1 among ``queue`` batches; None = it waits not here.

    ``since``: when it began to wait for this route.
    """

    route_id: str
    reason: str | None
    waiting_lines: int
    running_lines: int
    position: int | None
    queue: int
    since: int | None


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Batches of all personal workspaces together: platform roles see no more of them."""

    batches: int
    unfinished: int
    request_total: int
    request_completed: int
    request_failed: int
