"""The audit log's rows, written in the transaction of what they tell."""

from __future__ import annotations

from frontend.batches.store.route_rows import AuditRow
from frontend.batches.store.transaction import Op, clock, sql


def add_audit(row: AuditRow) -> Op[None]:
    """Append a row; the store sets its time."""
    now = yield from clock()
    yield from sql(
        "INSERT INTO audit_log (at, action, workspace_id, actor_key_id, subject, details)"
        " VALUES (:at, :action, :workspace, :actor, :subject, :details)",
        at=now,
        action=row.action,
        workspace=row.workspace_id,
        actor=row.actor_key_id,
        subject=row.subject,
        details=row.details,
    )
