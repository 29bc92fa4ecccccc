"""From read models to the documents of the API. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import overload

import msgspec

from frontend.batches.scheduling.outlook import Outlook, outlook_document
from frontend.batches.scheduling.plain_words import InWords, in_words
from frontend.batches.scheduling.settings_document import settings_document
from frontend.batches.store.rows import SECOND_US, SchedulingRow
from frontend.platform import documents as d
from frontend.platform import preview_documents as p
from frontend.platform.read_models import (
    AuditView,
    BatchRows,
    BatchSummary,
    BatchView,
    ChartView,
    EdgeView,
    Effects,
    IncidentView,
    LaneView,
    OpenInterval,
    PersonalTotals,
    PreviewView,
    Reading,
    RouteStatus,
    RouteView,
    WorkspaceView,
)


@overload
def time(us: int) -> str: ...
@overload
def time(us: None) -> None: ...
@overload
def time(us: int | None) -> str | None: ...
def time(us: int | None) -> str | None:
    """Return a time as the API shows it, to the second."""
    return None if us is None else datetime.fromtimestamp(us // SECOND_US, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def settings(row: SchedulingRow) -> d.SettingsDocument:
    """Return settings as they are PUT."""
    return msgspec.convert(settings_document(row), d.SettingsDocument)


def scheduling(view: RouteView, defaults: SchedulingRow) -> d.SchedulingDocument:
    """Return settings and status of a route."""
    deployment = view.deployment
    return d.SchedulingDocument(
        deployment=d.DeploymentDocument(id=deployment.id, model=deployment.model, kind=deployment.kind),
        configured=deployment.configured,
        version=view.version,
        settings=settings(view.settings),
        defaults=settings(defaults),
        priority_supported=deployment.priority_supported,
        status=_status(view.status),
        in_words=_words(in_words(view.settings)),
        updated_at=time(view.updated_at_us),
        updated_by=view.updated_by,
    )


def preview(view: PreviewView) -> p.PreviewDocument:
    """Return what settings would mean."""
    return p.PreviewDocument(
        in_words=_words(view.words),
        always=view.always,
        intervals=[_interval(one) for one in view.intervals],
        live_closed_percent=view.live_closed_percent,
        observed_minutes=view.observed_minutes,
        effects=None if view.effects is None else _effects(view.effects),
    )


def chart(view: ChartView) -> d.ChartDocument:
    """Return what happened on a route."""
    return d.ChartDocument(
        since=time(view.from_us),
        until=time(view.to_us),
        step_minutes=view.step_minutes,
        spans=[
            d.SpanDocument(since=time(one.from_us), until=time(one.to_us), state=one.state, reason=one.reason)
            for one in view.spans
        ],
        points=[
            d.PointDocument(
                at=time(one.at_us),
                live_max=one.live_max,
                running_max=one.running_max,
                queued_max=one.queued_max,
                cap=one.cap,
                lines_done=one.lines_done,
                overloads=one.overloads,
            )
            for one in view.points
        ],
        edges=[_edge(one) for one in view.edges],
    )


def batches(view: BatchRows) -> d.BatchesDocument:
    """Return a page of a workspace's batches."""
    return d.BatchesDocument(data=[batch(one) for one in view.rows], has_more=view.has_more, scope=view.scope)


def all_batches(view: BatchRows, totals: PersonalTotals) -> d.AllBatchesDocument:
    """Return a page of the installation's batches."""
    return d.AllBatchesDocument(
        data=[batch(one) for one in view.rows],
        has_more=view.has_more,
        personal=d.PersonalDocument(
            workspaces=totals.workspaces,
            unfinished=totals.unfinished,
            finished=totals.finished,
            total=totals.total,
            completed=totals.completed,
            failed=totals.failed,
        ),
    )


def batch(one: BatchSummary) -> d.BatchDocument:
    """Return one batch."""
    return d.BatchDocument(
        id=one.id,
        workspace_id=one.workspace_id,
        workspace=one.workspace_name,
        key_id=one.key_id,
        key_name=one.key_name,
        mine=one.mine,
        mode=one.mode,
        endpoint=one.endpoint,
        model=one.model,
        state=one.state,
        status=one.status,
        total=one.total,
        completed=one.completed,
        failed=one.failed,
        error_code=one.error_code,
        completion_window=f"{one.completion_window_hours}h",
        retries=one.retry_limit,
        created_at=time(one.created_at_us),
        in_progress_at=time(one.in_progress_at_us),
        finalizing_at=time(one.finalizing_at_us),
        cancelling_at=time(one.cancel_requested_at_us),
        ended_at=time(one.completed_at_us),
        expires_at=time(one.expires_at_us),
        input_file_id=one.input_file_id,
        output_file_id=one.output_file_id,
        error_file_id=one.error_file_id,
        running_lines=one.running_lines,
        waiting_reason=one.waiting_reason,
        outlook=None if one.outlook is None else _outlook(one.outlook),
    )


