"""Manifests: ``manifest.yaml`` parsed into frozen values. (Parsing follows; this is the shape that others build on.)"""

from __future__ import annotations

from dataclasses import dataclass

from engines.tensor import TensorSpec


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
    model_file: str = "model.onnx"
    derived: bool = False
