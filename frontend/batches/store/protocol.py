"""The seam between the gateway and its database: what every store does, and ``open_store``.

Two implementations answer alike (one contract suite runs on both): SQLite for one host, PostgreSQL for any number of
processes and machines. Calls are grouped by who makes them: ``store.keys``, ``store.files``, ``store.batches`` (the
API), ``store.runner`` (the batch runner), ``store.scheduling`` (gates, status); and, declared in watch_protocol.py,
``store.processes``, ``store.explain``, ``store.alerts``, ``store.views`` (what people look at).

Each call is one transaction. Time is the store's own (SQLite: the host's clock or an injected one; PostgreSQL:
``clock_timestamp()`` plus an injected offset); durations are passed in microseconds. Any call may raise
``StoreUnavailable``. SQLite commits calls that wait at the same moment together: one fsync for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from frontend.batches.store.route_rows import AuditRow, RouteCap, RouteCount, SignalRow
from frontend.batches.store.rows import (
    BatchRow,
    ClaimGroup,
    Demand,
    DirectFailure,
    FileRow,
    FinishLine,
    Idempotency,
    KeyRow,
    LeaseState,
    LineCounts,
    LineRow,
    NewBatch,
    NewFile,
    OutcomeCount,
    Page,
    RecordRow,
    Role,
    SchedulingRow,
    SegmentRow,
    TakenBatch,
    TerminalState,
    TurnResult,
    WaitRow,
    WorkspaceKind,
    WorkspaceRow,
    WrittenFile,
)  # fmt: skip
from frontend.batches.store.watch_protocol import Alerts, Explain, Processes, Views

if TYPE_CHECKING:
    from frontend.gateway_settings import GatewaySettings

FRESH_US = 10_000_000
"""A wait row older than this is ignored everywhere."""
IDEMPOTENCY_US = 24 * 3600 * 1_000_000
INFLIGHT_FRESH_US = 6_000_000
"""A process's live counts older than this no longer count: it died."""


class Keys(Protocol):
    """Workspaces and API keys. Only hashes are stored."""

    async def create_workspace(self, workspace_id: str, name: str, kind: WorkspaceKind = "team") -> WorkspaceRow:
        """Raises: AlreadyExists for a taken id or name."""

    async def workspace(self, id_or_name: str) -> WorkspaceRow | None: ...

    async def workspaces(self) -> tuple[WorkspaceRow, ...]: ...

    async def create_key(
        self, key_id: str, workspace_id: str, role: Role, name: str, prefix: str, key_hash: str
    ) -> KeyRow:
        """Raises: NotFound for an unknown workspace; AlreadyExists for a known hash."""

    async def find_key(self, key_hash: str) -> KeyRow | None:
        """Return the key with this hash, revoked or not: the caller checks ``revoked_at``."""

    async def key(self, key_id: str) -> KeyRow | None: ...

    async def list_keys(self, workspace_id: str | None = None) -> tuple[KeyRow, ...]:
        """Return all keys, oldest first."""

    async def revoke_key(self, key_id: str) -> KeyRow:
        """Return the key, revoked now or earlier. Raises: NotFound."""


