"""Which compiled shape a request's executable inputs have, and what to say when there is none (rule 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engines.bundle.manifest import variable_axes
from engines.bundle.signature import Signature
from engines.tensor import TensorSpec

NO_VARIANT: Final = -1
MAX_TOLD_VARIANTS: Final = 16
"""Compiled shapes a message lists before it says how many are left."""


def match_variant(signature: Signature, shapes: Sequence[Sequence[int]]) -> int:
    """Return the index of the variant with these sizes, or ``NO_VARIANT``.

    ``shapes`` holds one full shape per executable input, in the signature's order. Every axis but the batch axis is
    compared, so a match proves the sizes of a request's inputs; whether the rows agree is checked elsewhere.
    """
    specs = signature.inputs
    if [len(shape) for shape in shapes] != [len(spec.shape) for spec in specs]:
        return NO_VARIANT
    sizes = tuple(shapes[index][axis] for index, axis in variable_axes(specs))
    for number, variant in enumerate(signature.variants):
        if variant.sizes == sizes:
            pairs = zip(shapes, variant.inputs, specs, strict=True)
            fits = all(_fits(shape, compiled, spec.batch_axis) for shape, compiled, spec in pairs)
            return number if fits else NO_VARIANT
    return NO_VARIANT


def compiled_shapes(signature: Signature) -> str:
    """Return the compiled input shapes as a message lists them, such as ``[n, 16], [n, 32] with n up to 8``."""
    told = signature.variants[:MAX_TOLD_VARIANTS]
    text = ", ".join(_shapes_text(signature.inputs, variant.inputs) for variant in told)
    left = len(signature.variants) - len(told)
    if left:
        text += f" and {left} more"
    if signature.max_rows and any(spec.batch_axis is not None for spec in signature.inputs):
        text += f" with n up to {signature.max_rows}"
    return text


def compiled_text(signature: Signature, shapes: Sequence[Sequence[int]]) -> str:
    """Return the message for inputs whose shapes no variant has."""
    given = ", ".join(
        _named(spec, str(list(shape)), len(signature.inputs))
        for spec, shape in zip(signature.inputs, shapes, strict=False)
    )
    if len(signature.inputs) > 1:
        given = f"[{given}]"
    return f"no compiled program for input shape {given}; compiled: [{compiled_shapes(signature)}]"


def _fits(shape: Sequence[int], compiled: Sequence[int], batch_axis: int | None) -> bool:
    return all(shape[axis] == size or axis == batch_axis for axis, size in enumerate(compiled))


def _shapes_text(specs: Sequence[TensorSpec], shapes: Sequence[Sequence[int]]) -> str:
    parts: list[str] = []
    for spec, shape in zip(specs, shapes, strict=True):
        sizes = ", ".join("n" if axis == spec.batch_axis else str(size) for axis, size in enumerate(shape))
        parts.append(_named(spec, f"[{sizes}]", len(specs)))
    return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"


def _named(spec: TensorSpec, text: str, tensors: int) -> str:
    """Prefix a shape with its tensor's name where there is more than one tensor."""
    return text if tensors == 1 else f"{spec.name}: {text}"
