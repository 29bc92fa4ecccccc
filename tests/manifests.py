"""Manifests for tests, as compact as in YAML: ``manifest(["INPUT f32 n 4"], ["OUTPUT f32 n 4"])``."""

from __future__ import annotations

from collections.abc import Sequence

from engines.bundle.manifest import Manifest
from engines.tensor import TensorSpec


def tensor(text: str) -> TensorSpec:
    """Return the tensor that ``name dtype axis...`` describes; an axis is n (batch), a size, -1 or -1<=limit."""
    name, dtype, *axes = text.split()
    shape, limits, batch_axis = [], [], None
    for index, axis in enumerate(axes):
        size, _, limit = axis.partition("<=")
        if size == "n":
            batch_axis = index
        shape.append(-1 if size == "n" else int(size))
        limits.append(int(limit or 0))
    return TensorSpec(name, dtype, tuple(shape), batch_axis, tuple(limits) if any(limits) else ())


def manifest(
    inputs: Sequence[str],
    outputs: Sequence[str],
    batch_sizes: Sequence[int] = (1, 8),
    shapes: Sequence[Sequence[int]] = (),
) -> Manifest:
    """Return a manifest of executable tensors only; ``batch_sizes`` (0,) without a batch axis."""
    taken, given = tuple(map(tensor, inputs)), tuple(map(tensor, outputs))
    return Manifest(
        kind="model",
        engine="auto",
        inputs=taken,
        outputs=given,
        client_inputs=taken,
        client_outputs=given,
        batch_sizes=tuple(batch_sizes),
        input_shapes=tuple(tuple(sizes) for sizes in shapes),
    )