class Files(Protocol):
    """File rows. The bytes are somebody else's: an object is written first, then its row is committed."""

    async def insert(self, file: NewFile) -> FileRow:
        """Reserve the row; readers do not see it before ``commit``."""

    async def commit(self, written: WrittenFile, quota_bytes: int | None = None) -> FileRow:
        """Make the file visible; committing the same bytes again is harmless.

        Raises:
            QuotaExceeded: the workspace's listed files would exceed ``quota_bytes``; the row stays uncommitted.
            NotFound: no such row, or deleted meanwhile.
        """

    async def get(self, workspace_id: str, file_id: str) -> FileRow | None:
        """Return a file the API may show: committed, listed, not deleted, not expired, of this workspace."""

    async def get_internal(self, file_id: str) -> FileRow | None:
        """Return any committed, undeleted file, listed or not, expired or not."""

    async def list_files(
        self,
        workspace_id: str,
        limit: int,
        *,
        api_purpose: str | None = None,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Page[FileRow]:
        """Return files that ``get`` would show, by creation. Raises: NotFound for an unknown ``after``."""

    async def delete(self, workspace_id: str, file_id: str) -> FileRow | None:
        """Mark a visible file deleted; None if there is none (so a second delete says None).

        Raises:
            InputInUse: a batch that is still being validated reads it.
        """

    async def delete_internal(self, file_ids: Sequence[str]) -> None:
        """Mark files deleted, whatever they are; their objects are swept later."""

    async def stored_bytes(self, workspace_id: str) -> int:
        """Return the size of the workspace's visible files."""

    async def to_sweep(self, limit: int, abandoned_after_us: int) -> tuple[FileRow, ...]:
        """Return files whose object can go: deleted, expired, or uncommitted for that long."""

    async def mark_swept(self, file_ids: Sequence[str]) -> None:
        """The objects are gone: forget their paths (and mark the rows deleted)."""


class Batches(Protocol):
    """What the API asks about batches. Ownership is by the object's workspace, never by the caller."""

    async def create(
        self, batch: NewBatch, *, active_limit: int, idempotency: Idempotency | None = None
    ) -> tuple[BatchRow, bool]:
        """Create in one transaction (commits the work file too); False with the first batch for a repeated key.

        Raises:
            ActiveBatchLimit: ``active_limit`` batches of the workspace are unfinished and not being cancelled.
            IdempotencyConflict: the key came with another body.
            NotFound: the input file is not visible to the workspace (any more), or the work file is unknown.
        """

    async def find_idempotent(self, workspace_id: str, idempotency: Idempotency) -> BatchRow | None:
        """Return the batch of an earlier create with this key, before any work. Raises: IdempotencyConflict."""

    async def get(self, workspace_id: str | None, batch_id: str) -> BatchRow | None:
        """Return the batch; ``workspace_id`` None = whoever owns it (runner, platform roles)."""

    async def list_batches(
        self,
        workspace_id: str | None,
        limit: int,
        *,
        after: str | None = None,
        offset: int = 0,
        active: bool | None = None,
        api_key_id: str | None = None,
    ) -> Page[BatchRow]:
        """Return batches, newest first. Raises: NotFound for an unknown ``after``."""

    async def cancel(self, workspace_id: str | None, batch_id: str, audit: AuditRow | None = None) -> BatchRow:
        """Ask for a stop, with an audit row; repeating it is harmless, and leaves no further row.

        Raises:
            NotFound, BatchNotCancellable.
        """

    async def active_count(self, workspace_id: str) -> int:
        """Return how many job slots the workspace holds: unfinished batches not being cancelled."""

    async def outcomes(self, batch_id: str) -> tuple[OutcomeCount, ...]:
        """Return line counts by state and code, largest first, at most 20 groups."""


class Runner(Protocol):
    """What the batch runner does. Every write is fenced: it changes nothing for a runner that lost its lease."""

    async def acquire(self, runner_id: str, lease_us: int) -> bool:
        """Take or renew the right to run batches. PostgreSQL: always True. SQLite: one process at a time, else False.

        A dead holder on this host is replaced at once, and its batches' leases end with it.
        """

    async def release(self, runner_id: str) -> None:
        """Give the right back, and every batch lease of this runner."""

    async def take(
        self, runner_id: str, lease_us: int, limit: int, *, expired_only: bool = False
    ) -> tuple[TakenBatch, ...]:
        """Lease batches that are unsettled and free, oldest first.

        A lease that ran out is taken over: running lines, and succeeded ones whose result was not kept, become
        ``interrupted``. ``expired_only``: just those past ``expires_at`` or asked to cancel (the sweeper's call).
        """

    async def renew(self, runner_id: str, batch_ids: Sequence[str], lease_us: int) -> dict[str, LeaseState]: ...

    async def release_batches(self, runner_id: str, batch_ids: Sequence[str]) -> None:
        """Clear the leases so that another process resumes at once. Only when none of their lines is running."""

    async def accept_input(
        self, runner_id: str, batch_id: str, work: WrittenFile, request_total: int, model: str
    ) -> bool:
        """Record a deferred validation that passed. False: lease lost."""

    async def begin(self, runner_id: str, batch_id: str) -> bool:
        """``queued`` -> ``in_progress`` (or still there). False: lease lost or stopped."""

    async def turn(self, runner_id: str, finish: Sequence[FinishLine], claim: Sequence[ClaimGroup]) -> TurnResult:
        """Finish lines, then claim lines: all of a loop turn in one commit (SQLite), or one per route (PostgreSQL).

        Claims of one group are decided as if each asked when its turn came: between batches the fair order decides,
        within a batch the order of its lines. Both halves may be repeated after ``StoreUnavailable``.
        """

    async def give_back(self, runner_id: str, lines: Sequence[FinishLine]) -> tuple[bool, ...]:
        """Undo claims whose lines were never sent: they wait again, or, if retries, are ``failed`` as told here.

        True also for what was given back before; False: somebody else's by now, nothing changed. No progress counts.
        """

    async def fail_lines(self, runner_id: str, batch_id: str, lines: Sequence[DirectFailure]) -> tuple[bool, ...]:
        """Record lines that no route serves as ``failed``; False where already claimed, or the lease is lost."""

    async def claimed_lines(self, batch_id: str) -> tuple[int, ...]:
        """Return every claimed line number, ascending."""

    async def lines(self, batch_id: str, after_line: int, limit: int) -> tuple[LineRow, ...]:
        """Return claimed lines with ``line_no > after_line``, ascending."""

    async def line_counts(self, batch_id: str) -> LineCounts: ...

    async def records(self, batch_id: str, after_line: int, limit: int) -> tuple[RecordRow, ...]:
        """Return durable results that are not in a segment, ascending by line; ``limit`` rows."""

    async def add_segment(
        self, runner_id: str, batch_id: str, seq: int, written: WrittenFile, line_nos: Sequence[int]
    ) -> bool:
        """Commit a segment's file, stamp its lines and drop their records, in one transaction. False: lease lost."""

    async def segments(self, batch_id: str) -> tuple[SegmentRow, ...]: ...

    async def mark_finalizing(self, runner_id: str, batch_id: str, output_id: str, error_id: str) -> BatchRow | None:
        """Status ``finalizing``, wait rows gone, result ids reserved (the first call's ids stay). None: lease lost."""

    async def finalize(
        self,
        runner_id: str,
        batch_id: str,
        state: TerminalState,
        *,
        error_code: str | None = None,
        errors: str | None = None,
        output: WrittenFile | None = None,
        error: WrittenFile | None = None,
        lost_results: int = 0,
    ) -> BatchRow | None:
        """End the batch: state, file ids, counts from its lines, all at once. None: lease lost, nothing changed.

        ``lost_results``: succeeded lines that no file could be given a result of; they count as failed.

        ``errors``: JSON text of a failed deferred validation. Raises: IllegalTransition while a line is running.
        """

    async def settle(self, runner_id: str, batch_id: str) -> bool:
        """After a terminal state: records gone, work file and segments marked deleted, lease cleared. False: lost."""


class Scheduling(Protocol):
    """Demand, gate signals, settings: what readers need to say why a batch waits."""

    async def publish_waits(
        self, runner_id: str, batch_id: str, demands: Sequence[Demand], *, legitimate: bool
    ) -> None:
        """Replace the batch's wait rows (``since`` survives); ``legitimate`` moves ``last_waited_at``."""

    async def fresh_waits(self, route_id: str | None = None) -> tuple[WaitRow, ...]:
        """Return fresh wait rows per route in the fair order: rank = place in the queue."""

    async def route_counts(self) -> tuple[RouteCount, ...]:
        """Return demand and running lines of every route that has either."""

    async def running_by_batch(self, batch_ids: Sequence[str]) -> dict[str, int]:
        """Return how many lines of each batch run now (absent = none)."""

    async def running_on_route(self, batch_id: str) -> dict[str, int]: ...

    async def settings(self, route_id: str) -> SchedulingRow | None: ...

    async def all_settings(self) -> tuple[SchedulingRow, ...]: ...

    async def put_settings(
        self, row: SchedulingRow, audit: AuditRow | None, *, expected: int | None = None
    ) -> SchedulingRow:
        """Replace a route's whole settings and write the audit row in the same transaction.

        ``expected``: ``updated_at`` of those to replace, 0 for none, None for any. Raises: SettingsChanged.
        """

    async def put_cap(self, cap: RouteCap, expected: int | None = None) -> RouteCap:
        """Store an adaptive cap unless another process moved it away from ``expected``; return what stands now."""

    async def caps(self) -> tuple[RouteCap, ...]: ...

    async def set_weight(self, workspace_id: str, weight: int, audit: AuditRow | None) -> None:
        """Give a workspace 1 to 100 shares of every route, with the audit row. Raises: NotFound, RuleBroken."""

    async def weights(self) -> dict[str, int]:
        """Return the weights that are not 1, by workspace."""

    async def put_signal(self, signal: SignalRow) -> None:
        """Store a gate evaluation; live and metrics columns that are None keep their last value."""

    async def signals(self) -> tuple[SignalRow, ...]: ...

    async def stalled(self, window_us: int) -> tuple[BatchRow, ...]:
        """Return unfinished batches without progress or legitimate wait for that long (rule 70)."""

    async def audit(self, row: AuditRow) -> None: ...

    async def audit_log(
        self, limit: int, before_seq: int | None = None, *, action: str | None = None, subject: str | None = None
    ) -> tuple[AuditRow, ...]:
        """Return newest first; of one action, about one subject, if they are given."""


class Store(Protocol):
    """A database, open between ``start`` and ``close``."""

    kind: Literal["sqlite", "postgresql"]

    @property
    def keys(self) -> Keys: ...
    @property
    def files(self) -> Files: ...
    @property
    def batches(self) -> Batches: ...
    @property
    def runner(self) -> Runner: ...
    @property
    def scheduling(self) -> Scheduling: ...
    @property
    def processes(self) -> Processes: ...
    @property
    def explain(self) -> Explain: ...
    @property
    def alerts(self) -> Alerts: ...
    @property
    def views(self) -> Views: ...

    async def start(self) -> None:
        """Connect and check the schema; SQLite migrates itself.

        Raises:
            SchemaMismatch: migrate first (PostgreSQL), or the database is newer than this program.
            StoreUnavailable: no database there.
        """

    async def close(self) -> None: ...

    async def now_us(self) -> int:
        """Return the store's time."""

    async def ping(self) -> None:
        """Raises: StoreUnavailable."""


Clock = Callable[[], int]
"""Returns wall-clock microseconds since 1970."""


def open_store(
    settings: GatewaySettings, state_dir: Path, *, clock: Clock | None = None, clock_offset_us: int = 0
) -> Store:
    """Return the store that ``gateway.store`` names, not started.

    SQLite lives in ``state_dir/store.sqlite3``. Tests inject ``clock`` (SQLite) or ``clock_offset_us`` (PostgreSQL).
    """
    if settings.store:
        from frontend.batches.store.postgres import postgres_store

        return postgres_store(settings.store, settings.store_password_env, clock_offset_us=clock_offset_us)
    from frontend.batches.store.sqlite import sqlite_store

    return sqlite_store(state_dir / "store.sqlite3", clock=clock)
