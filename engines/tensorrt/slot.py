"""One execution from filled arrays to arrays of results, and the pinned memory it passes through.

States: idle -> staged (inputs on their way to a region) -> launched (execution and the way back are enqueued) -> idle.
A region that is taken back turns a staged slot idle again; ``launch`` stages it anew.

Copies name page-locked memory only. What the caller has in registered memory is read and written where it lies, whole
arrays as well as runs of rows; anything else passes through the slot's own pinned arrays (``engines.device.transfer``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, unique

import numpy as np

from engines.base import Rows, Timing
from engines.device.base import PinnedMemory
from engines.device.transfer import Transfer
from engines.errors import EngineFailed
from engines.staging import Plan
from engines.tensor import BY_NAME, NDArray, element_count
from engines.tensorrt.context import IoTensor, Outcome, ProfileContext
from engines.tensorrt.rooms import Region, Rooms


@unique
class State(Enum):
    """Where an execution is."""

    IDLE = "idle"
    STAGED = "staged"
    LAUNCHED = "launched"


class PinnedArrays:
    """Pinned room for one execution's inputs and outputs, laid out as in a region."""

    def __init__(self, title: str, context: ProfileContext, rooms: Rooms) -> None:
        self._memory: PinnedMemory | None = rooms.device.pinned(max(context.region_bytes, 1), f"staging of {title}")
        self.room = self._memory.array[: context.region_bytes]
        self.room[...] = 0
        self.inputs = [_view(self.room, tensor) for tensor in context.inputs]
        self.outputs = [_view(self.room, tensor) for tensor in context.outputs]

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""
        self.inputs, self.outputs, self.room = [], [], np.empty(0, np.uint8)
        if self._memory is not None:
            self._memory.free()
            self._memory = None


