"""Which engine runs a model, and on what: the bundle's own choice, else the node's, else the best that is there.

``runtime.backend`` is a kind of device or one engine:
    cpu                 ONNX Runtime, or the array engine where that is not installed
    cuda                TensorRT, or the array engine on the GPU where that is not installed; without a GPU the worker
                        does not start, and says which piece is missing
    auto                as cuda where a GPU and TensorRT are there, else as cpu; the log says which and why
    onnxruntime, array  one engine on the CPU
    tensorrt            one engine on the GPU

A bundle's ``engine`` names an engine or ``auto``; its ``array`` means the device that the node uses. Device libraries
are large and may be missing, so each is imported when something first asks for it.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from engines.base import Engine
from engines.device.shared import SharedDevice
from engines.errors import NotReady
from engines.tensor import NDArray

log = logging.getLogger("engines.select")

AUTO: Final = "auto"
CPU: Final = "cpu"
CUDA: Final = "cuda"
CPU_ORDER: Final = ("onnxruntime", "array")
CUDA_ORDER: Final = ("tensorrt", "array")
"""Engines that a kind of device tries, best first."""
ENGINES: Final = ("onnxruntime", "array", "tensorrt")
BACKENDS: Final = (AUTO, CPU, CUDA, *ENGINES)
INSTALL: Final[dict[str, str]] = {
    "onnxruntime": "install it with: pip install onnxruntime",
    "array": "install what it reads model files with: pip install onnx",
    "tensorrt": "install it with: pip install 'tensorrt>=10.16'",
}
TENSORRT_MODULES: Final = ("tensorrt", "tensorrt_rtx")


class Runtime(Protocol):
    """The part of the node's runtime settings that choosing an engine needs."""

    @property
    def backend(self) -> str:
        """One of ``BACKENDS``."""
        ...

    @property
    def threads(self) -> int:
        """CPU threads to compute with; 0 lets the engine choose."""
        ...

    @property
    def numerics(self) -> str: ...
    @property
    def weight_cache_fraction(self) -> float: ...
    @property
    def weight_cache_wiggle_fraction(self) -> float: ...


