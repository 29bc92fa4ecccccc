"""A request's place in the arena, and what comes back for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.bundle.signature import LINE_BYTES, MAX_AXES, BlockLayout, Signature
from engines.errors import EngineFailed, Kind
from engines.tensor import NDArray, TensorSpec
from worker.channel.arena import Span
from worker.channel.layout import WORD_BYTES
from worker.channel.messages import ModelEntry
from worker.channel.records import MASK_32, RECORD_WORDS, Reason, head_word

if TYPE_CHECKING:
    from worker.channel.attachment import Attachment

_KINDS: Final = tuple(Kind)
_REASONS: Final = tuple(Reason)


class Reply:
    """The one answer to a submitted request.

    Attributes:
        kind: OK, or why there are no outputs.
        text: for the caller, empty if OK.
    """

    __slots__ = ("_words", "kind", "text")

    def __init__(self, kind: Kind, text: str = "", words: Sequence[int] = (0,) * RECORD_WORDS) -> None:
        """``words``: of the reply record, for what few callers ask for."""
        self.kind = kind
        self.text = text
        self._words = words

    @property
    def reason(self) -> Reason:
        """Why the batch had its size; NONE for numbers this version does not know."""
        reason = self._words[1] >> 8 & 0xFF
        return _REASONS[reason] if reason < len(_REASONS) else Reason.NONE

    @property
    def batch_size(self) -> int:
        """Compiled size it ran in; 0 if it did not run or the model has no batch axis."""
        return self._words[1] >> 32

    @property
    def queue_ns(self) -> int:
        """From arrival to the start of the execution."""
        return self._words[2]

    @property
    def compute_ns(self) -> int:
        """Of the execution that served it."""
        return self._words[3]

    @property
    def batch_rows(self) -> int:
        """Rows that shared the execution."""
        return self._words[4] & MASK_32

    @property
    def batch_requests(self) -> int:
        """Requests that shared the execution."""
        return self._words[4] >> 32

    @property
    def finished_ns(self) -> int:
        return self._words[6]

    @property
    def dispatch_seq(self) -> int:
        return self._words[7]


OnReply = Callable[["Placement", Reply], None]


def kind_of(words: Sequence[int]) -> Kind:
    """Return what a reply record says of its request; a number this version does not know becomes INTERNAL."""
    kind = words[1] & 0xFF
    return _KINDS[kind] if kind < len(_KINDS) else Kind.INTERNAL


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

    __slots__ = ("entry", "head_word", "inputs", "key", "layout", "outputs", "shares", "variant")

    def __init__(self, entry: ModelEntry, signature: Signature, variant_index: int) -> None:
        variant = signature.variants[variant_index]
        self.entry = entry
        self.key = (entry.model_id, variant_index)
        self.head_word = head_word(entry.model_id, variant_index)
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
        "_attachment", "_span", "abandoned", "cancelled", "in_flight", "on_reply", "plan", "request_id", "rows",
    )  # fmt: skip

    def __init__(self, attachment: Attachment, plan: VariantPlan, span: Span) -> None:
        self.plan = plan
        self.rows = span.rows
        self.request_id = 0
        self.in_flight = self.abandoned = self.cancelled = False
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

    def place_of(self, tensor: int) -> int:
        """Return the first byte, in the arena's ``memory``, of an input or, counted on after them, an output."""
        span = self._span
        assert span is not None, "the placement was released"
        start = span.block.starts[tensor]
        return start + span.row_start * self.plan.layout.row_bytes[tensor] if span.row_start else start

    @property
    def memory(self) -> memoryview:
        """The arena's bytes. Only this placement's are the caller's, and only until ``release``."""
        return self._attachment.memory

    @property
    def inputs(self) -> list[NDArray]:
        """Writable views, one per executable input, shaped for ``rows`` rows; to be filled before ``submit``."""
        arena = self._attachment.memory
        return [
            np.ndarray(tensor.shape(self.rows), tensor.dtype, arena, self.place_of(index))
            for index, tensor in enumerate(self.plan.inputs)
        ]

    def outputs(self) -> list[NDArray]:
        """Return views of what the worker wrote, one per executable output; valid until ``release``.

        Raises:
            EngineFailed: a size that depends on the data is outside its limits.
        """
        plan = self.plan
        first = len(plan.inputs)
        arena = self._attachment.memory
        arrays: list[NDArray] = []
        for index, tensor in enumerate(plan.outputs):
            offset = self.place_of(first + index)
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


def _written_shape(
    arena: memoryview, offset: int, tensor: _TensorPlan, room: tuple[int, ...], rows: int
) -> tuple[int, ...]:
    """Return the shape that the worker told for an output whose size depends on the data."""
    axes = len(room)
    assert axes <= MAX_AXES, f"output {tensor.name!r} has {axes} axes"
    line: list[int] = arena[offset - LINE_BYTES : offset - LINE_BYTES + WORD_BYTES * axes].cast("Q").tolist()
    fits = all(size <= limit for size, limit in zip(line, room, strict=True))
    if not fits or (tensor.batched and line[len(tensor.before)] != rows):
        raise EngineFailed(f"output '{tensor.name}' has shape {line}, its limits are {list(room)} for {rows} rows")
    return tuple(line)
