"""The JSON of the management API, as types: answers are encoded from these and the OpenAPI document is made of them.

Times are UTC to the second, ``2026-10-09T12:00:00Z``; null where the event has not happened.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.batches.runner.gates import Reason
from frontend.batches.scheduling.load_limits import ReadError
from frontend.batches.store.rows import BatchState, LineState, Mode, StatusDetail, WorkspaceKind
from frontend.gateway_settings import UpstreamKind
from frontend.openai.principal import Role
from frontend.platform.read_models import GateState, Scope

ReasonText = Annotated[str, Meta(extra_json_schema={"enum": [reason.value for reason in Reason]})]
"""Not the type itself: a newer process may have stored a reason that is not known here yet."""
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Weight = Annotated[int, Meta(ge=1, le=100)]
Concurrency = Annotated[int, Meta(ge=1, le=256)]
Clock = Annotated[str, Meta(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
MetricsError = Annotated[str, Meta(extra_json_schema={"enum": [error.value for error in ReadError]})]


class Document(msgspec.Struct, kw_only=True):
    """Base of all."""


class ErrorBody(Document):
    """``code`` is the HTTP status as text; ``param`` names what was wrong, where that is one thing."""

    code: Annotated[str, Meta(pattern="^[1-5][0-9]{2}$")]
    message: str
    param: str | msgspec.UnsetType = msgspec.UNSET


class ErrorDocument(Document):
    """Every answer that is not a success."""

    error: ErrorBody


# Routes


class ConcurrencyRange(Document, forbid_unknown_fields=True):
    """A cap that adapts itself between two bounds."""

    min: Concurrency
    max: Concurrency


class MetricsLimits(Document, forbid_unknown_fields=True):
    """Server load signal: the route pauses while a reading is above its limit. At least one limit is set."""

    url: Annotated[str, Meta(min_length=12, max_length=2048)]
    max_waiting: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    max_running: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    max_kv_cache_percent: Annotated[int, Meta(ge=1, le=100)] | None = None


class WindowDocument(Document, forbid_unknown_fields=True):
    """When lines may start. The days are those on which a window starts; an end before its start is the next day's."""

    timezone: Annotated[str, Meta(min_length=1, max_length=64)]
    days: Annotated[tuple[Day, ...], Meta(min_length=1, max_length=7, extra_json_schema={"uniqueItems": True})]
    start: Clock
    end: Clock


class SettingsDocument(Document, forbid_unknown_fields=True):
    """Batch scheduling of a route. A PUT replaces all of it; what is left out is off."""

    max_concurrency: Concurrency | ConcurrencyRange
    yield_live_threshold: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    metrics: MetricsLimits | None = None
    priority: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    window: WindowDocument | None = None
    latency_share_percent: Annotated[int, Meta(ge=1, le=1000)] | None = None
    reopen_after_s: Annotated[int, Meta(ge=1, le=600)] | None = None


class ReadingDocument(Document):
    """The last look at the server's metrics."""

    checked_at: Time
    ok: bool
    waiting: int | None
    running: int | None
    kv_cache_permille: Annotated[int, Meta(ge=0, le=1000)] | None
    error: MetricsError | None


class RouteStatusDocument(Document):
    """``cap``: batch lines at once, as it is now; it moves within an adaptive range, and ``cap_why`` says why.

    ``reopens_at``: when lines start again after live traffic if nobody calls until then.
    """

    queued_lines: int
    waiting_batches: int
    running_lines: int
    paused_reason: ReasonText | None
    checked_at: Time | None
    live_in_flight: int | None
    metrics: ReadingDocument | None
    cap: int
    cap_why: str | None
    reopens_at: Time | None


class DeploymentDocument(Document):
    """A route: a public model served through one upstream; ``kind`` is null for one that is not configured any more."""

    id: str
    model: str
    kind: UpstreamKind | None


class SchedulingDocument(Document):
    """Settings and status of a route; ``in_words`` are the settings as people read them.

    ``configured`` false: the node file does not name the route any more. What is stored can be read, a PUT is refused.
    ``version``: of the settings; the ``ETag`` of the answer.
    """

    deployment: DeploymentDocument
    configured: bool
    version: str
    settings: SettingsDocument
    defaults: SettingsDocument
    priority_supported: bool
    status: RouteStatusDocument
    in_words: dict[str, str]
    updated_at: Time | None
    updated_by: str | None


