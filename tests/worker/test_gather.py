"""Rows from anywhere in several blocks, through the host and through a device that copies them itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onnx_models
from array_on_host import HostDeviceArrayEngine
from engines.base import Executable
from engines.onnxruntime import OnnxRuntimeEngine
from engines.probe import resolve
from engines.tensor import NDArray
from manifests import manifest
from tensorrt_fake.engines import FakeTensorRT
from worker.dispatch import Dispatcher
from worker.gather import RowGroup, gather, lend, scatter
from worker.scheduling.types import Dispatch

ROW = 16
BATCH = 8
BLOCK_ROWS = 6
BLOCKS = 3
LEAST = 3 * ROW * 4
"""Bytes from which on rows are lent here: three rows side by side."""
WANTED = manifest([f"INPUT f32 n {ROW}"], [f"OUTPUT f32 n {ROW}"], (BATCH,))
FAR = 1
"""The block that the device cannot reach, as when the driver refuses to register an arena."""

ENGINES: dict[str, Callable[[], Any]] = {
    "onnxruntime": lambda: OnnxRuntimeEngine(threads=1),
    "array on a device": HostDeviceArrayEngine,
    "tensorrt": lambda: FakeTensorRT("11.4"),
}


class Block:
    """One tensor each way, every row with a value of its own."""

    def __init__(self, index: int) -> None:
        rows = np.arange(BLOCK_ROWS * ROW, dtype=np.float32).reshape(BLOCK_ROWS, ROW)
        # One array, as in an arena: registered whole or not at all.
        self.arena = np.stack([rows + 1000 * (index + 1), np.full_like(rows, -1)])
        self.inputs: list[NDArray] = [self.arena[0]]
        self.outputs: list[NDArray] = [self.arena[1]]


class Bench:
    def __init__(self, engine: Any, directory: Path) -> None:
        self.engine = engine
        self.model = engine.open(WANTED, onnx_models.affine(directory / "m", columns=ROW))
        self.model.prepare(resolve(self.model, WANTED))
        self.executable: Executable = self.model.executable(0, BATCH)
        self.shared = getattr(engine, "shared", None)
        self.blocks = [Block(index) for index in range(BLOCKS)]
        if self.shared is not None:
            self.executable.direct_bytes = LEAST  # type: ignore[misc]
            for index, block in enumerate(self.blocks):
                if index != FAR:
                    assert self.shared.register(block.arena, "arena")

    def close(self) -> None:
        if self.shared is not None:
            for block in self.blocks:
                self.shared.unregister(block.arena)
        self.model.close()
        self.engine.close()


@pytest.fixture(params=sorted(ENGINES))
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(ENGINES[request.param](), tmp_path)
    yield bench
    bench.close()


def groups_of(bench: Bench, chosen: list[list[int]]) -> list[RowGroup]:
    groups, at = [], 0
    for block, rows in zip(bench.blocks, chosen, strict=True):
        if rows:
            unbroken = rows[-1] - rows[0] + 1 == len(rows)
            where = slice(rows[0], rows[-1] + 1) if unbroken else np.array(rows, np.intp)
            groups.append(RowGroup(block, at, len(rows), where))
            at += len(rows)
    return groups


CHOICES = st.lists(
    st.sets(st.integers(0, BLOCK_ROWS - 1), max_size=BLOCK_ROWS).map(sorted), min_size=BLOCKS, max_size=BLOCKS
).filter(lambda chosen: 0 < sum(map(len, chosen)) <= BATCH)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CHOICES, min_size=1, max_size=3))
def test_every_row_gets_its_own_answer_wherever_it_lies(bench: Bench, batches: list[list[list[int]]]) -> None:
    for chosen in batches:
        for block in bench.blocks:
            block.outputs[0][...] = -1
        groups = groups_of(bench, chosen)
        count = sum(map(len, chosen))
        slot = bench.executable.slot()
        slot.inputs[0][...] = 77
        if bench.executable.direct_bytes:
            groups = lend(bench.executable, slot, groups)
        gather(slot, groups, count)
        bench.executable.stage(slot)
        bench.executable.launch(slot)
        bench.executable.finish(slot)
        scatter(slot, groups)
        assert sorted(group.at for group in groups)[0] == 0
        assert sum(group.count for group in groups) == count
        for block, rows in zip(bench.blocks, chosen, strict=True):
            for row in range(BLOCK_ROWS):
                expected = block.inputs[0][row] * 2 + 1 if row in rows else np.full(ROW, -1, np.float32)
                np.testing.assert_allclose(block.outputs[0][row], expected, rtol=1e-6)


def test_runs_worth_a_copy_are_lent_and_others_gathered(tmp_path: Path) -> None:
    bench = Bench(FakeTensorRT("11.4"), tmp_path)
    slot = bench.executable.slot()
    groups = lend(bench.executable, slot, groups_of(bench, [[0, 1, 2, 4], [2, 3], []]))
    # Three in a row are lent; the lone row and the two of the other block are brought together by the host.
    assert [(group.at, group.count, bool(group.lent_inputs), bool(group.lent_outputs)) for group in groups] == [
        (0, 3, True, True),
        (3, 1, False, False),
        (4, 2, False, False),
    ]
    scattered = groups_of(bench, [[0, 2, 4], [], []])
    assert lend(bench.executable, bench.executable.slot(), scattered) == scattered, "no run is worth it"
    bench.close()


def test_next_batch_is_on_the_device_while_one_runs_straight_from_the_arenas(tmp_path: Path) -> None:
    """Copies of lent rows wait for nothing that runs; the device's order checker would find a wait that is missing."""
    bench = Bench(FakeTensorRT("11.4"), tmp_path)
    executable, shared = bench.executable, bench.engine.shared
    for _ in range(3):
        slots = []
        for chosen in ([[0, 1, 2], [], [0, 1, 2, 3]], [[3, 4, 5], [0], [4, 5]]):
            slot = executable.slot()
            groups = lend(executable, slot, groups_of(bench, chosen))
            gather(slot, groups, sum(map(len, chosen)))
            executable.stage(slot)
            shared.copy_in.synchronize()
            assert bool(shared.compute.pending) is bool(slots), "copying waited for the execution"
            if not slots:
                executable.launch(slot)
            slots.append((slot, groups))
        (first, first_groups), (second, second_groups) = slots
        executable.finish(first)
        executable.launch(second)
        scatter(first, first_groups)
        executable.finish(second)
        scatter(second, second_groups)
        for at, rows in ((0, range(6)), (1, [0]), (2, range(6))):
            block = bench.blocks[at]
            for row in rows:
                np.testing.assert_allclose(block.outputs[0][row], block.inputs[0][row] * 2 + 1, rtol=1e-6)
    bench.close()


