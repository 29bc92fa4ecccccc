"""Carrying out one dispatch: gather rows from the arenas, execute, scatter rows back.

Ways, cheapest first:
    in place    the requests' rows are one contiguous run that fills the compiled size (or the model runs one request
                whole): the engine reads and writes the arena itself, nothing is copied
    lent        a device copies runs of rows from and to the arenas itself (``gather``)
    by index    rows lie in shared blocks: one indexed copy per block and tensor, whatever the number of requests
    by request  tensors whose batch axis is not in front: one strided copy per request and tensor

Rows keep no order within a batch beyond the one this file chooses; what matters is that the row that carried a
request's input is the row its output is read from.

Padding rows are zeros and never leave the worker.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from operator import attrgetter
from typing import cast

import numpy as np

from engines.base import Executable, Rows, Slot, Timing
from engines.bundle.signature import Signature
from engines.errors import EngineFailed, InvalidInput, ServingError
from engines.tensor import NDArray
from worker.arrival import Arrival, Block
from worker.gather import RowGroup, gather, lend, scatter
from worker.models import LoadedModel
from worker.scheduling.types import Dispatch

_place = attrgetter("place")


@dataclass(slots=True)
class Batch:
    """A dispatch on its way through the engine.

    Attributes:
        order: requests in row order.
        in_place: whether outputs are already where they belong.
        started_ns: when the requests stopped waiting: they were chosen, or the execution before ended.
        estimate_ns: what the execution is expected to take.
        staging_ns: what bringing the inputs together took.
        scattered_ns: what writing the outputs took, where that was done at once.
    """

    dispatch: Dispatch
    loaded: LoadedModel
    executable: Executable
    slot: Slot
    order: list[Arrival]
    in_place: bool
    started_ns: int
    staged_ns: int = 0
    estimate_ns: int = 0
    staging_ns: int = 0
    scattered_ns: int = 0
    groups: list[RowGroup] = field(default_factory=list)
    failure: ServingError | None = None
    timing: Timing | None = None


class Dispatcher:
    """Turns dispatches into executed batches. Belongs to the loop; ``execute`` alone may run on another thread."""

    def begin(self, dispatch: Dispatch, loaded: LoadedModel, now_ns: int) -> Batch:
        """Bring the inputs together and stage them.

        Raises:
            InvalidInput: no compiled size holds the request (rule 11).
        """
        if dispatch.batch_size < 0 or 0 < dispatch.batch_size < dispatch.rows:
            raise InvalidInput(shape_text(loaded.signature, dispatch))
        executable = loaded.executable(dispatch.variant, dispatch.batch_size)
        if loaded.shares_blocks:
            batch = self._begin_rows(dispatch, loaded, executable, now_ns)
        else:
            batch = self._begin_requests(dispatch, loaded, executable, now_ns)
        executable.stage(batch.slot)
        batch.staged_ns = time.monotonic_ns()
        return batch

    @staticmethod
    def execute(batch: Batch) -> None:
        """Run the batch; leaves a timing or a failure in it. Never raises, since it may run on the device thread."""
        try:
            batch.executable.launch(batch.slot)
            batch.timing = batch.executable.finish(batch.slot)
        except ServingError as error:
            batch.failure = error
        except Exception as error:
            batch.failure = EngineFailed(
                f"model '{batch.loaded.entry.name}' failed while running: {type(error).__name__}: {error}"
            )

    def complete(self, batch: Batch) -> None:
        """Write outputs into the requests' rooms.

        Raises:
            EngineFailed: a data-dependent output is larger than its declared limit.
        """
        if batch.in_place:
            return
        if batch.groups:
            scatter(batch.slot, batch.groups)
            return
        at = 0
        for request in batch.order:
            self._scatter_request(batch, request, at)
            at += request.rows

    def _begin_rows(self, dispatch: Dispatch, loaded: LoadedModel, executable: Executable, now_ns: int) -> Batch:
        order = cast("list[Arrival]", dispatch.requests)
        if len(order) > 1:
            order = sorted(order, key=_place)
        groups = _groups(order)
        first = groups[0]
        if len(groups) == 1 and isinstance(first.rows, slice) and dispatch.rows == dispatch.batch_size:
            inputs = [view[first.rows] for view in first.block.inputs]
            outputs = [view[first.rows] for view in first.block.outputs]
            if executable.binds:
                return Batch(dispatch, loaded, executable, executable.bind(inputs, outputs), order, True, now_ns)
        slot = executable.slot()
        if executable.direct_bytes:
            groups = lend(executable, slot, groups)
        gather(slot, groups, dispatch.rows)
        return Batch(dispatch, loaded, executable, slot, order, False, now_ns, groups=groups)

    def _begin_requests(self, dispatch: Dispatch, loaded: LoadedModel, executable: Executable, now_ns: int) -> Batch:
        order = cast("list[Arrival]", dispatch.requests)
        signature = loaded.signature
        if (len(order) == 1 and dispatch.rows == dispatch.batch_size) or dispatch.batch_size == 0:
            block = order[0].block
            if executable.binds and not any(line is not None for line in block.shape_lines):
                slot = executable.bind(block.inputs, block.outputs)
                return Batch(dispatch, loaded, executable, slot, order, True, now_ns)
        slot = executable.slot()
        lent: list[Rows] = []
        for index, (spec, destination) in enumerate(zip(signature.inputs, slot.inputs, strict=True)):
            axis = spec.batch_axis
            at = 0
            for request in order:
                source = request.block.inputs[index]
                if not axis and source.ndim and 0 < executable.direct_bytes <= source.nbytes:
                    lent.append(Rows(index, at, source))
                elif axis is None:
                    destination[...] = source
                else:
                    destination[_along(axis, at, at + request.rows)] = source
                if axis is not None:
                    at += request.rows
            if axis is not None and at < destination.shape[axis]:
                destination[_along(axis, at, destination.shape[axis])] = np.zeros((), destination.dtype)
        if lent:
            executable.rows(slot, lent, [])
        return Batch(dispatch, loaded, executable, slot, order, False, now_ns)

    @staticmethod
    def _scatter_request(batch: Batch, request: Arrival, at: int) -> None:
        loaded, block = batch.loaded, request.block
        for index, (spec, output) in enumerate(zip(loaded.signature.outputs, batch.slot.outputs, strict=True)):
            axis = spec.batch_axis
            mine = output if axis is None else output[_along(axis, at, at + request.rows)]
            room = block.outputs[index]
            line = block.shape_lines[index]
            if line is not None:
                _write_dynamic(loaded.entry.name, spec.name, mine, room, line)
            else:
                room[...] = mine


def shape_text(signature: Signature, dispatch: Dispatch) -> str:
    """Return rule 11's message for a request whose shape has no executable."""
    rows = dispatch.requests[0].rows if dispatch.requests else dispatch.rows
    variant = signature.variants[max(0, dispatch.variant)]
    asked = [
        _with_rows(shape, spec.batch_axis, rows) for spec, shape in zip(signature.inputs, variant.inputs, strict=True)
    ]
    compiled = [
        _with_rows(shape, spec.batch_axis, size)
        for size in signature.batch_sizes
        for spec, shape in zip(signature.inputs, variant.inputs, strict=True)
    ]
    return (
        f"no compiled program for input shape {', '.join(map(str, asked))}; compiled: {', '.join(map(str, compiled))}"
    )


