"""What an operator is to the interpreter: a function over arrays of one module.

``xp`` is the array module the operator computes with: numpy, or a device module with the same functions. Sizes and
axes stay on the host, since they decide shapes: an operator lists the inputs that it wants as host arrays, and
``Shape`` returns one; arithmetic on host integers only is done on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Array = Any
"""An array of ``xp``; the modules share no type."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a graph.

    Attributes:
        title: how messages name it: ``node 'name'``, or its position.
        inputs: names of values; empty for an optional input that is not given.
    """

    operator: str
    title: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One execution of a node.

    Attributes:
        inputs: arrays, None for an optional input that is not given.
        attributes: the node's.
        opset: version of the operator set, where meanings differ.
        output_count: outputs that the node names.
    """

    xp: Any
    inputs: list[Array]
    attributes: Mapping[str, Any]
    opset: int
    output_count: int

    def input(self, index: int) -> Array:
        """Return an input, None if it is not given."""
        return self.inputs[index] if index < len(self.inputs) else None

    def host_ints(self, index: int) -> list[int] | None:
        """Return an input of sizes or axes as integers, None if it is not given."""
        array = self.input(index)
        return None if array is None else [int(value) for value in array.ravel().tolist()]


Function = Callable[[Call], Array]
"""Returns one array, or a tuple with one per output."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A function and the positions of the inputs that it takes as host arrays."""

    function: Function
    host: tuple[int, ...] = ()


def wide(xp: Any, array: Array) -> Array:
    """Return half-precision values as f32, others as they are: sums of halves lose too much."""
    return array.astype(xp.float32) if array.dtype.kind in "fV" and array.dtype.itemsize == 2 else array
