"""The seam between the worker and whatever executes a model.

The worker owns rows, requests and batching; an engine sees arrays only. One execution happens at a time per worker,
but ``stage`` of the next batch may overlap ``launch`` of the running one on devices that copy asynchronously.

Life of one batch: ``slot = executable.slot()`` (staging arrays owned by the engine, reused) or
``executable.bind(inputs, outputs)`` (the caller's arrays, used in place) -> fill ``slot.inputs`` ->
``stage(slot)`` -> ``launch(slot)`` -> ``finish(slot)`` -> read ``slot.outputs``.

An executable has ``staging.SLOTS`` slots that take turns, so the next batch may be gathered and staged, of the same
executable too, while one runs and until its outputs were read; a slot is used again at the call of ``slot`` or ``bind``
after the next one. A slot that is never launched after all is taken back there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engines.bundle.manifest import Manifest
from engines.bundle.signature import Signature
from engines.tensor import NDArray


@dataclass(frozen=True, slots=True)
class Timing:
    """Nanoseconds one execution took: on the device alone, and for the copies around it (0 on a CPU)."""

    compute_ns: int
    copy_in_ns: int = 0
    copy_out_ns: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes a loaded model holds: its weights and the scratch of its largest execution; ``exact`` if not estimated."""

    weights_bytes: int
    scratch_bytes: int
    exact: bool


@dataclass(slots=True)
class Rows:
    """Rows of a batch that lie in memory of the caller: ``array`` holds rows ``at`` on of input or output ``tensor``.

    The batch axis is in front, and the array C-contiguous; it must stay alive until ``finish`` or ``unstage``.
    """

    tensor: int
    at: int
    array: NDArray


class Slot(Protocol):
    """Buffers of one execution, host side, full batch size along the batch axis, C-contiguous.

    ``outputs`` entries of data-dependent size are replaced by arrays of the real size in ``finish``.
    """

    @property
    def inputs(self) -> list[NDArray]: ...
    @property
    def outputs(self) -> list[NDArray]: ...


class Executable(Protocol):
    """One compiled (variant, batch size). Lookup is cheap; only the first ``slot()`` allocates."""

    @property
    def batch_size(self) -> int: ...
    @property
    def binds(self) -> bool:
        """Whether ``bind`` works: the engine can run on the caller's host memory without a copy."""
        ...

    @property
    def direct_bytes(self) -> int:
        """Rows side by side of at least so many bytes are better given to ``rows`` than copied by the caller; 0: none.

        An engine on a device copies them from and to where they lie, beside the running execution.
        """
        ...

    def slot(self) -> Slot:
        """Return the engine's own staging buffers. The caller fills every input row; padding rows must be zeros."""
        ...

    def bind(self, inputs: list[NDArray], outputs: list[NDArray]) -> Slot:
        """Return a slot over the caller's C-contiguous arrays, which must stay alive until ``finish``."""
        ...

    def rows(self, slot: Slot, inputs: Sequence[Rows], outputs: Sequence[Rows]) -> None:
        """Let rows lie with the caller instead of in the arrays of ``slot()``, whose same rows are not looked at then.

        Before ``stage``; only where ``direct_bytes`` is not 0. No two may share a row of a tensor.
        """
        ...

    def stage(self, slot: Slot) -> None:
        """Start moving inputs to the device; a no-op where there is nothing to move."""
        ...

    def unstage(self, slot: Slot) -> None:
        """Give up a staged slot that will not be launched: afterwards nothing reads its inputs."""
        ...

    def launch(self, slot: Slot) -> None:
        """Execute. Exclusive: never two at once in one worker. May block; releases the GIL while it computes."""
        ...

    def finish(self, slot: Slot) -> Timing:
        """Wait until ``slot.outputs`` hold the results.

        Raises:
            EngineFailed: the model raised, or an output's shape or type differs from the signature; names both.
        """
        ...


class Model(Protocol):
    """A loaded model version; closed by the worker."""

    @property
    def footprint(self) -> Footprint: ...

    def run(self, inputs: list[NDArray]) -> list[NDArray]:
        """Execute once on arrays of any valid size, allocating outputs; for probing and checks, not for serving.

        Raises:
            EngineFailed: the model raised.
        """
        ...

    def prepare(self, signature: Signature) -> None:
        """Make every (variant, batch size) of the resolved signature available through ``executable``."""
        ...

    def executable(self, variant: int, batch_size: int) -> Executable: ...

    def close(self) -> None:
        """Release weights and buffers; memory goes back to the operating system."""
        ...


class Engine(Protocol):
    """One per worker process and device library."""

    @property
    def name(self) -> str: ...

    def open(self, manifest: Manifest, model_file: Path) -> Model:
        """Load weights and check that names, types and ranks agree with the manifest.

        Raises:
            NotReady: the file cannot be loaded, or contradicts the manifest; the message says what to fix.
        """
        ...

    def close(self) -> None: ...
