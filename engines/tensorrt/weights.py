"""The weights of one model outside its plan: a slab in the shared arena, with a count of where it came to lie.

Who decides what is resident is not this module's business; it offers ``load``, ``unload`` and exact sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from engines.device.base import Span
from engines.device.errors import OutOfDeviceMemory
from engines.device.weights import SlabWeights
from engines.tensor import NDArray
from engines.tensorrt.rooms import Rooms


class OutsideWeights:
    """Inputs of the network that hold weights, by name.

    Attributes:
        generation: counts how often the slab came to lie elsewhere: addresses and graphs of before are void.
        slab_bytes: room for all of it; 0 for a model with its weights inside.
    """

    def __init__(self, title: str, rooms: Rooms, arrays: Mapping[str, NDArray]) -> None:
        self.generation = 0
        self._rooms = rooms
        self._slab = SlabWeights(rooms.shared, title, arrays, self._moved)
        self.slab_bytes = self._slab.size_bytes

    def start(self, arrays: Mapping[str, NDArray]) -> None:
        """Keep the values in pinned host memory.

        Raises:
            DeviceFailed: the system does not lock that much.
        """
        self._slab.start(arrays)

    @property
    def resident(self) -> bool:
        """Whether the weights are on the device, or on their way there."""
        return self._slab.resident

    @property
    def span(self) -> Span | None:
        """Where they lie; None for a model without a slab."""
        return self._slab.span() if self.slab_bytes else None

    def addresses(self) -> dict[str, int]:
        """Return where each weight lies now."""
        return {name: self._slab.part(name)[0].address for name in self._slab.names}

    def load(self) -> None:
        """Begin copying to the device; later executions wait there, the caller does not. May compact the arena.

        Raises:
            OutOfDeviceMemory: the arena has not that much left.
        """
        with self._rooms.lock:
            if self.resident:
                return
            try:
                self._slab.load()
            except OutOfDeviceMemory:
                memory = self._rooms.shared.arena.memory()
                if memory.capacity_bytes - memory.used_bytes < self.slab_bytes:
                    raise
                # Enough room, in pieces.
                self._rooms.settle()
                self._rooms.shared.compact(self.slab_bytes)
                self._slab.load()
            self.generation += 1

    def unload(self) -> None:
        """Give the room on the device back; waits for what runs."""
        with self._rooms.lock:
            if self.slab_bytes and self.resident:
                self._rooms.settle()
                self._slab.unload()

    def close(self) -> None:
        """Let go of the copies on device and host."""
        with self._rooms.lock:
            self._rooms.settle()
            self._slab.close()

    def _moved(self) -> None:
        self.generation += 1
