"""What the engines of one worker share on its device: streams, the weights arena, and reachable host memory."""

from __future__ import annotations

import threading
from bisect import bisect_right

from engines.device.base import Device, Registration, Stream
from engines.device.errors import CannotRegister
from engines.slab import SlabArena
from engines.staging import address_of
from engines.tensor import NDArray

MAX_REGISTRATIONS = 256
"""Pieces of host memory registered at once: one arena per frontend, and room for those that are being replaced."""


class SharedDevice:
    """One device, used by several models and engines.

    Copies of inputs, execution, copies of outputs and loading of weights have a stream each, so that none waits for
    another without a reason. ``lock`` is held while operations are enqueued: one stream must not get those of two
    threads mixed, and a capture must not get those of another.

    Args:
        arena_bytes: device memory kept for weights.
    """

    def __init__(self, device: Device, arena_bytes: int) -> None:
        self.device = device
        self.arena = SlabArena(device, arena_bytes)
        self.lock = threading.RLock()
        self.copy_in: Stream
        self.compute: Stream
        self.copy_out: Stream
        self.load: Stream
        self._streams: list[Stream] = []
        self._registered: list[tuple[int, int, Registration]] = []

    def start(self) -> None:
        """Allocate the arena and make the streams.

        Raises:
            OutOfDeviceMemory: the arena does not fit.
        """
        self.arena.start()
        try:
            for name in ("copy in", "compute", "copy out", "load"):
                self._streams.append(self.device.stream(name))
        except BaseException:
            self.close()
            raise
        self.copy_in, self.compute, self.copy_out, self.load = self._streams

    def register(self, memory: NDArray, purpose: str) -> bool:
        """Let copies go straight from and to host memory until ``unregister``; False if the driver refuses."""
        if len(self._registered) >= MAX_REGISTRATIONS:
            return False
        try:
            registration = self.device.register(memory, purpose)
        except CannotRegister:
            return False
        start = address_of(memory)
        with self.lock:
            self._registered.append((start, start + memory.nbytes, registration))
            self._registered.sort(key=_start_of)
        return True

    def unregister(self, memory: NDArray) -> None:
        """Undo ``register``; does nothing if it was refused. No copy may use the memory any more."""
        start = address_of(memory)
        with self.lock:
            for entry in self._registered:
                if entry[0] == start:
                    self._registered.remove(entry)
                    entry[2].release()
                    return

    def reaches(self, array: NDArray) -> bool:
        """Return whether a contiguous host array lies in registered memory."""
        start = address_of(array)
        at = bisect_right(self._registered, start, key=_start_of) - 1
        return at >= 0 and start + array.nbytes <= self._registered[at][1]

    def compact(self, wanted_bytes: int | None = None) -> int:
        """Make room for ``wanted_bytes`` in the arena, or of all free bytes one block; return the bytes moved.

        Waits for everything on the device first, and for the copies; who enqueues meanwhile waits for the lock.
        """
        with self.lock:
            self.device.synchronize()
            moved_bytes = self.arena.compact(self.compute, wanted_bytes)
            self.compute.synchronize()
            return moved_bytes

    def close(self) -> None:
        """Give everything back; models must be closed before."""
        for _, _, registration in self._registered:
            registration.release()
        self._registered.clear()
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self.arena.close()


def _start_of(entry: tuple[int, int, Registration]) -> int:
    return entry[0]
