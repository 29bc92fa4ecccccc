"""The array engine on a device: the same operators over the device's array module, the device layer around them.

It runs any model that the array engine runs on any GPU that CuPy knows, without a compiler for the model, and uses all
of the device layer: that is what it is for. A library that compiles models is faster.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from engines.agreement import model_name, require_agreement, require_facts
from engines.array.graph import Graph
from engines.array.interpreter import Interpreter, NodeFailed, Notes, to_host
from engines.array.loading import load_graph
from engines.base import Footprint, Rows, Slot, Timing
from engines.bundle.manifest import Manifest
from engines.bundle.signature import Signature
from engines.device.base import Graph as DeviceGraph
from engines.device.base import Span, Work
from engines.device.errors import CannotCapture, OutOfDeviceMemory
from engines.device.shared import SharedDevice
from engines.device.staging import DeviceSlot, Layout
from engines.device.transfer import DIRECT_BYTES
from engines.device.weights import SlabWeights
from engines.errors import EngineFailed
from engines.process_memory import release_freed
from engines.staging import SLOTS, Plan
from engines.tensor import NDArray

log = logging.getLogger("engines.array")

_BOOL: Final = np.dtype(np.bool_)


class DeviceArrayEngine:
    """Computes with the array module of a device; the shared device outlives the engine."""

    name = "array"

    def __init__(self, shared: SharedDevice) -> None:
        self._shared = shared

    def open(self, manifest: Manifest, model_file: Path) -> DeviceArrayModel:
        name = model_name(model_file)
        require_facts(model_file)
        graph = load_graph(name, model_file)
        require_agreement(manifest, graph.inputs, graph.outputs, model_file)
        model = DeviceArrayModel(name, manifest, graph, self._shared)
        try:
            model.start()
        except BaseException:
            model.close()
            raise
        return model

    def compact(self) -> int:
        """Make one free block of all free bytes of the weights arena, while nothing runs; return the bytes moved."""
        return self._shared.compact()

    def close(self) -> None:
        """Nothing is shared between models but the device."""


class DeviceArrayModel:
    """One graph, its weights in the arena, and its executables."""

    def __init__(self, name: str, manifest: Manifest, graph: Graph, shared: SharedDevice) -> None:
        self._name = name
        self._manifest = manifest
        self._shared = shared
        self._interpreter = Interpreter(graph, shared.device.xp)
        self._weights = SlabWeights(shared, name, self._interpreter.weights(), self._drop_graphs)
        self._executables: dict[tuple[int, int], DeviceArrayExecutable] = {}
        self._closed = False

    @property
    def footprint(self) -> Footprint:
        """Weights as the slab holds them; scratch as the intermediate values of the largest run so far."""
        return Footprint(self._weights.size_bytes, self._interpreter.peak_bytes, exact=False)

    @property
    def resident(self) -> bool:
        return self._weights.resident

    def start(self) -> None:
        """Copy the weights to pinned memory and load them.

        Raises:
            OutOfDeviceMemory: the arena has no room for them.
        """
        self._weights.start(self._interpreter.weights())
        self.load()

    def load(self) -> None:
        """Enqueue the copy of the weights to the device; the running batch goes on meanwhile.

        If the arena has room only in pieces, it is compacted first, which waits for what runs.

        Raises:
            OutOfDeviceMemory: the arena has not that much left.
        """
        with self._shared.lock:
            try:
                self._weights.load()
            except OutOfDeviceMemory:
                memory = self._shared.arena.memory()
                if memory.capacity_bytes - memory.used_bytes < self._weights.size_bytes:
                    raise
                self._shared.compact(self._weights.size_bytes)
                self._weights.load()

    def unload(self) -> None:
        """Free the weights' device memory; none of the model's executions may be in flight."""
        self._weights.unload()

    def run(self, inputs: list[NDArray]) -> list[NDArray]:
        assert not self._closed, "the model is closed"
        shared, device = self._shared, self._shared.device
        layout = Layout.of(array.nbytes for array in inputs)
        buffer = device.allocate(max(1, layout.size_bytes), f"inputs of '{self._name}'")
        pinned = device.pinned(max(1, layout.size_bytes), f"inputs of '{self._name}'")
        parts = [
            Span.whole(buffer).part(offset, size) for offset, size in zip(layout.offsets, layout.sizes, strict=True)
        ]
        outcome: list[list[NDArray] | EngineFailed] = []

        def work() -> None:
            feeds = {
                spec.name: device.array(part, array.shape, array.dtype)
                for spec, part, array in zip(self._manifest.inputs, parts, inputs, strict=True)
            }
            try:
                results = self.interpret(feeds)
                refused = [reason for wrong, reason in self._interpreter.notes.refusals if bool(to_host(wrong))]
                if refused:
                    raise NodeFailed(refused[0])
                outcome.append([to_host(results[spec.name]) for spec in self._manifest.outputs])
            except Exception as error:
                outcome.append(failure(self._name, error))

        try:
            with shared.lock:
                for offset, part, array in zip(layout.offsets, parts, inputs, strict=True):
                    staged = pinned.array[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
                    staged[...] = array
                    device.copy_in(part, staged, shared.compute)
                device.launch(shared.compute, work, reads=[*parts, *self.weight_spans()], writes=[])
        finally:
            shared.compute.synchronize()
            buffer.free()
            pinned.free()
        (result,) = outcome
        if isinstance(result, EngineFailed):
            raise result
        return result

    def interpret(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run the graph, inside work of the device that declares ``weight_spans``."""
        device = self._shared.device
        weights = {name: device.array(*self._weights.part(name)) for name in self._weights.names}
        return self._interpreter.run(feeds, weights)

    @property
    def notes(self) -> Notes:
        """What the last run left behind."""
        return self._interpreter.notes

    def weight_spans(self) -> list[Span]:
        return [self._weights.span()] if self._weights.size_bytes else []

    def prepare(self, signature: Signature) -> None:
        assert not self._closed, "the model is closed"
        can = self._shared.device.capabilities
        captures = can.graphs
        if captures and not can.captures_products and self._interpreter.multiplies:
            # Not tried: a capture that the array module breaks off midway is a state nobody else tests.
            captures = False
            log.info("graph.refused model=%s reason=the array module records no matrix products", self._name)
        self._executables = {
            (variant, batch_size): DeviceArrayExecutable(
                self,
                self._shared,
                Plan.of(self._name, signature, variant, batch_size),
                batch_size,
                self._interpreter.refusal_room,
                captures,
            )
            for variant in range(len(signature.variants))
            for batch_size in signature.batch_sizes
        }

    def executable(self, variant: int, batch_size: int) -> DeviceArrayExecutable:
        return self._executables[variant, batch_size]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for executable in self._executables.values():
            executable.close()
        self._executables.clear()
        self._weights.close()
        release_freed()

    def _drop_graphs(self) -> None:
        for executable in self._executables.values():
            executable.drop_graphs()