def batch_page(view: BatchView) -> d.BatchPageDocument:
    """Return one batch with its outcomes and what it waits for."""
    return d.BatchPageDocument(
        batch=batch(view.batch),
        outcomes=[d.OutcomeDocument(state=one.state, code=one.code, lines=one.lines) for one in view.outcomes],
        scheduling=[_lane(one) for one in view.scheduling],
    )


def workspace(view: WorkspaceView) -> d.WorkspaceDocument:
    """Return a workspace with its weight."""
    return d.WorkspaceDocument(id=view.id, name=view.name, kind=view.kind, weight=view.weight)


def incident(view: IncidentView) -> d.IncidentDocument:
    """Return an incident."""
    return d.IncidentDocument(
        id=view.id,
        rule=view.rule,
        subject=view.subject,
        workspace_id=view.workspace_id,
        summary=view.summary,
        details=msgspec.json.decode(view.details, type=dict),
        opened_at=time(view.opened_at_us),
        resolved_at=time(view.resolved_at_us),
    )


def audit(view: AuditView) -> d.AuditDocument:
    """Return a row of the audit log."""
    return d.AuditDocument(
        seq=view.seq,
        at=time(view.at_us),
        action=view.action,
        actor_key_id=view.actor_key_id,
        actor=view.actor_name,
        workspace_id=view.workspace_id,
        subject=view.subject,
        details=msgspec.json.decode(view.details, type=dict),
    )


def _status(status: RouteStatus) -> d.RouteStatusDocument:
    return d.RouteStatusDocument(
        queued_lines=status.queued_lines,
        waiting_batches=status.waiting_batches,
        running_lines=status.running_lines,
        paused_reason=status.paused_reason,
        checked_at=time(status.checked_at_us),
        live_in_flight=status.live_in_flight,
        metrics=_reading(status.metrics),
        cap=status.cap,
        cap_why=status.cap_why,
        reopens_at=time(status.reopens_at_us),
    )


def _reading(reading: Reading | None) -> d.ReadingDocument | None:
    if reading is None:
        return None
    return d.ReadingDocument(
        checked_at=time(reading.checked_at_us),
        ok=reading.ok,
        waiting=reading.waiting,
        running=reading.running,
        kv_cache_permille=reading.kv_cache_permille,
        error=reading.error,
    )


def _edge(edge: EdgeView) -> d.EdgeDocument:
    return d.EdgeDocument(
        at=time(edge.at_us),
        reason=edge.reason,
        live_in_flight=edge.live_in_flight,
        metrics=_reading(edge.reading),
        cap=edge.cap,
        why=edge.why,
    )


def _interval(one: OpenInterval) -> p.IntervalDocument:
    return p.IntervalDocument(
        opens_at=time(one.opens_us),
        closes_at=time(one.closes_us),
        opens_local=one.opens_local,
        closes_local=one.closes_local,
        open_now=one.open_now,
        note=one.note or None,
    )


def _lane(one: LaneView) -> d.LaneDocument:
    return d.LaneDocument(
        model=one.model,
        reason=one.reason,
        waiting_lines=one.waiting_lines,
        running_lines=one.running_lines,
        position=one.position,
        queue=one.queue,
        since=time(one.since_us),
    )


def _effects(view: Effects) -> p.EffectsDocument:
    return p.EffectsDocument(
        data=[
            p.EffectDocument(
                batch_id=one.batch_id,
                workspace=one.workspace_name,
                model=one.public_model,
                now=_eta(one.now),
                then=_eta(one.then),
            )
            for one in view.batches
        ],
        left_out=view.left_out,
        personal=view.personal,
    )


def _eta(outlook: Outlook) -> p.EtaDocument:
    ends = (None if end is None else time(end * SECOND_US) for end in (outlook.eta_p50, outlook.eta_p90))
    return p.EtaDocument(eta_p50=next(ends), eta_p90=next(ends), at_risk=outlook.at_risk)


def _outlook(outlook: Outlook) -> d.OutlookDocument:
    document = outlook_document(outlook)
    for name in ("eta_p50", "eta_p90"):
        seconds = document[name]
        document[name] = None if seconds is None else time(seconds * SECOND_US)
    return msgspec.convert(document, d.OutlookDocument)


def _words(words: InWords) -> dict[str, str]:
    return {name: getattr(words, name) for name in InWords.__slots__}