@pytest.mark.interpreted
def test_a_request_with_a_tensor_of_no_rows_lends_its_rows_too(tmp_path: Path) -> None:
    """Such a model runs one request at a time, in a block of its own; the rest of the compiled size is padding."""
    engine = FakeTensorRT("11.4")
    wanted = manifest(["INPUT f32 n 4", "NEGATE bool"], ["OUTPUT f32 n 4"], (8,))
    model = engine.open(wanted, onnx_models.flag(tmp_path / "m"))
    signature = resolve(model, wanted)
    model.prepare(signature)
    executable = model.executable(0, 8)
    executable.direct_bytes = 5 * 16  # type: ignore[misc]
    arena = np.arange(5 * 4, dtype=np.float32).reshape(5, 4)
    assert engine.shared.register(arena, "arena")
    for negate in (True, False):
        room = np.zeros((5, 4), np.float32)
        block = SimpleNamespace(inputs=[arena, np.array(negate)], outputs=[room], shape_lines=[None])
        request: Any = SimpleNamespace(block=block, rows=5)
        loaded: Any = SimpleNamespace(
            executable=lambda variant, size: executable, shares_blocks=False, signature=signature
        )
        batch = Dispatcher().begin(Dispatch(1, 1, 0, 8, 5, [request]), loaded, 0)
        slot: Any = batch.slot
        assert slot._in_transfer.straight_bytes == arena.nbytes
        assert not slot.inputs[0][:5].any(), "the host copied them as well"
        Dispatcher.execute(batch)
        Dispatcher().complete(batch)
        np.testing.assert_array_equal(room, -arena if negate else arena)
    engine.shared.unregister(arena)
    model.close()
    engine.close()
