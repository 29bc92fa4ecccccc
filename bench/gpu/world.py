"""What every section of the device check is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from bench.gpu.report import Report
from engines.array.on_device import DeviceArrayEngine
from engines.device.base import Buffer, Device, PinnedMemory, Span, Stream
from engines.device.shared import SharedDevice
from engines.tensor import NDArray


@dataclass(slots=True)
class World:
    """A device and how large things are on it.

    Attributes:
        copy_bytes: of one large copy.
        arena_bytes: of a weights arena; not more than a fifth of the device.
        cycles: loads and evictions.
        work_dir: for model files.
        ends_s: time of the monotonic clock after which nothing new is begun.
    """

    device: Device
    report: Report
    random: np.random.Generator
    copy_bytes: int
    arena_bytes: int
    cycles: int
    work_dir: Path
    ends_s: float

    @property
    def late(self) -> bool:
        return time.monotonic() > self.ends_s

    @contextmanager
    def memory(self, size_bytes: int) -> Iterator[tuple[Span, NDArray]]:
        """Give device memory and pinned memory of a size, filled with random bytes on the host."""
        buffer: Buffer | None = None
        pinned: PinnedMemory | None = None
        try:
            buffer = self.device.allocate(size_bytes, "check")
            pinned = self.device.pinned(size_bytes, "check")
            fill(pinned.array, self.random)
            yield Span.whole(buffer), pinned.array
        finally:
            self.device.synchronize()
            if buffer is not None:
                buffer.free()
            if pinned is not None:
                pinned.free()

    @contextmanager
    def stream(self, name: str) -> Iterator[Stream]:
        stream = self.device.stream(name)
        try:
            yield stream
        finally:
            stream.close()

    @contextmanager
    def engine(self) -> Iterator[tuple[SharedDevice, DeviceArrayEngine]]:
        """Give an array engine with an arena; everything that was opened must be closed inside."""
        shared = SharedDevice(self.device, self.arena_bytes)
        shared.start()
        engine = DeviceArrayEngine(shared)
        try:
            yield shared, engine
        finally:
            engine.close()
            shared.close()

    def device_s(self, stream: Stream, enqueue: Callable[[], None], repeats: int = 5) -> float:
        """Return the median of the device times between events around what ``enqueue`` enqueues, after one warm-up."""
        start, end = self.device.event(), self.device.event()
        times = []
        for turn in range(repeats + 1):
            stream.record(start)
            enqueue()
            stream.record(end)
            end.synchronize()
            if turn:
                times.append(self.device.elapsed_ns(start, end) / 1e9)
        start.close()
        end.close()
        return max(median(times), 1e-9)


def fill(array: NDArray, random: np.random.Generator) -> None:
    """Fill bytes with random ones, quickly: a block that is repeated with its position mixed in."""
    words = array[: len(array) // 8 * 8].view(np.uint64)
    block = random.integers(0, 1 << 63, min(len(words), 1 << 17), np.uint64)
    for at in range(0, len(words), max(1, len(block))):
        part = words[at : at + len(block)]
        np.bitwise_xor(block[: len(part)], np.uint64(at), out=part)
    array[len(words) * 8 :] = 7


def wall_s(run: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of a call, after one warm-up."""
    times = []
    for turn in range(repeats + 1):
        began = time.perf_counter()
        run()
        if turn:
            times.append(time.perf_counter() - began)
    return median(times)
