"""What people see of routes, batches and their scheduling: plain values, made by ``views``, rendered by API and pages.

Every time is wall-clock UTC in microseconds since 1970 and named ``*_us``. Nothing here holds a line, a custom id, a
body or a metadata value, so nothing that renders these can show one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.scheduling.plain_words import InWords
from frontend.batches.store.rows import BatchState, LineState, Mode, SchedulingRow, StatusDetail, WorkspaceKind
from frontend.gateway_settings import UpstreamKind

GateState = Literal["open", "closed", "unwatched"]
"""``unwatched``: no batch asked for the route then, so nobody looked at its gates."""
Scope = Literal["workspace", "own"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """A route as it is configured.

    Attributes:
        kind: None for one that is not configured any more.
        configured: False for one of which only settings and history are left; its ``model`` is its id then.
        endpoint: base URL; empty for our own worker.
        metrics_url: the only server metrics URL that can be approved for it; None for our own worker.
        priority_supported: whether a priority hint may be set.
    """

    id: str
    model: str
    kind: UpstreamKind | None
    endpoint: str
    metrics_url: str | None
    priority_supported: bool
    configured: bool = True


@dataclass(frozen=True, slots=True)
class Reading:
    """The last look at a server's metrics; with ``ok`` False there is an ``error`` and no numbers."""

    checked_at_us: int
    ok: bool
    waiting: int | None
    running: int | None
    kv_cache_permille: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class RouteStatus:
    """What a route does now.

    Attributes:
        queued_lines, waiting_batches: fresh demand.
        cap: batch lines it may run at once now: the setting, or what the adaptive cap has come to.
        cap_why: why the adaptive cap is what it is; None for a fixed one.
        paused_reason: the gate that held the last evaluation; None if all were open, or if nobody asked lately.
        checked_at_us: of that evaluation.
        live_in_flight: live calls counted by it.
        reopens_at_us: when the live gate opens if nobody calls; None unless that is still to come.
    """

    queued_lines: int
    waiting_batches: int
    running_lines: int
    cap: int
    cap_why: str | None
    paused_reason: str | None
    checked_at_us: int | None
    live_in_flight: int | None
    metrics: Reading | None
    reopens_at_us: int | None = None


@dataclass(frozen=True, slots=True)
class RouteView:
    """One route with its settings and status.

    Attributes:
        settings: in force: stored, or the defaults.
        stored: whether somebody has saved settings.
        version: of the settings; a save may name it.
        updated_by: name of the key that saved them, None if unknown or never.
        now_us: when this was read, by the store's clock.
    """

    deployment: Deployment
    settings: SchedulingRow
    stored: bool
    version: str
    updated_at_us: int | None
    updated_by: str | None
    status: RouteStatus
    now_us: int


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """One batch as lists show it.

    Attributes:
        status: as the API of ``/v1/batches`` says it.
        mine: created with the caller's key.
        running_lines: lines that run now.
        waiting_reason: why it waits, of the route with most waiting lines; None while a line runs, or when it does not
            wait for capacity (rule 68).
    """

    id: str
    workspace_id: str
    workspace_name: str
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
    completion_window_hours: int
    retry_limit: int
    created_at_us: int
    in_progress_at_us: int | None
    finalizing_at_us: int | None
    completed_at_us: int | None
    cancel_requested_at_us: int | None
    expires_at_us: int
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    running_lines: int
    waiting_reason: str | None
    outlook: Outlook | None

    @property
    def finished(self) -> bool:
        return self.completed_at_us is not None


@dataclass(frozen=True, slots=True)
class BatchRows:
    """One page of batches, newest first."""

    rows: tuple[BatchSummary, ...]
    has_more: bool
    scope: Scope


@dataclass(frozen=True, slots=True)
class Outcome:
    """Lines that ended, or run, alike."""

    state: LineState
    code: str | None
    lines: int


@dataclass(frozen=True, slots=True)
class LaneView:
    """What a batch has on one route.

    Attributes:
        route_id: for platform roles; the API of a workspace names the model only.
        reason: why nothing more starts, None if lines start.
        position, queue: place (from 1) among the batches that want the route, and how many those are; None and 0 if
            nothing of the batch waits there.
        since_us: since when it has waited there.
    """

    route_id: str
    model: str
    reason: str | None
    waiting_lines: int
    running_lines: int
    position: int | None
    queue: int
    since_us: int | None


@dataclass(frozen=True, slots=True)
class BatchView:
    """One batch with its outcomes and what it waits for."""

    batch: BatchSummary
    outcomes: tuple[Outcome, ...]
    scheduling: tuple[LaneView, ...]
    outlook: Outlook | None


