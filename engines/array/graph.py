"""An ONNX file as plain nodes and arrays, and the check that every operator in it is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

from engines.agreement import FileTensor
from engines.array.operator import Node
from engines.tensor import DTYPES, NDArray

OLDEST_OPSET: Final = 7
NEWEST_OPSET: Final = 24
"""Operator set versions whose meanings the operators here follow."""
MAX_TOLD_NODES: Final = 10

_DTYPE_NAMES: Final[dict[str, str]] = {dtype.numpy.name: dtype.name for dtype in DTYPES}


class UnusableGraph(ValueError):
    """The file is an ONNX model that this engine cannot run; the message says why."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph in execution order.

    Attributes:
        constants: initializers and outputs of Constant nodes, on the host.
        last_use: per value, the index of the last node that reads it; values missing here are read by none.
    """

    opset: int
    nodes: tuple[Node, ...]
    constants: Mapping[str, NDArray]
    inputs: Mapping[str, FileTensor]
    outputs: Mapping[str, FileTensor]
    last_use: Mapping[str, int]


def read_graph(path: Path, known: Mapping[str, Any]) -> Graph:
    """Return the graph in the file; ``known`` holds the supported operators by name.

    Raises:
        UnusableGraph: an operator, operator set, or construct is not supported, or a value is read before it exists.
    """
    model = onnx.load(str(path))
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise UnusableGraph(
            f"opset {opset} is not supported, only {OLDEST_OPSET} to {NEWEST_OPSET}; export the model with one of "
            "those, or write engine: onnxruntime"
        )
    constants = {tensor.name: _array(tensor) for tensor in model.graph.initializer}
    nodes: list[Node] = []
    unknown: list[str] = []
    for index, proto in enumerate(model.graph.node):
        node = _node(proto, index)
        if node.operator == "Constant" and proto.domain in ("", "ai.onnx"):
            constants[node.outputs[0]] = _constant(node)
        elif proto.domain not in ("", "ai.onnx"):
            unknown.append(f"operator {proto.domain}.{node.operator} ({node.title})")
        elif node.operator not in known:
            unknown.append(f"operator {node.operator} ({node.title})")
        else:
            nodes.append(node)
    if unknown:
        more = f" and {len(unknown) - MAX_TOLD_NODES} more" if len(unknown) > MAX_TOLD_NODES else ""
        raise UnusableGraph(
            f"{', '.join(unknown[:MAX_TOLD_NODES])}{more} not supported by the array engine; write engine: onnxruntime"
        )
    inputs = {value.name: _file_tensor(value) for value in model.graph.input if value.name not in constants}
    outputs = {value.name: _file_tensor(value) for value in model.graph.output}
    last_use = _last_use(nodes, constants, inputs, outputs)
    return Graph(opset, tuple(nodes), constants, inputs, outputs, last_use)


def _last_use(
    nodes: list[Node], constants: Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> dict[str, int]:
    made = {*constants, *inputs}
    last_use: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in node.inputs:
            if name and name not in made:
                raise UnusableGraph(f"{node.title} reads '{name}', which nothing before it makes")
            last_use[name] = index
        made.update(node.outputs)
    for name in outputs:
        if name not in made:
            raise UnusableGraph(f"output '{name}' is made by no node")
        last_use[name] = len(nodes)
    return last_use


def _node(proto: Any, index: int) -> Node:
    attributes: dict[str, Any] = {}
    for attribute in proto.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        elif isinstance(value, onnx.TensorProto):
            value = _array(value)
        attributes[attribute.name] = value
    title = f"node '{proto.name}'" if proto.name else f"node {index}"
    return Node(proto.op_type, title, tuple(proto.input), tuple(proto.output), attributes)


def _constant(node: Node) -> NDArray:
    if not node.attributes:
        raise UnusableGraph(f"{node.title}: Constant without a value")
    ((name, value),) = list(node.attributes.items())[:1]
    match name:
        case "value":
            return np.asarray(value)
        case "value_float" | "value_floats":
            return np.asarray(value, np.float32)
        case "value_int" | "value_ints":
            return np.asarray(value, np.int64)
        case _:
            raise UnusableGraph(f"{node.title}: Constant with {name} is not supported; use value")


def _array(tensor: Any) -> NDArray:
    """Return an initializer as an array of its own, so that the message can be dropped."""
    try:
        array = numpy_helper.to_array(tensor)
    except (TypeError, ValueError, KeyError) as error:
        raise UnusableGraph(f"tensor '{tensor.name}' cannot be read: {error}") from error
    # to_array may return a view of the message's bytes, which would keep all of them alive.
    return np.array(array)


def _file_tensor(value: Any) -> FileTensor:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return FileTensor(value.name, str(kind), None)
    tensor = value.type.tensor_type
    try:
        name = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
    except (KeyError, TypeError):
        name = onnx.TensorProto.DataType.Name(tensor.elem_type)
    dims = None
    if tensor.HasField("shape"):
        dims = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return FileTensor(value.name, _DTYPE_NAMES.get(name, name), dims)
