"""Values that go into and come out of the scheduler. Times are integer ns of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engines.errors import Kind
from worker.channel.records import NO_DEADLINE, Reason

__all__ = ["NO_DEADLINE", "Dispatch", "Idle", "ModelSpec", "Reason", "Request", "Shed", "WaitUntil"]


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
    """One queued request. The scheduler never looks into ``payload``; ``gone`` is the scheduler's own.

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
    payload: object = None
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
