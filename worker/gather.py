"""Bringing rows of several blocks together in a slot, and results back to them.

On a CPU the host copies: one copy per block and tensor, an indexed one where rows do not lie side by side. For a device
that copies by itself, runs of rows that are worth a copy of their own are lent to the executable where they lie, and so
are their outputs; the host copies the rest, small tensors and lone small rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engines.base import Executable, Rows, Slot
from engines.tensor import NDArray

NONE: frozenset[int] = frozenset()


class Tensors(Protocol):
    """Arrays over a stretch of an arena, every tensor with all of its rows."""

    @property
    def inputs(self) -> list[NDArray]: ...
    @property
    def outputs(self) -> list[NDArray]: ...


@dataclass(slots=True)
class RowGroup:
    """Consecutive batch rows that lie in one block, at ``rows`` (a slice when contiguous there).

    Attributes:
        lent_inputs, lent_outputs: tensors whose rows the device copies from and to the block itself.
    """

    block: Tensors
    at: int
    count: int
    rows: slice | NDArray
    lent_inputs: frozenset[int] = NONE
    lent_outputs: frozenset[int] = NONE


def gather(slot: Slot, groups: Sequence[RowGroup], rows: int) -> None:
    """Fill the slot's inputs from the blocks, and the rows behind the first ``rows`` with zeros."""
    for index, destination in enumerate(slot.inputs):
        for group in groups:
            if index in group.lent_inputs:
                continue
            source = group.block.inputs[index]
            target = destination[group.at : group.at + group.count]
            if isinstance(group.rows, slice):
                target[...] = source[group.rows]
            else:
                np.take(source, group.rows, axis=0, out=target, mode="clip")
        if rows < len(destination):
            destination[rows:] = np.zeros((), destination.dtype)


def scatter(slot: Slot, groups: Sequence[RowGroup]) -> None:
    """Copy the slot's outputs to the blocks."""
    for index, output in enumerate(slot.outputs):
        for group in groups:
            if index not in group.lent_outputs:
                group.block.outputs[index][group.rows] = output[group.at : group.at + group.count]


def lend(executable: Executable, slot: Slot, groups: Sequence[RowGroup]) -> list[RowGroup]:
    """Give the executable what is worth a copy of its own, and return all rows as groups that say what that was.

    ``gather`` and ``scatter`` of these groups leave it alone. A group of rows that do not lie side by side is taken
    apart if any run of them is worth it.
    """
    least = executable.direct_bytes
    inputs: list[Rows] = []
    outputs: list[Rows] = []
    result: list[RowGroup] = []
    for group in groups:
        for run in _runs(group, least):
            if isinstance(run.rows, slice):
                run.lent_inputs = _lent(run, run.block.inputs, least, inputs)
                run.lent_outputs = _lent(run, run.block.outputs, least, outputs)
            result.append(run)
    if inputs or outputs:
        executable.rows(slot, inputs, outputs)
    return result


def _lent(run: RowGroup, tensors: Sequence[NDArray], least: int, rows: list[Rows]) -> frozenset[int]:
    lent = []
    for index, tensor in enumerate(tensors):
        array = tensor[run.rows]
        if array.nbytes >= least:
            rows.append(Rows(index, run.at, array))
            lent.append(index)
    return frozenset(lent) if lent else NONE


def _runs(group: RowGroup, least: int) -> list[RowGroup]:
    """Return the group, or one per run of neighbours if some tensor's longest run has ``least`` bytes."""
    if isinstance(group.rows, slice):
        return [group]
    starts = [0, *(np.flatnonzero(np.diff(group.rows) != 1) + 1).tolist(), group.count]
    lengths = np.diff(starts)
    row_bytes = max(tensor[:1].nbytes for tensor in (*group.block.inputs, *group.block.outputs))
    if int(lengths.max()) * row_bytes < least:
        return [group]
    runs = []
    for start, length in zip(starts, lengths.tolist(), strict=False):
        first = int(group.rows[start])
        runs.append(RowGroup(group.block, group.at + start, length, slice(first, first + length)))
    return runs
