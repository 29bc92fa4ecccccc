"""Carrying out one dispatch: gather rows from the arenas, execute, scatter rows back.

Three ways, cheapest first:
    in place    the requests' rows are one contiguous run that fills the compiled size (or the model runs one request
                whole): the engine reads and writes the arena itself, nothing is copied
    by index    rows lie in shared blocks: one indexed copy per block and tensor, whatever the number of requests
    by request  tensors whose batch axis is not in front: one strided copy per request and tensor

Rows keep no order within a batch beyond the one this file chooses; what matters is that the row that carried a
request's input is the row its output is read from.

Padding rows are zeros and never leave the worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engines.base import Executable, Slot, Timing
from engines.bundle.signature import LINE_BYTES, MAX_AXES, BlockLayout, Signature
from engines.errors import EngineFailed, InvalidInput, ServingError
from engines.tensor import NDArray
from worker.channel.channel import Channel
from worker.models import LoadedModel
from worker.scheduling.types import Dispatch, Request

MAX_CACHED_BLOCKS = 1024
"""Block views remembered per model; frontends reuse a few blocks over and over."""


@dataclass(slots=True)
class Place:
    """Where a request's tensors lie: the payload of a scheduler request.

    The channel's mapping stays valid until the loop releases it: after the last dispatch that uses it.
    """

    channel: Channel
    request_id: int
    block_offset: int
    block_rows: int
    row_start: int
    rows: int


@dataclass(slots=True)
class BlockViews:
    """Arrays over one block: every tensor with all of the block's rows."""

    inputs: list[NDArray]
    outputs: list[NDArray]
    shape_lines: list[NDArray | None]


@dataclass(slots=True)
class Batch:
    """A dispatch on its way through the engine.

    Attributes:
        order: requests in row order.
        in_place: whether outputs are already where they belong.
    """

    dispatch: Dispatch
    loaded: LoadedModel
    executable: Executable
    slot: Slot
    order: list[Request]
    in_place: bool
    started_ns: int
    staged_ns: int = 0
    groups: list[RowGroup] = field(default_factory=list)
    failure: ServingError | None = None
    timing: Timing | None = None


@dataclass(slots=True)
class RowGroup:
    """Consecutive batch rows that lie in one block, at ``rows`` (a slice when contiguous there)."""

    views: BlockViews
    at: int
    count: int
    rows: slice | NDArray


def place_of(request: Request) -> Place:
    """Return a request's place; the scheduler carries it unseen."""
    place = request.payload
    assert isinstance(place, Place)
    return place


