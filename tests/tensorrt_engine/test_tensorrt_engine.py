"""Weights that come, go and move; graphs that follow; executions that overlap; memory of frontends used in place."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onnx_models
from engines.base import Slot
from engines.bundle.manifest import Manifest
from engines.device.base import Capabilities, Graph, Span, Stream, Work
from engines.device.errors import CannotCapture, DeviceLost, OutOfDeviceMemory
from engines.errors import EngineFailed, NotReady
from engines.probe import resolve
from engines.staging import aligned_zeros
from engines.tensor import NDArray
from engines.tensorrt.model import TensorRTModel
from engines.tensorrt.profiles import MAX_PROFILES, profiles_of
from manifests import manifest
from one_execution import executed
from tensorrt_fake.engines import FakeTensorRT
from tensorrt_fake.library import VERSIONS

WIDTH = 32
WIDE = manifest([f"INPUT f32 n {WIDTH}"], [f"OUTPUT f32 n {WIDTH}"], (1, 4))
SLAB = 2 * (WIDTH * WIDTH * 4)
"""Bytes of the two weights that are large enough to lie outside; biases of 128 bytes stay inside."""


@pytest.fixture
def engine() -> Iterator[FakeTensorRT]:
    engine = FakeTensorRT("11.4", arena_bytes=1 << 20)
    yield engine
    engine.close()


def opened(engine: FakeTensorRT, wanted: Manifest, path: Path) -> TensorRTModel:
    model = engine.open(wanted, path)
    model.prepare(resolve(model, wanted))
    return model


def rows_of(seed: int, count: int = 4) -> NDArray:
    return np.random.default_rng(seed).random((count, WIDTH), dtype=np.float32)


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_one_code_path_serves_every_version(tmp_path: Path, version: str) -> None:
    engine = FakeTensorRT(version)
    model = opened(engine, WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH))
    for seed in range(4):
        np.testing.assert_array_equal(
            executed(model.executable(0, 4), rows_of(seed)), np.concatenate([model.run([rows_of(seed)])[0]])
        )
    model.close()
    engine.close()


def test_all_batch_sizes_share_one_slab_and_one_scratch(engine: FakeTensorRT, tmp_path: Path) -> None:
    path = onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH)
    few = opened(engine, WIDE, path)
    assert engine.shared.arena.memory().used_bytes == few.evictable_bytes == SLAB
    few.close()
    wanted = manifest([f"INPUT f32 n {WIDTH}"], [f"OUTPUT f32 n {WIDTH}"], (1, 2, 4, 8, 16, 32))
    many = opened(engine, wanted, path)
    assert engine.shared.arena.memory().used_bytes == many.evictable_bytes == SLAB
    assert many.footprint.exact
    assert many.footprint.weights_bytes == SLAB + 2 * WIDTH * 4
    many.close()
    assert engine.shared.arena.memory().used_bytes == 0


def test_graph_replays_answer_like_plain_launches(tmp_path: Path) -> None:
    path = onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH)
    answers = []
    for graphs in (True, False):
        engine = FakeTensorRT("11.4", capabilities=Capabilities(overlaps=True, graphs=graphs, registers=True))
        model = opened(engine, WIDE, path)
        answers.append([executed(model.executable(0, 4), rows_of(seed)) for seed in range(10)])
        model.close()
        engine.close()
    np.testing.assert_array_equal(answers[0], answers[1])


@pytest.mark.parametrize("raises", [True, False])
def test_model_that_cannot_be_captured_is_launched_plainly(
    engine: FakeTensorRT,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raises: bool,
) -> None:
    """A GPU runs the work while it captures; the library may refuse then, and the driver still makes a graph."""
    caplog.set_level(logging.INFO, "engines.tensorrt")
    capture = engine.device.capture

    def refused(stream: Stream, work: Work, *, reads: Sequence[Span], writes: Sequence[Span]) -> Graph:
        work()
        if raises:
            raise CannotCapture("the stream is not capturable")
        return capture(stream, work, reads=reads, writes=writes)

    monkeypatch.setattr(engine.device, "capture", refused)
    model = opened(engine, WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH))
    for seed in range(5):
        np.testing.assert_array_equal(executed(model.executable(0, 4), rows_of(seed)), model.run([rows_of(seed)])[0])
    reason = "the stream is not capturable" if raises else "work is enqueued outside the device's launch"
    assert re.search(rf"tensorrt\.no_graph model=m shapes=INPUT \[4, 32\] reason=.*{reason}", caplog.text)
    model.close()


def test_graphs_and_addresses_follow_weights_that_move(engine: FakeTensorRT, tmp_path: Path) -> None:
    models = [opened(engine, WIDE, onnx_models.mlp(tmp_path / str(i), layers=2, width=WIDTH, seed=i)) for i in range(3)]
    expected = [executed(model.executable(0, 4), rows_of(7)) for model in models]
    for model in models:
        # Often enough that every region has a graph.
        for _ in range(8):
            executed(model.executable(0, 4), rows_of(7))
    models[0].unload()
    assert engine.engine.compact() == 2 * SLAB
    for model, answer in zip(models[1:], expected[1:], strict=True):
        for _ in range(8):
            np.testing.assert_array_equal(executed(model.executable(0, 4), rows_of(7)), answer)
    models[0].load()
    np.testing.assert_array_equal(executed(models[0].executable(0, 4), rows_of(7)), expected[0])
    for model in models:
        model.close()


def test_larger_model_grows_what_all_share_and_the_others_go_on(engine: FakeTensorRT, tmp_path: Path) -> None:
    small = opened(engine, WIDE, onnx_models.mlp(tmp_path / "small", layers=2, width=WIDTH))
    expected = [executed(small.executable(0, 4), rows_of(seed)) for seed in range(6)]
    slot = small.executable(0, 4).slot()
    slot.inputs[0][...] = rows_of(0)
    small.executable(0, 4).stage(slot)
    wanted = manifest(["INPUT f32 n 128"], ["OUTPUT f32 n 128"], (1, 64))
    large = opened(engine, wanted, onnx_models.mlp(tmp_path / "large", layers=2, width=128))
    # Staged before everything moved.
    small.executable(0, 4).launch(slot)
    small.executable(0, 4).finish(slot)
    np.testing.assert_array_equal(slot.outputs[0], expected[0])
    for seed in range(6):
        np.testing.assert_array_equal(executed(small.executable(0, 4), rows_of(seed)), expected[seed])
    small.close()
    large.close()


def test_arena_that_is_full_says_how_full_and_a_gap_is_closed_for_a_load(tmp_path: Path) -> None:
    engine = FakeTensorRT("11.4", arena_bytes=3 * SLAB)
    models = [opened(engine, WIDE, onnx_models.mlp(tmp_path / str(i), layers=2, width=WIDTH, seed=i)) for i in range(3)]
    answer = executed(models[1].executable(0, 4), rows_of(1))
    with pytest.raises(OutOfDeviceMemory, match=f"need {SLAB} bytes in one piece; the arena of {3 * SLAB} has 0 free"):
        engine.open(WIDE, onnx_models.mlp(tmp_path / "more", layers=2, width=WIDTH))
    models[0].unload()
    models[2].unload()
    wanted = manifest(["INPUT f32 n 32"], ["OUTPUT f32 n 32"], (1,))
    # Twice a slab, in two pieces.
    large = opened(engine, wanted, onnx_models.mlp(tmp_path / "large", layers=4, width=WIDTH))
    np.testing.assert_array_equal(executed(models[1].executable(0, 4), rows_of(1)), answer)
    for model in (large, *models):
        model.close()
    engine.close()


def test_executing_what_was_evicted_is_our_own_mistake(engine: FakeTensorRT, tmp_path: Path) -> None:
    model = opened(engine, WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH))
    assert model.resident
    model.unload()
    model.unload()
    assert not model.resident
    slot = model.executable(0, 4).slot()
    with pytest.raises(AssertionError, match="are not on the device"):
        model.executable(0, 4).launch(slot)
    model.load()
    assert model.resident
    model.close()


ACTIONS = ("stage", "launch", "finish", "unload", "compact")
Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["stage", "launch", "finish", "unload", "compact"]), st.integers(0, 2), st.integers(0, 1)
    ),
    max_size=40,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_any_order_of_staging_running_and_evicting_answers_right(tmp_path: Path, steps: list[Step]) -> None:
    """Three models, two batch sizes, executions staged ahead and finished late; the host device checks every access."""
    engine = FakeTensorRT("11.4", arena_bytes=4 * SLAB)
    models = [opened(engine, WIDE, onnx_models.mlp(tmp_path / str(i), layers=2, width=WIDTH, seed=i)) for i in range(3)]
    flying: dict[tuple[int, int], tuple[Slot, NDArray, bool]] = {}

    def finish(key: tuple[int, int]) -> None:
        slot, given, launched = flying.pop(key)
        model, executable = models[key[0]], models[key[0]].executable(0, (1, 4)[key[1]])
        if not launched:
            model.load()
            executable.launch(slot)
        executable.finish(slot)
        model.load()
        np.testing.assert_array_equal(slot.outputs[0], model.run([given])[0])

    for seed, (action, index, size) in enumerate(steps):
        key, model, executable = (index, size), models[index], models[index].executable(0, (1, 4)[size])
        if action == "stage" and key not in flying:
            slot, given = executable.slot(), rows_of(seed, (1, 4)[size])
            slot.inputs[0][...] = given
            executable.stage(slot)
            flying[key] = (slot, given, False)
        elif action == "launch" and key in flying and not flying[key][2]:
            model.load()
            executable.launch(flying[key][0])
            flying[key] = (*flying[key][:2], True)
        elif action == "finish" and key in flying:
            finish(key)
        elif action == "unload":
            model.unload()
        elif action == "compact":
            engine.engine.compact()
    for key in list(flying):
        finish(key)
    for model in models:
        model.close()
    engine.close()


def test_next_batch_is_on_the_device_before_the_running_one_ends(engine: FakeTensorRT, tmp_path: Path) -> None:
    """Copies of the next batch wait for nothing that runs: they are done although no execution was waited for."""
    model = opened(engine, WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH))
    executable = model.executable(0, 4)
    first = executable.slot()
    first.inputs[0][...] = rows_of(1)
    executable.stage(first)
    executable.launch(first)
    second = executable.slot()
    assert second is not first
    second.inputs[0][...] = rows_of(2)
    executable.stage(second)
    engine.shared.copy_in.synchronize()
    compute = engine.shared.compute
    assert compute.pending, "the execution ran although only copies were waited for"  # type: ignore[attr-defined]
    executable.finish(first)
    executable.launch(second)
    executable.finish(second)
    model.close()


@pytest.mark.parametrize("registers", [True, False])
def test_rows_of_registered_memory_are_copied_once(tmp_path: Path, registers: bool) -> None:
    engine = FakeTensorRT("11.4", capabilities=Capabilities(overlaps=True, graphs=True, registers=registers))
    model = opened(engine, WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH))
    executable = model.executable(0, 4)
    block = aligned_zeros((2, 8, WIDTH), np.dtype(np.float32))
    assert engine.shared.register(block, "a frontend's arena") is registers
    block[0] = rows_of(3, 8)
    for start in (0, 4, 2):
        slot = executable.bind([block[0, start : start + 4]], [block[1, start : start + 4]])
        executable.stage(slot)
        executable.launch(slot)
        executable.finish(slot)
        wanted_bytes = 4 * WIDTH * 4 if registers else 0
        assert slot._in_transfer.straight_bytes == slot._out_transfer.straight_bytes == wanted_bytes  # type: ignore[attr-defined]
        np.testing.assert_array_equal(block[1, start : start + 4], model.run([block[0, start : start + 4].copy()])[0])
    engine.shared.unregister(block)
    model.close()
    engine.close()


def test_one_registered_tensor_beside_one_that_is_not(tmp_path: Path) -> None:
    engine = FakeTensorRT("11.4")
    wanted = manifest(["INPUT0 i32 n 5", "INPUT1 i32 n 5"], ["OUTPUT0 i32 n 5", "OUTPUT1 i32 n 5"], (3,))
    model = opened(engine, wanted, onnx_models.simple(tmp_path / "m", columns=5))
    block = aligned_zeros((2, 3, 5), np.dtype(np.int32))
    assert engine.shared.register(block, "a frontend's arena")
    block[0] = np.arange(15).reshape(3, 5)
    other, result = np.full((3, 5), 7, np.int32), np.zeros((3, 5), np.int32)
    executable = model.executable(0, 3)
    slot = executable.bind([block[0], other], [block[1], result])
    executable.stage(slot)
    executable.launch(slot)
    executable.finish(slot)
    np.testing.assert_array_equal(block[1], block[0] + 7)
    np.testing.assert_array_equal(result, block[0] - 7)
    engine.shared.unregister(block)
    model.close()
    engine.close()


def test_failed_execution_fails_alone_with_the_librarys_reason(engine: FakeTensorRT, tmp_path: Path) -> None:
    wanted = manifest(["INPUT f32 n 4"], ["OUTPUT f32 n 4"], (2,))
    model = opened(engine, wanted, onnx_models.poison(tmp_path / "fragile"))
    executable = model.executable(0, 2)
    good, bad = np.ones((2, 4), np.float32), np.full((2, 4), onnx_models.POISON, np.float32)
    slots: list[tuple[Slot, bool]] = []
    for rows in (good, bad):
        slot = executable.slot()
        slot.inputs[0][...] = rows
        executable.stage(slot)
        executable.launch(slot)
        slots.append((slot, rows is bad))
    for slot, fails in slots:
        if fails:
            with pytest.raises(EngineFailed, match=r"model 'fragile': Gather node .* failed: index 1 is out of bounds"):
                executable.finish(slot)
        else:
            executable.finish(slot)
            np.testing.assert_array_equal(slot.outputs[0], good)
    for _ in range(6):
        np.testing.assert_array_equal(executed(executable, good), good)
    model.close()


def test_lost_device_is_told_apart_from_a_failed_model(tmp_path: Path) -> None:
    engine = FakeTensorRT("11.4")
    executable = opened(engine, WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH)).executable(0, 4)
    slot = executable.slot()
    executable.stage(slot)
    engine.device.lose("an illegal address was met")
    with pytest.raises(DeviceLost, match="an illegal address was met"):
        executable.launch(slot)
    other = FakeTensorRT("11.4")
    executable = opened(other, WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH)).executable(0, 4)
    slot = executable.slot()
    executable.stage(slot)
    executable.launch(slot)
    other.device.lose("an illegal address was met")
    with pytest.raises(DeviceLost, match="an illegal address was met"):
        executable.finish(slot)


def test_models_open_and_close_on_one_thread_while_another_executes(engine: FakeTensorRT, tmp_path: Path) -> None:
    serving = opened(engine, WIDE, onnx_models.mlp(tmp_path / "serving", layers=2, width=WIDTH))
    expected = [executed(serving.executable(0, 4), rows_of(seed)) for seed in range(4)]
    path = onnx_models.mlp(tmp_path / "loading", layers=2, width=WIDTH, seed=9)
    larger = manifest(["INPUT f32 n 64"], ["OUTPUT f32 n 64"], (1, 16))
    larger_path = onnx_models.mlp(tmp_path / "larger", layers=2, width=64)
    failures: list[BaseException] = []
    done = threading.Event()

    def load() -> None:
        try:
            for turn in range(4):
                model = opened(engine, *((WIDE, path) if turn % 2 else (larger, larger_path)))
                model.unload()
                engine.engine.compact()
                model.load()
                model.close()
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=load)
    thread.start()
    turns = 0
    while not done.is_set() or turns < 8:
        seed = turns % 4
        np.testing.assert_array_equal(executed(serving.executable(0, 4), rows_of(seed)), expected[seed])
        turns += 1
    thread.join()
    assert not failures, failures
    serving.close()


def test_f64_is_refused_since_the_library_would_compute_it_as_f32(engine: FakeTensorRT, tmp_path: Path) -> None:
    wanted = manifest(["INPUT f64 n 4"], ["OUTPUT f64 n 4"], (1, 3))
    with pytest.raises(NotReady, match=r"TensorRT does not compute with f64 .*write engine: onnxruntime"):
        engine.open(wanted, onnx_models.identity(tmp_path / "m", "f64"))


def test_too_many_profiles_are_refused() -> None:
    shapes = [[size] for size in range(1, MAX_PROFILES + 2)]
    with pytest.raises(NotReady, match=r"input_shapes: 129 shapes x 1 batch sizes are 129 profiles"):
        profiles_of(manifest(["IDS i64 n -1"], ["OUT f32 n 4"], (1,), shapes))


def test_profiles_are_exact_and_in_order() -> None:
    profiles = profiles_of(manifest(["IDS i64 n -1", "FLAG bool"], ["OUT f32 n 4"], (1, 4), [[16], [64]]))
    assert [(p.index, p.variant, p.batch_size, dict(p.shapes)["IDS"]) for p in profiles] == [
        (0, 0, 1, (1, 16)), (1, 0, 4, (4, 16)), (2, 1, 1, (1, 64)), (3, 1, 4, (4, 64)),
    ]  # fmt: skip
    assert all(dict(profile.shapes)["FLAG"] == () for profile in profiles)


def test_axes_that_an_exporter_gave_one_name_may_differ(engine: FakeTensorRT, tmp_path: Path) -> None:
    """The parser takes equal names for equal sizes, and '?' is a favourite of exporters."""
    from onnx import helper

    path = onnx_models.write(
        tmp_path / "m",
        [helper.make_node("Relu", ["X"], ["Y"])],
        [onnx_models.value("X", "f32", ["?", "?", "?"])],
        [onnx_models.value("Y", "f32", ["?", "?", "?"])],
    )
    wanted = manifest(["X f32 n -1 -1"], ["Y f32 n -1 -1"], (1, 2), [[3, 5], [4, 4]])
    model = opened(engine, wanted, path)
    rows = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    np.testing.assert_array_equal(executed(model.executable(0, 2), rows), np.maximum(rows, 0))
    model.close()


def test_progress_of_a_build_goes_from_nothing_to_all(tmp_path: Path) -> None:
    engine = FakeTensorRT("11.4")
    told: list[float] = []
    engine.planner._progress = told.append
    engine.open(WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH)).close()
    assert told == sorted(told)
    assert 0 < told[0] < 1
    assert told[-1] == 1.0
    engine.close()


_WITHOUT = """
import sys
sys.modules["tensorrt"] = sys.modules["tensorrt_rtx"] = None
from engines.errors import NotReady
from engines.tensorrt.names import Api
import engines.tensorrt.engine
try:
    Api.load()