@dataclass(frozen=True, slots=True)
class PersonalTotals:
    """All batches of personal workspaces together: platform roles see no more of them."""

    workspaces: int
    unfinished: int
    finished: int
    total: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class GateSpan:
    """A time in which a route's gates were in one state.

    Attributes:
        reason: set while ``closed``.
    """

    from_us: int
    to_us: int
    state: GateState
    reason: str | None


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """Some minutes of a route (see ``ChartView``): the most that was seen in them, the cap at their end."""

    at_us: int
    live_max: int
    running_max: int
    queued_max: int
    cap: int
    lines_done: int
    overloads: int


@dataclass(frozen=True, slots=True)
class CapChange:
    """The adaptive cap moved."""

    at_us: int
    cap: int
    why: str


@dataclass(frozen=True, slots=True)
class EdgeView:
    """A gate opened, closed, or closed for another reason, and what was read at that moment."""

    at_us: int
    process_id: str
    reason: str | None
    live_in_flight: int | None
    reading: Reading | None
    cap: int | None
    why: str | None


@dataclass(frozen=True, slots=True)
class ChartView:
    """Why lines of a route did or did not start, from ``from_us`` to ``to_us``; spans cover all of it, in order.

    Attributes:
        step_minutes: how many minutes each point stands for; those in which nobody looked have no point.
    """

    route_id: str
    from_us: int
    to_us: int
    step_minutes: int
    spans: tuple[GateSpan, ...]
    points: tuple[ChartPoint, ...]
    edges: tuple[EdgeView, ...]
    caps: tuple[CapChange, ...]


@dataclass(frozen=True, slots=True)
class OpenInterval:
    """One time in which a window is open.

    Attributes:
        closes_us, closes_local: None if it does not end within what is looked ahead.
        opens_local, closes_local: ``Sun 2026-10-25 01:30 BST``.
        open_now: it had begun before the time that was asked from, which ``opens_us`` is then.
        note: what a change of clocks does to it, empty otherwise.
    """

    opens_us: int
    closes_us: int | None
    opens_local: str
    closes_local: str | None
    open_now: bool
    note: str


@dataclass(frozen=True, slots=True)
class BatchEffect:
    """What settings would change for a batch: its outlook as things are, and under them."""

    batch_id: str
    workspace_name: str
    public_model: str
    now: Outlook
    then: Outlook


@dataclass(frozen=True, slots=True)
class Effects:
    """What settings would change for the batches that want the route, the earliest end first.

    Attributes:
        left_out: further batches of team and project workspaces.
        personal: batches of personal workspaces, of which nobody else is told.
    """

    batches: tuple[BatchEffect, ...]
    left_out: int
    personal: int


@dataclass(frozen=True, slots=True)
class PreviewView:
    """What settings that are not saved yet would mean.

    Attributes:
        words: the settings in plain words.
        always: no window, so lines may start at any time; ``intervals`` is empty then.
        intervals: the next ones, the one open now first.
        live_closed_percent: share of the last week's observed minutes whose most live calls reached the yield
            threshold; None without a threshold or without observations.
        observed_minutes: what that share stands on; 0 without a threshold.
        effects: None if that cannot be told now.
    """

    words: InWords
    always: bool
    intervals: tuple[OpenInterval, ...]
    live_closed_percent: float | None
    observed_minutes: int
    effects: Effects | None


@dataclass(frozen=True, slots=True)
class WorkspaceView:
    """A workspace and its share of a route when several want it."""

    id: str
    name: str
    kind: WorkspaceKind
    weight: int


@dataclass(frozen=True, slots=True)
class CallerNames:
    """What a caller's workspace and key are called."""

    workspace: str
    key: str | None


@dataclass(frozen=True, slots=True)
class IncidentView:
    """Something an alert rule found.

    Attributes:
        workspace_id: None for one that concerns no single workspace.
        workspace_name: its id if it is gone.
        personal: the workspace is one person's: platform roles cannot open its batches.
        details: JSON object text.
        resolved_at_us: None while it is open.
    """

    id: str
    rule: str
    subject: str
    workspace_id: str | None
    workspace_name: str | None
    personal: bool
    summary: str
    details: str
    opened_at_us: int
    resolved_at_us: int | None


@dataclass(frozen=True, slots=True)
class AuditView:
    """Who changed what. ``details`` is JSON object text without secrets and addresses."""

    seq: int
    at_us: int
    action: str
    actor_key_id: str | None
    actor_name: str | None
    workspace_id: str | None
    subject: str
    details: str
