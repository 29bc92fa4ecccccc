"""Buffers of one execution on a device: pinned host memory, device memory of the same layout, and what times them.

All inputs lie in one piece, all outputs in another, so that the engine's own buffers take one copy each way; what the
caller has elsewhere goes its own way (``transfer``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engines.base import Rows, Timing
from engines.device.base import ALIGNMENT_BYTES, Event, Span
from engines.device.shared import SharedDevice
from engines.device.transfer import Transfer
from engines.staging import Plan
from engines.tensor import NDArray, TensorSpec, element_count

_MOMENTS = ("copy in from", "copied in", "began", "ended", "copy out from", "copied out")


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets and sizes of tensors laid one behind the other, aligned."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Layout:
        offsets, each, end = [], list(sizes), 0
        for size in each:
            offsets.append(end)
            end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(offsets), tuple(each), end)

    @property
    def extents(self) -> list[tuple[int, int]]:
        """Offset and size of each."""
        return list(zip(self.offsets, self.sizes, strict=True))

    @classmethod
    def of_tensors(cls, specs: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]], extra_bytes: int = 0) -> Layout:
        """Return the layout of full tensors, with ``extra_bytes`` as one more piece at the end if not 0."""
        sizes = [element_count(shape) * spec.element.numpy.itemsize for spec, shape in zip(specs, shapes, strict=True)]
        return cls.of([*sizes, extra_bytes] if extra_bytes else sizes)


class DeviceSlot:
    """A slot whose arrays have a place on the device.

    Args:
        refusals: boolean results (one byte each) that travel back behind the outputs.

    Attributes:
        inputs, outputs: the engine's own pinned arrays, or the caller's.
    """

    def __init__(self, shared: SharedDevice, plan: Plan, refusals: int = 0) -> None:
        self.inputs: list[NDArray] = []
        self.outputs: list[NDArray] = []
        self.staged = self.launched = False
        self._shared = shared
        self._plan = plan
        self._in = Layout.of_tensors(plan.input_specs, plan.inputs)
        self._out = Layout.of_tensors(plan.output_specs, plan.outputs, refusals)
        device = shared.device
        size_bytes = max(1, self._in.size_bytes + self._out.size_bytes)
        self._buffer = device.allocate(size_bytes, f"staging of '{plan.model}'")
        try:
            self._pinned = device.pinned(size_bytes, f"staging of '{plan.model}'")
        except BaseException:
            self._buffer.free()
            raise
        self._pinned.array[...] = 0
        whole = Span.whole(self._buffer)
        self.input_span = whole.part(0, self._in.size_bytes)
        self.output_span = whole.part(self._in.size_bytes, self._out.size_bytes)
        self._own_inputs = self._arrays(plan.input_specs, plan.inputs, self._in, 0)
        self._own_outputs = self._arrays(plan.output_specs, plan.outputs, self._out, self._in.size_bytes)
        room, start = self._pinned.array, self._in.size_bytes
        self._in_transfer = Transfer(shared, room[:start], self._in.extents)
        self._out_transfer = Transfer(shared, room[start : start + self._out.size_bytes], self._out.extents)
        self._events: dict[str, Event] = {moment: device.event() for moment in _MOMENTS}

    def input_part(self, index: int) -> Span:
        return self.input_span.part(self._in.offsets[index], self._in.sizes[index])

    @property
    def input_parts(self) -> list[Span]:
        """What an execution reads: not the gaps between the inputs, where nothing is ever written."""
        return [self.input_part(index) for index, size in enumerate(self._in.sizes) if size]

    def output_part(self, index: int) -> Span:
        return self.output_span.part(self._out.offsets[index], self._out.sizes[index])

    @property
    def refusal_part(self) -> Span:
        """The bytes behind the last output."""
        return self.output_part(len(self._plan.outputs))

    @property
    def refused(self) -> NDArray:
        """The boolean results of the last execution, after ``wait``."""
        start = self._in.size_bytes + self._out.offsets[len(self._plan.outputs)]
        return self._pinned.array[start : start + self._out.sizes[len(self._plan.outputs)]]

    def use_own(self) -> None:
        """Hand out the pinned arrays; outputs of a data-dependent size were replaced by the last run's."""
        self.inputs, self.outputs = list(self._own_inputs), list(self._own_outputs)
        self._in_transfer.reset()
        self._out_transfer.reset()

    def use(self, inputs: list[NDArray], outputs: list[NDArray]) -> None:
        """Run on the caller's arrays, which must stay until the results are there."""
        self._plan.require_fit(inputs, outputs)
        self.use_own()
        for index, array in enumerate(inputs):
            self._in_transfer.use(index, 0, array)
        for index, (array, dynamic) in enumerate(zip(outputs, self._plan.dynamic, strict=True)):
            if not dynamic:
                self._out_transfer.use(index, 0, array)
        self.inputs, self.outputs = inputs, list(outputs)

    def use_rows(self, inputs: Sequence[Rows], outputs: Sequence[Rows]) -> None:
        """Let rows lie with the caller, beside those in the pinned arrays; after ``use_own``."""
        for rows in inputs:
            self._in_transfer.use(rows.tensor, self._plan.row_offset_bytes(self._plan.inputs, rows), rows.array)
        for rows in outputs:
            self._out_transfer.use(rows.tensor, self._plan.row_offset_bytes(self._plan.outputs, rows), rows.array)

    def send(self) -> None:
        """Enqueue the copies of the inputs."""
        shared = self._shared
        self.unstage()
        self.staged = True
        self._in_transfer.collect()
        with shared.lock:
            shared.copy_in.record(self._events["copy in from"])
            self._in_transfer.copy_in(self.input_span, shared.copy_in)
            shared.copy_in.record(self._events["copied in"])

    def begin(self) -> None:
        """Order the compute stream behind the inputs; the work comes next."""
        assert self.staged and not self.launched, "launched without new inputs"
        self.staged, self.launched = False, True
        self._shared.compute.wait(self._events["copied in"])
        self._shared.compute.record(self._events["began"])

    def end(self) -> None:
        """Enqueue the copies of the outputs behind the work; the lock is held since ``begin``."""
        shared = self._shared
        stream = shared.copy_out
        shared.compute.record(self._events["ended"])
        stream.wait(self._events["ended"])
        stream.record(self._events["copy out from"])
        self._out_transfer.copy_out(self.output_span, stream)
        stream.record(self._events["copied out"])

    def wait(self) -> Timing:
        """Wait for the outputs and return what each part took on the device."""
        self._events["copied out"].synchronize()
        self.launched = False
        elapsed, events = self._shared.device.elapsed_ns, self._events
        return Timing(
            # The clock of some devices is coarser than a small model; 0 would mean that nothing ran.
            max(1, elapsed(events["began"], events["ended"])),
            elapsed(events["copy in from"], events["copied in"]),
            elapsed(events["copy out from"], events["copied out"]),
        )

    def abandon(self) -> None:
        """Give the slot up after something could not be enqueued."""
        self._shared.device.synchronize()
        self.staged = self.launched = False

    def unstage(self) -> None:
        """Wait until no copy reads the inputs, which may be filled anew then."""
        if self.staged:
            self._events["copied in"].synchronize()
            self.staged = False

    def take_outputs(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Put outputs where the caller looks for them, after ``wait``; ``shapes`` are their real ones."""
        for index, shape in enumerate(shapes):
            if self._plan.dynamic[index]:
                room = self._own_outputs[index].reshape(-1)
                self.outputs[index] = room[: element_count(shape)].reshape(shape).copy()
        self._out_transfer.deliver()

    def close(self) -> None:
        """Free the buffers; nothing may be in flight."""
        self._own_inputs, self._own_outputs, self.inputs, self.outputs = [], [], [], []
        self._in_transfer.close()
        self._out_transfer.close()
        self._buffer.free()
        self._pinned.free()
        for event in self._events.values():
            event.close()

    def _arrays(
        self, specs: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]], layout: Layout, base: int
    ) -> list[NDArray]:
        arrays: list[NDArray] = []
        for spec, shape, offset, size in zip(specs, shapes, layout.offsets, layout.sizes, strict=False):
            piece = self._pinned.array[base + offset : base + offset + size]
            arrays.append(piece.view(spec.element.numpy).reshape(shape))
        return arrays
