"""The right engine on the right device, or a sentence that says what to write or install."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import engines.device.opening as opening
import engines.select as select
from engines.array.engine import ArrayEngine
from engines.array.on_device import DeviceArrayEngine
from engines.device.base import Capabilities
from engines.device.errors import DeviceMissing
from engines.device.host import HostDevice
from engines.errors import NotReady
from engines.select import EngineSet
from worker.config import RuntimeSettings

SMALL = 1 << 20


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whatever this one has."""

    def refuse(index: int) -> HostDevice:
        raise DeviceMissing("the library CuPy does not load: No module named 'cupy'; install it with: pip install X")

    monkeypatch.setattr(opening, "open_device", refuse)
    monkeypatch.setattr(opening, "gpu_is_present", lambda: False)
    monkeypatch.setattr(select, "_tensorrt_is_installed", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with a "GPU"; gives the numbers of those that were opened."""
    opened: list[int] = []

    def open_host(index: int) -> HostDevice:
        opened.append(index)
        return HostDevice(SMALL)

    monkeypatch.setattr(opening, "open_device", open_host)
    monkeypatch.setattr(opening, "gpu_is_present", lambda: True)
    monkeypatch.setattr(select, "_tensorrt_is_installed", lambda: False)
    return opened


@pytest.mark.usefixtures("bare")
def test_auto_takes_onnxruntime_and_each_engine_is_made_once() -> None:
    engines = EngineSet(RuntimeSettings(threads=1))
    assert engines.choose("auto").name == "onnxruntime"
    assert engines.choose("onnxruntime") is engines.choose("auto")
    assert engines.choose("array").name == "array"
    engines.close()


def test_threads_setting_reaches_the_engine() -> None:
    engine = EngineSet(RuntimeSettings(threads=3)).choose("onnxruntime")
    assert vars(engine)["threads"] == 3


@pytest.mark.usefixtures("bare")
def test_the_nodes_backend_decides_for_auto_and_the_bundle_decides_for_itself() -> None:
    engines = EngineSet(RuntimeSettings(backend="array"))
    assert engines.choose("auto").name == "array"
    assert engines.choose("onnxruntime").name == "onnxruntime"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("backend", "wanted", "message"),
    [
        ("auto", "fast", "engine: unknown engine 'fast'; choose one of auto, onnxruntime, array, tensorrt"),
        (
            "fast",
            "auto",
            "runtime.backend: unknown engine 'fast'; choose one of auto, cpu, cuda, onnxruntime, array, tensorrt",
        ),
        ("cpu", "tensorrt", "engine: tensorrt needs a GPU, and runtime.backend is cpu; write cuda or auto"),
        ("cuda", "auto", "runtime.backend: cuda: the library CuPy does not load: No module named 'cupy'; install it"),
    ],
)
def test_what_cannot_be_served_says_why(backend: str, wanted: str, message: str) -> None:
    with pytest.raises(NotReady) as raised:
        EngineSet(RuntimeSettings(backend=backend)).choose(wanted)
    assert message in str(raised.value)


@pytest.mark.usefixtures("bare")
def test_asking_for_cuda_without_it_fails_at_start() -> None:
    with pytest.raises(NotReady, match=r"^runtime\.backend: cuda: .*CuPy.*install it with"):
        EngineSet(RuntimeSettings(backend="cuda")).start()


@pytest.mark.parametrize("gpus", [(), (3,)])
def test_auto_says_what_it_chose_on_a_machine_without_a_gpu(
    bare: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...]
) -> None:
    monkeypatch.setattr(select, "_tensorrt_is_installed", lambda: True)
    with caplog.at_level(logging.INFO, "engines.select"):
        EngineSet(RuntimeSettings(), gpus).start()
    reason = "the GPU cannot be used: runtime.backend: auto: the library CuPy" if gpus else "no GPU on this machine"
    assert f"backend.chosen backend=cpu reason={reason}" in caplog.text


def test_auto_stays_on_the_cpu_without_a_compiler_for_the_gpu(gpu: list[int], caplog: pytest.LogCaptureFixture) -> None:
    engines = EngineSet(RuntimeSettings(threads=1))
    with caplog.at_level(logging.INFO, "engines.select"):
        engines.start()
    assert "backend=cpu reason=there is a GPU, but TensorRT is not installed; install it with" in caplog.text
    assert not gpu
    assert engines.choose("auto").name == "onnxruntime"
    engines.close()


def test_auto_takes_the_gpu_where_all_is_there(
    gpu: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "_tensorrt_is_installed", lambda: True)
    engines = EngineSet(RuntimeSettings(), (2, 3))
    with caplog.at_level(logging.INFO, "engines.select"):
        engines.start()
    assert "backend=cuda reason=found host and TensorRT" in caplog.text
    assert gpu == [2]
    engines.close()


def test_cuda_without_tensorrt_runs_the_array_engine_on_the_device(
    gpu: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    engines = EngineSet(RuntimeSettings(backend="cuda"))
    engines.start()
    assert "backend.slow engine=array reason=TensorRT is not installed" in caplog.text
    assert isinstance(engines.choose("array"), DeviceArrayEngine)
    assert engines.choose("onnxruntime").name == "onnxruntime"
    if not select.importlib.util.find_spec("tensorrt") and not select.importlib.util.find_spec("tensorrt_rtx"):
        assert engines.choose("auto") is engines.choose("array")
    assert gpu == [0]
    engines.close()


def test_cpu_keeps_the_array_engine_off_the_device(gpu: list[int]) -> None:
    engines = EngineSet(RuntimeSettings(backend="cpu"))
    assert isinstance(engines.choose("array"), ArrayEngine)
    assert not gpu
    engines.close()


def test_frontends_memory_is_registered_while_it_is_attached(gpu: list[int], caplog: pytest.LogCaptureFixture) -> None:
    engines = EngineSet(RuntimeSettings(backend="cuda"))
    arena = np.zeros(4096, np.uint8)
    engines.attach(arena, "arena")
    engines.start()
    assert engines.shared is not None
    assert not engines.shared.reaches(arena)
    engines.attach(arena, "arena")
    assert engines.shared.reaches(arena[64:128])
    engines.detach(arena)
    assert not engines.shared.reaches(arena)
    engines.close()


def test_memory_that_cannot_be_registered_is_told_and_served(
    monkeypatch: pytest.MonkeyPatch, gpu: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    lesser = Capabilities(overlaps=True, graphs=True, registers=False)
    monkeypatch.setattr(opening, "open_device", lambda index: HostDevice(SMALL, lesser))
    engines = EngineSet(RuntimeSettings(backend="cuda"))
    engines.start()
    arena = np.zeros(4096, np.uint8)
    engines.attach(arena, "arena of frontend0")
    assert "device.not_registered purpose='arena of frontend0'" in caplog.text
    engines.detach(arena)
    engines.close()


@pytest.mark.parametrize(
    ("free", "fraction", "wiggle", "expected"),
    [
        (100 << 30, 1.0, 0.1, 90 << 30),
        (100 << 30, 0.5, 0.1, 45 << 30),
        (4 << 30, 1.0, 0.1, 3 << 30),
        (1 << 30, 1.0, 0.0, 1 << 29),
        (0, 1.0, 0.1, 0),
    ],
)
def test_weights_leave_room_for_everything_else(free: int, fraction: float, wiggle: float, expected: int) -> None:
    settings = SimpleNamespace(weight_cache_fraction=fraction, weight_cache_wiggle_fraction=wiggle)
    assert opening.arena_bytes(free, settings) == pytest.approx(expected, abs=1)


_WITHOUT_RUNTIME = """
import sys
sys.modules["onnxruntime"] = None
from engines.errors import NotReady
from engines.select import EngineSet
from worker.config import RuntimeSettings
engines = EngineSet(RuntimeSettings(backend="cpu"))
print(engines.choose("auto").name)
try:
    engines.choose("onnxruntime")
except NotReady as error:
    print(error)
"""


@pytest.mark.process
def test_missing_library_is_named_and_auto_does_without() -> None:
    run = subprocess.run([sys.executable, "-c", _WITHOUT_RUNTIME], capture_output=True, text=True, check=True)
    chosen, message = run.stdout.splitlines()
    assert chosen == "array"
    assert message.startswith("engine: onnxruntime cannot be used: ")
    assert "pip install onnxruntime" in message


@pytest.mark.process
def test_choosing_loads_no_library_before_it_is_asked_for() -> None:
    code = (
        "import sys, engines.select, engines.probe;"
        "print([name for name in ('onnxruntime', 'onnx', 'cupy', 'tensorrt') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[]"]


class CudaError(RuntimeError):
    """Stands for CuPy's exception class."""

    status = 100


def cupy_stub(**changes: Any) -> Any:
    """Return a module that answers what opening a device asks, one piece changed."""

    def raised(error: Exception) -> Callable[..., Any]:
        def function(*_: Any, **__: Any) -> Any:
            raise error

        return function

    values: dict[str, Any] = {"built": 12090, "driver": 13000, "count": 1, "answer": 6} | changes
    count, answer = values["count"], values["answer"]
    runtime = SimpleNamespace(
        CUDARuntimeError=CudaError,
        runtimeGetVersion=lambda: values["built"],
        driverGetVersion=lambda: values["driver"],
        getDeviceCount=raised(count) if isinstance(count, Exception) else lambda: count,
        getDeviceProperties=lambda index: {
            "name": b"GPU X", "major": 9, "minor": 0, "multiProcessorCount": 132, "asyncEngineCount": 3,
        },
    )  # fmt: skip

    class Device:
        def __init__(self, index: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    total = raised(answer) if isinstance(answer, Exception) else lambda: answer
    cuda = SimpleNamespace(runtime=runtime, Device=Device, MemoryPool=lambda: None)
    return SimpleNamespace(cuda=cuda, arange=lambda *_, **__: SimpleNamespace(sum=total))


@pytest.mark.parametrize(
    ("changes", "index", "why"),
    [
        ({"driver": 0}, 0, "there is no NVIDIA driver on this machine"),
        ({"driver": 11080}, 0, r"the NVIDIA driver is for CUDA 11\.8, CuPy was built for 12\.9: update"),
        ({"count": CudaError("cudaErrorNoDevice")}, 0, "the driver finds no GPU: cudaErrorNoDevice"),
        ({"count": 2}, 2, "GPU 2 does not exist: there are 2, counted from 0"),
        (
            {"answer": RuntimeError("libnvrtc.so not found")},
            0,
            r"GPU 0 does not compute: .*libnvrtc.*pip install",
        ),
        ({"answer": 7}, 0, "GPU 0 computes wrongly"),
    ],
)
def test_each_missing_piece_of_a_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], index: int, why: str
) -> None:
    from engines.device.cupy_device import open_device

    monkeypatch.setitem(sys.modules, "cupy", cupy_stub(**changes))
    with pytest.raises(DeviceMissing, match=why):
        open_device(index)


def test_a_library_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.device.cupy_device import open_device

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceMissing, match=r"CuPy does not load: .*cupy.*cupy-cuda12x\[ctk\].*cupy-cuda13x"):
        open_device(0)


def test_a_gpu_is_known_by_what_a_plan_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.device.cupy_device import open_device

    monkeypatch.setitem(sys.modules, "cupy", cupy_stub())
    device = open_device(0)
    assert device.name == "GPU X"
    assert device.key == "GPU X sm90 132 multiprocessors CUDA 13"
    assert device.capabilities == Capabilities(overlaps=True, graphs=True, registers=True, captures_products=False)