class DeviceSlot:
    """An execution of one context; ``inputs`` and ``outputs`` are what the caller fills and reads.

    Args:
        pinned: where everything passes through that is not page-locked.
        bound: whether ``inputs`` and ``outputs`` are the caller's arrays, and not the pinned ones.

    Attributes:
        given: the output arrays as they came, while ``outputs`` holds others of a size that the data decided.
    """

    def __init__(
        self,
        title: str,
        context: ProfileContext,
        rooms: Rooms,
        pinned: PinnedArrays,
        inputs: list[NDArray],
        outputs: list[NDArray],
        *,
        bound: bool,
    ) -> None:
        self.pinned = pinned
        self.inputs, self.outputs, self.given = inputs, list(outputs), list(outputs)
        self.state = State.IDLE
        self.timing = Timing(0)
        self.error: EngineFailed | None = None
        self._title = title
        self._context = context
        self._device = rooms.device
        self._rooms = rooms
        start = context.inputs_bytes
        into = [(tensor.offset_bytes, tensor.room_bytes) for tensor in context.inputs]
        # Outputs whose size the data decides are fetched when it is known.
        out = [(tensor.offset_bytes - start, 0 if tensor.dynamic else tensor.room_bytes) for tensor in context.outputs]
        self._in_transfer = Transfer(rooms.shared, pinned.room[:start], into)
        self._out_transfer = Transfer(rooms.shared, pinned.room[start:], out)
        if bound:
            for index, array in enumerate(inputs):
                self._in_transfer.use(index, 0, array)
            for index, (array, tensor) in enumerate(zip(outputs, context.outputs, strict=True)):
                if not tensor.dynamic:
                    self._out_transfer.use(index, 0, array)
        self._region: Region | None = None
        self._outcome: Outcome | None = None

    def use_own(self) -> None:
        """Let everything pass through the pinned arrays again; of a slot that is not bound, and idle."""
        self._in_transfer.reset()
        self._out_transfer.reset()

    def use_rows(self, plan: Plan, inputs: Sequence[Rows], outputs: Sequence[Rows]) -> None:
        """Let rows lie with the caller, beside those in the pinned arrays; of a slot that is not bound, and idle."""
        for rows in inputs:
            self._in_transfer.use(rows.tensor, plan.row_offset_bytes(plan.inputs, rows), rows.array)
        for rows in outputs:
            self._out_transfer.use(rows.tensor, plan.row_offset_bytes(plan.outputs, rows), rows.array)

    def stage(self) -> None:
        """Begin copying inputs to the device."""
        assert self.state is not State.LAUNCHED, "staged while it runs"
        self.unstage()
        self._in_transfer.collect()
        with self._rooms.lock:
            self._stage()

    def launch(self) -> None:
        """Enqueue the execution and the copies of its results."""
        rooms, context = self._rooms, self._context
        with rooms.lock:
            assert self.state is not State.LAUNCHED, "launched twice"
            self.error = None
            if self.state is State.IDLE:
                # The region was taken back.
                self._in_transfer.collect()
                self._stage()
            region = self._region
            assert region is not None
            compute, copy_out = rooms.shared.compute, rooms.shared.copy_out
            compute.wait(region.inputs_ready)
            compute.record(region.started)
            self._outcome = context.launch(region)
            compute.record(region.ended)
            copy_out.wait(region.ended)
            self._copy_out(region)
            copy_out.record(region.outputs_ready)
            self.state = State.LAUNCHED

    def finish(self) -> Timing:
        """Wait for the results.

        Raises:
            EngineFailed: the execution failed.
            DeviceLost: the device is broken.
        """
        region = self._region
        if self.state is State.LAUNCHED and region is not None:
            # Not under the lock: another thread may stage meanwhile. If the slot is settled meanwhile, this waits for
            # another execution, which does no harm.
            region.outputs_ready.synchronize()
        self.settle()
        if self.error is not None:
            raise self.error
        return self.timing

    def running(self) -> bool:
        return self.state is State.LAUNCHED

    def settle(self) -> None:
        """See ``rooms.Lodger``; errors are kept for ``finish``."""
        with self._rooms.lock:
            if self.state is not State.LAUNCHED:
                return
            region, outcome = self._region, self._outcome
            assert region is not None and outcome is not None
            try:
                region.outputs_ready.synchronize()
                region.ended.synchronize()
                if outcome.errors:
                    self.error = EngineFailed(f"model '{self._title}': {'; '.join(outcome.errors)}")
                else:
                    self._collect(region, outcome)
                self.timing = self._measured(region)
            except EngineFailed as error:
                self.error = error
            finally:
                self._leave()

    def unstage(self) -> None:
        """See ``rooms.Lodger``."""
        with self._rooms.lock:
            if self.state is State.STAGED and self._region is not None:
                self._region.inputs_ready.synchronize()
                self._leave()

    def release(self) -> None:
        """Let go of every array."""
        self.inputs, self.outputs, self.given = [], [], []
        self._in_transfer.close()
        self._out_transfer.close()

    def _leave(self) -> None:
        if self._region is not None:
            self._region.lodger = None
        self._region = self._outcome = None
        self.state = State.IDLE

    def _stage(self) -> None:
        context, stream = self._context, self._rooms.shared.copy_in
        region = self._region = self._rooms.acquire(self)
        stream.record(region.copy_started)
        self._in_transfer.copy_in(region.span.part(0, context.inputs_bytes), stream)
        stream.record(region.inputs_ready)
        self.state = State.STAGED

    def _copy_out(self, region: Region) -> None:
        """Enqueue copies of all outputs whose size is known."""
        context = self._context
        size_bytes = context.region_bytes - context.inputs_bytes
        self._out_transfer.copy_out(region.span.part(context.inputs_bytes, size_bytes), self._rooms.shared.copy_out)

    def _collect(self, region: Region, outcome: Outcome) -> None:
        """Bring the outputs where the caller reads them: those of unknown size have one now."""
        stream = self._rooms.shared.copy_out
        pending = []
        for index, tensor in enumerate(self._context.outputs):
            if tensor.dynamic:
                shape = outcome.shapes[tensor.name]
                dtype = BY_NAME[tensor.dtype]
                size = element_count(shape) * dtype.itemsize
                room = self.pinned.room[tensor.offset_bytes : tensor.offset_bytes + size]
                if size:
                    self._device.copy_out(room, region.span.part(tensor.offset_bytes, size), stream)
                pending.append((index, room, shape, dtype.numpy))
        self._out_transfer.deliver()
        if pending:
            stream.synchronize()
        for index, room, shape, numpy_dtype in pending:
            # Copied: the next execution writes over the pinned room.
            self.outputs[index] = room.copy().view(numpy_dtype).reshape(shape)

    def _measured(self, region: Region) -> Timing:
        elapsed = self._device.elapsed_ns
        return Timing(
            elapsed(region.started, region.ended),
            copy_in_ns=elapsed(region.copy_started, region.inputs_ready),
            copy_out_ns=elapsed(region.ended, region.outputs_ready),
        )


def _view(room: NDArray, tensor: IoTensor) -> NDArray:
    shape = tuple(max(size, 0) for size in tensor.shape)
    dtype = BY_NAME[tensor.dtype]
    size = element_count(shape) * dtype.itemsize
    return room[tensor.offset_bytes : tensor.offset_bytes + size].view(dtype.numpy).reshape(shape)
