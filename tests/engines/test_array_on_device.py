"""The array engine over the device layer: graphs, moving weights, loading and unloading, registered memory, overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_models
from array_on_host import HostDeviceArrayEngine
from engines.array.on_device import DeviceArrayExecutable, DeviceArrayModel, _ArrayDeviceSlot
from engines.base import Timing
from engines.bundle.manifest import Manifest
from engines.device.base import Capabilities
from engines.device.errors import DeviceLost, OutOfDeviceMemory
from engines.device.host import HostDevice, HostGraph
from engines.device.host_order import DeviceMisuse
from engines.device.host_stream import HostStream
from engines.device.staging import DeviceSlot
from engines.device.weights import SlabWeights
from engines.errors import EngineFailed
from engines.probe import resolve
from engines.staging import SLOTS
from engines.tensor import NDArray
from manifests import manifest
from one_execution import executed

MLP = manifest(["INPUT f32 n 16"], ["OUTPUT f32 n 16"], (1, 4))
ARENA_BYTES = 1 << 20


@pytest.fixture
def engine() -> Iterator[HostDeviceArrayEngine]:
    engine = HostDeviceArrayEngine(arena_bytes=ARENA_BYTES)
    yield engine
    engine.close()


def opened(engine: HostDeviceArrayEngine, path: Path, wanted: Manifest = MLP) -> DeviceArrayModel:
    model = engine.open(wanted, path)
    model.prepare(resolve(model, wanted))
    return model


def mlp(engine: HostDeviceArrayEngine, path: Path, seed: int = 0) -> DeviceArrayModel:
    return opened(engine, onnx_models.mlp(path, width=16, seed=seed))


def draw(seed: int, rows: int = 4) -> NDArray:
    return np.random.default_rng(seed).standard_normal((rows, 16)).astype(np.float32)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[HostGraph]:
    """Graphs in the order of their launches."""
    launched: list[HostGraph] = []
    launch = HostGraph.launch

    def noted(self: HostGraph, stream: Any) -> None:
        launched.append(self)
        launch(self, stream)

    monkeypatch.setattr(HostGraph, "launch", noted)
    return launched


def test_second_execution_is_a_graph_and_says_the_same(
    engine: HostDeviceArrayEngine, tmp_path: Path, replays: list[HostGraph]
) -> None:
    model = mlp(engine, tmp_path / "m")
    for turn in range(5):
        rows = draw(turn)
        np.testing.assert_array_equal(executed(model.executable(0, 4), rows), model.run([rows])[0])
        assert len(replays) == turn
    assert len(set(map(id, replays))) == SLOTS
    model.close()


def test_models_that_need_values_on_the_host_are_not_captured(
    engine: HostDeviceArrayEngine, tmp_path: Path, replays: list[HostGraph]
) -> None:
    wanted = manifest(["SCORES f32 8"], ["KEPT f32 -1<=8", "INDEX i64 -1<=8"], (0,))
    model = opened(engine, onnx_models.positives(tmp_path / "m"), wanted)
    for count in (3, 8, 0, 5):
        scores = np.array([1.0] * count + [-1.0] * (8 - count), np.float32)
        assert executed(model.executable(0, 0), scores).tolist() == [1.0] * count
    assert not replays
    model.close()


def test_graphs_see_what_the_device_refuses_to_say_aloud(
    engine: HostDeviceArrayEngine, tmp_path: Path, replays: list[HostGraph]
) -> None:
    wanted = manifest(["IDS i64 n -1"], ["HIDDEN f32 n -1 8", "MEAN f32 n 8"], (1, 4), [[4]])
    model = opened(engine, onnx_models.sequence(tmp_path / "m", vocabulary=10), wanted)
    executable = model.executable(0, 4)
    right = np.arange(16).reshape(4, 4) % 10
    hidden = [executed(executable, right) for _ in range(3)]
    np.testing.assert_array_equal(hidden[0], hidden[2])
    assert replays
    wrong = right.copy()
    wrong[2, 1] = 10
    with pytest.raises(EngineFailed, match=r"model 'm': Gather .* failed: an index is out of range for axis 0 with 10"):
        executed(executable, wrong)
    np.testing.assert_array_equal(executed(executable, right), hidden[0])
    model.close()


def test_compaction_moves_weights_and_graphs_follow(
    engine: HostDeviceArrayEngine, tmp_path: Path, replays: list[HostGraph]
) -> None:
    first, second, third = (mlp(engine, tmp_path / f"m{seed}", seed) for seed in range(3))
    rows = draw(1)
    before = {id(model): model.run([rows])[0] for model in (second, third)}
    for _ in range(3):
        executed(second.executable(0, 4), rows)
    captured = replays[-1]
    first.close()
    assert engine.shared.arena.memory().fragmentation > 0
    moved = engine.compact()
    assert moved == second.footprint.weights_bytes + third.footprint.weights_bytes
    assert engine.shared.arena.memory().fragmentation == 0
    for model in (second, third):
        for _ in range(3):
            np.testing.assert_array_equal(executed(model.executable(0, 4), rows), before[id(model)])
    assert captured not in replays[2:]
    second.close()
    third.close()


def test_weights_are_loaded_and_unloaded_and_leave_nothing(engine: HostDeviceArrayEngine, tmp_path: Path) -> None:
    model = mlp(engine, tmp_path / "m")
    rows = draw(0)
    for _ in range(SLOTS):
        expected = executed(model.executable(0, 4), rows)
    free = engine.device.memory().free_bytes
    for _ in range(10):
        model.unload()
        model.unload()
        assert not model.resident
        assert engine.shared.arena.memory().used_bytes == 0
        model.load()
        model.load()
        assert model.resident
        for _ in range(2):
            np.testing.assert_array_equal(executed(model.executable(0, 4), rows), expected)
        assert engine.device.memory().free_bytes == free
    model.close()


def test_arena_without_room_says_how_much(engine: HostDeviceArrayEngine, tmp_path: Path) -> None:
    wanted = manifest(["INPUT f32 n 512"], ["OUTPUT f32 n 512"], (1,))
    path = onnx_models.mlp(tmp_path / "large", layers=1, width=512)
    with pytest.raises(OutOfDeviceMemory, match=r"'large'.*1050624 bytes in one piece; the arena of 1048576"):
        engine.open(wanted, path)
    assert engine.shared.arena.memory().used_bytes == 0


def test_loading_compacts_an_arena_with_room_in_pieces(tmp_path: Path) -> None:
    slab_bytes = 3 * (16 * 16 * 4 + 256)
    engine = HostDeviceArrayEngine(arena_bytes=4 * slab_bytes)
    models = [mlp(engine, tmp_path / f"m{seed}", seed) for seed in range(4)]
    rows = draw(0)
    expected = [executed(model.executable(0, 4), rows) for model in models]
    assert models[0].footprint.weights_bytes == slab_bytes
    models[0].unload()
    models[2].unload()
    large = manifest(["INPUT f32 n 32"], ["OUTPUT f32 n 32"], (1, 4))
    # Runs on the device while the arena is compacted under it.
    running = models[3].executable(0, 4)
    slot = running.slot()
    slot.inputs[0][...] = rows
    running.stage(slot)
    running.launch(slot)
    newcomer = opened(engine, onnx_models.mlp(tmp_path / "large", layers=1, width=32), large)
    assert newcomer.footprint.weights_bytes > slab_bytes
    running.finish(slot)
    np.testing.assert_array_equal(slot.outputs[0], expected[3])
    for model, want in ((models[1], expected[1]), (models[3], expected[3])):
        np.testing.assert_array_equal(executed(model.executable(0, 4), rows), want)
    with pytest.raises(OutOfDeviceMemory, match="'m0'"):
        models[0].load()
    newcomer.close()
    models[0].load()
    np.testing.assert_array_equal(executed(models[0].executable(0, 4), rows), expected[0])
    for model in models:
        model.close()
    engine.close()


def test_next_batch_is_staged_while_one_runs(engine: HostDeviceArrayEngine, tmp_path: Path) -> None:
    model = mlp(engine, tmp_path / "m")
    executable = model.executable(0, 4)
    expected = [model.run([draw(turn)])[0] for turn in range(6)]
    slots = []
    for turn in range(6):
        slot = executable.slot()
        slot.inputs[0][...] = draw(turn)
        executable.stage(slot)
        executable.launch(slot)
        slots.append(slot)
        if turn:
            executable.finish(slots[turn - 1])
            np.testing.assert_array_equal(slots[turn - 1].outputs[0], expected[turn - 1])
    assert len(set(map(id, slots))) == 2
    spare = executable.slot()
    executable.stage(spare)
    assert executable.slot() is spare, "staged and never launched"
    executable.stage(spare)
    executable.launch(spare)
    with pytest.raises(AssertionError, match="more than 2 executions"):
        executable.slot()
    executable.finish(slots[-1])
    executable.finish(spare)
    model.close()


def test_registered_memory_is_read_and_written_where_it_lies(engine: HostDeviceArrayEngine, tmp_path: Path) -> None:
    model = mlp(engine, tmp_path / "m")
    executable = model.executable(0, 4)
    arena = np.zeros(4096, np.uint8)
    inputs, outputs = arena[256:512].view(np.float32).reshape(4, 16), arena[1024:1280].view(np.float32).reshape(4, 16)
    assert engine.shared.register(arena, "arena of frontend 0")
    assert not engine.shared.register(arena[:64], "again")
    assert engine.shared.reaches(inputs)
    for turn in range(3):
        inputs[...] = draw(turn)
        slot = executable.bind([inputs], [outputs])
        assert isinstance(slot, _ArrayDeviceSlot)
        slot._own_inputs[0][...] = 1
        slot._own_outputs[0][...] = 1
        executable.stage(slot)
        executable.launch(slot)
        executable.finish(slot)
        np.testing.assert_array_equal(outputs, model.run([draw(turn)])[0])
        assert (slot._own_inputs[0] == 1).all()
        assert (slot._own_outputs[0] == 1).all()
    engine.shared.unregister(arena)
    engine.shared.unregister(arena)
    assert not engine.shared.reaches(inputs)
    inputs[...] = draw(9)
    slot = executable.bind([inputs], [outputs])
    executable.stage(slot)
    executable.launch(slot)
    executable.finish(slot)
    np.testing.assert_array_equal(outputs, model.run([draw(9)])[0])
    model.close()


def test_devices_without_graphs_and_registration(tmp_path: Path, replays: list[HostGraph]) -> None:
    device = HostDevice(capabilities=Capabilities(overlaps=False, graphs=False, registers=False))
    engine = HostDeviceArrayEngine(device, ARENA_BYTES)
    assert not engine.shared.register(np.zeros(64, np.uint8), "arena")
    model = mlp(engine, tmp_path / "m")
    for turn in range(3):
        np.testing.assert_array_equal(executed(model.executable(0, 4), draw(turn)), model.run([draw(turn)])[0])
    assert not replays
    model.close()
    engine.close()


def test_lost_device_fails_every_execution_with_its_own_error(engine: HostDeviceArrayEngine, tmp_path: Path) -> None:
    model = mlp(engine, tmp_path / "m")
    slot = model.executable(0, 4).slot()
    engine.device.lose("an illegal address was used")
    with pytest.raises(DeviceLost, match="illegal address"):
        model.executable(0, 4).stage(slot)
    engine.device.findings.lost = ""
    model.close()


def test_timing_has_three_parts(engine: HostDeviceArrayEngine, tmp_path: Path) -> None:
    model = mlp(engine, tmp_path / "m")
    executable = model.executable(0, 4)
    slot = executable.slot()
    executable.stage(slot)
    executable.launch(slot)
    timing = executable.finish(slot)
    assert isinstance(timing, Timing)
    assert timing.compute_ns > 0
    assert timing.copy_in_ns > 0
    assert timing.copy_out_ns > 0
    model.close()


def without(holder: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(holder, name, lambda self, *args, **kwargs: None)


def forget_to_wait_for(stream: str, after: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Leave out the waits of one stream for events that another has recorded."""
    wait = HostStream.wait

    def careless(self: HostStream, event: Any) -> None:
        if not (self.name == stream and event.place.stream.name == after):
            wait(self, event)

    return lambda monkeypatch: monkeypatch.setattr(HostStream, "wait", careless)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (forget_to_wait_for("compute", "copy in"), "nothing orders"),
        (forget_to_wait_for("copy out", "compute"), "nothing orders"),
        (forget_to_wait_for("compute", "load"), "weights arena.*nothing orders"),
        (without(DeviceArrayExecutable, "drop_graphs"), "before anything was written|does not declare"),
        (without(SlabWeights, "unload"), "slabs left in the arena"),
        (without(DeviceSlot, "close"), "staging of 'm'"),
    ],
    ids=["inputs", "outputs", "weights", "graphs", "slab", "buffers"],
)
def test_planted_mistakes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], found: str
) -> None:
    engine = HostDeviceArrayEngine(arena_bytes=ARENA_BYTES)

    def live() -> None:
        model = mlp(engine, tmp_path / "m")
        for _ in range(3):
            executed(model.executable(0, 4), draw(0))
        model.unload()
        model.load()
        for _ in range(3):
            executed(model.executable(0, 4), draw(0))
        other = mlp(engine, tmp_path / "n", 1)
        model.unload()
        engine.compact()
        model.load()
        for _ in range(3):
            executed(model.executable(0, 4), draw(0))
        model.close()
        other.close()
        engine.close()

    plant(monkeypatch)
    with pytest.raises((DeviceMisuse, AssertionError, EngineFailed), match=found):
        live()
    # Whoever swallowed it, the device has not forgotten.
    if found != "slabs left in the arena":
        with pytest.raises(DeviceMisuse, match=found):
            engine.device.close()


def test_the_same_life_without_a_mistake_leaves_no_finding(tmp_path: Path) -> None:
    engine = HostDeviceArrayEngine(arena_bytes=ARENA_BYTES)
    model, other = mlp(engine, tmp_path / "m"), mlp(engine, tmp_path / "n", 1)
    for _ in range(3):
        executed(model.executable(0, 4), draw(0))
    model.unload()
    engine.compact()
    model.load()
    for _ in range(3):
        executed(model.executable(0, 4), draw(0))
    model.close()
    other.close()
    engine.close()