def _with_rows(shape: tuple[int, ...], batch_axis: int | None, rows: int) -> list[int]:
    return [rows if axis == batch_axis else size for axis, size in enumerate(shape)]


def _groups(order: list[Arrival]) -> list[RowGroup]:
    """Return the rows of ``order``, sorted by place, as one group per block."""
    groups: list[RowGroup] = []
    at = 0
    block = order[0].block
    rows: list[int] = []
    for request in order:
        if request.block is not block:
            groups.append(_group(block, at, rows))
            at += len(rows)
            rows = []
            block = request.block
        if request.rows == 1:
            rows.append(request.row_start)
        else:
            rows.extend(range(request.row_start, request.row_start + request.rows))
    groups.append(_group(block, at, rows))
    return groups


def _group(block: Block, at: int, rows: list[int]) -> RowGroup:
    first, count = rows[0], len(rows)
    # Sorted and without repeats, so the ends say whether the run is unbroken.
    if rows[-1] - first + 1 == count:
        return RowGroup(block, at, count, slice(first, first + count))
    return RowGroup(block, at, count, np.array(rows, dtype=np.intp))


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (slice(None),) * axis + (slice(start, stop),)


def _write_dynamic(model: str, name: str, value: NDArray, room: NDArray, line: NDArray) -> None:
    if value.ndim != room.ndim or any(size > limit for size, limit in zip(value.shape, room.shape, strict=True)):
        raise EngineFailed(
            f"model '{model}', output '{name}': shape {list(value.shape)} exceeds the declared maximum "
            f"{list(room.shape)}"
        )
    line[: value.ndim] = value.shape
    flat = room.reshape(-1)
    flat[: value.size] = value.reshape(-1)