class DeploymentsDocument(Document):
    data: list[SchedulingDocument]


class SpanDocument(Document):
    """``unwatched``: no batch wanted the route then, so nobody looked at its gates."""

    since: Time
    until: Time
    state: GateState
    reason: ReasonText | None


class PointDocument(Document):
    """The most that was seen in these minutes."""

    at: Time
    live_max: int
    running_max: int
    queued_max: int
    cap: int
    lines_done: int
    overloads: int


class EdgeDocument(Document):
    """A gate that changed, or the adaptive cap (``why``)."""

    at: Time
    reason: ReasonText | None
    live_in_flight: int | None
    metrics: ReadingDocument | None
    cap: int | None
    why: str | None


class ChartDocument(Document):
    """Why lines did or did not start; ``spans`` cover the whole time, each point stands for ``step_minutes``."""

    since: Time
    until: Time
    step_minutes: int
    spans: list[SpanDocument]
    points: list[PointDocument]
    edges: list[EdgeDocument]


# Batches


class OutlookDocument(Document):
    """When the batch is expected to have ended, in 5 and in 9 of 10 cases; null: not within what can be foreseen."""

    eta_p50: Time | None
    eta_p90: Time | None
    at_risk: bool
    suggested_completion_window: str | None
    measured_lines: int


class BatchDocument(Document):
    """One batch. ``waiting_reason`` is set while it waits for capacity with no line running."""

    id: str
    workspace_id: str
    workspace: str
    key_id: str
    key_name: str | None
    mine: bool
    mode: Mode
    endpoint: str
    model: str
    state: BatchState
    status: StatusDetail
    total: int
    completed: int
    failed: int
    error_code: str | None
    completion_window: str
    retries: int
    created_at: Time
    in_progress_at: Time | None
    finalizing_at: Time | None
    cancelling_at: Time | None
    ended_at: Time | None
    expires_at: Time
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    running_lines: int
    waiting_reason: ReasonText | None
    outlook: OutlookDocument | None


class BatchesDocument(Document):
    """``scope`` ``own``: only those created with the caller's key."""

    data: list[BatchDocument]
    has_more: bool
    scope: Scope


class PersonalDocument(Document):
    """Batches of personal workspaces, all together."""

    workspaces: int
    unfinished: int
    finished: int
    total: int
    completed: int
    failed: int


class AllBatchesDocument(Document):
    """Batches of team and project workspaces."""

    data: list[BatchDocument]
    has_more: bool
    personal: PersonalDocument


class OutcomeDocument(Document):
    state: LineState
    code: str | None
    lines: int


class LaneDocument(Document):
    """What the batch has on one model's route; ``position`` of ``queue`` batches that want it."""

    model: str
    reason: ReasonText | None
    waiting_lines: int
    running_lines: int
    position: int | None
    queue: int
    since: Time | None


class BatchPageDocument(Document):
    batch: BatchDocument
    outcomes: list[OutcomeDocument]
    scheduling: list[LaneDocument]


# Workspaces, incidents, changes


class CallerDocument(Document):
    """Whom the key, or the session, belongs to."""

    workspace_id: str
    workspace: str
    key_id: str
    key_name: str | None
    role: Role


class WorkspaceDocument(Document):
    """``weight``: the workspace's share of a route when several want it."""

    id: str
    name: str
    kind: WorkspaceKind
    weight: Weight


class WorkspacesDocument(Document):
    data: list[WorkspaceDocument]


class WeightDocument(Document, forbid_unknown_fields=True):
    weight: Weight


class IncidentDocument(Document):
    """``details``: what the rule found; once it is resolved, also ``ended_by``, the code of what ended it."""

    id: str
    rule: str
    subject: str
    workspace_id: str | None
    summary: str
    details: dict[str, Any]
    opened_at: Time
    resolved_at: Time | None


class IncidentsDocument(Document):
    data: list[IncidentDocument]


class AuditDocument(Document):
    """``details.changes`` has ``before`` and ``after`` in words, by the name of what changed."""

    seq: int
    at: Time
    action: str
    actor_key_id: str | None
    actor: str | None
    workspace_id: str | None
    subject: str
    details: dict[str, Any]


class AuditLogDocument(Document):
    data: list[AuditDocument]
    has_more: bool
