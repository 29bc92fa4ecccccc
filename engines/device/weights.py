"""A model's weights: one slab on the device, and a pinned copy on the host to load it from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from engines.device.base import ALIGNMENT_BYTES, Event, PinnedMemory, Span
from engines.device.errors import OutOfDeviceMemory
from engines.device.shared import SharedDevice
from engines.tensor import NDArray


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a weight lies in its slab."""

    offset_bytes: int
    size_bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class SlabWeights:
    """Loads, unloads and follows a slab.

    Args:
        title: the model's name, for messages.
        arrays: what the slab holds; only their shapes are kept, the bytes are copied in ``start``.
        moved: told that addresses have changed: graphs that hold them must go.
    """

    def __init__(
        self, shared: SharedDevice, title: str, arrays: Mapping[str, NDArray], moved: Callable[[], None]
    ) -> None:
        self._shared = shared
        self._title = title
        self._moved = moved
        self._places: dict[str, _Place] = {}
        self._span: Span | None = None
        self._pinned: PinnedMemory | None = None
        self._loaded: Event | None = None
        end = 0
        for name, array in arrays.items():
            self._places[name] = _Place(end, array.nbytes, array.shape, array.dtype)
            end = -(-(end + array.nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.size_bytes = end
        """Of the slab, gaps for alignment included."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    @property
    def resident(self) -> bool:
        return self._span is not None or not self.size_bytes

    def start(self, arrays: Mapping[str, NDArray]) -> None:
        """Copy the weights to pinned host memory.

        Raises:
            DeviceFailed: the system does not lock that much memory.
        """
        if not self.size_bytes:
            return
        self._pinned = self._shared.device.pinned(self.size_bytes, f"weights of '{self._title}'")
        self._loaded = self._shared.device.event()
        room = self._pinned.array
        room[...] = 0
        for name, place in self._places.items():
            array = np.ascontiguousarray(arrays[name])
            room[place.offset_bytes : place.offset_bytes + place.size_bytes] = array.reshape(-1).view(np.uint8)

    def load(self) -> None:
        """Enqueue one copy that brings the weights to the device; does not wait for it.

        Raises:
            OutOfDeviceMemory: the arena has no block for them; the message says whether compacting would make one.
        """
        if self.resident:
            return
        assert self._pinned is not None and self._loaded is not None, "not started"
        shared = self._shared
        with shared.lock:
            span = shared.arena.place(id(self), self.size_bytes, self._move)
            if span is None:
                memory = shared.arena.memory()
                free_bytes = memory.capacity_bytes - memory.used_bytes
                raise OutOfDeviceMemory(
                    f"model '{self._title}': its weights need {self.size_bytes} bytes in one piece; the arena of "
                    f"{memory.capacity_bytes} has {free_bytes} free, {memory.largest_free_bytes} of them in one piece"
                )
            self._span = span
            shared.device.copy_in(span, self._pinned.array, shared.load)
            shared.load.record(self._loaded)
            shared.compute.wait(self._loaded)

    def span(self) -> Span:
        """Return the whole slab; it must be resident and not empty."""
        assert self._span is not None, f"the weights of '{self._title}' are not on the device"
        return self._span

    def part(self, name: str) -> tuple[Span, tuple[int, ...], np.dtype[np.generic]]:
        """Return where a weight lies now, its shape and its type."""
        place = self._places[name]
        return self.span().part(place.offset_bytes, place.size_bytes), place.shape, place.dtype

    def unload(self) -> None:
        """Free the slab; the host must have synchronized with every execution that read it."""
        if self._span is not None:
            assert self._loaded is not None
            self._moved()
            self._loaded.synchronize()
            with self._shared.lock:
                self._shared.arena.remove(id(self))
            self._span = None

    def close(self) -> None:
        """Free the slab and the copy on the host."""
        self.unload()
        if self._pinned is not None:
            self._pinned.free()
            self._pinned = None
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def _move(self, span: Span) -> None:
        self._span = span
        self._moved()