class _ArrayDeviceSlot(DeviceSlot):
    """A slot and what its last execution left behind."""

    graph: DeviceGraph | None = None
    error: EngineFailed | None = None
    reasons: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


class DeviceArrayExecutable:
    """One (variant, batch size).

    The first execution is plain. If no value went between host and device in its midst, the next one on each slot is
    captured as a graph, and later ones replay it, until the weights move.
    """

    binds = True
    direct_bytes = DIRECT_BYTES

    def __init__(
        self, model: DeviceArrayModel, shared: SharedDevice, plan: Plan, batch_size: int, room: int, captures: bool
    ) -> None:
        self.batch_size = batch_size
        self._model = model
        self._shared = shared
        self._plan = plan
        self._room = room
        self._slots: list[_ArrayDeviceSlot] = []
        self._captures = captures
        self._can_replay = False

    def slot(self) -> Slot:
        slot = self._turn()
        slot.use_own()
        return slot

    def bind(self, inputs: list[NDArray], outputs: list[NDArray]) -> Slot:
        slot = self._turn()
        slot.use(inputs, outputs)
        return slot

    def rows(self, slot: Slot, inputs: Sequence[Rows], outputs: Sequence[Rows]) -> None:
        assert isinstance(slot, _ArrayDeviceSlot)
        slot.use_rows(inputs, outputs)

    def stage(self, slot: Slot) -> None:
        assert isinstance(slot, _ArrayDeviceSlot)
        slot.send()

    def unstage(self, slot: Slot) -> None:
        assert isinstance(slot, _ArrayDeviceSlot)
        slot.unstage()

    def launch(self, slot: Slot) -> None:
        assert isinstance(slot, _ArrayDeviceSlot)
        shared, device = self._shared, self._shared.device
        slot.error = None

        def work() -> None:
            self._compute(slot)

        with shared.lock:
            # Under the lock: weights move between executions.
            reads, writes = [*slot.input_parts, *self._model.weight_spans()], [slot.output_span]
            if slot.graph is None and self._can_replay and self._captures:
                slot.graph = self._captured(slot, work, reads, writes)
            try:
                slot.begin()
                if slot.graph is not None:
                    slot.graph.launch(shared.compute)
                else:
                    device.launch(shared.compute, work, reads=reads, writes=writes)
                slot.end()
            except BaseException:
                slot.abandon()
                raise

    def finish(self, slot: Slot) -> Timing:
        assert isinstance(slot, _ArrayDeviceSlot)
        timing = slot.wait()
        if slot.error is not None:
            self._can_replay = False
            raise slot.error
        for reason, refused in zip(slot.reasons, slot.refused if self._room else (), strict=False):
            if refused:
                raise EngineFailed(f"model '{self._plan.model}': {reason}")
        slot.take_outputs(slot.shapes)
        return timing

    def drop_graphs(self) -> None:
        """Forget graphs, which hold the addresses of weights."""
        for slot in self._slots:
            if slot.graph is not None:
                slot.graph.close()
                slot.graph = None

    def close(self) -> None:
        """Let go of graphs and buffers; nothing may be in flight."""
        self.drop_graphs()
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _captured(
        self, slot: _ArrayDeviceSlot, work: Work, reads: list[Span], writes: list[Span]
    ) -> DeviceGraph | None:
        """Return the work as a graph; None, from now on, if it cannot be one."""
        shared = self._shared
        try:
            graph = shared.device.capture(shared.compute, work, reads=reads, writes=writes)
        except CannotCapture as error:
            reason: Exception | None = error
        else:
            # The work keeps what goes wrong in it to itself, and what was captured until then is not all of it.
            reason = slot.error
            if reason is None:
                return graph
            graph.close()
        slot.error, self._captures = None, False
        log.info("graph.refused model=%s batch_size=%d reason=%s", self._plan.model, self.batch_size, reason)
        return None

    def _turn(self) -> _ArrayDeviceSlot:
        """Return the slot whose last turn is longest ago and that does not run; one only staged is taken back."""
        if len(self._slots) < SLOTS:
            self._slots.append(_ArrayDeviceSlot(self._shared, self._plan, self._room))
            return self._slots[-1]
        for at, slot in enumerate(self._slots):
            if not slot.launched:
                slot.unstage()
                self._slots.append(self._slots.pop(at))
                return slot
        raise AssertionError(f"more than {SLOTS} executions of one compiled size in flight")

    def _compute(self, slot: _ArrayDeviceSlot) -> None:
        """Run the graph into the slot's device memory; the work of a launch, which must not raise."""
        device, plan = self._shared.device, self._plan
        try:
            feeds = {
                spec.name: device.array(slot.input_part(index), plan.inputs[index], spec.element.numpy)
                for index, spec in enumerate(plan.input_specs)
            }
            results = self._model.interpret(feeds)
            notes = self._model.notes
            shapes = []
            for index, spec in enumerate(plan.output_specs):
                result = plan.checked(index, results[spec.name])
                shapes.append(tuple(result.shape))
                target = device.array(slot.output_part(index), result.shape, spec.element.numpy)
                target[...] = result
            if self._room:
                flags = device.array(slot.refusal_part, (self._room,), _BOOL)
                flags[...] = False
                for at, (wrong, _) in enumerate(notes.refusals):
                    flags[at] = wrong
            slot.shapes, slot.reasons = tuple(shapes), tuple(reason for _, reason in notes.refusals)
            self._can_replay = notes.crossings == 0
        except Exception as error:
            slot.error = failure(plan.model, error)


def failure(model: str, error: Exception) -> EngineFailed:
    """Return what went wrong inside a model's work as an error that names the model."""
    if isinstance(error, EngineFailed):
        return error
    told = str(error) if isinstance(error, NodeFailed) else f"{type(error).__name__}: {error}"
    return EngineFailed(f"model '{model}': {told}")
