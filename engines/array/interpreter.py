"""Executes a graph node by node with one array module, and forgets each value after its last use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from engines.array.graph import Graph
from engines.array.operator import Array, Call, Node, Operator
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
        self.peak_bytes = 0
        """Most bytes that intermediate values held at once, over all runs."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the graph's outputs as contiguous arrays of the module.

        Raises:
            NodeFailed: a node raised.
        """
        values: dict[str, Array] = dict(feeds)
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
        return outputs

    def _execute(self, node: Node, values: Mapping[str, Array]) -> tuple[Array, ...]:
        operator = OPERATORS[node.operator]
        given = [self._value(name, values) for name in node.inputs]
        xp, inputs = self._placed(operator, node, given)
        try:
            # Infinities and NaN are answers, not warnings.
            with np.errstate(all="ignore"):
                result = operator.function(
                    Call(xp, inputs, node.attributes, self._graph.opset, len([name for name in node.outputs if name]))
                )
        except Exception as error:
            raise NodeFailed(f"{node.operator} {node.title} failed: {error}") from error
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
            array is not None and not isinstance(array, np.ndarray)
            for index, array in enumerate(given)
            if index not in operator.host
        ) or any(
            isinstance(array, np.ndarray) and array.dtype.kind not in "iub"
            for index, array in enumerate(given)
            if index not in operator.host
        )
        for index, (name, array) in enumerate(zip(node.inputs, given, strict=True)):
            if array is None or not on_device:
                placed.append(array)
            elif index in operator.host:
                placed.append(array if isinstance(array, np.ndarray) else to_host(array))
            else:
                placed.append(self._to_device(name, array))
        return (self._xp if on_device else np), placed

    def _to_device(self, name: str, array: Array) -> Array:
        if not isinstance(array, np.ndarray):
            return array
        if name not in self._constants:
            return self._xp.asarray(array)
        moved = self._device_constants.get(name)
        if moved is None:
            moved = self._device_constants[name] = self._xp.asarray(array)
        return moved


def to_host(array: Array) -> NDArray:
    """Return an array of any module as a numpy array."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())
