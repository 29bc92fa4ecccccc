"""The TensorRT engine: one plan per model with a profile for every (variant, batch size), weights shared by all.

Opening a model builds its plan, or takes it from the cache, lays out its contexts and brings its weights to the device.
Weights lie outside the plan if the library builds it so; else inside, and the log says why. Executions of all models
run on one stream, one at a time, over one scratch block; copies run beside them (``rooms``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.agreement import model_name
from engines.bundle.manifest import Manifest
from engines.device.errors import OutOfDeviceMemory
from engines.device.shared import SharedDevice
from engines.errors import NotReady
from engines.process_memory import release_freed
from engines.tensor import NDArray
from engines.tensorrt.context import ProfileContext
from engines.tensorrt.memory import MORE_ROOM, LibraryMemory, Owner
from engines.tensorrt.model import TensorRTModel
from engines.tensorrt.names import Api, MessageLog
from engines.tensorrt.planning import NO_WEIGHTS, Planned, Planner
from engines.tensorrt.profiles import profiles_of
from engines.tensorrt.rooms import Rooms
from engines.tensorrt.weights import DeferredWeights, OutsideWeights

log = logging.getLogger("engines.tensorrt")


class TensorRTEngine:
    """Runs ONNX files on an NVIDIA GPU.

    Args:
        shared: of the worker's engines, started; the engine does not close it.
        planner: makes plans or finds them.
    """

    name = "tensorrt"

    def __init__(self, api: Api, shared: SharedDevice, planner: Planner) -> None:
        self._api = api
        self._shared = shared
        self._planner = planner
        self._rooms = Rooms(shared)
        self._messages = MessageLog()
        self._memory = LibraryMemory(shared.device)
        self._logger: Any = None
        self._allocator: Any = None
        self._runtime: Any = None

    def start(self) -> None:
        """Make events and the library's runtime."""
        self._use_device()
        self._rooms.start()
        # Only now that a device is there: see the trap in ``names``.
        self._logger = self._api.logger(self._messages)
        self._runtime = self._api.module.Runtime(self._logger)
        self._allocator = self._api.gpu_allocator(self._memory)
        self._runtime.gpu_allocator = self._allocator

    def open(self, manifest: Manifest, model_file: Path) -> TensorRTModel:
        assert self._runtime is not None, "not started"
        name = model_name(model_file)
        self._use_device()
        # What models left behind that did not open.
        self._memory.sweep()
        planned, arrays = self._planner.plan(name, manifest, model_file, self._shared.device.key)
        owner = Owner(name)
        engine = self._deserialized(planned, owner)
        if engine is None and planned.cached:
            log.warning(
                "tensorrt.plan_refused model=%s reason=%s: it is built again", name, self._told() or "not given"
            )
            planned, arrays = self._planner.plan(name, manifest, model_file, self._shared.device.key, anew=True)
            engine = self._deserialized(planned, owner)
        if engine is None:
            raise NotReady(f"{name}: {model_file}: TensorRT does not load its own plan: {self._told() or 'no reason'}")
        with self._memory.of(owner):
            return self._made(name, manifest, planned, arrays, engine, owner)

    def compact(self, wanted_bytes: int | None = None) -> int:
        """Make room for ``wanted_bytes`` in the weights arena, or of all free bytes one block; return the bytes moved.

        Waits for what runs.
        """
        with self._rooms.lock:
            self._rooms.settle()
            return self._shared.compact(wanted_bytes)

    def close(self) -> None:
        # The allocator last: the library calls it while it goes.
        self._runtime = self._logger = None
        self._memory.sweep()
        self._allocator = None
        self._rooms.close()

    def _made(
        self,
        name: str,
        manifest: Manifest,
        planned: Planned,
        arrays: Mapping[str, NDArray],
        engine: Any,
        owner: Owner,
    ) -> TensorRTModel:
        stat = self._api.module.EngineStat.TOTAL_WEIGHTS_SIZE
        inside_bytes = int(engine.get_engine_stat(stat))
        weights: OutsideWeights | DeferredWeights
        contexts: list[ProfileContext] = []
        if self._defers(planned):
            weights = DeferredWeights(name, self._rooms, engine, self._memory, owner, inside_bytes, self._told)
        else:
            weights = OutsideWeights(name, self._rooms, arrays)
        try:
            if isinstance(weights, DeferredWeights):
                weights.start(planned.plan)
            else:
                weights.start(arrays)
            weights.load()
            for profile in profiles_of(manifest):
                context = ProfileContext(name, self._api, engine, profile, self._rooms, weights)
                contexts.append(context)
                context.start([spec.name for spec in manifest.outputs])
        except BaseException:
            for context in contexts:
                context.close()
            weights.close()
            release_freed()
            raise
        model = TensorRTModel(name, manifest, engine, contexts, weights, self._memory, owner, inside_bytes, self._rooms)
        log.info(
            "tensorrt.opened model=%s profiles=%d weights=%s slab_bytes=%d engine_bytes=%d scratch_bytes=%d",
            name, len(contexts), "outside" if arrays else "inside", weights.slab_bytes, inside_bytes,
            model.footprint.scratch_bytes,
        )  # fmt: skip
        return model

    def _use_device(self) -> None:
        """Make the worker's GPU this thread's: the library builds and loads on whichever is current."""
        # Any call of the device does.
        self._shared.device.memory()

    def _defers(self, planned: Planned) -> bool:
        """Whether the plan's weights are loaded after it, so that they can be unloaded."""
        return self._api.defers_weights and planned.reason not in ("", NO_WEIGHTS)

    def _deserialized(self, planned: Planned, owner: Owner) -> Any:
        """Return an engine; None if the library refuses the plan.

        Raises:
            OutOfDeviceMemory: what it keeps on the device does not fit beside the arena.
        """
        self._messages.take()
        if self._api.defers_weights:
            self._runtime.defer_weights_loading = self._defers(planned)
        with self._memory.of(owner):
            engine = self._runtime.deserialize_cuda_engine(planned.plan)
        if engine is None and self._memory.refused is not None:
            self._memory.sweep()
            raise OutOfDeviceMemory(
                f"model '{owner.title}': TensorRT does not load it: {self._memory.refused}; {MORE_ROOM}"
            )
        return engine

    def _told(self) -> str:
        return "; ".join(message.text for message in self._messages.take())
