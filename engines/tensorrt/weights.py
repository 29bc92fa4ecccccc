"""The weights of one model: a slab in the shared arena, or inside its plan and then the library's.

Who decides what is resident is not this module's business; it offers ``load``, ``unload`` and exact sizes, and counts
how often addresses changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from engines.device.base import PinnedMemory, Span
from engines.device.errors import OutOfDeviceMemory
from engines.device.weights import SlabWeights
from engines.errors import NotReady
from engines.tensor import NDArray
from engines.tensorrt.memory import MORE_ROOM, LibraryMemory, Owner
from engines.tensorrt.rooms import Rooms


class Weights(Protocol):
    """What a model and its contexts need to know.

    Attributes:
        generation: counts how often weights came to lie elsewhere: addresses and graphs of before are void.
        slab_bytes: of the arena; 0 for a model with its weights inside.
        evictable_bytes: what ``unload`` gives back.
    """

    generation: int
    slab_bytes: int
    evictable_bytes: int

    @property
    def resident(self) -> bool: ...
    @property
    def span(self) -> Span | None: ...
    def addresses(self) -> dict[str, int]: ...
    def load(self) -> None: ...
    def unload(self) -> None: ...
    def close(self) -> None: ...


class OutsideWeights:
    """Inputs of the network that hold weights, by name; none for a plan that holds all of them for good."""

    def __init__(self, title: str, rooms: Rooms, arrays: Mapping[str, NDArray]) -> None:
        self.generation = 0
        self._rooms = rooms
        self._slab = SlabWeights(rooms.shared, title, arrays, self._moved)
        self.slab_bytes = self.evictable_bytes = self._slab.size_bytes

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


class DeferredWeights:
    """Weights inside a plan that the library loads and unloads while contexts stay; TensorRT-RTX does.

    Args:
        plan: as it was deserialized, deferred; kept in pinned memory, from which each ``load`` reads it again.
        evictable_bytes: what the library says they take.
        told: returns why the library refused something.
    """

    slab_bytes = 0
    span: Span | None = None

    def __init__(
        self,
        title: str,
        rooms: Rooms,
        engine: Any,
        memory: LibraryMemory,
        owner: Owner,
        evictable_bytes: int,
        told: Callable[[], str],
    ) -> None:
        self.generation = 0
        self.evictable_bytes = evictable_bytes
        self._title = title
        self._rooms = rooms
        self._engine = engine
        self._memory = memory
        self._owner = owner
        self._told = told
        self._plan: PinnedMemory | None = None

    def start(self, plan: bytes) -> None:
        """Keep the plan in pinned host memory.

        Raises:
            DeviceFailed: the system does not lock that much.
        """
        self._plan = self._rooms.device.pinned(len(plan), f"plan of '{self._title}'")
        self._plan.array[...] = np.frombuffer(plan, np.uint8)

    @property
    def resident(self) -> bool:
        return self._engine is not None and bool(self._engine.weights_loaded)

    def addresses(self) -> dict[str, int]:
        """Return nothing: contexts know where their engine's weights are."""
        return {}

    def load(self) -> None:
        """Bring the weights to the device; waits for what runs, and for them.

        Raises:
            OutOfDeviceMemory: they do not fit beside the arena.
            NotReady: the library refuses for another reason.
        """
        with self._rooms.lock:
            if self.resident:
                return
            assert self._plan is not None, "not started"
            self._rooms.settle()
            with self._memory.of(self._owner):
                loaded = self._engine.load_weights(memoryview(self._plan.array))  # type: ignore[arg-type]
            if not loaded:
                refused = self._memory.refused
                if refused is not None:
                    raise OutOfDeviceMemory(
                        f"model '{self._title}': its weights are inside its plan: {refused}; {MORE_ROOM}"
                    )
                raise NotReady(f"{self._title}: TensorRT does not load the plan's weights: {self._told()}")
            self.generation += 1

    def unload(self) -> None:
        """Give their room on the device back; waits for what runs."""
        with self._rooms.lock:
            if self.resident:
                self._rooms.settle()
                self._engine.unload_weights()
                self._memory.sweep()
                self.generation += 1

    def close(self) -> None:
        """Let go of the copy on the host and of the engine."""
        with self._rooms.lock:
            self._rooms.settle()
            self._engine = None
            if self._plan is not None:
                self._plan.free()
                self._plan = None
