"""Gather, execute, scatter: every packing gives every request its own rows, and padding never leaks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import Timing
from engines.bundle.signature import BlockLayout, Signature, Variant
from engines.errors import EngineFailed, InvalidInput
from engines.tensor import TensorSpec
from worker.arrival import Arrival, Attached, Block, block_views
from worker.dispatch import Dispatcher
from worker.metrics import ModelCounters
from worker.models import LoadedModel
from worker.scheduling.types import NO_DEADLINE, Dispatch, ModelSpec

pytestmark = pytest.mark.interpreted

ARENA_BYTES = 1 << 20


class Slot:
    def __init__(self, inputs: list[Any], outputs: list[Any]) -> None:
        self.inputs, self.outputs = inputs, outputs


class Doubling:
    """An executable that doubles every input; counts how it was given its buffers."""

    def __init__(self, signature: Signature, variant: int, batch_size: int, binds: bool) -> None:
        self.batch_size = batch_size
        self.binds = binds
        self.direct_bytes = 0
        self.bound = 0
        self.seen: list[Any] = []
        shapes = signature.variants[variant]
        self._staging = Slot(
            [self._array(spec, shape, batch_size) for spec, shape in zip(signature.inputs, shapes.inputs, strict=True)],
            [
                self._array(spec, shape, batch_size)
                for spec, shape in zip(signature.outputs, shapes.outputs, strict=True)
            ],
        )

    @staticmethod
    def _array(spec: TensorSpec, shape: tuple[int, ...], batch_size: int) -> Any:
        full = tuple(batch_size if axis == spec.batch_axis else size for axis, size in enumerate(shape))
        return np.full(full, 77, spec.element.numpy)

    def slot(self) -> Slot:
        return self._staging

    def bind(self, inputs: list[Any], outputs: list[Any]) -> Slot:
        self.bound += 1
        assert all(array.flags.c_contiguous for array in inputs + outputs)
        return Slot(inputs, outputs)

    def stage(self, slot: Slot) -> None: ...

    def launch(self, slot: Slot) -> None:
        self.seen = [array.copy() for array in slot.inputs]
        for source, target in zip(slot.inputs, slot.outputs, strict=True):
            target[...] = source * 2

    def finish(self, slot: Slot) -> Timing:
        return Timing(1000)


def spec(name: str, axis: int | None, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, "f32", shape, axis)


def signature_of(axis: int | None, sizes: tuple[int, ...]) -> Signature:
    """One tensor of rows on ``axis``, 3 columns; a second one of the same kind."""
    shape = {0: (-1, 3), 1: (3, -1), None: (4, 3)}[axis]
    inputs = (spec("A", axis, shape), spec("B", axis, shape))
    outputs = (spec("C", axis, shape), spec("D", axis, shape))
    variant = Variant((), (shape, shape), (shape, shape), (False, False))
    return Signature(inputs, outputs, inputs, outputs, sizes, (variant,))


def loaded_of(signature: Signature, binds: bool = True) -> LoadedModel:
    model = SimpleNamespace(executable=lambda variant, size: Doubling(signature, variant, size, binds))
    entry: Any = SimpleNamespace(model_id=1, name="m", version="1")
    return LoadedModel(
        entry=entry,
        model=model,  # type: ignore[arg-type]
        signature=signature,
        spec=ModelSpec(1, "m", signature.batch_sizes, 1, signature.coalesces),
        layouts=(BlockLayout.of(signature, 0),),
        counters=ModelCounters("m", "1"),
        shares_blocks=signature.shares_blocks,
    )


def attached(number: int) -> Attached:
    channel: Any = SimpleNamespace(id=number, arena=np.zeros(ARENA_BYTES, np.uint8))
    return Attached(channel)


def arrive(loaded: LoadedModel, home: Attached, number: int, offset: int, block_rows: int, at: int, rows: int) -> Any:
    """Return a request for ``rows`` rows at ``at`` of a block; blocks are remembered as intake does."""
    block = home.blocks.get((0, offset, block_rows))
    if block is None:
        views = block_views(home.channel.arena, loaded.signature, 0, loaded.layouts[0], offset, block_rows)
        # Any number does that no other block has.
        block = Block(loaded, (home.channel.id << 16 | offset // 64) << 32, block_rows, *views)
        home.blocks[0, offset, block_rows] = block
    return Arrival(number, home, number, block, at, rows, 1, NO_DEADLINE, 0)


def run(dispatcher: Dispatcher, loaded: LoadedModel, requests: list[Arrival], batch_size: int) -> Any:
    rows = sum(request.rows for request in requests)
    dispatch = Dispatch(1, 1, 0, batch_size, rows, list(requests))
    batch = dispatcher.begin(dispatch, loaded, 0)
    dispatcher.execute(batch)
    assert batch.failure is None, batch.failure
    dispatcher.complete(batch)
    return batch


@given(
    packing=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 7)), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_every_packing_of_shared_blocks_returns_each_request_its_rows(packing: list[Any], order: Any) -> None:
    """Requests lie in several blocks of several channels, in any order, with gaps; each gets exactly its own rows."""
    loaded = loaded_of(signature_of(0, (1, 8, 32, 128)))
    layout = loaded.layouts[0]
    block_rows = 100
    block_bytes = layout.block_bytes(block_rows)
    homes = [attached(number) for number in range(3)]
    next_row: dict[tuple[int, int], int] = {}
    requests, expected = [], []
    for number, (channel_index, block_index, rows) in enumerate(packing):
        start = next_row.get((channel_index, block_index), 0)
        next_row[channel_index, block_index] = start + rows + number % 2
        home, offset = homes[channel_index], block_index * block_bytes
        requests.append(arrive(loaded, home, number, offset, block_rows, start, rows))
        values = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + 1000 * (number + 1)
        expected.append(values)
        shared = requests[-1].block
        shared.inputs[0][start : start + rows] = values
        shared.inputs[1][start : start + rows] = -values
        shared.outputs[0][start : start + rows] = -1
    order.shuffle(requests)
    total = sum(request.rows for request in requests)
    batch_size = next(size for size in (1, 8, 32, 128) if size >= total)
    batch = run(Dispatcher(), loaded, requests, batch_size)
    for request in requests:
        shared = request.block
        rows = slice(request.row_start, request.row_start + request.rows)
        np.testing.assert_array_equal(shared.outputs[0][rows], expected[request.key] * 2)
        np.testing.assert_array_equal(shared.outputs[1][rows], -expected[request.key] * 2)
    if not batch.in_place:
        seen = batch.executable.seen[0]
        assert not seen[total:].any(), "padding rows must be zeros"


def test_rule_14_a_lone_request_that_fills_the_size_runs_in_place() -> None:
    loaded = loaded_of(signature_of(0, (4,)))
    lone = arrive(loaded, attached(1), 1, 0, 10, 2, 4)
    lone.block.inputs[0][2:6] = 3
    batch = run(Dispatcher(), loaded, [lone], 4)
    assert batch.in_place
    assert batch.executable.bound == 1
    np.testing.assert_array_equal(lone.block.outputs[0][2:6], np.full((4, 3), 6, np.float32))
    np.testing.assert_array_equal(lone.block.outputs[0][:2], np.zeros((2, 3), np.float32))


def test_neighbouring_requests_that_fill_the_size_run_in_place() -> None:
    loaded = loaded_of(signature_of(0, (4,)))
    home = attached(1)
    requests = [arrive(loaded, home, n, 0, 10, 2 * n, 2) for n in (1, 0)]
    assert run(Dispatcher(), loaded, requests, 4).in_place


def test_an_engine_that_cannot_bind_is_given_staging() -> None:
    loaded = loaded_of(signature_of(0, (4,)), binds=False)
    lone = arrive(loaded, attached(1), 1, 0, 4, 0, 4)
    lone.block.inputs[0][...] = 5
    batch = run(Dispatcher(), loaded, [lone], 4)
    assert not batch.in_place
    np.testing.assert_array_equal(lone.block.outputs[0], np.full((4, 3), 10, np.float32))


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_batch_axis_that_is_not_in_front(sizes: list[int]) -> None:
    loaded = loaded_of(signature_of(1, (1, 8, 16)))
    home = attached(1)
    requests, at = [], 0
    for number, rows in enumerate(sizes):
        requests.append(arrive(loaded, home, number, at, rows, 0, rows))
        at += loaded.layouts[0].block_bytes(rows)
        requests[-1].block.inputs[0][...] = np.arange(3 * rows).reshape(3, rows) + 100 * number
    batch_size = next(size for size in (1, 8, 16) if size >= sum(sizes))
    run(Dispatcher(), loaded, requests, batch_size)
    for request in requests:
        shared = request.block
        np.testing.assert_array_equal(shared.outputs[0], shared.inputs[0] * 2)


def test_a_model_without_batch_axis_runs_whole_and_in_place() -> None:
    loaded = loaded_of(signature_of(None, (0,)))
    lone = arrive(loaded, attached(1), 1, 64, 1, 0, 1)
    lone.block.inputs[0][...] = 2
    batch = run(Dispatcher(), loaded, [lone], 0)
    assert batch.in_place
    np.testing.assert_array_equal(lone.block.outputs[0], np.full((4, 3), 4, np.float32))


@pytest.mark.parametrize("batch_size", [-1, 8])
def test_rule_11_a_request_that_no_size_holds_fails_with_the_shapes(batch_size: int) -> None:
    loaded = loaded_of(signature_of(0, (1, 8)))
    request = arrive(loaded, attached(1), 1, 0, 9, 0, 9)
    dispatch = Dispatch(1, 1, 0, batch_size, 9, [request])
    with pytest.raises(InvalidInput, match=r"no compiled program for input shape \[9, 3\].*compiled: \[1, 3\]"):
        Dispatcher().begin(dispatch, loaded, 0)


def dynamic_model(limit: int) -> LoadedModel:
    shape = (-1, limit)
    inputs = (spec("A", 0, (-1, 3)),)
    outputs = (TensorSpec("K", "f32", (-1, -1), 0, (0, limit)),)
    signature = Signature(inputs, outputs, inputs, outputs, (1, 4), (Variant((), ((-1, 3),), (shape,), (True,)),))
    return loaded_of(signature)


@pytest.mark.parametrize(("found", "fits"), [(0, True), (2, True), (5, True), (6, False)])
def test_a_data_dependent_output_tells_its_shape_or_its_limit(found: int, fits: bool) -> None:
    loaded = dynamic_model(5)
    lone = arrive(loaded, attached(1), 1, 0, 2, 0, 2)
    dispatcher = Dispatcher()
    batch = dispatcher.begin(Dispatch(1, 1, 0, 4, 2, [lone]), loaded, 0)
    batch.slot.outputs[0] = np.arange(4 * found, dtype=np.float32).reshape(4, found)
    if not fits:
        with pytest.raises(EngineFailed, match=r"output 'K': shape \[2, 6\] exceeds the declared maximum \[2, 5\]"):
            dispatcher.complete(batch)
        return
    dispatcher.complete(batch)
    shared = lone.block
    assert shared.shape_lines[0] is not None
    assert shared.shape_lines[0][:2].tolist() == [2, found]
    flat = shared.outputs[0].reshape(-1)[: 2 * found]
    np.testing.assert_array_equal(flat, np.arange(2 * found, dtype=np.float32))
