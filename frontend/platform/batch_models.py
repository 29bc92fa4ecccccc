"""From rows of the store to what people see of batches and their incidents. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.store.route_rows import IncidentRow, PositionRow
from frontend.batches.store.rows import BatchRow, WorkspaceRow
from frontend.openai.principal import Principal
from frontend.platform.read_models import BatchSummary, IncidentView, LaneView


@dataclass(frozen=True, slots=True)
class Beside:
    """What lists show of batches that is not in their rows, by batch, key or workspace id."""

    running: Mapping[str, int]
    reasons: Mapping[str, str]
    key_names: Mapping[str, str]
    workspace_names: Mapping[str, str]
    outlooks: Mapping[str, Outlook] = field(default_factory=dict)


def batch_summary(row: BatchRow, principal: Principal, beside: Beside) -> BatchSummary:
    """Return a batch as lists show it."""
    running = beside.running.get(row.id, 0)
    return BatchSummary(
        id=row.id,
        workspace_id=row.workspace_id,
        workspace_name=beside.workspace_names.get(row.workspace_id, row.workspace_id),
        key_id=row.api_key_id,
        key_name=beside.key_names.get(row.api_key_id),
        mine=row.api_key_id == principal.key_id,
        mode=row.mode,
        endpoint=row.endpoint,
        model=row.public_model,
        state=row.state,
        status=row.status_detail,
        total=row.request_total,
        completed=row.request_completed,
        failed=row.request_failed,
        error_code=row.error_code,
        completion_window_hours=row.completion_window_hours,
        retry_limit=row.retry_limit,
        created_at_us=row.created_at,
        in_progress_at_us=row.in_progress_at,
        finalizing_at_us=row.finalizing_at,
        completed_at_us=row.completed_at,
        cancel_requested_at_us=row.cancel_requested_at,
        expires_at_us=row.expires_at,
        input_file_id=row.input_file_id,
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        running_lines=running,
        waiting_reason=beside.reasons.get(row.id) if running == 0 and waits_for_capacity(row) else None,
        outlook=None if row.finished else beside.outlooks.get(row.id),
    )


def waits_for_capacity(row: BatchRow) -> bool:
    """Return whether a batch can be waiting for capacity at all (rule 68)."""
    return (
        row.mode == "gateway"
        and row.state in ("queued", "in_progress")
        and row.cancel_requested_at is None
        and row.finalizing_at is None
    )


def lane_view(row: PositionRow, model_of: Callable[[str], str]) -> LaneView:
    """Return what a batch has on one route."""
    return LaneView(
        route_id=row.route_id,
        model=model_of(row.route_id),
        reason=row.reason,
        waiting_lines=row.waiting_lines,
        running_lines=row.running_lines,
        position=row.position,
        queue=row.queue,
        since_us=row.since,
    )


def incident_view(row: IncidentRow, workspace: WorkspaceRow | None) -> IncidentView:
    """Return an incident; ``workspace`` None if it concerns none, or one that is gone."""
    return IncidentView(
        id=row.id,
        rule=row.rule,
        subject=row.subject,
        workspace_id=row.workspace_id,
        workspace_name=row.workspace_id if workspace is None else workspace.name,
        personal=workspace is not None and workspace.kind == "personal",
        summary=row.summary,
        details=row.details,
        opened_at_us=row.opened_at,
        resolved_at_us=row.resolved_at,
    )
