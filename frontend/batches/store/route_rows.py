"""A route's signals and counts, and the audit log, as the store keeps them (see rows.py for the conventions)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SignalRow:
    """Last gate evaluation of a route by any process; ``checked_at`` is set by the store on write."""

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
