"""An ONNX file as the builder gets it: dynamic axes named by what they are, weights taken out as inputs.

Weights outside
    Every large floating-point constant becomes an input of the network, and its bytes one part of a slab of ours. The
    engine is then small and stays loaded; all variants and batch sizes read the same weights; loading is one copy and
    evicting forgets it. Small constants stay inside: many of them are shapes, scales and limits which the builder must
    know.

Weights inside
    The file as it is. For models with an operator that wants its weights as constants.

Dynamic axes are renamed in both: exporters use one name, or ``?``, for axes that differ, and the parser takes equal
names for equal sizes. The batch axis is ``n`` everywhere, any other dynamic axis has a name of its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from engines.agreement import FileTensor
from engines.bundle.manifest import Manifest
from engines.tensor import BY_NAME, DTYPES, NDArray

PROMOTED_BYTES: Final = 1024
"""Constants of at least this size become inputs. Smaller ones add up to little, and the builder folds them."""
_PROMOTED_TYPES: Final[dict[int, str]] = {
    TensorProto.FLOAT: "f32", TensorProto.FLOAT16: "f16", TensorProto.BFLOAT16: "bf16",
}  # fmt: skip
_DTYPE_NAMES: Final[dict[str, str]] = {dtype.numpy.name: dtype.name for dtype in DTYPES}
_KNOWN_BY_THE_BUILDER: Final[dict[str, tuple[int, ...]]] = {
    "Resize": (1, 2, 3), "Upsample": (1,), "Pad": (1, 2, 3), "Clip": (1, 2), "Dropout": (1, 2), "TopK": (1,),
    "QuantizeLinear": (0, 1, 2), "DequantizeLinear": (0, 1, 2), "NonMaxSuppression": (2, 3, 4), "Range": (0, 1, 2),
    "RoiAlign": (), "LSTM": (1, 2, 3, 4, 5, 6, 7), "GRU": (1, 2, 3, 4, 5), "RNN": (1, 2, 3, 4, 5),
}  # fmt: skip
"""Per operator, the operands that must be constants when the network is built, whatever their size."""


class UnreadableModel(ValueError):
    """The file cannot be turned into a network; the message says why."""


@dataclass(slots=True)
class Network:
    """What the builder parses, and the weights beside it.

    Attributes:
        model: the ONNX message, serialised.
        outside: names of the inputs that hold weights; empty if they are inside.
    """

    model: bytes
    outside: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the model: without the weights' values where they are outside."""
        return hashlib.sha256(self.model).hexdigest()


class ModelFile:
    """A parsed model file, to make networks of. Holds the whole message: drop it when they are made."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Read the file.

        Raises:
            UnreadableModel: it is no ONNX model, or its external data is missing.
        """
        try:
            self._proto = onnx.load(str(path))
        except Exception as error:
            raise UnreadableModel(f"{type(error).__name__}: {error}") from error
        graph = self._proto.graph
        constants = {tensor.name for tensor in graph.initializer}
        # Old files list constants among the inputs; the parser would ask a profile for them.
        _keep(graph.input, [value for value in graph.input if value.name not in constants])
        self.inputs = {value.name: _file_tensor(value) for value in graph.input}
        self.outputs = {value.name: _file_tensor(value) for value in graph.output}
        self.operators = {node.op_type for node in graph.node}
        wanted = {spec.name for spec in manifest.outputs}
        _keep(graph.output, [value for value in graph.output if value.name in wanted])
        # Sizes that an exporter noted for values in between carry the old names of axes.
        del graph.value_info[:]
        self._name_axes(manifest)

    def inside(self) -> Network:
        """Return the network with its weights as constants.

        Raises:
            UnreadableModel: it is larger than a protobuf message may be.
        """
        return Network(self._serialised(), ())

    def outside(self) -> tuple[Network, dict[str, NDArray]]:
        """Return the network without its large weights, and those by name. ``inside`` cannot be asked for afterwards.

        No weights are returned if none is large enough.
        """
        arrays: dict[str, NDArray] = {}
        values = []
        for name, tensor in self._promoted():
            # Reinterpreted, since numpy has no bfloat16 of its own.
            array = numpy_helper.to_array(tensor).view(BY_NAME[_PROMOTED_TYPES[tensor.data_type]].numpy)
            arrays[name] = array
            values.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, array.shape))
        self._drop(set(arrays))
        self._proto.graph.input.extend(values)
        return Network(self._serialised(), tuple(arrays)), arrays

    def _promoted(self) -> Iterable[tuple[str, Any]]:
        graph = self._proto.graph
        constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                for attribute in node.attribute:
                    if attribute.name == "value":
                        constants[node.output[0]] = attribute.t
        kept = {value.name for value in graph.output}
        used: set[str] = set()
        for node in graph.node:
            needs = _KNOWN_BY_THE_BUILDER.get(node.op_type, ())
            kept.update(name for index, name in enumerate(node.input) if index in needs)
            used.update(node.input)
        for name, tensor in constants.items():
            if name in used and name not in kept and tensor.data_type in _PROMOTED_TYPES:
                count = int(np.prod(tensor.dims, dtype=np.int64))
                if count * BY_NAME[_PROMOTED_TYPES[tensor.data_type]].itemsize >= PROMOTED_BYTES:
                    yield name, tensor

    def _drop(self, names: set[str]) -> None:
        graph = self._proto.graph
        _keep(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in names])
        _keep(graph.node, [node for node in graph.node if not (node.op_type == "Constant" and node.output[0] in names)])

    def _name_axes(self, manifest: Manifest) -> None:
        batch_axes = {spec.name: spec.batch_axis for spec in manifest.inputs + manifest.outputs}
        for prefix, values in (("in", self._proto.graph.input), ("out", self._proto.graph.output)):
            for index, value in enumerate(values):
                for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                    if dim.HasField("dim_value") and dim.dim_value > 0:
                        continue
                    dim.dim_param = "n" if axis == batch_axes.get(value.name) else f"{prefix}{index}_{axis}"

    def _serialised(self) -> bytes:
        try:
            return bytes(self._proto.SerializeToString(deterministic=True))
        except ValueError as error:
            raise UnreadableModel(f"larger than one ONNX message may be (2 GB): {error}") from error


def _keep(field: Any, kept: list[Any]) -> None:
    """Leave only these entries of a repeated field, in this order."""
    if len(kept) == len(field):
        return
    copies = [type(entry).FromString(entry.SerializeToString()) for entry in kept]
    del field[:]
    field.extend(copies)


def _file_tensor(value: Any) -> FileTensor:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return FileTensor(value.name, str(kind), None)
    tensor = value.type.tensor_type
    try:
        name = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
    except (KeyError, TypeError):
        name = TensorProto.DataType.Name(tensor.elem_type)
    dims = None
    if tensor.HasField("shape"):
        dims = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return FileTensor(value.name, _DTYPE_NAMES.get(name, name), dims)


_NAME_PARTS: Final = re.compile(r"[^A-Za-z0-9_.-]+")


def file_stem(name: str) -> str:
    """Return a model's name as part of a file name."""
    return _NAME_PARTS.sub("_", name)[:100] or "model"
