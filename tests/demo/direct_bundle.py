"""Demo bundles run without a server: hook, ONNX Runtime, hook."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import onnxruntime


class Session(Protocol):
    """What is used of an ONNX Runtime session."""

    def run(self, names: list[str] | None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]: ...

    def get_outputs(self) -> list[Any]: ...


@dataclass(frozen=True)
class DirectBundle:
    """A bundle's hooks and its model."""

    directory: Path
    hooks: ModuleType | None
    state: object
    session: Session

    def infer(self, inputs: dict[str, np.ndarray], pad_to: int = 0) -> dict[str, np.ndarray]:
        """Return the client outputs for client inputs, run among enough rows of zeros to make ``pad_to`` rows."""
        ctx = SimpleNamespace(state=self.state)
        preprocess = getattr(self.hooks, "preprocess", None)
        postprocess = getattr(self.hooks, "postprocess", None)
        tensors = preprocess(inputs, ctx) if preprocess else inputs
        rows = len(next(iter(tensors.values())))
        padded = {
            name: np.concatenate([tensor, np.zeros((max(pad_to - rows, 0), *tensor.shape[1:]), tensor.dtype)])
            for name, tensor in tensors.items()
        }
        names = [output.name for output in self.session.get_outputs()]
        outputs = {name: value[:rows] for name, value in zip(names, self.session.run(names, padded), strict=True)}
        return postprocess(outputs, ctx) if postprocess else outputs


def load_bundle(directory: Path) -> DirectBundle:
    """Load a bundle's hooks and model in this process."""
    hooks, state = None, None
    if (directory / "model.py").is_file():
        spec = importlib.util.spec_from_file_location(f"demo_{directory.name}", directory / "model.py")
        assert spec is not None
        assert spec.loader is not None
        hooks = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(hooks)
        state = hooks.load(str(directory)) if hasattr(hooks, "load") else None
    return DirectBundle(directory, hooks, state, onnxruntime.InferenceSession(str(directory / "model.onnx")))


def as_bytes_tensor(*values: bytes) -> np.ndarray:
    """Return a BYTES tensor as hooks see it."""
    tensor = np.empty(len(values), object)
    tensor[:] = values
    return tensor
