"""A stand-in for CuPy, on host memory: the functions and classes that the device layer uses, and no others.

It is strict where the real one is: signatures, states of streams and captures, matrix products refused while capturing,
kinds of copies, memory that was freed. Arrays come from the host device's module, which refuses host arrays. What it
does not do is run anything late; that is the host device's part. ``test_cupy_device.py`` compares names and signatures
with the real library where that is installed. Captures are refused unless ``Graph.allowed`` is set; then they run at
once, and launching the graph only counts.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from engines.device.host_arrays import DeviceArray, HostArrays, running

TOTAL_BYTES: Final = 256 << 20
HOST_TO_DEVICE, DEVICE_TO_HOST, WITHIN = 1, 2, 3


class CUDARuntimeError(RuntimeError):
    """An error of the runtime, with its number."""

    def __init__(self, status: int, text: str = "cudaErrorInvalidValue: invalid argument") -> None:
        super().__init__(text)
        self.status = status


class Runtime:
    """``cupy.cuda.runtime``. ``fail_next`` lets the next call that enqueues fail with a status."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self.device: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.registered: dict[int, int] = {}
        self.fail_next = 0
        self.broken = 0

    def runtimeGetVersion(self) -> int:  # noqa: N802 - CuPy's name
        return 13000

    def driverGetVersion(self) -> int:  # noqa: N802
        return 13000

    def getDeviceCount(self) -> int:  # noqa: N802
        return 2

    def getDeviceProperties(self, device: int) -> dict[str, Any]:  # noqa: N802
        return {"name": b"Fake", "major": 9, "minor": 0, "multiProcessorCount": 132, "asyncEngineCount": 3}

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return TOTAL_BYTES - sum(size for _, size in self.device.values()), TOTAL_BYTES

    def malloc(self, size: int) -> int:
        self.check()
        if size > self.memGetInfo()[0]:
            raise CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
        return self._new(self.device, size)

    def free(self, ptr: int) -> None:
        self._remove(self.device, ptr)

    def hostAlloc(self, size: int, flags: int) -> int:  # noqa: N802
        self.check()
        return self._new(self.host, size)

    def freeHost(self, ptr: int) -> None:  # noqa: N802
        self._remove(self.host, ptr)

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:  # noqa: N802
        if ptr in self.registered:
            raise CUDARuntimeError(712, "cudaErrorHostMemoryAlreadyRegistered")
        self.registered[ptr] = size

    def hostUnregister(self, ptr: int) -> None:  # noqa: N802
        if self.registered.pop(ptr, None) is None:
            raise CUDARuntimeError(713, "cudaErrorHostMemoryNotRegistered")

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        self.check()
        assert stream in Stream.handles, "the stream is closed"
        for address, on_device in ((dst, kind in (HOST_TO_DEVICE, WITHIN)), (src, kind in (DEVICE_TO_HOST, WITHIN))):
            if self._inside(self.device, address, size) != on_device:
                raise CUDARuntimeError(1)
            if not on_device:
                # The driver takes it and makes the copy synchronous, which nobody would notice.
                registered = any(at <= address and address + size <= at + of for at, of in self.registered.items())
                assert registered or self._inside(self.host, address, size), "host memory of a copy is not page-locked"
        ctypes.memmove(dst, src, size)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        self.check()
        if not self._inside(self.device, ptr, size):
            raise CUDARuntimeError(1)
        ctypes.memset(ptr, value, size)

    def deviceSynchronize(self) -> None:  # noqa: N802
        self.check()

    def check(self) -> None:
        """Raise what was planted; an illegal address stays."""
        status, self.fail_next = self.fail_next or self.broken, 0
        if status == 700:
            self.broken = status
        if status:
            raise CUDARuntimeError(status, f"cudaError{status}")

    @staticmethod
    def _new(where: dict[int, Any], size: int) -> int:
        memory = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(memory) // 256) * 256
        ctypes.memset(address, 0xA5, size)
        where[address] = (memory, size)
        return address

    @staticmethod
    def _remove(where: dict[int, Any], address: int) -> None:
        if where.pop(address, None) is None:
            raise CUDARuntimeError(1)

    @staticmethod
    def _inside(where: dict[int, Any], address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + held for start, (_, held) in where.items())


