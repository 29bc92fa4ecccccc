"""What a manifest says, as frozen values, and how its mistakes are told.

Reading ``manifest.yaml`` has two phases. ``document`` turns text into plain YAML values; ``validate`` turns those into
a ``Manifest``. Both collect every mistake they can find, so that a file is corrected once and not line by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engines.errors import NotReady
from engines.tensor import TensorSpec

MAX_MANIFEST_BYTES: Final = 256 * 1024
"""Size of a manifest file. 200 tensors and 1,000 input shapes need a tenth of it."""
MAX_TENSORS: Final = 256
"""Tensors in one of the four lists; the same as the default of a request's tensors."""
MAX_TENSOR_AXES: Final = 16
"""Axes of one tensor; one of a data-dependent size has at most ``signature.MAX_AXES``."""
MAX_AXIS_SIZE: Final = 2**31 - 1
"""Size of one axis: what every engine's shape type can hold."""
MAX_VARIANTS: Final = 1024
"""Entries of ``input_shapes``; a variant's index must also fit the 16 bits a request record has for it."""
MAX_BATCH_SIZES: Final = 64
"""Entries of ``compiled_batch_sizes``."""
MAX_BATCH_SIZE: Final = 65_536
"""Largest compiled batch size, in rows."""
MAX_TENSOR_NAME_BYTES: Final = 1024
"""A tensor's name in UTF-8."""
MAX_TOLD_PROBLEMS: Final = 50
"""Mistakes an error message spells out; ``ManifestError.problems`` holds all of them."""

DEFAULT_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32)
"""Compiled sizes of a model with a batch axis that lists none.

Powers of two waste less than half of a padded batch; 32 is where the measured CPU models stop gaining.
"""
BATCH_LETTER: Final = "n"
DEFAULT_MODEL_FILE: Final = "model.onnx"
MANIFEST_FILE: Final = "manifest.yaml"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A bundle's manifest, checked within itself; nothing here has been compared with the model file yet.

    Attributes:
        kind: ``model`` (``meta`` is refused until metas exist).
        engine: ``auto`` | ``onnxruntime`` | ``tensorrt`` | ``array``.
        inputs, outputs: executable tensors, in manifest order.
        client_inputs, client_outputs: as declared, or the executable tensors.
        batch_sizes: ascending; (0,) for a model without a batch axis.
        input_shapes: served sizes of the variable axes, one entry per variant; empty without variable axes.
        hooks: ``thread`` | ``inline``.
        task: empty, or ``embedding``.
        model_file: file name inside the version directory.
        derived: made from the model file, not read from a manifest.
    """

    kind: str
    engine: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    client_inputs: tuple[TensorSpec, ...]
    client_outputs: tuple[TensorSpec, ...]
    batch_sizes: tuple[int, ...]
    input_shapes: tuple[tuple[int, ...], ...] = ()
    hooks: str = "thread"
    task: str = ""
    model_file: str = DEFAULT_MODEL_FILE
    derived: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a manifest.

    Attributes:
        file: the manifest, as the reader may open it.
        key: path of the value, such as ``executable_inputs[1].dims.h``; empty for the file as a whole.
        expected: what belongs there.
        found: what is there.
        fix: what to write or do instead.
    """

    file: str
    key: str
    expected: str
    found: str
    fix: str

    def __str__(self) -> str:
        place = f"{self.key}: " if self.key else ""
        return f"{place}expected {self.expected}, found {self.found}; fix: {self.fix}"


class ManifestError(NotReady):
    """A manifest is wrong, so its model cannot be loaded; ``problems`` lists every mistake that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "an error needs a problem"
        self.problems: tuple[Problem, ...] = tuple(problems)
        count = len(self.problems)
        lines = [f"{self.problems[0].file}: {count} {'mistake' if count == 1 else 'mistakes'}"]
        lines += [f"  {problem}" for problem in self.problems[:MAX_TOLD_PROBLEMS]]
        if count > MAX_TOLD_PROBLEMS:
            lines.append(f"  and {count - MAX_TOLD_PROBLEMS} more")
        super().__init__("\n".join(lines))


def variable_axes(inputs: Sequence[TensorSpec]) -> tuple[tuple[int, int], ...]:
    """Return (input, axis) of every axis whose sizes ``input_shapes`` lists, in the order it lists them."""
    return tuple(
        (index, axis)
        for index, spec in enumerate(inputs)
        for axis, size in enumerate(spec.shape)
        if size == -1 and axis != spec.batch_axis
    )