except NotReady as error:
    print(error)
"""


@pytest.mark.process
def test_missing_library_is_named_with_how_to_install_it() -> None:
    run = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("TensorRT cannot be imported (tensorrt: ")
    assert "pip install 'tensorrt>=10.16'" in run.stdout
    assert not run.stderr


def test_workers_device_is_the_threads_before_the_library_does_anything(
    engine: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library builds for the thread's current device, and models are opened on a thread of their own."""
    order: list[str] = []
    memory, plan = engine.device.memory, engine.planner.plan
    monkeypatch.setattr(engine.device, "memory", lambda: (order.append("device"), memory())[1])
    monkeypatch.setattr(
        engine.planner, "plan", lambda *args, **kwargs: (order.append("plan"), plan(*args, **kwargs))[1]
    )
    engine.open(WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH)).close()
    assert order[:2] == ["device", "plan"]


def test_opening_is_logged_with_exact_figures(
    engine: FakeTensorRT, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engines.tensorrt")
    model = opened(engine, WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH))
    scratch = model.footprint.scratch_bytes
    assert (
        f"tensorrt.opened model=m profiles=2 weights=outside slab_bytes={SLAB} engine_bytes={2 * WIDTH * 4} "
        f"scratch_bytes={scratch}"
    ) in caplog.text
    model.close()
