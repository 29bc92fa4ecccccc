"""What the store returns and takes: frozen values, one per table, fields named as the columns.

Every time is wall-clock UTC in microseconds since 1970 (the store's clock, never the caller's), ``None`` where the
event has not happened. JSON columns are JSON text: the store does not look inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, Literal, TypeVar

T = TypeVar("T")

SECOND_US = 1_000_000

WorkspaceKind = Literal["personal", "team", "project"]
Role = Literal["member", "workspace_admin", "platform_admin", "auditor"]
FilePurpose = Literal["batch_input", "batch_output", "user_file"]
Mode = Literal["gateway", "native"]
BatchState = Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
TerminalState = Literal["completed", "failed", "cancelled", "expired"]
StatusDetail = Literal[
    "validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "cancelled", "expired"
]
LineState = Literal["running", "succeeded", "failed", "interrupted"]
WindowHours = Literal[24, 48, 72, 168]


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a listing; ``has_more`` says whether rows follow the last one."""

    rows: tuple[T, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class WorkspaceRow:
    id: str
    name: str
    kind: WorkspaceKind
    created_at: int


@dataclass(frozen=True, slots=True)
class KeyRow:
    """An API key without its secret: ``key_hash`` is the SHA-256 of the whole key in hex, ``prefix`` is for display."""

    id: str
    workspace_id: str
    role: Role
    name: str
    prefix: str
    key_hash: str
    created_at: int
    revoked_at: int | None


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file about to be written. ``api_purpose`` None = internal: never listed, never served."""

    id: str
    workspace_id: str
    purpose: FilePurpose
    api_purpose: str | None
    filename: str
    content_type: str
    storage_path: str
    created_by_key_id: str | None = None
    created_by_user_id: str | None = None
    expires_in_us: int | None = None
    """Retention from now; None = kept until deleted."""


@dataclass(frozen=True, slots=True)
class FileRow:
    """``committed_at`` None = upload not finished. ``storage_path`` None = the object is gone (swept)."""

    id: str
    workspace_id: str
    purpose: FilePurpose
    api_purpose: str | None
    filename: str
    content_type: str
    bytes: int
    sha256: str
    created_by_key_id: str | None
    created_by_user_id: str | None
    created_at: int
    committed_at: int | None
    expires_at: int | None
    deleted_at: int | None
    storage_path: str | None
    key_id: str | None


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Size and SHA-256 (hex) of an inserted file whose object is complete and durable."""

    file_id: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Idempotency:
    """``Idempotency-Key`` of a create, with the SHA-256 (hex) of what it must repeat."""

    key: str
    body_sha256: str


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch to create.

    Attributes:
        work_file: the private copy, validated and written; None = still to be validated (``batch_validation: async``).
        request_total: lines; 0 while not validated.
        metadata: JSON object text or None.
    """

    id: str
    workspace_id: str
    api_key_id: str
    endpoint: str
    public_model: str
    input_file_id: str
    work_file: WrittenFile | None
    completion_window_hours: WindowHours
    retry_limit: int
    request_total: int
    metadata: str | None = None
    user_id: str | None = None
    output_expires_after_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One batch. ``state`` is the stored machine (job_state.py); ``status_detail`` is the API's ``status``.

    ``output_file_id`` and ``error_file_id`` are set by the terminal commit only, and only for files with a line; the
    ``reserved_*`` ids name the files that finalizing writes, so that a crash in between repeats harmlessly.
    """

    id: str
    workspace_id: str
    api_key_id: str
    user_id: str | None
    mode: Mode
    endpoint: str
    public_model: str
    state: BatchState
    status_detail: StatusDetail
    input_file_id: str
    work_file_id: str | None
    output_file_id: str | None
    error_file_id: str | None
    completion_window_hours: WindowHours
    retry_limit: int
    request_total: int
    request_completed: int
    request_failed: int
    error_code: str | None
    errors: str | None
    metadata: str | None
    output_expires_after_seconds: int | None
    reserved_output_id: str | None
    reserved_error_id: str | None
    created_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    cancel_requested_at: int | None
    expires_at: int
    last_progress_at: int | None
    last_waited_at: int | None
    settled_at: int | None
    runner_id: str | None
    runner_lease_until: int | None

    @property
    def finished(self) -> bool:
        return self.completed_at is not None


@dataclass(frozen=True, slots=True)
class LineRow:
    batch_id: str
    line_no: int
    workspace_id: str
    route_id: str | None
    state: LineState
    attempts: int
    execution_id: str
    status_code: int | None
    error_code: str | None
    segment: int | None
    runner_id: str
    started_at: int
    finished_at: int | None


@dataclass(frozen=True, slots=True)
class SegmentRow:
    batch_id: str
    seq: int
    workspace_id: str
    file_id: str
    lines: int
    created_at: int


@dataclass(frozen=True, slots=True)
class RecordRow:
    """A finished line's durable result that is not in a segment yet; ``record`` is what the runner handed in."""

    line_no: int
    is_error: bool
    record: bytes


class ClaimResult(Enum):
    """Answer to one asked line."""

    CLAIMED = "claimed"
    """It is yours to run, once."""
    FULL = "full"
    """The route is at its cap (reason ``concurrency``)."""
    WAIT = "wait"
    """Another batch is first in the fair order (reason ``fair_share``)."""
    TAKEN = "taken"
    """Already claimed, or the retry is no longer as expected: drop the line, never run it."""
    STOPPED = "stopped"
    """The batch was cancelled, expired, ended, or its lease is someone else's: start nothing of it."""


@dataclass(frozen=True, slots=True)
class ClaimLine:
    """One line that wants to start.

    Attributes:
        execution_id: fresh per attempt; asking again with the same one after a lost connection answers the same.
        attempt: 1 for a new line, 2 or 3 for a retry of a ``failed`` line.
    """

    line_no: int
    execution_id: str
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class ClaimBatch:
    """Lines of one batch for one route, in the order they should start.

    ``waiting_lines`` counts every line of the batch that waits for this route, ``lines`` included.
    """

    batch_id: str
    workspace_id: str
    waiting_lines: int
    lines: tuple[ClaimLine, ...]


@dataclass(frozen=True, slots=True)
class ClaimGroup:
    """All that one runner wants to start on one route in this loop turn.

    Attributes:
        cap: the route's ``max_concurrency``.
        limit: most lines to claim now (free worker permits); those beyond wait.
    """

    route_id: str
    cap: int
    batches: tuple[ClaimBatch, ...]
    limit: int = 1 << 30


@dataclass(frozen=True, slots=True)
class FinishLine:
    """End of one execution. ``record`` None keeps no result: after a crash it is ``result_unavailable``."""

    batch_id: str
    line_no: int
    execution_id: str
    state: Literal["succeeded", "failed"]
    status_code: int | None
    error_code: str | None
    record: bytes | None


@dataclass(frozen=True, slots=True)
class DirectFailure:
    """A line that no route serves: it fails without having run (route NULL, no slot used)."""

    line_no: int
    execution_id: str
    status_code: int | None
    error_code: str
    record: bytes | None


@dataclass(frozen=True, slots=True)
class TurnResult:
    """``finished[i]`` and ``claimed[g][b][l]`` answer the asked items by position.

    ``finished`` False: fenced off (no longer this execution's line); drop its result.
    """

    finished: tuple[bool, ...]
    claimed: tuple[tuple[tuple[ClaimResult, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch whose lease is now yours. ``taken_over``: another runner died with it and ``interrupted`` lines."""

    batch: BatchRow
    taken_over: bool
    interrupted: int


@dataclass(frozen=True, slots=True)
class LeaseState:
    """Answer to a renewal. ``owned`` False = lost: start nothing more, let running lines finish, do not finalize."""

    owned: bool
    cancel_requested: bool
    expired: bool


@dataclass(frozen=True, slots=True)
class Demand:
    """Lines of a batch that wait for a route; ``reason`` None = something started there in this pass."""

    route_id: str
    waiting_lines: int
    reason: str | None
    ready: bool


@dataclass(frozen=True, slots=True)
class WaitRow:
    route_id: str
    batch_id: str
    workspace_id: str
    waiting_lines: int
    reason: str | None
    ready: bool
    since: int
    last_claim_at: int | None
    updated_at: int


@dataclass(frozen=True, slots=True)
class OutcomeCount:
    state: LineState
    code: str | None
    lines: int


@dataclass(frozen=True, slots=True)
class LineCounts:
    running: int
    succeeded: int
    failed: int
    interrupted: int

    @property
    def claimed(self) -> int:
        return self.running + self.succeeded + self.failed + self.interrupted


@dataclass(frozen=True, slots=True)
class SchedulingRow:
    """Batch scheduling settings of a route; a route without a row has the defaults.

    ``min_concurrency``: the cap adapts, by ``latency_share_percent``; ``reopen_after_s``: see ``reopen_state``."""

    route_id: str
    max_concurrency: int = 2
    yield_live_threshold: int | None = None
    metrics_url: str | None = None
    metrics_max_waiting: int | None = None
    metrics_max_running: int | None = None
    metrics_max_kv_cache_percent: int | None = None
    priority: int | None = None
    window_timezone: str | None = None
    window_days: int | None = None
    window_start_minute: int | None = None
    window_end_minute: int | None = None
    updated_at: int = 0
    updated_by: str = ""
    min_concurrency: int | None = None
    latency_share_percent: int | None = None
    reopen_after_s: int | None = None
