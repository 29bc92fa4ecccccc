"""The device layer over CuPy, on a stand-in for CuPy; and the stand-in beside the real library where that is there."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_fake
import onnx_models
from cupy_fake import fake_cupy
from engines.array.on_device import DeviceArrayEngine
from engines.base import Rows
from engines.bundle.manifest import Manifest
from engines.device.base import Capabilities, Device, Span
from engines.device.cupy_device import STICKY, CupyDevice
from engines.device.errors import CannotCapture, CannotRegister, DeviceFailed, DeviceLost, OutOfDeviceMemory
from engines.device.host_arrays import FUNCTIONS
from engines.device.shared import SharedDevice
from engines.errors import EngineFailed
from engines.probe import resolve
from engines.tensor import NDArray
from manifests import manifest
from one_execution import executed

BYTES = np.dtype(np.uint8)


@pytest.fixture
def device() -> Iterator[CupyDevice]:
    device = CupyDevice(fake_cupy(), 0)
    yield device
    assert not cupy_fake.runtime.device, "device memory was left"
    assert not cupy_fake.runtime.host, "pinned memory was left"
    assert not cupy_fake.runtime.registered, "memory was left registered"


@pytest.fixture
def shared(device: CupyDevice) -> Iterator[SharedDevice]:
    shared = SharedDevice(device, 1 << 20)
    shared.start()
    yield shared
    shared.close()
    device.close()


def typed(device: CupyDevice) -> Device:
    """Let the type checker compare the class with the protocol."""
    return device


def test_bytes_go_round(device: CupyDevice) -> None:
    stream, event = typed(device).stream("s"), device.event()
    buffer, pinned = device.allocate(1000, "b"), device.pinned(1000, "p")
    span, half = Span.whole(buffer), Span.whole(buffer).part(0, 500)
    pinned.array[...] = np.arange(1000) % 251
    device.copy_in(span, pinned.array, stream)
    device.copy_within(half, span.part(500, 500), stream)
    stream.record(event)
    stream.wait(event)
    expected = pinned.array[500:].copy()
    pinned.array[...] = 0
    device.copy_out(pinned.array, span, stream)
    event.synchronize()
    assert event.done()
    assert device.elapsed_ns(event, event) == 0
    np.testing.assert_array_equal(pinned.array[:500], expected)
    device.zero(span, stream)
    device.copy_out(pinned.array, span, stream)
    assert not pinned.array.any()
    device.forget(span)
    for thing in (buffer, pinned):
        thing.free()
        thing.free()
    for closed in (event, stream):
        closed.close()
        closed.close()


def test_work_computes_on_device_memory(device: CupyDevice) -> None:
    stream = device.stream("s")
    buffer, pinned = device.allocate(64, "b"), device.pinned(64, "p")
    pinned.array[...] = 3
    device.copy_in(Span.whole(buffer), pinned.array, stream)

    def work() -> None:
        array = device.array(Span.whole(buffer), (8, 8), BYTES)
        array[...] = device.xp.add(array, array)

    device.launch(stream, work, reads=[Span.whole(buffer)], writes=[Span.whole(buffer)])
    device.copy_out(pinned.array, Span.whole(buffer), stream)
    assert (pinned.array == 6).all()
    buffer.free()
    pinned.free()


def test_running_out_of_memory_says_how_much_there_is(device: CupyDevice) -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"weights: 999999999 bytes of device memory do not fit, 268435456 are"):
        device.allocate(999_999_999, "weights")
    assert device.memory().free_bytes == device.memory().total_bytes


def test_registrations_of_the_same_memory_are_counted(device: CupyDevice) -> None:
    memory = np.zeros(4096, np.uint8)
    first, second = device.register(memory, "arena"), device.register(memory, "arena")
    first.release()
    first.release()
    assert cupy_fake.runtime.registered
    second.release()
    assert not cupy_fake.runtime.registered
    readonly = memory[:]
    readonly.flags.writeable = False
    with pytest.raises(CannotRegister, match="only contiguous writable"):
        device.register(readonly, "arena")


def test_memory_the_driver_refuses_to_register(device: CupyDevice) -> None:
    memory = np.zeros(4096, np.uint8)
    registration = device.register(memory, "arena")
    with pytest.raises(CannotRegister, match=r"part: the driver does not register this memory: .*AlreadyRegistered"):
        device.register(memory[:64], "part")
    registration.release()


@pytest.mark.parametrize("status", sorted(STICKY))
def test_errors_that_stay_mean_the_device_is_lost(device: CupyDevice, status: int) -> None:
    cupy_fake.runtime.fail_next = status
    with pytest.raises(DeviceLost, match=r"waiting for the device: cudaError.*context is broken"):
        device.synchronize()


def test_other_errors_are_of_one_operation(device: CupyDevice) -> None:
    cupy_fake.runtime.fail_next = 1
    with pytest.raises(DeviceFailed) as raised:
        device.synchronize()
    assert not isinstance(raised.value, DeviceLost)
    device.synchronize()


def test_captures(device: CupyDevice) -> None:
    stream = device.stream("s")
    with pytest.raises(CannotCapture, match="CaptureUnsupported"):
        device.capture(stream, lambda: None, reads=[], writes=[])
    cupy_fake.Graph.allowed = True
    graph = device.capture(stream, lambda: None, reads=[], writes=[])
    graph.launch(stream)
    assert cupy_fake.Graph.launched == 1
    graph.close()
    graph.close()

    def refuse() -> None:
        raise NotImplementedError("cuBLAS")

    with pytest.raises(CannotCapture, match="NotImplementedError: cuBLAS"):
        device.capture(stream, refuse, reads=[], writes=[])
    device.capture(stream, lambda: None, reads=[], writes=[]).close()


def execute(model: Any, rows: NDArray) -> NDArray:
    return executed(model.executable(0, len(rows)), rows)


def opened(shared: SharedDevice, path: Path, wanted: Manifest) -> Any:
    model = DeviceArrayEngine(shared).open(wanted, path)
    model.prepare(resolve(model, wanted))
    return model


MLP = manifest(["INPUT f32 n 16"], ["OUTPUT f32 n 16"], (1, 4))


def test_array_engine_runs_over_it(shared: SharedDevice, tmp_path: Path) -> None:
    model = opened(shared, onnx_models.mlp(tmp_path / "m", width=16), MLP)
    for seed in range(4):
        rows = np.random.default_rng(seed).standard_normal((4, 16)).astype(np.float32)
        np.testing.assert_array_equal(execute(model, rows), model.run([rows])[0])
    model.unload()
    shared.compact()
    model.load()
    np.testing.assert_array_equal(execute(model, rows), model.run([rows])[0])
    model.close()


def test_rows_are_copied_from_and_to_registered_memory(shared: SharedDevice, tmp_path: Path) -> None:
    model = opened(shared, onnx_models.affine(tmp_path / "m"), manifest(["INPUT f32 n 8"], ["OUTPUT f32 n 8"], (4,)))
    executable = model.executable(0, 4)
    arena = np.zeros((2, 8, 8), np.float32)
    assert shared.register(arena, "arena")
    for turn in range(4):
        rows = np.random.default_rng(turn).random((3, 8), dtype=np.float32)
        arena[0, turn : turn + 2] = rows[:2]
        slot = executable.slot()
        slot.inputs[0][...] = 0
        slot.inputs[0][2] = rows[2]
        executable.rows(slot, [Rows(0, 0, arena[0, turn : turn + 2])], [Rows(0, 0, arena[1, 4:6])])
        executable.stage(slot)
        executable.launch(slot)
        executable.finish(slot)
        assert slot._in_transfer.straight_bytes == slot._out_transfer.straight_bytes == 2 * 8 * 4
        np.testing.assert_allclose(np.concatenate([arena[1, 4:6], slot.outputs[0][2:3]]), rows * 2 + 1, rtol=1e-6)
    shared.unregister(arena)
    model.close()


def test_matrix_products_are_not_captured_and_the_log_says_why(
    shared: SharedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CuPy refuses them in the middle of a capture, so none is begun."""
    monkeypatch.setattr(shared.device, "capture", None)
    with caplog.at_level("INFO", "engines.array"):
        model = opened(shared, onnx_models.mlp(tmp_path / "m", width=16), MLP)
    assert len(re.findall(r"graph.refused model=m .*matrix products", caplog.text)) == 1
    rows = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
    for _ in range(4):
        np.testing.assert_array_equal(execute(model, rows), model.run([rows])[0])
    model.close()


