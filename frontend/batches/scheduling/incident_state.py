"""Which alerts about batches fire, and what opens and ends an incident. Pure.

At most one incident is open per rule and batch. A rule watches one workspace, or (an installation rule) all team and
project workspaces: personal ones are nobody else's business.

    batch_stalled   no progress and no legitimate wait for the rule's minutes; ends with progress or the batch.
    batch_failed    ended failed or expired in the last 24 h; ends when that is past.
    batch_at_risk   the forecast says it may expire before it is done, twice in a row; ends when there is room to
                    spare again, or with the batch. Forecasts move: between the two the incident stays as it is.

Source: batches.md 1.14, rules 70 to 72, and section 2, idea 4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.store.route_rows import IncidentRow
from frontend.batches.store.rows import SECOND_US, BatchRow, WorkspaceRow
from frontend.gateway_settings import AlertRule

FAILED_US: Final = 24 * 3600 * SECOND_US
ROOM_SHARE: Final = 0.1
ROOM_S: Final = 300
"""Room to spare: this share of the time that is left, and at least so many seconds."""

Key = tuple[str, str]
"""Rule and subject."""


@dataclass(frozen=True, slots=True)
class Firing:
    """A rule that fires for a batch."""

    rule: str
    subject: str
    workspace_id: str
    summary: str
    details: dict[str, Any]

    @property
    def key(self) -> Key:
        return self.rule, self.subject


@dataclass(frozen=True, slots=True)
class Picture:
    """What the rules are judged on, all of one moment.

    Attributes:
        stalled: unfinished batches without progress or legitimate wait, per length of that in minutes.
        ended: batches that ended ``failed`` or ``expired`` within ``FAILED_US``.
        unfinished: batches there is an outlook for, or an open incident; those that have not ended.
    """

    now_us: int
    workspaces: Mapping[str, WorkspaceRow]
    stalled: Mapping[int, Sequence[BatchRow]]
    ended: Sequence[BatchRow]
    unfinished: Mapping[str, BatchRow]
    outlooks: Mapping[str, Outlook]


@dataclass(frozen=True, slots=True)
class Changes:
    """What to do now. ``pending``: at risk for the first time; to be passed to the next judgement."""

    opens: tuple[Firing, ...]
    resolves: tuple[Key, ...]
    pending: frozenset[Key]


def judge(
    rules: Iterable[AlertRule], picture: Picture, incidents: Sequence[IncidentRow], pending: Collection[Key]
) -> Changes:
    """Return what to open and to end, given the open incidents and what was pending before."""
    opened = {(incident.rule, incident.subject) for incident in incidents}
    firing: dict[Key, Firing] = {}
    holding: set[Key] = set()
    waits: set[Key] = set()
    for rule in rules:
        for found in _fires(rule, picture):
            if rule.kind == "batch_at_risk" and found.key not in opened and found.key not in pending:
                waits.add(found.key)
            else:
                firing.setdefault(found.key, found)
        if rule.kind == "batch_at_risk":
            holding |= {
                (rule.name, subject) for name, subject in opened if name == rule.name and _still_tight(picture, subject)
            }
    opens = tuple(found for key, found in firing.items() if key not in opened)
    resolves = tuple(sorted(key for key in opened if key not in firing and key not in holding))
    return Changes(opens, resolves, frozenset(waits))


def ending(rule: AlertRule | None, batch: BatchRow | None) -> str:
    """Return the code of what ended an incident.

    Args:
        rule: None if it is not configured any more.
        batch: as it is now, None if it is gone.
    """
    if rule is None:
        return "rule_removed"
    if rule.kind == "batch_failed":
        return "day_passed"
    if batch is None or batch.completed_at is not None:
        return "batch_ended"
    if rule.kind == "batch_at_risk":
        return "on_time"
    waited, progress = batch.last_waited_at or 0, batch.last_progress_at or 0
    return "waits" if waited > progress else "progress"


def watches(rule: AlertRule, workspace: WorkspaceRow | None) -> bool:
    """Return whether a rule is about a workspace's batches."""
    if workspace is None:
        return False
    return rule.workspace in (workspace.id, workspace.name) if rule.workspace else workspace.kind != "personal"


def _fires(rule: AlertRule, picture: Picture) -> Iterable[Firing]:
    match rule.kind:
        case "batch_stalled":
            batches: Iterable[BatchRow] = picture.stalled.get(rule.window_minutes, ())
        case "batch_failed":
            batches = picture.ended
        case _:
            batches = [
                batch
                for batch_id, batch in picture.unfinished.items()
                if (outlook := picture.outlooks.get(batch_id)) is not None and outlook.at_risk
            ]
    for batch in batches:
        if watches(rule, picture.workspaces.get(batch.workspace_id)):
            summary, details = _text(rule, batch, picture)
            yield Firing(rule.name, batch.id, batch.workspace_id, summary, _facts(rule, batch) | details)


def _text(rule: AlertRule, batch: BatchRow, picture: Picture) -> tuple[str, dict[str, Any]]:
    match rule.kind:
        case "batch_stalled":
            minutes = (picture.now_us - stall_clock_us(batch)) // (60 * SECOND_US)
            summary = f"Batch {batch.id} has made no progress for {minutes} minutes"
            return summary, {"minutes_without_progress": minutes, "window_minutes": rule.window_minutes}
        case "batch_failed":
            return _ended_text(batch), {"state": batch.state, "error_code": batch.error_code}
        case _:
            outlook = picture.outlooks[batch.id]
            needed = None if outlook.window_hours is None else f"{outlook.window_hours}h"
            summary = f"Batch {batch.id} may expire before it is done"
            return summary, {
                "eta_p50": outlook.eta_p50,
                "eta_p90": outlook.eta_p90,
                "expires_at": outlook.expires_at,
                "suggested_completion_window": needed,
            }


def _ended_text(batch: BatchRow) -> str:
    if batch.state == "expired":
        return f"Batch {batch.id} expired before all its lines had run"
    if batch.error_code == "budget_exceeded":
        return f"Batch {batch.id} was stopped by its budget"
    return f"Batch {batch.id} failed"


def _facts(rule: AlertRule, batch: BatchRow) -> dict[str, Any]:
    return {
        "kind": rule.kind,
        "batch": batch.id,
        "mode": batch.mode,
        "total": batch.request_total,
        "done": batch.request_completed + batch.request_failed,
    }


def stall_clock_us(batch: BatchRow) -> int:
    """Return since when a batch has neither progressed nor waited for a legitimate reason (rule 70)."""
    progress = batch.last_progress_at or batch.in_progress_at or batch.created_at
    return max(progress, batch.last_waited_at or 0)


def _still_tight(picture: Picture, subject: str) -> bool:
    """Return whether an incident that is open stays so: the batch runs, and its forecast leaves no room."""
    batch = picture.unfinished.get(subject)
    if batch is None:
        return False
    outlook = picture.outlooks.get(subject)
    # Nothing known of it now (no runner, a store that was away): that is no good news.
    if outlook is None or outlook.at_risk or outlook.eta_p90 is None:
        return True
    left_s = outlook.expires_at - picture.now_us // SECOND_US
    return outlook.eta_p90 > outlook.expires_at - max(ROOM_S, ROOM_SHARE * left_s)
