"""An engine of array operations: reads ONNX files and computes them node by node.

It needs no runtime library, computes bfloat16 (halves as f32, rounded once per operator) and can be followed in a
debugger, so tests use it beside ONNX Runtime. Written over ``xp``, the same operators run on a device module with
numpy's functions. It is not made to be fast.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engines.agreement import model_name, require_agreement, require_facts
from engines.array.interpreter import Interpreter, NodeFailed, to_host
from engines.array.loading import load_graph
from engines.array.operator import Array
from engines.base import Footprint, Rows, Slot, Timing
from engines.bundle.manifest import Manifest
from engines.bundle.signature import Signature
from engines.errors import EngineFailed
from engines.process_memory import release_freed
from engines.staging import HostSlot, Plan, Turns
from engines.tensor import NDArray


class ArrayEngine:
    """Computes with one array module.

    Args:
        xp: numpy, or a module with its functions.
    """

    name = "array"

    def __init__(self, xp: Any = np) -> None:
        self._xp = xp

    def open(self, manifest: Manifest, model_file: Path) -> ArrayModel:
        name = model_name(model_file)
        facts = require_facts(model_file)
        graph = load_graph(name, model_file)
        require_agreement(manifest, graph.inputs, graph.outputs, model_file)
        return ArrayModel(name, manifest, Interpreter(graph, self._xp), self._xp, facts.weights_bytes)

    def close(self) -> None:
        """Nothing is shared between models."""


class ArrayModel:
    """One graph and its constants."""

    def __init__(self, name: str, manifest: Manifest, interpreter: Interpreter, xp: Any, weights_bytes: int) -> None:
        self._name = name
        self._manifest = manifest
        self._interpreter: Interpreter | None = interpreter
        self._xp = xp
        self._weights_bytes = weights_bytes
        self._executables: dict[tuple[int, int], ArrayExecutable] = {}

    @property
    def footprint(self) -> Footprint:
        """Weights as the file holds them; scratch as the intermediate values of the largest run so far."""
        scratch_bytes = self._interpreter.peak_bytes if self._interpreter is not None else 0
        return Footprint(self._weights_bytes, scratch_bytes, exact=False)

    def run(self, inputs: list[NDArray]) -> list[NDArray]:
        assert self._interpreter is not None, "the model is closed"
        feeds = {spec.name: self._xp.asarray(array) for spec, array in zip(self._manifest.inputs, inputs, strict=True)}
        try:
            results = self._interpreter.run(feeds)
        except NodeFailed as error:
            raise EngineFailed(f"model '{self._name}': {error}") from error
        # Copied, since an output may be an input or a constant itself.
        return [np.array(to_host(results[spec.name])) for spec in self._manifest.outputs]

    def prepare(self, signature: Signature) -> None:
        assert self._interpreter is not None, "the model is closed"
        self._executables = {
            (variant, batch_size): ArrayExecutable(
                self._interpreter, Plan.of(self._name, signature, variant, batch_size), batch_size, self._xp
            )
            for variant in range(len(signature.variants))
            for batch_size in signature.batch_sizes
        }

    def executable(self, variant: int, batch_size: int) -> ArrayExecutable:
        return self._executables[variant, batch_size]

    def close(self) -> None:
        for executable in self._executables.values():
            executable.close()
        self._executables.clear()
        self._interpreter = None
        release_freed()


@dataclass(slots=True)
class _ArraySlot(HostSlot):
    """A slot and its arrays on the device.

    Attributes:
        rooms: of a slot of the executable's own, the output arrays it was made with.
    """

    rooms: list[NDArray] = field(default_factory=list)
    feeds: dict[str, Array] = field(default_factory=dict)
    results: dict[str, Array] = field(default_factory=dict)


class ArrayExecutable:
    """One (variant, batch size); results are copied into the slot's arrays in ``finish``."""

    binds = True
    direct_bytes = 0

    def __init__(self, interpreter: Interpreter, plan: Plan, batch_size: int, xp: Any) -> None:
        self.batch_size = batch_size
        self._interpreter: Interpreter | None = interpreter
        self._plan = plan
        self._xp = xp
        self._own = Turns(self._made)

    def slot(self) -> Slot:
        slot = self._own.take()
        # Outputs of a data-dependent size were replaced by the last run's.
        slot.outputs[:] = slot.rooms
        return slot

    def bind(self, inputs: list[NDArray], outputs: list[NDArray]) -> Slot:
        self._plan.require_fit(inputs, outputs)
        return _ArraySlot(inputs, list(outputs))

    def rows(self, slot: Slot, inputs: Sequence[Rows], outputs: Sequence[Rows]) -> None:
        raise AssertionError("rows are gathered into the slot: there is no device to copy them to")

    def stage(self, slot: Slot) -> None:
        assert isinstance(slot, _ArraySlot)
        slot.feeds = {
            spec.name: self._xp.asarray(array) for spec, array in zip(self._plan.input_specs, slot.inputs, strict=True)
        }

    def unstage(self, slot: Slot) -> None:
        """Nothing was moved."""

    def launch(self, slot: Slot) -> None:
        assert isinstance(slot, _ArraySlot)
        assert self._interpreter is not None, "the model is closed"
        slot.error = None
        started_ns = time.monotonic_ns()
        try:
            slot.results = self._interpreter.run(slot.feeds)
        except NodeFailed as error:
            slot.error = EngineFailed(f"model '{self._plan.model}': {error}")
        slot.compute_ns = time.monotonic_ns() - started_ns

    def finish(self, slot: Slot) -> Timing:
        assert isinstance(slot, _ArraySlot)
        results, slot.results, slot.feeds = slot.results, {}, {}
        if slot.error is not None:
            raise slot.error
        started_ns = time.monotonic_ns()
        for index, spec in enumerate(self._plan.output_specs):
            array = self._plan.checked(index, to_host(results[spec.name]))
            if self._plan.dynamic[index]:
                slot.outputs[index] = array.copy()
            else:
                slot.outputs[index][...] = array
        return Timing(slot.compute_ns, copy_out_ns=time.monotonic_ns() - started_ns)

    def close(self) -> None:
        """Let go of the graph and every buffer."""
        self._interpreter = None
        self._own.clear()

    def _made(self) -> _ArraySlot:
        slot = _ArraySlot.for_plan(self._plan)
        slot.rooms = list(slot.outputs)
        return slot