class Stream:
    """``cupy.cuda.Stream``."""

    handles: Final[set[int]] = set()
    _count = 0

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None
    ) -> None:
        assert non_blocking, "a blocking stream waits for the default one"
        Stream._count += 1
        self.ptr = Stream._count
        Stream.handles.add(self.ptr)
        self.captures = False

    def __enter__(self) -> Stream:
        running.title = "launch"
        return self

    def __exit__(self, *_: object) -> None:
        running.title = ""

    def wait_event(self, event: Event) -> None:
        assert event.time_ns, "an event is waited for that was never recorded"

    def synchronize(self) -> None:
        assert not self.captures, "a stream that captures cannot be waited for"
        runtime.check()

    def begin_capture(self, mode: Any = None) -> None:
        assert not self.captures
        if not Graph.allowed:
            raise CUDARuntimeError(900, "cudaErrorStreamCaptureUnsupported")
        self.captures = Graph.capturing = True

    def end_capture(self) -> Graph:
        if not self.captures:
            raise RuntimeError("the stream does not capture")
        self.captures = Graph.capturing = False
        return Graph()


class Event:
    """``cupy.cuda.Event``."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        assert block and not disable_timing
        self.time_ns = 0

    @property
    def done(self) -> bool:
        return True

    def record(self, stream: Stream | None = None) -> None:
        assert stream is not None and not stream.captures
        runtime.check()
        self.time_ns = time.monotonic_ns()

    def synchronize(self) -> None:
        runtime.check()
        assert self.time_ns


class Graph:
    """``cupy.cuda.Graph``."""

    allowed = False
    capturing = False
    launched = 0

    def launch(self, stream: Stream | None = None) -> None:
        assert stream is not None
        Graph.launched += 1


class UnownedMemory:
    """``cupy.cuda.UnownedMemory``."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        assert device_id >= 0
        self.ptr, self.size = ptr, size


class MemoryPointer:
    """``cupy.cuda.MemoryPointer``."""

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class MemoryPool:
    """``cupy.cuda.MemoryPool``; nothing is taken from it here."""

    def malloc(self, size: int) -> Any:
        raise NotImplementedError

    def free_all_blocks(self, stream: Any = None) -> None: ...


class Device:
    """``cupy.cuda.Device``."""

    def __init__(self, device: int = 0) -> None: ...
    def use(self) -> None: ...
    def __enter__(self) -> None:
        running.title = "trial"

    def __exit__(self, *_: object) -> None:
        running.title = ""


@contextmanager
def using_allocator(allocator: Any = None) -> Iterator[None]:
    """``cupy.cuda.using_allocator``."""
    assert callable(allocator)
    yield


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """``cupy.cuda.get_elapsed_time``, in milliseconds."""
    return (end_event.time_ns - start_event.time_ns) / 1e6


class Arrays(HostArrays):
    """``cupy`` itself: the array functions, and ``cuda``."""

    __version__ = "fake"

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(
            runtime=runtime, Stream=Stream, Event=Event, Graph=Graph, Device=Device, MemoryPool=MemoryPool,
            MemoryPointer=MemoryPointer, UnownedMemory=UnownedMemory, using_allocator=using_allocator,
            get_elapsed_time=get_elapsed_time,
        )  # fmt: skip

    def ndarray(self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None) -> Any:
        assert memptr is not None
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        assert size <= memptr.mem.size
        raw = (ctypes.c_uint8 * size).from_address(memptr.ptr)
        return np.ctypeslib.as_array(raw).view(dtype).reshape(shape).view(DeviceArray)

    def matmul(self, left: Any, right: Any) -> Any:
        if Graph.capturing:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        return self.__getattr__("matmul")(left, right)


runtime = Runtime()


def fake_cupy() -> Arrays:
    """Return the module, as new."""
    runtime.__init__()  # type: ignore[misc]
    Graph.allowed, Graph.capturing, Graph.launched = False, False, 0
    return Arrays()
