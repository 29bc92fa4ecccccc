"""Values that go into and come out of the scheduler. Times are integer ns of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engines.errors import Kind
from worker.channel.records import NO_DEADLINE, Reason

__all__ = [
    "NO_DEADLINE", "BatchPlan", "Discipline", "Dispatch", "Idle", "ModelSnapshot", "ModelSpec", "Reason", "Request",
    "SchedulerOptions", "SchedulerSnapshot", "Shed", "Sizing", "WaitUntil",
]  # fmt: skip


class Discipline(Enum):
    """Which model runs next: by weighted device time, by oldest front, or by soonest deadline."""

    FAIR = "fair"
    FIFO = "fifo"
    EDF = "edf"


class Sizing(Enum):
    """How a batch size is chosen: the largest that queued rows fill, or the cheapest per row by learned cost."""

    FILL = "fill"
    LEARNED = "learned"


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How the scheduler decides; the defaults are the scheduling page's.

    Attributes:
        ema_halflife_ns: half-life of the recent-compute average under ``fair``.
        recency_penalty_cap: clamp on the share-against-use deficit under ``fair``.
        coalescing_discount: part taken off the cost of a dispatch that carries more than one request.
        cost_ema_alpha: weight of the newest measurement in a learned cost.
        max_queue_depth: requests that may wait per model.
        default_cost_ns: cost of a (variant, size) that was never measured.
    """

    discipline: Discipline = Discipline.FAIR
    sizing: Sizing = Sizing.LEARNED
    ema_halflife_ns: int = 30_000_000_000
    recency_penalty_cap: float = 0.25
    coalescing_discount: float = 0.10
    cost_ema_alpha: float = 0.2
    max_queue_depth: int = 1024
    default_cost_ns: int = 10_000_000


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the scheduler must know of a loaded model.

    Attributes:
        batch_sizes: compiled sizes, ascending; (0,) for a model without a batch axis.
        variants: number of input-shape variants; a request's variant is in range(variants), or -1 when its shape has no
            executable.
        coalesces: rule 10.
        weight: relative share under ``fair``; > 0.
        max_batch_size: cap on coalesced rows, or 0 for none.
        max_queue_delay_ns: rule 16; 0 for none.
    """

    model_id: int
    name: str
    batch_sizes: tuple[int, ...]
    variants: int
    coalesces: bool
    weight: float = 1.0
    max_batch_size: int = 0
    max_queue_delay_ns: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One queued request; callers may add to it by a subclass. ``gone`` is the scheduler's own.

    Attributes:
        key: unique among requests the scheduler holds.
        rows: along the batch axis; 1 for a model without one.
    """

    key: int
    model_id: int
    variant: int
    rows: int
    arrival_ns: int
    deadline_ns: int = NO_DEADLINE
    background: bool = False
    committed: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Shed:
    """A request that will not run and must be answered now.

    ``reason`` labels the metric: ``deadline``, ``laxity``, ``cancelled``, ``queue_full``, ``unloaded``.
    """

    request: Request
    kind: Kind
    reason: str
    text: str


@dataclass(slots=True)
class BatchPlan:
    """How much of a queue to run now. Not to be changed; frozen, it would cost 1 us more to make, in each decision.

    Attributes:
        batch_size: as in ``Dispatch``.
        taken: requests to take from the front; at least 1.
        rows: rows those requests fill.
        growable: whether a request that arrives later could change the plan: all that waits has one shape and is less
            than the largest batch the model may run.
    """

    variant: int
    batch_size: int
    taken: int
    rows: int
    reason: Reason
    growable: bool


@dataclass(slots=True, eq=False)
class Dispatch:
    """One execution to carry out now.

    Attributes:
        seq: number of this dispatch in the worker's life, from 1.
        batch_size: compiled size to execute; 0 for a model without a batch axis; -1 when the shape of the only request
            has no executable, so that the caller answers it with the shape error.
        rows: rows of ``requests``; ``batch_size - rows`` rows are padding.
        reason: why the batch has this size.
    """

    seq: int
    model_id: int
    variant: int
    batch_size: int
    rows: int
    requests: list[Request] = field(default_factory=list)
    reason: Reason = Reason.NONE


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to run yet; ask again at ``at_ns`` or when a request arrives."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing is queued."""


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """What one model has done since it was added, and what waits now. Counters are cumulative.

    Attributes:
        recent_compute_s: decayed sum of device seconds, as of the snapshot.
        wait_p50_ns, wait_p99_ns: queue wait of dispatched requests, from a histogram (a few per cent off); 0 if none.
        wait_counts: dispatched requests per bucket of ``waits.WAIT_BOUNDS_NS``, one more for longer waits.
        row_counts: dispatches per bucket of ``waits.ROW_BOUNDS``, one more for larger ones.
        dispatched_sizes: compiled batch size to dispatches.
        sheds: shed reason to requests.
        max_batch_rows: rows that one dispatch may coalesce.
    """

    model_id: int
    name: str
    weight: float
    queue_depth: int
    dispatches: int
    requests: int
    rows: int
    padding_rows: int
    compute_ns: int
    recent_compute_s: float
    wait_p50_ns: int
    wait_p99_ns: int
    wait_sum_ns: int
    wait_counts: tuple[int, ...]
    row_counts: tuple[int, ...]
    dispatched_sizes: dict[int, int]
    sheds: dict[str, int]
    max_batch_rows: int


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """All loaded models, by id, and the scheduler's own gauges.

    Attributes:
        queued: requests that wait, over all models; 0 at rest.
        dispatches: handed out in the scheduler's life, also of models that are gone.
    """

    discipline: Discipline
    sizing: Sizing
    queued: int
    dispatches: int
    models: tuple[ModelSnapshot, ...]
