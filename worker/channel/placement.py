"""A request's place in the arena, and what comes back for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.bundle.signature import LINE_BYTES, MAX_AXES, BlockLayout, Signature
from engines.errors import EngineFailed, Kind
from engines.tensor import NDArray, TensorSpec
from worker.channel.arena import Span
from worker.channel.layout import WORD_BYTES
from worker.channel.messages import ModelEntry
from worker.channel.records import MASK_32, Reason

if TYPE_CHECKING:
    from worker.channel.attachment import Attachment

_KINDS: Final = tuple(Kind)
_REASONS: Final = tuple(Reason)


@dataclass(slots=True, eq=False)
class Reply:
    """The one answer to a submitted request.

    Attributes:
        kind: OK, or why there are no outputs.
        text: for the caller, empty if OK.
        batch_size: compiled size it ran in; 0 if it did not run or the model has no batch axis.
        queue_ns: from arrival to the start of the execution.
        compute_ns: of the execution that served it.
        batch_rows, batch_requests: rows and requests that shared the execution.
    """

    kind: Kind
    text: str = ""
    reason: Reason = Reason.NONE
    batch_size: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    batch_rows: int = 0
    batch_requests: int = 0
    finished_ns: int = 0
    dispatch_seq: int = 0


OnReply = Callable[["Placement", Reply], None]


def reply_of(words: Sequence[int], text: str) -> Reply:
    """Return the reply that a record's words describe; numbers this version does not know become INTERNAL / NONE."""
    outcome = words[1]
    kind = outcome & 0xFF
    reason = outcome >> 8 & 0xFF
    batch = words[4]
    return Reply(
        _KINDS[kind] if kind < len(_KINDS) else Kind.INTERNAL,
        text,
        _REASONS[reason] if reason < len(_REASONS) else Reason.NONE,
        outcome >> 32,
        words[2],
        words[3],
        batch & MASK_32,
        batch >> 32,
        words[6],
        words[7],
    )


class _TensorPlan:
    """Shape and type of one tensor for any number of rows."""

    __slots__ = ("after", "batched", "before", "dtype", "name")

    def __init__(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        axis = spec.batch_axis
        self.name = spec.name
        self.dtype: np.dtype[Any] = spec.element.numpy
        self.batched = axis is not None
        self.before = shape if axis is None else shape[:axis]
        self.after = () if axis is None else shape[axis + 1 :]

    def shape(self, rows: int) -> tuple[int, ...]:
        return (*self.before, rows, *self.after) if self.batched else self.before


class VariantPlan:
    """All that placing a request of one (model, variant) needs, computed once.

    Attributes:
        entry: the table entry that last named this model.
        shares: whether requests may share a block. A size that depends on the data is told in a line of the block, so
            such a request needs its own.
    """

    __slots__ = ("entry", "inputs", "key", "layout", "outputs", "shares", "variant")

    def __init__(self, entry: ModelEntry, signature: Signature, variant_index: int) -> None:
        variant = signature.variants[variant_index]
        self.entry = entry
        self.key = (entry.model_id, variant_index)
        self.variant = variant
        self.layout = BlockLayout.of(signature, variant_index)
        self.shares = signature.shares_blocks and not any(variant.dynamic_outputs)
        self.inputs = [_TensorPlan(*pair) for pair in zip(signature.inputs, variant.inputs, strict=True)]
        self.outputs = [_TensorPlan(*pair) for pair in zip(signature.outputs, variant.outputs, strict=True)]


class Placement:
    """Rows in the arena for one request; made by ``WorkerChannel.place``.

    Whoever placed it calls ``release`` once nothing reads its arrays any more; further calls do nothing.

    Attributes:
        rows: along the batch axis.
        request_id: 0 until submitted.
        in_flight: submitted and not answered; the worker may read and write the rows.
        abandoned: nobody waits for the answer; the rows go back when it comes.
    """

    __slots__ = (
        "_attachment",
        "_span",
        "abandoned",
        "cancelled",
        "in_flight",
        "on_reply",
        "plan",
        "request_id",
        "rows",
    )

    def __init__(self, attachment: Attachment, plan: VariantPlan, span: Span) -> None:
        self.plan = plan
        self.rows = span.rows
        self.request_id = 0
        self.in_flight = False
        self.abandoned = False
        self.cancelled = False
        self.on_reply: OnReply | None = None
        self._attachment = attachment
        self._span: Span | None = span

    @property
    def span(self) -> Span:
        """The rows owned; only until ``release``."""
        assert self._span is not None, "the placement was released"
        return self._span

    @property
    def attachment(self) -> Attachment:
        """The attachment that owns the arena."""
        return self._attachment

    @property
    def inputs(self) -> list[NDArray]:
        """Writable views, one per executable input, shaped for ``rows`` rows; to be filled before ``submit``."""
        offsets = self._offsets()
        arena = self._attachment.memory
        return [
            np.ndarray(tensor.shape(self.rows), tensor.dtype, arena, offsets[index])
            for index, tensor in enumerate(self.plan.inputs)
        ]

    def outputs(self) -> list[NDArray]:
        """Return views of what the worker wrote, one per executable output; valid until ``release``.

        Raises:
            EngineFailed: a size that depends on the data is outside its limits.
        """
        plan = self.plan
        offsets = self._offsets()
        first = len(plan.inputs)
        arena = self._attachment.memory
        arrays: list[NDArray] = []
        for index, tensor in enumerate(plan.outputs):
            offset = offsets[first + index]
            shape = tensor.shape(self.rows)
            if plan.variant.dynamic_outputs[index]:
                shape = _written_shape(arena, offset, tensor, shape, self.rows)
            arrays.append(np.ndarray(shape, tensor.dtype, arena, offset))
        return arrays

    def release(self) -> None:
        """Give the rows back: now, or when the answer comes if the worker still owns them."""
        if self._span is None:
            return
        if self.in_flight:
            self._attachment.abandon(self.request_id)
            return
        span, self._span = self._span, None
        self._attachment.give_back(self, span)

    def _offsets(self) -> list[int]:
        """Return each tensor's first byte in the arena."""
        span = self.span
        layout = self.plan.layout
        at = span.block_offset
        if span.row_start == 0:
            return [at + offset for offset in layout.offsets(span.block_rows)]
        return [
            at + offset + span.row_start * row_bytes
            for offset, row_bytes in zip(layout.offsets(span.block_rows), layout.row_bytes, strict=True)
        ]


def _written_shape(
    arena: NDArray, offset: int, tensor: _TensorPlan, room: tuple[int, ...], rows: int
) -> tuple[int, ...]:
    """Return the shape that the worker told for an output whose size depends on the data."""
    axes = len(room)
    assert axes <= MAX_AXES, f"output {tensor.name!r} has {axes} axes"
    line: list[int] = arena[offset - LINE_BYTES : offset - LINE_BYTES + WORD_BYTES * axes].view(np.uint64).tolist()
    fits = all(size <= limit for size, limit in zip(line, room, strict=True))
    if not fits or (tensor.batched and line[len(tensor.before)] != rows):
        raise EngineFailed(f"output '{tensor.name}' has shape {line}, its limits are {list(room)} for {rows} rows")
    return tuple(line)
