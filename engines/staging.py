"""Host-side buffers and output checks that every engine shares.

A *plan* is the full shape of each tensor for one (variant, batch size); a slot holds arrays of those shapes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np

from engines.base import Rows
from engines.bundle.signature import LINE_BYTES, Signature
from engines.errors import EngineFailed
from engines.tensor import NDArray, TensorSpec, element_count

SLOTS: Final = 2
"""Slots of one executable, which take turns: the next batch is gathered while one runs, or while its outputs are read.
So staging takes twice the bytes of a batch per compiled size, the second half when a second batch comes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Shapes of one (variant, batch size).

    Attributes:
        model: the bundle's name, for messages.
        inputs, outputs: full shapes; an output axis whose size depends on the data holds its limit.
        dynamic: per output, whether some axis size depends on the data.
    """

    model: str
    input_specs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dynamic: tuple[bool, ...]

    @classmethod
    def of(cls, model: str, signature: Signature, variant: int, batch_size: int) -> Plan:
        """Return the shapes of ``signature.variants[variant]`` at ``batch_size`` rows."""
        sizes = signature.variants[variant]
        return cls(
            model,
            signature.inputs,
            signature.outputs,
            tuple(_filled(shape, spec, batch_size) for shape, spec in zip(sizes.inputs, signature.inputs, strict=True)),
            tuple(
                _filled(shape, spec, batch_size) for shape, spec in zip(sizes.outputs, signature.outputs, strict=True)
            ),
            sizes.dynamic_outputs,
        )

    def require_fit(self, inputs: list[NDArray], outputs: list[NDArray]) -> None:
        """Assert that arrays to run on in place have this plan's shapes and types and are contiguous."""
        given = inputs + outputs
        specs = self.input_specs + self.output_specs
        shapes = self.inputs + self.outputs
        assert len(given) == len(specs), f"expected {len(specs)} arrays, got {len(given)}"
        for array, spec, shape in zip(given, specs, shapes, strict=True):
            fits = array.shape == shape and array.dtype == spec.element.numpy and array.flags.c_contiguous
            assert fits, f"'{spec.name}': expected C-contiguous {spec.dtype} {shape}, got {array.dtype} {array.shape}"

    def row_offset_bytes(self, shapes: tuple[tuple[int, ...], ...], rows: Rows) -> int:
        """Return where ``rows`` begin in their tensor of ``shapes``; asserts that they are rows of it."""
        full = shapes[rows.tensor]
        given = rows.array.shape
        fits = given[1:] == full[1:] and rows.at + given[0] <= full[0] and rows.array.flags.c_contiguous
        assert fits, f"rows {rows.at} on of a tensor {full}: got contiguous={rows.array.flags.c_contiguous} {given}"
        return rows.at * element_count(full[1:]) * rows.array.itemsize

    def checked(self, index: int, array: NDArray) -> NDArray:
        """Return output ``index`` if its shape and type are what the signature allows.

        Raises:
            EngineFailed: naming model, output, expected and got.
        """
        spec, expected = self.output_specs[index], self.outputs[index]
        if array.dtype != spec.element.numpy:
            raise EngineFailed(
                f"model '{self.model}': output '{spec.name}': expected data type {spec.dtype}, got {array.dtype.name}"
            )
        if array.shape != expected:
            self.require_shape(index, array.shape)
        return array

    def require_shape(self, index: int, got: tuple[int, ...]) -> None:
        """Raise EngineFailed unless output ``index`` may have the shape ``got``."""
        spec, expected = self.output_specs[index], self.outputs[index]
        limits = spec.limits if self.dynamic[index] else ()
        wrong = len(got) != len(expected)
        for axis, (have, want) in enumerate(zip(got, expected, strict=False)):
            if axis < len(limits) and limits[axis]:
                if have > want:
                    raise EngineFailed(
                        f"model '{self.model}': output '{spec.name}': axis {axis} has {have} entries, more than the "
                        f"{want} that the manifest's max allows"
                    )
            elif have != want:
                wrong = True
        if wrong:
            raise EngineFailed(
                f"model '{self.model}': output '{spec.name}': expected shape {list(expected)}, got {list(got)}"
            )


@dataclass(slots=True)
class HostSlot:
    """Arrays of one execution, and what became of it."""

    inputs: list[NDArray]
    outputs: list[NDArray]
    compute_ns: int = 0
    error: EngineFailed | None = None

    @classmethod
    def for_plan(cls, plan: Plan) -> Self:
        """Return a slot over fresh zeroed arrays, each on a cache line of its own."""
        return cls(
            [
                aligned_zeros(shape, spec.element.numpy)
                for shape, spec in zip(plan.inputs, plan.input_specs, strict=True)
            ],
            [
                aligned_zeros(shape, spec.element.numpy)
                for shape, spec in zip(plan.outputs, plan.output_specs, strict=True)
            ],
        )

    @property
    def staged_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.inputs + self.outputs)


SlotT = TypeVar("SlotT")


class Turns(Generic[SlotT]):
    """The slots of one executable, each made when it is first due.

    A slot's arrays stay as they are until the other ``SLOTS - 1`` had their turn.
    """

    def __init__(self, make: Callable[[], SlotT]) -> None:
        self._make = make
        self._slots: list[SlotT] = []
        self._next = 0

    def take(self) -> SlotT:
        """Return the slot whose last turn is longest ago."""
        turn = self._next
        self._next = (turn + 1) % SLOTS
        if turn == len(self._slots):
            self._slots.append(self._make())
        return self._slots[turn]

    def clear(self) -> None:
        """Let go of all."""
        self._slots.clear()
        self._next = 0


def address_of(array: NDArray) -> int:
    """Return where a contiguous array begins in memory; ``array.ctypes.data`` takes five times as long."""
    # Python 3.11's type stubs do not know that arrays have buffers.
    buffer: Any = array
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, ValueError, BufferError):
        # Read-only, empty, or of a type without a buffer format, such as bfloat16.
        return int(array.ctypes.data)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray:
    """Return a zeroed C-contiguous array that starts on a ``LINE_BYTES`` boundary."""
    size = element_count(shape) * dtype.itemsize
    room = np.zeros(size + LINE_BYTES, dtype=np.uint8)
    start = -address_of(room) % LINE_BYTES
    return room[start : start + size].view(dtype).reshape(shape)


def _filled(shape: tuple[int, ...], spec: TensorSpec, batch_size: int) -> tuple[int, ...]:
    return tuple(batch_size if axis == spec.batch_axis else size for axis, size in enumerate(shape))
