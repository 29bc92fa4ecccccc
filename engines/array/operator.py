"""What an operator is to the interpreter: a function over arrays of one module.

``xp`` is the array module the operator computes with: numpy, or a device module with the same functions. Sizes and
axes stay on the host, since they decide shapes: an operator lists the inputs that it wants as host arrays, and
``Shape`` returns one; arithmetic on host integers only is done on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

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
        refusals: filled by ``require_not`` on a device, None on the host.
    """

    xp: Any
    inputs: list[Array]
    attributes: Mapping[str, Any]
    opset: int
    output_count: int
    refusals: list[tuple[Array, str]] | None = None

    def input(self, index: int) -> Array:
        """Return an input, None if it is not given."""
        return self.inputs[index] if index < len(self.inputs) else None

    def require_not(self, wrong: Array, reason: str) -> None:
        """Fail the node if a boolean array of rank 0 is true.

        On the host that is now; on a device whoever waits for the results looks at the array then, so that the host
        need not wait here.
        """
        if self.refusals is not None:
            self.refusals.append((wrong, reason))
        elif wrong:
            raise ValueError(reason)

    def host_ints(self, index: int) -> list[int] | None:
        """Return an input of sizes or axes as integers, None if it is not given."""
        array = self.input(index)
        return None if array is None else [int(value) for value in array.ravel().tolist()]


Function = Callable[[Call], Array]
"""Returns one array, or a tuple with one per output."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A function and how it stands to the host.

    Attributes:
        host: positions of the inputs that it takes as host arrays.
        waits: whether the host must know values before it can go on, because they decide the size of an output.
        may_refuse: whether it calls ``require_not``.
        multiplies: whether it computes matrix products.
    """

    function: Function
    host: tuple[int, ...] = ()
    waits: bool = False
    may_refuse: bool = False
    multiplies: bool = False


def is_on_host(array: Array) -> bool:
    """Return whether an array is numpy's own; arrays of a device can be fetched with ``get``."""
    return isinstance(array, np.ndarray) and not hasattr(array, "get")


def wide(xp: Any, array: Array) -> Array:
    """Return half-precision values as f32, others as they are: sums of halves lose too much."""
    return array.astype(xp.float32) if array.dtype.kind in "fV" and array.dtype.itemsize == 2 else array
