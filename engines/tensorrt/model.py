"""A model that is built: its engine, its contexts, and its weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from engines.base import Footprint
from engines.bundle.manifest import Manifest
from engines.bundle.signature import Signature
from engines.errors import EngineFailed
from engines.process_memory import release_freed
from engines.staging import Plan
from engines.tensor import NDArray
from engines.tensorrt.context import ProfileContext
from engines.tensorrt.executable import TensorRTExecutable
from engines.tensorrt.memory import LibraryMemory, Owner
from engines.tensorrt.rooms import Rooms
from engines.tensorrt.slot import DeviceSlot, PinnedArrays
from engines.tensorrt.weights import Weights


class TensorRTModel:
    """Owns every reference to its library objects: the last one that goes frees their device memory.

    Args:
        memory, owner: what the library holds for this model.
        inside_bytes: weights that are part of the engine, as the library tells.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        engine: Any,
        contexts: list[ProfileContext],
        weights: Weights,
        memory: LibraryMemory,
        owner: Owner,
        inside_bytes: int,
        rooms: Rooms,
    ) -> None:
        self._name = name
        self._manifest = manifest
        self._engine = engine
        self._contexts = contexts
        self._weights = weights
        self._memory = memory
        self._owner = owner
        self._inside_bytes = inside_bytes
        self._rooms = rooms
        self._pinned: dict[int, PinnedArrays] = {}
        self._executables: dict[tuple[int, int], TensorRTExecutable] = {}

    @property
    def footprint(self) -> Footprint:
        """Exact: the slab, and what the library asked for or tells of its engine; scratch is shared by all models."""
        scratch = max((context.scratch_bytes for context in self._contexts), default=0)
        inside_bytes = max(self._inside_bytes, self._memory.held_bytes(self._owner))
        return Footprint(self._weights.slab_bytes + inside_bytes, scratch, exact=True)

    @property
    def evictable_bytes(self) -> int:
        """What ``unload`` gives back: 0 where weights are inside for good, until the model is closed."""
        return self._weights.evictable_bytes

    @property
    def resident(self) -> bool:
        """Whether it can execute without ``load``."""
        return self._weights.resident

    def load(self) -> None:
        """Begin bringing the weights to the device; executions wait for them on the device, the caller does not.

        Raises:
            OutOfDeviceMemory: they do not fit beside the others.
        """
        self._weights.load()

    def unload(self) -> None:
        """Free the weights' room; contexts and executables stay."""
        self._weights.unload()

    def run(self, inputs: list[NDArray]) -> list[NDArray]:
        assert self._engine is not None, "the model is closed"
        context = self._fitting(inputs)
        with self._rooms.lock:
            pinned = self._pinned.get(context.profile.index)
            if pinned is None:
                pinned = self._pinned[context.profile.index] = PinnedArrays(self._name, context, self._rooms)
            slot = DeviceSlot(self._name, context, self._rooms, pinned, pinned.inputs, pinned.outputs, bound=False)
            for room, given in zip(pinned.inputs, inputs, strict=True):
                room[...] = 0
                room[tuple(slice(0, size) for size in given.shape)] = given
            slot.stage()
            slot.launch()
            slot.finish()
        rows = self._rows(inputs)
        return [
            _first_rows(output, spec.batch_axis, rows, context.profile.batch_size)
            for output, spec in zip(slot.outputs, self._manifest.outputs, strict=True)
        ]

    def prepare(self, signature: Signature) -> None:
        assert self._engine is not None, "the model is closed"
        by_key = {(context.profile.variant, context.profile.batch_size): context for context in self._contexts}
        self._executables = {
            key: TensorRTExecutable(key[1], Plan.of(self._name, signature, *key), context, self._rooms)
            for key, context in by_key.items()
        }
        self._free_pinned()

    def executable(self, variant: int, batch_size: int) -> TensorRTExecutable:
        return self._executables[variant, batch_size]

    def close(self) -> None:
        with self._rooms.lock:
            self._rooms.settle()
            for executable in self._executables.values():
                executable.close()
            self._executables.clear()
            self._free_pinned()
            for context in self._contexts:
                context.close()
            self._contexts = []
            self._engine = None
            self._weights.close()
        release_freed()
        # Only now the library has let go of everything: its objects may have hung in cycles.
        self._memory.sweep()

    def _free_pinned(self) -> None:
        for pinned in self._pinned.values():
            pinned.free()
        self._pinned.clear()

    def _rows(self, inputs: list[NDArray]) -> int:
        for spec, array in zip(self._manifest.inputs, inputs, strict=True):
            if spec.batch_axis is not None:
                return int(array.shape[spec.batch_axis])
        return 0

    def _fitting(self, inputs: list[NDArray]) -> ProfileContext:
        """Return the smallest compiled shape that holds the inputs; rows beyond theirs are zeros.

        Raises:
            EngineFailed: there is none.
        """
        specs = self._manifest.inputs
        for context in self._contexts:
            if all(
                len(dims) == array.ndim
                and all(
                    size <= dim if axis == spec.batch_axis else size == dim
                    for axis, (size, dim) in enumerate(zip(array.shape, dims, strict=True))
                )
                for (_, dims), array, spec in zip(context.profile.shapes, inputs, specs, strict=True)
            ):
                return context
        given = ", ".join(f"'{spec.name}' {list(array.shape)}" for spec, array in zip(specs, inputs, strict=True))
        raise EngineFailed(f"model '{self._name}': no compiled shape holds {given}")


def _first_rows(output: NDArray, batch_axis: int | None, rows: int, batch_size: int) -> NDArray:
    """Return a copy without padding rows; an output of another size than it should be is left for the caller to see."""
    if batch_axis is None or batch_axis >= output.ndim or output.shape[batch_axis] != batch_size or rows == batch_size:
        return output.copy()
    return np.ascontiguousarray(np.take(output, range(rows), axis=batch_axis))
