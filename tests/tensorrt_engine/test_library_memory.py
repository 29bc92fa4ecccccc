"""Device memory that the library asks for: counted by model, given back, and told when it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onnx_models
from engines.device.base import Span
from engines.device.errors import OutOfDeviceMemory
from engines.device.host import HostDevice
from engines.errors import NotReady
from engines.probe import resolve
from engines.tensor import NDArray
from engines.tensorrt.memory import LibraryMemory, Owner
from engines.tensorrt.model import TensorRTModel
from engines.tensorrt.weights import DeferredWeights
from manifests import manifest
from one_execution import executed
from tensorrt_fake.engines import FakeTensorRT

WIDTH = 32
WIDE = manifest([f"INPUT f32 n {WIDTH}"], [f"OUTPUT f32 n {WIDTH}"], (1, 4))
INSIDE = 2 * (WIDTH * WIDTH + WIDTH) * 4
CONSTANTS = {"Gemm": (1,), "MatMul": (1,)}
"""Operands that a library wants as constants, so that weights stay inside."""


def opened(engine: FakeTensorRT, path: Path) -> TensorRTModel:
    model = engine.open(WIDE, onnx_models.mlp(path, layers=2, width=WIDTH))
    model.prepare(resolve(model, WIDE))
    return model


def rows_of(seed: int) -> NDArray:
    return np.random.default_rng(seed).random((4, WIDTH), dtype=np.float32)


@pytest.fixture
def rtx() -> Iterator[FakeTensorRT]:
    engine = FakeTensorRT("rtx-1.7", constant_operands=CONSTANTS)
    yield engine
    engine.close()


def test_weights_inside_a_plan_are_counted_and_given_back(tmp_path: Path) -> None:
    engine = FakeTensorRT("11.4", constant_operands=CONSTANTS)
    free = engine.device.memory().free_bytes
    first = opened(engine, tmp_path / "m")
    assert first.footprint.weights_bytes == INSIDE
    # A second version of that name, as when a model is replaced: each counts its own.
    second = opened(engine, tmp_path / "m")
    assert second.footprint.weights_bytes == INSIDE
    assert second.evictable_bytes == 0
    second.unload()
    assert second.resident
    first.close()
    second.close()
    left = free - engine.device.memory().free_bytes
    assert left == engine.engine._rooms.device_bytes, "something but scratch and staging stayed"
    engine.close()


def test_what_does_not_fit_is_told_in_bytes_and_not_built_again(tmp_path: Path) -> None:
    """A cached plan that the library refuses is built anew, but not if only memory was missing."""
    cache = tmp_path / "plans"
    FakeTensorRT("11.4", constant_operands=CONSTANTS, cache=cache).open(WIDE, mlp(tmp_path)).close()
    engine = FakeTensorRT("11.4", constant_operands=CONSTANTS, cache=cache)
    hog = engine.device.allocate(engine.device.memory().free_bytes - INSIDE + 1024, "something else")
    with pytest.raises(
        OutOfDeviceMemory, match=rf"model 'm'.*'m' in TensorRT: {INSIDE} bytes .* are free; lower runtime"
    ):
        engine.open(WIDE, mlp(tmp_path))
    assert engine.world.builds == 0
    hog.free()
    model = opened(engine, tmp_path / "m")
    assert executed(model.executable(0, 4), rows_of(1)).any()
    model.close()
    engine.close()


def mlp(directory: Path) -> Path:
    return onnx_models.mlp(directory / "m", layers=2, width=WIDTH)


def test_rtx_unloads_and_loads_weights_while_contexts_stay(rtx: FakeTensorRT, tmp_path: Path) -> None:
    model = opened(rtx, tmp_path / "m")
    assert isinstance(model._weights, DeferredWeights)
    executable = model.executable(0, 4)
    expected = [executed(executable, rows_of(seed)) for seed in range(4)]
    assert model.evictable_bytes == INSIDE
    loaded = rtx.device.memory().free_bytes
    contexts = list(model._contexts)
    for _ in range(3):
        slot = executable.slot()
        slot.inputs[0][...] = rows_of(0)
        executable.stage(slot)
        executable.launch(slot)
        # Waits for what runs.
        model.unload()
        executable.finish(slot)
        np.testing.assert_array_equal(slot.outputs[0], expected[0])
        model.unload()
        assert not model.resident
        assert rtx.device.memory().free_bytes - loaded == INSIDE
        model.load()
        model.load()
        assert rtx.device.memory().free_bytes == loaded
        for seed in range(4):
            np.testing.assert_array_equal(executed(executable, rows_of(seed)), expected[seed])
    assert model._contexts == contexts
    model.close()


def test_rtx_says_why_weights_are_not_loaded(rtx: FakeTensorRT, tmp_path: Path) -> None:
    model = opened(rtx, tmp_path / "m")
    expected = executed(model.executable(0, 4), rows_of(1))
    model.unload()
    hog = rtx.device.allocate(rtx.device.memory().free_bytes - 1024, "something else")
    with pytest.raises(OutOfDeviceMemory, match=rf"model 'm': its weights are inside its plan: .*{INSIDE} bytes"):
        model.load()
    hog.free()
    model.load()
    np.testing.assert_array_equal(executed(model.executable(0, 4), rows_of(1)), expected)
    model.unload()
    weights = model._weights
    assert isinstance(weights, DeferredWeights) and weights._plan is not None
    weights._plan.array[-1] ^= 1
    with pytest.raises(NotReady, match="m: TensorRT does not load the plan's weights"):
        model.load()
    model.close()


def test_blocks_wait_for_the_work_that_uses_them() -> None:
    device = HostDevice(1 << 20)
    memory = LibraryMemory(device)
    owner = Owner("m")
    with memory.of(owner):
        first = memory.allocate(1000, 7)
        assert first is not None
        assert memory.allocate(0, 7) is None
        assert memory.refused is None
    assert memory.held_bytes(owner) == 1000
    free = device.memory().free_bytes
    assert memory.release(first, 7)
    assert not memory.release(first, 7), "given back twice"
    assert memory.release(0, 7), "what was refused may be given back"
    assert memory.held_bytes(owner) == 0
    assert device.memory().free_bytes == free
    # Later work of the same stream comes after what still uses the block; any other work may not.
    others = [memory.allocate(1000, 8), memory.allocate(999, 7), memory.allocate(1000, 0)]
    assert first not in others
    assert memory.allocate(1000, 7) == first
    for address in (*others, first):
        assert address is not None and memory.release(address, 7)
    memory.sweep()
    assert device.memory().free_bytes == device.memory().total_bytes
    device.close()


def test_sweeping_waits_for_the_device() -> None:
    """Without waiting, the host device refuses to free what a copy still reads."""
    device = HostDevice(1 << 20)
    memory = LibraryMemory(device)
    address = memory.allocate(1000, 7)
    assert address is not None
    (block,) = memory._held.values()
    pinned, stream = device.pinned(1000, "source"), device.stream("s")
    device.copy_in(Span.whole(block.buffer), pinned.array[:1000], stream)
    assert memory.release(address, 7)
    memory.sweep()
    pinned.free()
    stream.close()
    device.close()
