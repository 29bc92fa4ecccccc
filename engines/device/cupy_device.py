"""The device layer on an NVIDIA GPU, over CuPy: its bindings of the CUDA runtime, streams, events and arrays.

CuPy's wheels are named after the CUDA version they are built for: ``cupy-cuda12x`` and ``cupy-cuda13x``. Either works.

Traps this file goes around:
    CuPy's memory pool splits and never compacts, so weights and staging never come from it; intermediate values do.
    A pool's memory that a captured graph uses must not serve anything else: each graph has a pool of its own.
    CuPy refuses to call cuBLAS while it captures (its issue 6290), so models with matrix products are launched plainly.
    ``alloc_pinned_memory`` never gives memory back, so pinned memory comes from the runtime itself.
    After some errors every later call fails (``STICKY``): the process must be replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from engines.device.base import Capabilities, DeviceMemory, Event, Span, Stream, Work
from engines.device.errors import (
    CannotCapture,
    CannotRegister,
    DeviceFailed,
    DeviceLost,
    DeviceMissing,
    OutOfDeviceMemory,
)
from engines.staging import address_of
from engines.tensor import NDArray

INSTALL: Final = (
    "install it with: pip install 'cupy-cuda12x[ctk]' (driver for CUDA 12) or 'cupy-cuda13x[ctk]' (driver for CUDA 13)"
)

OUT_OF_MEMORY: Final = 2
STICKY: Final = frozenset({46, 214, 220, 221, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999})
"""Values of ``cudaError`` that leave the context broken: uncorrectable memory or link errors, illegal addresses and
instructions, failed launches and assertions, and unknown ones."""


def open_device(index: int) -> CupyDevice:
    """Return GPU ``index`` of this process, tried with a small computation.

    Raises:
        DeviceMissing: something is not there; says what, and how to get it.
    """
    try:
        import cupy
    except Exception as error:
        # Not only ImportError: a library that CuPy preloads may raise what it likes.
        raise DeviceMissing(f"the library CuPy does not load: {error}; {INSTALL}") from error
    runtime = cupy.cuda.runtime
    built = runtime.runtimeGetVersion()
    driver = runtime.driverGetVersion()
    if driver == 0:
        raise DeviceMissing(
            "there is no NVIDIA driver on this machine (libcuda.so.1 is not found); install it, or start a container "
            "with the GPU: docker run --gpus all"
        )
    if driver // 1000 < built // 1000:
        raise DeviceMissing(
            f"the NVIDIA driver is for CUDA {_version(driver)}, CuPy was built for {_version(built)}: update the "
            f"driver, or {INSTALL}"
        )
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceMissing(f"the driver finds no GPU: {error}; look at nvidia-smi and CUDA_VISIBLE_DEVICES") from error
    if not 0 <= index < count:
        raise DeviceMissing(f"GPU {index} does not exist: there are {count}, counted from 0; see gpus in the node file")
    try:
        with cupy.cuda.Device(index):
            answer = int(cupy.arange(4, dtype=np.int32).sum())
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise DeviceMissing(f"GPU {index} does not compute: {type(error).__name__}: {reason}; {INSTALL}") from error
    if answer != 6:
        raise DeviceMissing(f"GPU {index} computes wrongly: 0 + 1 + 2 + 3 is {answer}")
    return CupyDevice(cupy, index)


class CupyBuffer:
    """One ``cudaMalloc``."""

    def __init__(self, device: CupyDevice, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._device: CupyDevice | None = device

    def free(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            with device.calling("free"):
                device.runtime.free(self.address)


class CupyPinned:
    """One ``cudaHostAlloc``."""

    def __init__(self, device: CupyDevice, address: int, size_bytes: int) -> None:
        self._device: CupyDevice | None = device
        self._address = address
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        self.array: NDArray = np.ctypeslib.as_array(memory)

    def free(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            # A view that outlives this would read freed memory; ours at least is gone.
            self.array = np.empty(0, np.uint8)
            with device.calling("freeing pinned memory"):
                device.runtime.freeHost(self._address)


class CupyRegistration:
    """One ``cudaHostRegister``; the array is kept alive until it is undone."""

    def __init__(self, device: CupyDevice, memory: NDArray) -> None:
        self._device = device
        self._memory: NDArray | None = memory

    def release(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._device.unregister(memory)


class CupyEvent:
    """An event with timing that blocks instead of spinning."""

    def __init__(self, device: CupyDevice, event: Any) -> None:
        self._device = device
        self.event = event

    def done(self) -> bool:
        with self._device.calling("asking for an event"):
            return bool(self.event.done)

    def synchronize(self) -> None:
        with self._device.calling("waiting for an event"):
            self.event.synchronize()

    def close(self) -> None:
        self.event = None


class CupyStream:
    """A stream that does not wait for the default one."""

    def __init__(self, device: CupyDevice, name: str, stream: Any) -> None:
        self.name = name
        self.handle = int(stream.ptr)
        self._device = device
        self.stream = stream

    def record(self, event: Event) -> None:
        assert isinstance(event, CupyEvent)
        with self._device.calling("recording an event"):
            event.event.record(self.stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CupyEvent)
        with self._device.calling("letting a stream wait"):
            self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        with self._device.calling("waiting for a stream"):
            self.stream.synchronize()

    def close(self) -> None:
        if self.stream is not None:
            self.synchronize()
            self.stream = None


class CupyGraph:
    """An instantiated graph and the pool its intermediate values live in."""

    def __init__(self, device: CupyDevice, graph: Any, pool: Any) -> None:
        self._device = device
        self._graph = graph
        self._pool = pool

    def launch(self, stream: Stream) -> None:
        assert isinstance(stream, CupyStream)
        with self._device.calling("launching a graph"):
            self._graph.launch(stream.stream)

    def close(self) -> None:
        if self._graph is not None:
            self._graph = None
            self._pool.free_all_blocks()
            self._pool = None


class CupyDevice:
    """Implements ``Device``; made by ``open_device``."""

    def __init__(self, cupy: Any, index: int) -> None:
        self.xp = cupy
        self.runtime = cupy.cuda.runtime
        self.index = index
        self._cuda = cupy.cuda
        self._device = cupy.cuda.Device(index)
        self._pool = cupy.cuda.MemoryPool()
        self._thread = threading.local()
        self._registered: dict[tuple[int, int], int] = {}
        facts = self.runtime.getDeviceProperties(index)
        name = facts["name"]
        self.name = name.decode() if isinstance(name, bytes) else str(name)
        driver = self.runtime.driverGetVersion()
        self.key = (
            f"{self.name} sm{facts['major']}{facts['minor']} {facts['multiProcessorCount']} multiprocessors "
            f"CUDA {driver // 1000}"
        )
        self.capabilities = Capabilities(
            overlaps=facts.get("asyncEngineCount", 1) > 0, graphs=True, registers=True, captures_products=False
        )

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Make this device the thread's, and tell the runtime's errors in our classes."""
        if not getattr(self._thread, "uses", False):
            self._device.use()
            self._thread.uses = True
        try:
            yield
        except self.runtime.CUDARuntimeError as error:
            if error.status in STICKY:
                raise DeviceLost(f"{what}: {error}: the GPU's context is broken, this process must end") from error
            if error.status == OUT_OF_MEMORY:
                raise OutOfDeviceMemory(f"{what}: {error}") from error
            raise DeviceFailed(f"{what}: {error}") from error

    def memory(self) -> DeviceMemory:
        with self.calling("asking for memory"):
            free_bytes, total_bytes = self.runtime.memGetInfo()
        return DeviceMemory(int(free_bytes), int(total_bytes))

    def allocate(self, size_bytes: int, purpose: str) -> CupyBuffer:
        try:
            with self.calling(purpose):
                return CupyBuffer(self, int(self.runtime.malloc(max(1, size_bytes))), size_bytes)
        except OutOfDeviceMemory as error:
            free_bytes = self.memory().free_bytes
            raise OutOfDeviceMemory(
                f"{purpose}: {size_bytes} bytes of device memory do not fit, {free_bytes} are free"
            ) from error

    def pinned(self, size_bytes: int, purpose: str) -> CupyPinned:
        with self.calling(f"{purpose}: page-locking {size_bytes} bytes of host memory"):
            # 0: usable by this context; what CUDA calls portable is for several.
            address = int(self.runtime.hostAlloc(max(1, size_bytes), 0))
        return CupyPinned(self, address, size_bytes)

    def register(self, memory: NDArray, purpose: str) -> CupyRegistration:
        if not (memory.flags.c_contiguous and memory.flags.writeable and memory.nbytes):
            raise CannotRegister(f"{purpose}: only contiguous writable memory can be registered")
        place = (address_of(memory), memory.nbytes)
        if place not in self._registered:
            try:
                with self.calling(purpose):
                    self.runtime.hostRegister(*place, 0)
            except DeviceLost:
                raise
            except DeviceFailed as error:
                raise CannotRegister(f"{purpose}: the driver does not register this memory: {error}") from error
        self._registered[place] = self._registered.get(place, 0) + 1
        return CupyRegistration(self, memory)

    def unregister(self, memory: NDArray) -> None:
        """Undo one registration; for ``CupyRegistration``."""
        place = (address_of(memory), memory.nbytes)
        self._registered[place] -= 1
        if self._registered[place] == 0:
            del self._registered[place]
            with self.calling("unregistering memory"):
                self.runtime.hostUnregister(place[0])

    def stream(self, name: str) -> CupyStream:
        with self.calling("making a stream"):
            return CupyStream(self, name, self._cuda.Stream(non_blocking=True))

    def event(self) -> CupyEvent:
        with self.calling("making an event"):
            return CupyEvent(self, self._cuda.Event(block=True))

    def elapsed_ns(self, start: Event, end: Event) -> int:
        assert isinstance(start, CupyEvent) and isinstance(end, CupyEvent)
        with self.calling("timing"):
            return int(self._cuda.get_elapsed_time(start.event, end.event) * 1e6)

    def copy_in(self, target: Span, source: NDArray, stream: Stream) -> None:
        assert source.nbytes == target.size_bytes and source.flags.c_contiguous
        self._copy(target.address, address_of(source), target.size_bytes, 1, stream)

    def copy_out(self, target: NDArray, source: Span, stream: Stream) -> None:
        assert target.nbytes == source.size_bytes and target.flags.c_contiguous
        self._copy(address_of(target), source.address, source.size_bytes, 2, stream)

    def copy_within(self, target: Span, source: Span, stream: Stream) -> None:
        assert target.size_bytes == source.size_bytes
        self._copy(target.address, source.address, source.size_bytes, 3, stream)

    def zero(self, target: Span, stream: Stream) -> None:
        with self.calling("filling with zeros"):
            self.runtime.memsetAsync(target.address, 0, target.size_bytes, stream.handle)

    def forget(self, target: Span) -> None:
        """Nothing to do: only the host device follows contents."""

    def array(self, span: Span, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Any:
        memory = self._cuda.UnownedMemory(span.address, span.size_bytes, span.buffer, self.index)
        return self.xp.ndarray(shape, dtype, memptr=self._cuda.MemoryPointer(memory, 0))

    def launch(self, stream: Stream, work: Work, *, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        assert isinstance(stream, CupyStream)
        with self.calling("launching"), stream.stream, self._cuda.using_allocator(self._pool.malloc):
            work()

    def capture(self, stream: Stream, work: Work, *, reads: Sequence[Span], writes: Sequence[Span]) -> CupyGraph:
        assert isinstance(stream, CupyStream)
        pool = self._cuda.MemoryPool()
        try:
            with self.calling("capturing"), stream.stream, self._cuda.using_allocator(pool.malloc):
                stream.stream.begin_capture()
                try:
                    work()
                finally:
                    graph = stream.stream.end_capture()
        except DeviceLost:
            raise
        except Exception as error:
            pool.free_all_blocks()
            raise CannotCapture(f"{type(error).__name__}: {error}") from error
        return CupyGraph(self, graph, pool)

    def synchronize(self) -> None:
        with self.calling("waiting for the device"):
            self.runtime.deviceSynchronize()

    def close(self) -> None:
        self.synchronize()
        self._pool.free_all_blocks()

    def _copy(self, target: int, source: int, size_bytes: int, kind: int, stream: Stream) -> None:
        if size_bytes:
            with self.calling("copying"):
                self.runtime.memcpyAsync(target, source, size_bytes, kind, stream.handle)


def _version(number: int) -> str:
    """Return what people call a version that CUDA gives as 12090."""
    return f"{number // 1000}.{number % 1000 // 10}"