def test_work_that_fails_half_way_into_a_capture_is_no_graph(
    shared: SharedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cupy_fake.Graph.allowed = True
    monkeypatch.setattr(shared.device, "capabilities", Capabilities(True, True, True, captures_products=True))
    model = opened(shared, onnx_models.mlp(tmp_path / "m", width=16), MLP)
    rows = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
    with caplog.at_level("INFO", "engines.array"):
        for _ in range(4):
            np.testing.assert_array_equal(execute(model, rows), model.run([rows])[0])
    assert cupy_fake.Graph.launched == 0
    assert len(re.findall(r"graph.refused model=m batch_size=4 .*cuBLAS", caplog.text)) == 1
    model.close()


def test_work_that_can_be_captured_is_replayed(shared: SharedDevice, tmp_path: Path) -> None:
    cupy_fake.Graph.allowed = True
    wanted = manifest(["INPUT f32 n 8"], ["OUTPUT f32 n 8"], (1, 4))
    model = opened(shared, onnx_models.affine(tmp_path / "m"), wanted)
    rows = np.ones((4, 8), np.float32)
    for turn in range(4):
        execute(model, rows)
        assert cupy_fake.Graph.launched == turn
    model.close()


def test_lost_device_in_an_execution(shared: SharedDevice, tmp_path: Path) -> None:
    model = opened(shared, onnx_models.mlp(tmp_path / "m", width=16), MLP)
    cupy_fake.runtime.fail_next = 700
    with pytest.raises(DeviceLost):
        execute(model, np.ones((4, 16), np.float32))
    with pytest.raises(EngineFailed):
        model.run([np.ones((4, 16), np.float32)])
    cupy_fake.runtime.broken = 0
    model.close()


has_cupy = importlib.util.find_spec("cupy") is not None


@pytest.mark.skipif(not has_cupy, reason="CuPy is not installed; the stand-in is compared with it where it is")
def test_the_real_library_has_what_the_stand_in_has() -> None:
    import cupy

    fake = fake_cupy()
    assert [name for name in sorted(FUNCTIONS) if not hasattr(cupy, name)] == []
    assert callable(cupy.lib.stride_tricks.as_strided)
    own = {"check", "fail_next", "device", "host", "registered", "broken"}
    for name in vars(cupy_fake.Runtime):
        if not name.startswith("_") and name not in own:
            assert hasattr(cupy.cuda.runtime, name), name
            compare_signature(getattr(cupy.cuda.runtime, name), getattr(fake.cuda.runtime, name))
    for holder in ("Stream", "Event", "Graph", "MemoryPool", "Device"):
        for name, member in vars(getattr(fake.cuda, holder)).items():
            if not name.startswith("_") and callable(member):
                assert hasattr(getattr(cupy.cuda, holder), name), f"{holder}.{name}"
                compare_signature(getattr(getattr(cupy.cuda, holder), name), member)
    for name in vars(fake.cuda):
        assert hasattr(cupy.cuda, name), name


def compare_signature(real: Any, fake: Any) -> None:
    """Assert that parameters are named alike, as far as the real one tells them."""
    if not callable(fake) or isinstance(fake, type):
        return
    told = re.match(r"[\w.]*\((.*?)\)", (real.__doc__ or "").split("\n")[0])
    if told is None:
        return
    names = [part.split("=")[0].split()[-1] for part in told.group(1).split(",") if part.strip()]
    wanted = [name for name in names if name != "self"]
    have = [name for name in inspect.signature(fake).parameters if name != "self"]
    assert have == wanted, f"{real.__name__}: {have} instead of {wanted}"
