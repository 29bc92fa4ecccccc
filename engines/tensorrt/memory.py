"""Device memory that the library asks for: weights of plans that hold them, and what it keeps beside.

The library asks here instead of the driver, so that every byte is known by model, and a plan that does not fit fails
with the figures. These blocks are allocations of their own and not part of the arena: the library keeps their
addresses, so they can never be moved.

What the library lets go of may still be read by work that it enqueued: the block waits here, serves the next request of
that size on the same stream, or is freed when ``sweep`` has waited for the device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engines.device.base import Buffer, Device
from engines.device.errors import OutOfDeviceMemory

MORE_ROOM: Final = "lower runtime.weight_cache_fraction, so that the arena leaves more beside it"


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """A model version that the library holds memory for; two of one name are two."""

    title: str


@dataclass(frozen=True, slots=True)
class _Block:
    owner: Owner
    buffer: Buffer


class LibraryMemory:
    """What the library holds. It calls from the thread that called it, and from threads of its own."""

    def __init__(self, device: Device) -> None:
        self.refused: OutOfDeviceMemory | None = None
        self._device = device
        self._lock = threading.RLock()
        self._owner = Owner("TensorRT itself")
        self._held: dict[int, _Block] = {}
        self._dropped: list[tuple[int, _Block]] = []

    @contextlib.contextmanager
    def of(self, owner: Owner) -> Iterator[None]:
        """Count what is asked for meanwhile as a model's; ``refused`` says afterwards what did not fit, if anything."""
        with self._lock:
            before, self._owner, self.refused = self._owner, owner, None
        try:
            yield
        finally:
            self._owner = before

    def held_bytes(self, owner: Owner) -> int:
        """Return what a model holds now."""
        with self._lock:
            return sum(block.buffer.size_bytes for block in self._held.values() if block.owner is owner)

    def allocate(self, size_bytes: int, stream: int) -> int | None:
        """Return an address for the library, None if it does not fit or nothing was asked for."""
        if size_bytes == 0:
            return None
        with self._lock:
            buffer = self._waiting(size_bytes, stream)
            if buffer is None:
                try:
                    buffer = self._device.allocate(size_bytes, f"memory of '{self._owner.title}' in TensorRT")
                except OutOfDeviceMemory as error:
                    self.refused = error
                    return None
            self._held[buffer.address] = _Block(self._owner, buffer)
            return buffer.address

    def release(self, address: int, stream: int) -> bool:
        """Take a block back; False if it is none of ours."""
        if not address:
            return True
        with self._lock:
            block = self._held.pop(address, None)
            if block is None:
                return False
            self._dropped.append((stream, block))
            return True

    def sweep(self) -> None:
        """Free what was given back; waits for the device. Not while a graph is captured."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        if dropped:
            self._device.synchronize()
            for _, block in dropped:
                block.buffer.free()

    def _waiting(self, size_bytes: int, stream: int) -> Buffer | None:
        """Return a block that was given back: the stream's later work comes after the work that still uses it."""
        for at, (given_back_on, block) in enumerate(self._dropped):
            if stream and given_back_on == stream and block.buffer.size_bytes == size_bytes:
                del self._dropped[at]
                return block.buffer
        return None
