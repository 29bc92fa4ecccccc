"""Executes a graph node by node with one array module, and forgets each value after its last use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from engines.array.graph import Graph
from engines.array.operator import Array, Call, Node, Operator, is_on_host
from engines.array.operators import elementwise, matrix, reduction, shape, window
from engines.tensor import NDArray

OPERATORS: Final[dict[str, Operator]] = {
    **elementwise.OPERATORS,
    **matrix.OPERATORS,
    **reduction.OPERATORS,
    **shape.OPERATORS,
    **window.OPERATORS,
}


class NodeFailed(Exception):
    """A node raised; the message names operator, node and reason."""


@dataclass(slots=True)
class Notes:
    """What one run left behind.

    Attributes:
        crossings: values that went between host and device in its midst; a run with none can be replayed as a graph.
        refusals: (boolean array of rank 0, message) for whoever waits for the results; empty on the host.
    """

    crossings: int = 0
    refusals: list[tuple[Array, str]] = field(default_factory=list)


class Interpreter:
    """Runs one graph.

    Args:
        xp: numpy, or a device module with numpy's functions; constants are moved to it once.
    """

    def __init__(self, graph: Graph, xp: Any) -> None:
        self._graph = graph
        self._xp = xp
        self._on_host = xp is np
        self._constants: dict[str, Array] = dict(graph.constants)
        self._device_constants: dict[str, Array] = {}
        self._weights: Mapping[str, Array] = {}
        self.notes = Notes()
        """Of the last run."""
        self.peak_bytes = 0
        """Most bytes that intermediate values held at once, over all runs."""

    def weights(self) -> dict[str, NDArray]:
        """Return the floating-point constants that the module computes with, as host arrays.

        A caller that keeps them on the device itself hands them to every ``run``.
        """
        wanted = {
            name
            for node in self._graph.nodes
            for index, name in enumerate(node.inputs)
            if index not in OPERATORS[node.operator].host
        }
        return {
            name: array
            for name, array in self._constants.items()
            if name in wanted and array.dtype.kind not in "iub" and array.size
        }

    @property
    def multiplies(self) -> bool:
        """Whether any node computes matrix products."""
        return any(OPERATORS[node.operator].multiplies for node in self._graph.nodes)

    @property
    def refusal_room(self) -> int:
        """Most refusals that one run can leave behind."""
        return sum(OPERATORS[node.operator].may_refuse for node in self._graph.nodes)

    def run(self, feeds: Mapping[str, Array], weights: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return the graph's outputs as contiguous arrays of the module.

        Args:
            weights: arrays of the module for constants that the caller keeps there.

        Raises:
            NodeFailed: a node raised.
        """
        values: dict[str, Array] = dict(feeds)
        self._weights = weights or {}
        self.notes = Notes()
        live_bytes = 0
        for index, node in enumerate(self._graph.nodes):
            for name, array in zip(node.outputs, self._execute(node, values), strict=False):
                if name:
                    values[name] = array
                    live_bytes += array.nbytes
            self.peak_bytes = max(self.peak_bytes, live_bytes)
            for name in {*node.inputs, *node.outputs}:
                if name in values and self._graph.last_use.get(name, -1) <= index and name not in feeds:
                    live_bytes -= values.pop(name).nbytes
        outputs = {}
        for name in self._graph.outputs:
            array = values[name] if name in values else self._constants[name]
            outputs[name] = self._xp.asarray(array, order="C")
            self.notes.crossings += not self._on_host and is_on_host(array)
        self._weights = {}
        return outputs

    def _execute(self, node: Node, values: Mapping[str, Array]) -> tuple[Array, ...]:
        operator = OPERATORS[node.operator]
        given = [self._value(name, values) for name in node.inputs]
        xp, inputs = self._placed(operator, node, given)
        try:
            # Infinities and NaN are answers, not warnings.
            with np.errstate(all="ignore"):
                named = len([name for name in node.outputs if name])
                call = Call(xp, inputs, node.attributes, self._graph.opset, named, None if xp is np else [])
                result = operator.function(call)
        except Exception as error:
            raise NodeFailed(f"{node.operator} {node.title} failed: {error}") from error
        if call.refusals:
            self.notes.refusals += [
                (wrong, f"{node.operator} {node.title} failed: {why}") for wrong, why in call.refusals
            ]
        if xp is not np:
            self.notes.crossings += operator.waits
        results = result if isinstance(result, tuple) else (result,)
        # Operations on rank 0 give scalars that are no arrays.
        return tuple(
            array if hasattr(array, "nbytes") and hasattr(array, "reshape") else xp.asarray(array) for array in results
        )

    def _value(self, name: str, values: Mapping[str, Array]) -> Array:
        if not name:
            return None
        return values[name] if name in values else self._constants[name]

    def _placed(self, operator: Operator, node: Node, given: list[Array]) -> tuple[Any, list[Array]]:
        """Return the module to compute with and the inputs where it needs them."""
        if self._on_host:
            return np, given
        placed: list[Array] = []
        on_device = any(
            array is not None and not is_on_host(array)
            for index, array in enumerate(given)
            if index not in operator.host
        ) or any(
            is_on_host(array) and array.dtype.kind not in "iub"
            for index, array in enumerate(given)
            if index not in operator.host
        )
        for index, (name, array) in enumerate(zip(node.inputs, given, strict=True)):
            if array is None or not on_device:
                placed.append(array)
            elif index in operator.host:
                placed.append(array if is_on_host(array) else to_host(array))
                self.notes.crossings += not is_on_host(array)
            else:
                placed.append(self._to_device(name, array))
        return (self._xp if on_device else np), placed

    def _to_device(self, name: str, array: Array) -> Array:
        if not is_on_host(array):
            return array
        if name in self._weights:
            return self._weights[name]
        if name not in self._constants:
            self.notes.crossings += 1
            return self._xp.asarray(array)
        moved = self._device_constants.get(name)
        if moved is None:
            moved = self._device_constants[name] = self._xp.asarray(array)
        return moved


def to_host(array: Array) -> NDArray:
    """Return an array of any module as a numpy array."""
    return array if is_on_host(array) else np.asarray(array.get())