class Dispatcher:
    """Turns dispatches into executed batches. Belongs to the loop; ``execute`` alone may run on another thread."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int, int, int, int], BlockViews] = {}

    def forget(self, channel: Channel) -> None:
        """Drop views into a channel's arena, so that its mapping can go."""
        self._blocks = {key: views for key, views in self._blocks.items() if key[0] != channel.id}

    def forget_model(self, model_id: int) -> None:
        """Drop views shaped for an unloaded model."""
        self._blocks = {key: views for key, views in self._blocks.items() if key[1] != model_id}

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
            for index, output in enumerate(batch.slot.outputs):
                for group in batch.groups:
                    group.views.outputs[index][group.rows] = output[group.at : group.at + group.count]
            return
        at = 0
        for request in batch.order:
            self._scatter_request(batch, request, at)
            at += request.rows

    def _begin_rows(self, dispatch: Dispatch, loaded: LoadedModel, executable: Executable, now_ns: int) -> Batch:
        order = dispatch.requests
        if len(order) > 1:
            order = sorted(order, key=_row_order)
        groups = self._groups(dispatch, loaded, order)
        first = groups[0]
        if len(groups) == 1 and isinstance(first.rows, slice) and dispatch.rows == dispatch.batch_size:
            inputs = [view[first.rows] for view in first.views.inputs]
            outputs = [view[first.rows] for view in first.views.outputs]
            if executable.binds:
                return Batch(dispatch, loaded, executable, executable.bind(inputs, outputs), order, True, now_ns)
        slot = executable.slot()
        for index, destination in enumerate(slot.inputs):
            for group in groups:
                source = group.views.inputs[index]
                target = destination[group.at : group.at + group.count]
                if isinstance(group.rows, slice):
                    target[...] = source[group.rows]
                else:
                    np.take(source, group.rows, axis=0, out=target, mode="clip")
            if dispatch.rows < len(destination):
                destination[dispatch.rows :] = np.zeros((), destination.dtype)
        return Batch(dispatch, loaded, executable, slot, order, False, now_ns, groups=groups)

    def _groups(self, dispatch: Dispatch, loaded: LoadedModel, order: Iterable[Request]) -> list[RowGroup]:
        groups: list[RowGroup] = []
        at = 0
        current: tuple[int, int, int] | None = None
        rows: list[int] = []
        views: BlockViews | None = None
        for request in order:
            place = place_of(request)
            key = (place.channel.id, place.block_offset, place.block_rows)
            if key != current:
                if views is not None:
                    groups.append(_group(views, at, rows))
                    at += len(rows)
                    rows = []
                current = key
                views = self._views(loaded, dispatch.variant, place)
            if place.rows == 1:
                rows.append(place.row_start)
            else:
                rows.extend(range(place.row_start, place.row_start + place.rows))
        assert views is not None, "a dispatch has at least one request"
        groups.append(_group(views, at, rows))
        return groups

    def _views(self, loaded: LoadedModel, variant: int, place: Place) -> BlockViews:
        key = (place.channel.id, loaded.entry.model_id, variant, place.block_offset, place.block_rows)
        views = self._blocks.get(key)
        if views is None:
            if len(self._blocks) >= MAX_CACHED_BLOCKS:
                self._blocks.clear()
            views = self._blocks[key] = block_views(
                place.channel.arena,
                loaded.signature,
                variant,
                loaded.layouts[variant],
                place.block_offset,
                place.block_rows,
            )
        return views

    def _begin_requests(self, dispatch: Dispatch, loaded: LoadedModel, executable: Executable, now_ns: int) -> Batch:
        order = dispatch.requests
        signature = loaded.signature
        if (len(order) == 1 and dispatch.rows == dispatch.batch_size) or dispatch.batch_size == 0:
            place = place_of(order[0])
            views = self._views(loaded, dispatch.variant, place)
            if executable.binds and not any(line is not None for line in views.shape_lines):
                slot = executable.bind(views.inputs, views.outputs)
                return Batch(dispatch, loaded, executable, slot, order, True, now_ns)
        slot = executable.slot()
        for index, (spec, destination) in enumerate(zip(signature.inputs, slot.inputs, strict=True)):
            axis = spec.batch_axis
            at = 0
            for request in order:
                source = self._views(loaded, dispatch.variant, place_of(request)).inputs[index]
                if axis is None:
                    destination[...] = source
                else:
                    destination[_along(axis, at, at + request.rows)] = source
                    at += request.rows
            if axis is not None and at < destination.shape[axis]:
                destination[_along(axis, at, destination.shape[axis])] = np.zeros((), destination.dtype)
        return Batch(dispatch, loaded, executable, slot, order, False, now_ns)

    def _scatter_request(self, batch: Batch, request: Request, at: int) -> None:
        loaded = batch.loaded
        views = self._views(loaded, batch.dispatch.variant, place_of(request))
        for index, (spec, output) in enumerate(zip(loaded.signature.outputs, batch.slot.outputs, strict=True)):
            axis = spec.batch_axis
            mine = output if axis is None else output[_along(axis, at, at + request.rows)]
            room = views.outputs[index]
            line = views.shape_lines[index]
            if line is not None:
                _write_dynamic(loaded.entry.name, spec.name, mine, room, line)
            else:
                room[...] = mine


def block_views(
    arena: NDArray, signature: Signature, variant_index: int, layout: BlockLayout, block_offset: int, block_rows: int
) -> BlockViews:
    """Return arrays over a block of an arena (uint8, one axis); nothing is copied.

    A data-dependent output's array has its largest size; its shape line is a (MAX_AXES,) uint64 array.
    """
    variant = signature.variants[variant_index]
    offsets = layout.offsets(block_rows)
    arrays: list[NDArray] = []
    lines: list[NDArray | None] = []
    specs = signature.inputs + signature.outputs
    dynamic = (False,) * len(signature.inputs) + variant.dynamic_outputs
    for spec, shape, offset, is_dynamic in zip(specs, variant.inputs + variant.outputs, offsets, dynamic, strict=True):
        full = tuple(block_rows if axis == spec.batch_axis else size for axis, size in enumerate(shape))
        dtype = spec.element.numpy
        count = int(np.prod(full, dtype=np.int64))
        start = block_offset + offset
        arrays.append(arena[start : start + count * dtype.itemsize].view(dtype).reshape(full))
        lines.append(arena[start - LINE_BYTES : start].view(np.uint64)[:MAX_AXES] if is_dynamic else None)
    inputs = len(signature.inputs)
    return BlockViews(arrays[:inputs], arrays[inputs:], lines[inputs:])


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


def _row_order(request: Request) -> tuple[int, int, int]:
    place = place_of(request)
    return (place.channel.id, place.block_offset, place.row_start)


def _group(views: BlockViews, at: int, rows: list[int]) -> RowGroup:
    first, count = rows[0], len(rows)
    # Sorted and without repeats, so the ends say whether the run is unbroken.
    if rows[-1] - first + 1 == count:
        return RowGroup(views, at, count, slice(first, first + count))
    return RowGroup(views, at, count, np.array(rows, dtype=np.intp))


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
