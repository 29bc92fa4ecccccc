"""Behaviours of the running half: engines and contexts that compute on the host device's memory, by address.

Every precondition of the real library whose neglect is silent or fatal there is an assertion here: shapes and addresses
that were never set, scratch memory too small or misaligned, work outside its stream, a capture of what cannot be
captured. Scratch memory is overwritten by each execution, so sharing it with anything shows.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from engines.array.interpreter import NodeFailed
from engines.device.host_arrays import running
from tensorrt_fake.building import MAGIC, FakeCrash, HostMemory, Log, World
from tensorrt_fake.computation import NUMPY, Computation
from tensorrt_fake.strict import EnumMember, Library

ALIGNMENT = 256
RUBBISH = 0xA5


class Runtime:
    def __init__(self, library: Library, world: World, logger: Any) -> None:
        if world.device is None:
            raise FakeCrash("a Runtime was made on a machine without a device: the process would end here")
        self._library, self._world = library, world
        self._log = Log(library, logger)
        self._allocator: Any = None
        self.defer_weights_loading = False

    @property
    def gpu_allocator(self) -> Any:
        return self._allocator

    @gpu_allocator.setter
    def gpu_allocator(self, allocator: Any) -> None:
        assert isinstance(allocator, self._library.classes["IGpuAsyncAllocator"]), "this is no allocator of the library"
        self._allocator = allocator

    def deserialize_cuda_engine(self, plan: Any) -> Any:
        data = bytes(plan)
        if not data.startswith(MAGIC):
            self._log.error("Serialization Error in verifyHeader: magic tag does not match")
            return None
        line, _, model = data[len(MAGIC) :].partition(b"\n")
        header = json.loads(line)
        if header["library"] != self._library.description["version"]:
            self._log.error(
                "Error Code 6: API Usage Error (The engine plan file is not compatible with this version of TensorRT, "
                f"expecting library version {self._library.description['version']} got {header['library']})"
            )
            return None
        if header["device"] != self._world.device_key:
            self._log.error("Error Code 1: the plan was built for another device")
            return None
        deferred = self._library.is_rtx and self.defer_weights_loading
        self.defer_weights_loading = False
        engine = CudaEngine(self._library, self._world, header, model, data, self._allocator, self._log)
        if not deferred and not engine.hold_weights():
            return None
        engine.deferred = deferred
        return self._library.wrap("ICudaEngine", engine)


class CudaEngine:
    """An engine whose weights take device memory from the moment they are loaded until it goes."""

    def __init__(
        self,
        library: Library,
        world: World,
        header: dict[str, Any],
        model: bytes,
        plan: bytes,
        allocator: Any,
        log: Log,
    ) -> None:
        self.library, self.world = library, world
        self.weights_loaded = False
        self.deferred = False
        self._plan, self._allocator, self._log = plan, allocator, log
        self._weights_at = 0
        self.computation = Computation(model)
        self.profiles = header["profiles"]
        self.inputs = {tensor.name: tensor for tensor in self.computation.inputs}
        self.outputs = {tensor.name: tensor for tensor in self.computation.outputs}

    def __del__(self) -> None:
        self._drop_weights()

    def hold_weights(self) -> bool:
        size = self.computation.constant_bytes
        if self._allocator is not None and size:
            self._weights_at = self._allocator.allocate_async(size, ALIGNMENT, 0, 0) or 0
            if not self._weights_at:
                self._log.error(f"Error Code 2: OutOfMemory (Requested size was {size} bytes.)")
                return False
        self.weights_loaded = True
        return True

    def load_weights(self, blob: Any) -> bool:
        if not self.deferred or self.weights_loaded or bytes(blob) != self._plan:
            return False
        return self.hold_weights()

    def unload_weights(self) -> bool:
        if not self.deferred or not self.weights_loaded:
            return False
        self._drop_weights()
        return True

    def _drop_weights(self) -> None:
        self.weights_loaded = False
        if self._weights_at:
            address, self._weights_at = self._weights_at, 0
            assert self._allocator.deallocate_async(address, 0), "the allocator does not know its own memory"

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    @property
    def device_memory_size_v2(self) -> int:
        return max(int(profile["scratch_bytes"]) for profile in self.profiles)

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return int(self.profiles[index]["scratch_bytes"])

    def get_engine_stat(self, stat: EnumMember | None = None) -> int:
        assert stat is not None and stat.name == "TOTAL_WEIGHTS_SIZE", "the fake knows one statistic"
        return self.computation.constant_bytes

    def get_tensor_dtype(self, name: str) -> EnumMember:
        tensor = self.inputs.get(name) or self.outputs.get(name)
        assert tensor is not None, f"the engine has no tensor {name!r}"
        return self.library.enum("DataType", tensor.dtype)

    def create_execution_context(self, strategy: EnumMember | None = None) -> Any:
        assert isinstance(strategy, EnumMember) and strategy.name == "USER_MANAGED", (
            "contexts with memory of their own would not fit beside each other"
        )
        return self.library.wrap("IExecutionContext", ExecutionContext(self))


class ExecutionContext:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._library, self._world = engine.library, engine.world
        self.error_recorder: Any = None
        self._profile = -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self._scratch = (0, 0)
        self._runs = 0

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._require_stream(stream)
        if not 0 <= index < len(self._engine.profiles):
            return False
        self._profile = index
        # As in the real library: shapes belong to the profile that they were set for.
        self._shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: Any) -> bool:
        assert self._profile >= 0, "a shape is set before a profile is chosen"
        expected = self._engine.profiles[self._profile]["inputs"].get(name)
        if name not in self._engine.inputs:
            return False
        if expected is None:
            expected = list(self._engine.inputs[name].shape)
        if list(shape) != list(expected):
            self._report("INVALID_ARGUMENT", f"{name}: {list(shape)} is outside the profile, {expected}")
            return False
        self._shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        missing = [
            name for name, tensor in self._engine.inputs.items() if -1 in tensor.shape and name not in self._shapes
        ]
        return missing

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        assert not self.infer_shapes(), "shapes of outputs are asked for before those of inputs are set"
        if name in self._engine.inputs:
            return self._shapes.get(name, self._engine.inputs[name].shape)
        return tuple(self._engine.profiles[self._profile]["outputs"][name])

    def get_max_output_size(self, name: str) -> int:
        if self._profile < 0 or self.infer_shapes():
            return -1
        return int(self._engine.profiles[self._profile]["bounds"][name])

    def set_device_memory(self, address: int, size: int) -> None:
        needed = self._engine.device_memory_size_v2
        assert address and address % ALIGNMENT == 0, f"scratch memory at {address:#x} is not aligned to {ALIGNMENT}"
        assert size >= needed, f"{size} bytes of scratch memory, the engine needs {needed}"
        self._scratch = (address, size)

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self._engine.inputs and name not in self._engine.outputs:
            return False
        assert address % ALIGNMENT == 0, f"address {address:#x} of {name!r} is not aligned to {ALIGNMENT}"
        self._addresses[name] = address
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        if name not in self._engine.outputs:
            return False
        self._allocators[name] = allocator
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self._require_stream(stream)
        assert self._engine.weights_loaded, "executed while its weights are not on the device"
        if not self._ready():
            return False
        if running.in_graph:
            assert self._runs > 0, "captured before it ran once: the library still sets itself up"
            assert not self._allocators, "outputs of unknown size cannot be captured"
        self._runs += 1
        feeds = {
            name: self._view(name, self._shapes.get(name, tensor.shape), writes=False)
            for name, tensor in self._engine.inputs.items()
        }
        address, size = self._scratch
        self._world.device.view(address, self._engine.device_memory_size_v2, writes=True)[...] = RUBBISH
        assert size, "scratch memory was never given"
        try:
            results = self._engine.computation.run(feeds)
        except NodeFailed as error:
            self._report("FAILED_EXECUTION", f"IExecutionContext::enqueueV3: Error Code 7: {error}")
            return False
        return all(self._write(name, results[name]) for name in self._engine.outputs)

    def _write(self, name: str, result: np.ndarray[Any, Any]) -> bool:
        tensor = self._engine.outputs[name]
        result = np.ascontiguousarray(result).astype(NUMPY[tensor.dtype], copy=False).reshape(result.shape)
        allocator = self._allocators.get(name)
        if allocator is None:
            self._view(name, self.get_tensor_shape(name), writes=True)[...] = result
            return True
        allocator.notify_shape(name, tuple(result.shape))
        address = allocator.reallocate_output_async(name, 0, max(result.nbytes, 1), ALIGNMENT, 0)
        if not address:
            self._report("FAILED_ALLOCATION", f"no memory for output {name}")
            return False
        raw = self._world.device.view(address, result.nbytes, writes=True)
        raw[...] = result.reshape(-1).view(np.uint8)
        return True

    def _view(self, name: str, shape: tuple[int, ...], *, writes: bool) -> np.ndarray[Any, Any]:
        tensor = self._engine.inputs.get(name) or self._engine.outputs[name]
        dtype = np.dtype(NUMPY[tensor.dtype])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw: np.ndarray[Any, Any] = self._world.device.view(self._addresses[name], size, writes=writes)
        return raw.view(dtype).reshape(shape)

    def _ready(self) -> bool:
        missing = self.infer_shapes()
        if missing:
            self._report("INVALID_STATE", f"shapes of {missing} are not set")
            return False
        tensors = [*self._engine.inputs, *(name for name in self._engine.outputs if name not in self._allocators)]
        unset = [name for name in tensors if not self._addresses.get(name)]
        if unset:
            self._report("INVALID_STATE", f"addresses of {unset} are not set")
            return False
        return True

    def _report(self, code: str, message: str) -> None:
        if self.error_recorder is not None:
            self.error_recorder.report_error(self._library.enum("ErrorCodeTRT", code), message)

    def _require_stream(self, stream: int) -> None:
        assert stream, "the default stream makes the library synchronize"
        assert running.title, "work is enqueued outside the device's launch"


__all__ = ["HostMemory", "Runtime"]
