"""What a loaded model takes and gives, and where each tensor lies in a block of shared memory.

Theory
    A *block* is a stretch of a frontend's arena shaped for ``block_rows`` rows of one (model, variant): first every
    executable input, then every executable output, each starting on a 64-byte line::

        | input 0: block_rows x row | input 1: ... | output 0: block_rows x row | output 1: ... |

    A request owns ``rows`` consecutive rows [row_start, row_start + rows) of a block, the same ones in every tensor.
    Neighbouring requests of one model are therefore contiguous per tensor: the worker gathers many of them with one
    indexed copy, or runs them in place.

    That needs the batch axis in front and known sizes. A model with a tensor whose batch axis is elsewhere, or missing,
    or whose output size depends on the data, gets one block per request (``shares_blocks`` is False), where the tensor
    lies whole: the batch axis is ``block_rows`` = ``rows`` long, wherever it stands.

    An output whose size depends on the data is preceded by a line of 8 u64 words holding the shape of what was really
    written (axes beyond 8 are not supported); its room is sized by the limits.

Both sides compute the same layout from the same signature, so that no offset but the block's travels in a record.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.tensor import TensorSpec, element_count

LINE_BYTES = 64
"""Alignment of every tensor in a block: one cache line, enough for any vector load."""
MAX_AXES = 8
"""Axes of a tensor with a data-dependent size: its shape must fit one line of u64 words."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One served set of sizes for the variable axes.

    Attributes:
        sizes: the variable axes' sizes, in (input, axis) order; empty for a model without variable axes.
        inputs: per executable input the full shape, with -1 left only at the batch axis.
        outputs: per executable output likewise; an axis whose size depends on the data holds its limit.
        dynamic_outputs: per executable output, whether some axis size depends on the data.
    """

    sizes: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dynamic_outputs: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """Everything a frontend must know to check, place and render requests of one model version.

    Attributes:
        inputs, outputs: executable tensors, in the model's own order.
        client_inputs, client_outputs: what clients send and get; equal to the executable tensors without hooks that
            change them.
        batch_sizes: compiled batch sizes, ascending; (0,) for a model compiled without a batch axis.
        variants: at least one.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    client_inputs: tuple[TensorSpec, ...]
    client_outputs: tuple[TensorSpec, ...]
    batch_sizes: tuple[int, ...]
    variants: tuple[Variant, ...]

    @property
    def coalesces(self) -> bool:
        """Whether several requests may share one execution: every executable tensor has a batch axis (rule 10)."""
        return self.batch_sizes != (0,) and all(spec.batch_axis is not None for spec in self.inputs + self.outputs)

    @property
    def shares_blocks(self) -> bool:
        """Whether several requests may live in one block: rows are contiguous in every tensor, of a known size."""
        dynamic = any(any(variant.dynamic_outputs) for variant in self.variants)
        return self.coalesces and not dynamic and all(spec.batch_axis == 0 for spec in self.inputs + self.outputs)

    @property
    def max_rows(self) -> int:
        """The largest compiled batch size; 0 for a model without a batch axis."""
        return self.batch_sizes[-1]


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of one tensor in a block: ``fixed + block_rows * per_row``, preceded by a shape line if dynamic."""

    per_row: int
    fixed: int
    shape_line: bool


@dataclass(slots=True)
class BlockLayout:
    """Offsets of one variant's tensors in a block of any number of rows.

    Attributes:
        row_bytes: per tensor (inputs, then outputs) the bytes of one row; for a tensor without a batch axis, all of it.
        input_count: how many of the tensors are inputs.
    """

    row_bytes: tuple[int, ...]
    input_count: int
    _rooms: tuple[_Room, ...]
    _offsets: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    @classmethod
    def of(cls, signature: Signature, variant_index: int) -> BlockLayout:
        """Return the layout of ``signature.variants[variant_index]``."""
        variant = signature.variants[variant_index]
        rooms: list[_Room] = []
        row_bytes: list[int] = []
        specs = signature.inputs + signature.outputs
        shapes = variant.inputs + variant.outputs
        dynamic = (False,) * len(signature.inputs) + variant.dynamic_outputs
        for spec, shape, is_dynamic in zip(specs, shapes, dynamic, strict=True):
            one = element_count(tuple(1 if axis == spec.batch_axis else size for axis, size in enumerate(shape)))
            one *= spec.element.itemsize
            batched = spec.batch_axis is not None
            rooms.append(_Room(one if batched else 0, 0 if batched else one, is_dynamic))
            row_bytes.append(one)
        return cls(tuple(row_bytes), len(signature.inputs), tuple(rooms))

    def offsets(self, block_rows: int) -> tuple[int, ...]:
        """Return each tensor's first byte (after its shape line, if it has one), relative to the block."""
        return self._place(block_rows)[0]

    def block_bytes(self, block_rows: int) -> int:
        """Return the size of a block of ``block_rows`` rows, a multiple of ``LINE_BYTES``."""
        return self._place(block_rows)[1]

    def _place(self, block_rows: int) -> tuple[tuple[int, ...], int]:
        placed = self._offsets.get(block_rows)
        if placed is None:
            if len(self._offsets) >= _MAX_CACHED_LAYOUTS:
                self._offsets.clear()
            placed = self._offsets[block_rows] = self._compute(block_rows)
        return placed

    def _compute(self, block_rows: int) -> tuple[tuple[int, ...], int]:
        offsets: list[int] = []
        at = 0
        for room in self._rooms:
            if room.shape_line:
                at += LINE_BYTES
            offsets.append(at)
            at += room.fixed + block_rows * room.per_row
            at = -(-at // LINE_BYTES) * LINE_BYTES
        return tuple(offsets), at


_MAX_CACHED_LAYOUTS = 4096
"""Distinct block heights remembered per variant; few occur, the limit keeps odd traffic from growing the table."""
