"""The weights of one model on their way between pinned host memory and the shared slab arena.

The host copy stays for as long as the model is open, so loading is one asynchronous copy and evicting only forgets.
Who decides what is resident is not this module's business; it offers ``load``, ``unload`` and exact sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from engines.device.base import Device, Event, PinnedMemory, Span, Stream
from engines.device.errors import OutOfDeviceMemory
from engines.slab import SlabArena
from engines.tensor import NDArray
from engines.tensorrt.network import Weight, fill_slab
from engines.tensorrt.rooms import Rooms


class Weights:
    """One slab.

    Attributes:
        generation: counts how often the slab came to lie elsewhere.
    """

    def __init__(
        self, title: str, weights: tuple[Weight, ...], slab_bytes: int, device: Device, rooms: Rooms, arena: SlabArena
    ) -> None:
        self.weights = weights
        self.slab_bytes = slab_bytes
        self.generation = 0
        self._title = title
        self._device = device
        self._rooms = rooms
        self._arena = arena
        self._host: PinnedMemory | None = None
        self._copied: Event | None = None
        self._span: Span | None = None
        self._waiting = False

    def start(self, arrays: Mapping[str, NDArray]) -> None:
        """Put the values into pinned memory.

        Raises:
            DeviceFailed: the system does not lock that much.
        """
        if not self.slab_bytes:
            return
        self._host = self._device.pinned(self.slab_bytes, f"weights of {self._title}")
        self._copied = self._device.event()
        fill_slab(self._host.array[: self.slab_bytes], self.weights, arrays)

    @property
    def resident(self) -> bool:
        """Whether the weights are on the device, or on their way there."""
        return self._span is not None or not self.slab_bytes

    @property
    def span(self) -> Span | None:
        """Where they lie; None for a model without a slab."""
        assert self.resident, f"weights of {self._title} are not on the device"
        return self._span

    def load(self) -> None:
        """Begin copying the weights to the device; compacts the arena if only that makes room.

        Raises:
            OutOfDeviceMemory: the arena has not that much left; says how much.
        """
        with self._rooms.lock:
            if self.resident:
                return
            assert self._host is not None and self._copied is not None, "not started"
            span = self._arena.place(self, self.slab_bytes, self._moved)
            if span is None:
                memory = self._arena.memory()
                if memory.capacity_bytes - memory.used_bytes >= self.slab_bytes:
                    self._rooms.settle()
                    self._arena.compact(self._rooms.copy_in, self.slab_bytes)
                    # Executions of the models that moved must run behind the copies.
                    self._rooms.copy_in.synchronize()
                    span = self._arena.place(self, self.slab_bytes, self._moved)
            if span is None:
                memory = self._arena.memory()
                raise OutOfDeviceMemory(
                    f"weights of {self._title}: {self.slab_bytes} bytes do not fit into the weights arena: "
                    f"{memory.used_bytes} of {memory.capacity_bytes} are used"
                )
            self._device.copy_in(span, self._host.array[: self.slab_bytes], self._rooms.copy_in)
            self._rooms.copy_in.record(self._copied)
            self._span, self._waiting = span, True
            self.generation += 1

    def before_use(self, stream: Stream) -> None:
        """Order what comes next on ``stream`` behind the load; the rooms' lock is held."""
        if self._waiting:
            assert self._copied is not None
            stream.wait(self._copied)
            self._waiting = False

    def unload(self) -> None:
        """Give the room on the device back; waits for what runs."""
        with self._rooms.lock:
            if self._span is None:
                return
            self._rooms.settle()
            self._arena.remove(self)
            self._span = None

    def close(self) -> None:
        """Let go of both copies."""
        self.unload()
        if self._host is not None:
            self._host.free()
            self._host = None
        if self._copied is not None:
            self._copied.close()
            self._copied = None

    def _moved(self, span: Span) -> None:
        self._span = span
        self.generation += 1