class EngineSet:
    """The engines of one worker process, each made once, and the device they share.

    Args:
        gpus: numbers of the devices that the worker may use; only the first is used. Empty: any.
        plan_dir: where compiled models are kept; None keeps none.
        built_dir: where ``ringserve build`` left compiled models; only read.
    """

    def __init__(
        self,
        runtime: Runtime,
        gpus: Sequence[int] = (),
        plan_dir: Path | None = None,
        built_dir: Path | None = None,
    ) -> None:
        self._runtime = runtime
        self._gpus = tuple(gpus)
        self._plan_dir = plan_dir
        self._built_dir = built_dir
        self._engines: dict[str, Engine] = {}
        self._shared: SharedDevice | None = None
        self._order: tuple[str, ...] | None = None

    @property
    def shared(self) -> SharedDevice | None:
        """The device, once something uses it."""
        return self._shared

    def start(self) -> None:
        """Decide what computes, and open the device if that is one; ``choose`` does it otherwise.

        Raises:
            NotReady: what the settings ask for is not there; says what is missing and how to get it.
        """
        if self._order is None:
            self._order = self._decided()
            if self._order == ("tensorrt",):
                self._engine("tensorrt", "runtime.backend")

    def choose(self, wanted: str) -> Engine:
        """Return the engine for a manifest's ``engine`` value; ``auto`` defers to ``runtime.backend``.

        Raises:
            NotReady: unknown name, or its library or device is missing; says what to do.
        """
        if wanted != AUTO:
            return self._engine(wanted, "engine")
        self.start()
        assert self._order is not None
        missing: list[str] = []
        for name in self._order:
            try:
                return self._engine(name, "runtime.backend")
            except NotReady as error:
                missing.append(str(error))
        raise NotReady(missing[0] if len(missing) == 1 else "no engine can be used: " + "; ".join(missing))

    def attach(self, memory: NDArray, purpose: str) -> None:
        """Let a device copy straight from and to memory shared with a frontend, where there is one that can."""
        if self._shared is not None and not self._shared.register(memory, purpose):
            log.warning("device.not_registered purpose=%r: its rows are copied once more", purpose)

    def detach(self, memory: NDArray) -> None:
        """Undo ``attach`` before the memory goes; nothing may use it any more."""
        if self._shared is not None:
            self._shared.unregister(memory)

    def close(self) -> None:
        """Close every engine that was made, then the device; models must be closed before."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        if self._shared is not None:
            self._shared.close()
            self._shared.device.close()
            self._shared = None

    def _decided(self) -> tuple[str, ...]:
        backend = self._runtime.backend
        if backend == CPU:
            return CPU_ORDER
        if backend == CUDA:
            self._open("runtime.backend: cuda")
            if not _tensorrt_is_installed():
                log.warning(
                    "backend.slow engine=array reason=TensorRT is not installed, so operators run one by one: %s",
                    INSTALL["tensorrt"],
                )
            return CUDA_ORDER
        if backend == AUTO:
            order, reason = self._best()
            log.info("backend.chosen backend=%s reason=%s", "cuda" if order == CUDA_ORDER else "cpu", reason)
            return order
        if backend not in ENGINES:
            raise NotReady(f"runtime.backend: unknown engine '{backend}'; choose one of {', '.join(BACKENDS)}")
        return (backend,)

    def _best(self) -> tuple[tuple[str, ...], str]:
        """Return the engines for ``auto`` and why."""
        from engines.device.opening import gpu_is_present

        if not self._gpus and not gpu_is_present():
            return CPU_ORDER, "no GPU on this machine"
        if not _tensorrt_is_installed():
            return CPU_ORDER, f"there is a GPU, but TensorRT is not installed; {INSTALL['tensorrt']}"
        try:
            self._open("runtime.backend: auto")
        except NotReady as error:
            return CPU_ORDER, f"the GPU cannot be used: {error}"
        assert self._shared is not None
        return CUDA_ORDER, f"found {self._shared.device.name} and TensorRT"

    def _open(self, place: str) -> SharedDevice:
        if self._shared is None:
            from engines.device.opening import open_shared

            try:
                self._shared = open_shared(self._gpus[0] if self._gpus else 0, self._runtime)
            except NotReady as error:
                raise NotReady(f"{place}: {error}") from error
        return self._shared

    def _engine(self, name: str, place: str) -> Engine:
        engine = self._engines.get(name)
        if engine is None:
            if name not in ENGINES:
                raise NotReady(f"{place}: unknown engine '{name}'; choose one of {', '.join((AUTO, *ENGINES))}")
            self.start()
            try:
                engine = self._engines[name] = self._made(name, place)
            except ImportError as error:
                raise NotReady(
                    f"{place}: {name} cannot be used: {error}; {INSTALL[name]}, or write {place}: {AUTO}"
                ) from error
        return engine

    def _made(self, name: str, place: str) -> Engine:
        if name == "onnxruntime":
            from engines.onnxruntime import OnnxRuntimeEngine

            return OnnxRuntimeEngine(threads=self._runtime.threads)
        if name == "tensorrt":
            if self._order == CPU_ORDER and self._runtime.backend == CPU:
                raise NotReady(f"{place}: tensorrt needs a GPU, and runtime.backend is cpu; write cuda or auto")
            return self._tensorrt(place)
        if self._order in (CUDA_ORDER, ("tensorrt",)):
            from engines.array.on_device import DeviceArrayEngine

            assert self._shared is not None
            return DeviceArrayEngine(self._shared)
        from engines.array.engine import ArrayEngine

        return ArrayEngine()

    def _tensorrt(self, place: str) -> Engine:
        from engines.tensorrt.builder import BuildOptions
        from engines.tensorrt.engine import TensorRTEngine
        from engines.tensorrt.names import Api
        from engines.tensorrt.plan_cache import PlanCache
        from engines.tensorrt.planning import Planner

        try:
            api = Api.load()
        except NotReady as error:
            raise NotReady(f"{place}: {error}") from error
        # The device first: the library must not be started where there is none.
        shared = self._open(f"{place}: tensorrt")
        planner = Planner(api, PlanCache(self._plan_dir, self._built_dir), BuildOptions.of(self._runtime.numerics))
        engine = TensorRTEngine(api, shared, planner)
        engine.start()
        return engine


def _tensorrt_is_installed() -> bool:
    return any(importlib.util.find_spec(name) is not None for name in TENSORRT_MODULES)
