"""What the fake library computes: an ONNX network on numpy, with sizes found out by running it.

TensorRT infers output sizes from input sizes. Here each profile is run on two inputs instead, zeros and large ones:
sizes are what came out. Outputs behind an operator whose output size depends on its input's values have an unknown
size, as in TensorRT; the axes that may vary are those that did, or the first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from engines.array.graph import UnusableGraph, read_graph
from engines.array.interpreter import OPERATORS, Interpreter, NodeFailed

DATA_DEPENDENT = frozenset({"NonZero", "Compress", "Unique", "NonMaxSuppression"})
LARGE = 1e6
"""A value above any threshold of a test model, so that everything passes."""

NUMPY: dict[str, Any] = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16, "INT32": np.int32, "INT64": np.int64,
    "INT8": np.int8, "UINT8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
FROM_ONNX: dict[int, str] = {
    onnx.TensorProto.FLOAT: "FLOAT", onnx.TensorProto.FLOAT16: "HALF", onnx.TensorProto.BFLOAT16: "BF16",
    onnx.TensorProto.INT32: "INT32", onnx.TensorProto.INT64: "INT64", onnx.TensorProto.INT8: "INT8",
    onnx.TensorProto.UINT8: "UINT8", onnx.TensorProto.BOOL: "BOOL",
    # Taken without a word and computed as f32.
    onnx.TensorProto.DOUBLE: "FLOAT",
}  # fmt: skip
"""Types of tensors that the library takes from a file. Seen with TensorRT-RTX 1.7."""

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Tensor:
    """An input or output of a network; sizes not known beforehand are -1."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """What one profile makes of the outputs.

    Attributes:
        shapes: per output; -1 where the data decides.
        bounds: per output, bytes that are always enough.
        scratch_bytes: of intermediate values.
    """

    shapes: Mapping[str, tuple[int, ...]]
    bounds: Mapping[str, int]
    scratch_bytes: int


class Computation:
    """One network, ready to compute."""

    def __init__(self, model: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
            file.write(model)
            file.flush()
            self._interpreter = Interpreter(read_graph(Path(file.name), OPERATORS), np)
        proto = onnx.load_model_from_string(model)
        self.inputs = [tensor_of(value) for value in proto.graph.input]
        self.outputs = [tensor_of(value) for value in proto.graph.output]
        self.constant_bytes = sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
        self.dependent = _dependent(proto.graph.node)

    def run(self, feeds: Mapping[str, Any]) -> Arrays:
        """Return outputs.

        Raises:
            NodeFailed: an operator raised.
        """
        return self._interpreter.run(feeds)

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> Sizes:
        """Return what input shapes make of the outputs; inputs without one keep the network's.

        Raises:
            NodeFailed: the shapes do not fit together.
        """
        found: list[Arrays] = []
        for value in (0.0, LARGE) if self.dependent else (0.0,):
            feeds = {}
            for tensor in self.inputs:
                dtype = np.dtype(NUMPY[tensor.dtype])
                filled = min(value, 1.0) if dtype.kind in "iub" else min(value, 1e4) if dtype.itemsize < 4 else value
                feeds[tensor.name] = np.full(shapes.get(tensor.name, tensor.shape), filled, dtype)
            found.append(self.run(feeds))
        zeros, large = found[0], found[-1]
        result: dict[str, tuple[int, ...]] = {}
        bounds: dict[str, int] = {}
        most = max((array.nbytes for array in feeds.values()), default=0)
        for tensor in self.outputs:
            shape = zeros[tensor.name].shape
            if tensor.name in self.dependent and shape:
                varied = [axis for axis, size in enumerate(shape) if size != large[tensor.name].shape[axis]]
                shape = tuple(-1 if axis in (varied or [0]) else size for axis, size in enumerate(shape))
            result[tensor.name] = shape
            bounds[tensor.name] = 2 * max(zeros[tensor.name].nbytes, large[tensor.name].nbytes, most)
        return Sizes(result, bounds, self._interpreter.peak_bytes)


def tensor_of(value: Any) -> Tensor:
    """Return a graph input or output as the library sees it.

    Raises:
        KeyError: its type is none that the library knows.
    """
    kind = value.type.tensor_type
    dims = kind.shape.dim
    return Tensor(
        value.name,
        FROM_ONNX[kind.elem_type],
        tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims),
        tuple(dim.dim_param for dim in dims),
    )


def _dependent(nodes: Iterable[Any]) -> frozenset[str]:
    names: set[str] = set()
    for node in nodes:
        if node.op_type in DATA_DEPENDENT or names.intersection(node.input):
            names.update(node.output)
    return frozenset(names)


__all__ = ["Computation", "NodeFailed", "Sizes", "Tensor", "UnusableGraph", "tensor_of"]
