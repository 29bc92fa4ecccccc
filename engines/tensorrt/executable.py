"""One compiled (variant, batch size), as the worker uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.base import Rows, Slot, Timing
from engines.device.transfer import DIRECT_BYTES
from engines.staging import SLOTS, Plan, aligned_zeros
from engines.tensor import NDArray
from engines.tensorrt.context import ProfileContext
from engines.tensorrt.rooms import Rooms
from engines.tensorrt.slot import DeviceSlot, PinnedArrays, State


@dataclass(slots=True)
class _Place:
    """Pinned arrays, the slot over them, and the slot that used them last (a bound one, maybe)."""

    pinned: PinnedArrays
    own: DeviceSlot
    last: DeviceSlot


class TensorRTExecutable:
    """Runs one profile; pinned memory is allocated by the first ``slot``."""

    binds = True
    direct_bytes = DIRECT_BYTES

    def __init__(
        self,
        batch_size: int,
        plan: Plan,
        context: ProfileContext,
        rooms: Rooms,
    ) -> None:
        self.batch_size = batch_size
        self._plan = plan
        self._context = context
        self._rooms = rooms
        self._places: list[_Place] = []
        self._next = 0

    def slot(self) -> Slot:
        place = self._turn()
        # Outputs of a data-dependent size were replaced by the last run's.
        place.own.outputs[:] = place.own.given
        place.own.use_own()
        place.last = place.own
        return place.own

    def bind(self, inputs: list[NDArray], outputs: list[NDArray]) -> Slot:
        self._plan.require_fit(inputs, outputs)
        place = self._turn()
        # In flight it may use the place's pinned arrays, so the next turn waits for it.
        place.last = self._made(place.pinned, inputs, outputs, bound=True)
        return place.last

    def rows(self, slot: Slot, inputs: Sequence[Rows], outputs: Sequence[Rows]) -> None:
        assert isinstance(slot, DeviceSlot)
        slot.use_rows(self._plan, inputs, outputs)

    def stage(self, slot: Slot) -> None:
        assert isinstance(slot, DeviceSlot)
        slot.stage()

    def unstage(self, slot: Slot) -> None:
        assert isinstance(slot, DeviceSlot)
        slot.unstage()

    def launch(self, slot: Slot) -> None:
        assert isinstance(slot, DeviceSlot)
        slot.launch()

    def finish(self, slot: Slot) -> Timing:
        assert isinstance(slot, DeviceSlot)
        timing = slot.finish()
        for index, tensor in enumerate(self._context.outputs):
            output = slot.outputs[index]
            if tensor.dynamic or output.shape != self._plan.outputs[index]:
                self._plan.checked(index, output)
                if not self._plan.dynamic[index]:
                    # The device could not know the size beforehand; the caller does.
                    slot.given[index][...] = output
                    slot.outputs[index] = slot.given[index]
        return timing

    def close(self) -> None:
        """Free the pinned memory; waits for what is in flight."""
        for place in self._places:
            _idle(place.last)
            _idle(place.own)
            place.own.release()
            place.pinned.free()
        self._places.clear()

    def _turn(self) -> _Place:
        """Return the place that was used longest ago, with nothing in flight."""
        if len(self._places) < SLOTS:
            pinned = PinnedArrays(self._plan.model, self._context, self._rooms)
            outputs = [
                aligned_zeros(shape, spec.element.numpy) if tensor.dynamic else array
                for array, tensor, shape, spec in zip(
                    pinned.outputs, self._context.outputs, self._plan.outputs, self._plan.output_specs, strict=True
                )
            ]
            own = self._made(pinned, list(pinned.inputs), outputs, bound=False)
            place = _Place(pinned, own, own)
            self._places.append(place)
            return place
        place = self._places[self._next]
        self._next = (self._next + 1) % SLOTS
        _idle(place.last)
        return place

    def _made(self, pinned: PinnedArrays, inputs: list[NDArray], outputs: list[NDArray], *, bound: bool) -> DeviceSlot:
        return DeviceSlot(self._plan.model, self._context, self._rooms, pinned, inputs, outputs, bound=bound)


def _idle(slot: DeviceSlot) -> None:
    if slot.state is State.LAUNCHED:
        slot.settle()
    elif slot.state is State.STAGED:
        slot.unstage()
