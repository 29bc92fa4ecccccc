"""One allocation of device memory in which all engines of a worker keep weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Final

from engines.device.base import Buffer, Device, Span, Stream
from engines.slab_state import Room, SlabState, copies

BOUNCE_BYTES: Final = 32 * 1024 * 1024
"""Room through which slabs move that slide by much less than their size."""
BOUNCE_SHARE: Final = 8
"""On small devices it is this part of the arena at most."""

Moved = Callable[[Span], None]
"""Told, before the copies run, where a slab lies from now on: point at the new place and drop graphs."""


@dataclass(frozen=True, slots=True)
class SlabMemory:
    """Bytes of an arena. ``fragmentation``: the part of the free bytes outside the largest free block."""

    capacity_bytes: int
    used_bytes: int
    largest_free_bytes: int
    fragmentation: float


class SlabArena:
    """Slabs on one allocation.

    ``compact`` may only run while no execution is in flight; the other methods from any thread.

    Args:
        capacity_bytes: of the allocation, taken in ``start`` and kept until ``close``.
    """

    def __init__(self, device: Device, capacity_bytes: int, bounce_bytes: int = BOUNCE_BYTES) -> None:
        self._device = device
        self._state: SlabState[Hashable] = SlabState(capacity_bytes)
        self._bounce_bytes = max(1, min(bounce_bytes, capacity_bytes // BOUNCE_SHARE))
        self._buffer: Buffer | None = None
        self._bounce: Buffer | None = None
        self._users: dict[Hashable, tuple[int, Moved]] = {}
        """Wanted size and whom to tell, per key."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Allocate.

        Raises:
            OutOfDeviceMemory: the device has not that much.
        """
        self._buffer = self._device.allocate(self._state.capacity_bytes, "weights arena")
        try:
            self._bounce = self._device.allocate(self._bounce_bytes, "compaction bounce")
        except BaseException:
            self.close()
            raise

    def memory(self) -> SlabMemory:
        with self._lock:
            state = self._state
            return SlabMemory(
                state.capacity_bytes,
                state.capacity_bytes - state.free_bytes,
                state.largest_free_bytes,
                state.fragmentation,
            )

    def place(self, key: Hashable, size_bytes: int, moved: Moved) -> Span | None:
        """Return room for a slab, contents undefined; None if no free block is large enough.

        ``memory()`` says whether compacting would make room.
        """
        with self._lock:
            slab = self._state.place(key, size_bytes)
            if slab is None:
                return None
            self._users[key] = (size_bytes, moved)
            return self._span(slab.offset_bytes, size_bytes)

    def remove(self, key: Hashable) -> None:
        """Free a slab; the host must have synchronized with everything that uses it."""
        with self._lock:
            slab = self._state.remove(key)
            del self._users[key]
            self._device.forget(self._span(slab.offset_bytes, slab.size_bytes))

    def compact(self, stream: Stream, wanted_bytes: int | None = None) -> int:
        """Enqueue the copies that make room for ``wanted_bytes``, or of all free bytes one block; return bytes moved.

        Nothing may be in flight, and the caller orders later use behind ``stream``.
        """
        with self._lock:
            assert self._bounce is not None, "not started"
            moves = self._state.compact(wanted_bytes)
            for move in moves:
                size_bytes, moved = self._users[move.key]
                moved(self._span(move.target_bytes, size_bytes))
                # Only what was asked for: the rest of the last unit holds nothing.
                for copy in copies(replace(move, size_bytes=size_bytes), self._bounce_bytes):
                    self._device.copy_within(
                        self._room(copy.target, copy.target_bytes, copy.size_bytes),
                        self._room(copy.source, copy.source_bytes, copy.size_bytes),
                        stream,
                    )
            return sum(move.size_bytes for move in moves)

    def close(self) -> None:
        """Free the allocation; every slab must be removed before."""
        assert not self._state.slabs, f"slabs left in the arena: {sorted(map(str, self._state.slabs))}"
        for buffer in (self._buffer, self._bounce):
            if buffer is not None:
                buffer.free()
        self._buffer = self._bounce = None

    def _span(self, offset_bytes: int, size_bytes: int) -> Span:
        assert self._buffer is not None, "not started"
        return Span(self._buffer, offset_bytes, size_bytes)

    def _room(self, room: Room, offset_bytes: int, size_bytes: int) -> Span:
        assert self._bounce is not None, "not started"
        return (
            Span(self._bounce, offset_bytes, size_bytes)
            if room is Room.BOUNCE
            else self._span(offset_bytes, size_bytes)
        )
