"""A manifest made from an ``.onnx`` file alone, and what of a written one contradicts the file.

What a file tells of its batch axis is a hint: exporters name dynamic axes at random, repeat ``?``, or leave them
unnamed, so names are not compared. The rule is
    a dynamic leading axis of an input or an output is the batch axis;
    without dynamic inputs, a leading size N shared by every input and output is a batch compiled for N rows;
    any other dynamic input axis needs served sizes, which only a person knows: refused, with a manifest to edit.
Whether the axis really is one is for the probe to find out, by running.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import TensorProto

from engines.bundle.manifest import (
    DEFAULT_BATCH_SIZES,
    MAX_AXIS_SIZE,
    MAX_BATCH_SIZE,
    MAX_TENSOR_AXES,
    MAX_TENSORS,
    Manifest,
    Problem,
    variable_axes,
)
from engines.bundle.render import to_yaml as to_yaml
from engines.bundle.tensors import close_match
from engines.errors import NotReady
from engines.tensor import TensorSpec

ONNX_DTYPES: Final[dict[int, str]] = {
    TensorProto.BOOL: "bool",
    TensorProto.UINT8: "u8",
    TensorProto.UINT16: "u16",
    TensorProto.UINT32: "u32",
    TensorProto.UINT64: "u64",
    TensorProto.INT8: "i8",
    TensorProto.INT16: "i16",
    TensorProto.INT32: "i32",
    TensorProto.INT64: "i64",
    TensorProto.FLOAT16: "f16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.FLOAT: "f32",
    TensorProto.DOUBLE: "f64",
}
EXAMPLE_SIZE: Final = 64
"""Size written into a manifest to edit, where only a person knows the served ones."""


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output as a model file declares it.

    Attributes:
        kind: ONNX name of the element type, such as ``FLOAT``; of the value type, such as ``sequence``, if no tensor.
        dtype: manifest name, or empty for a type that cannot be served.
        dims: -1 for a dynamic axis; None if the file does not tell the rank.
    """

    name: str
    kind: str
    dtype: str
    dims: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Graph:
    """The tensors of a model file, weights excluded, in the file's order."""

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]


def read_graph(path: Path) -> Graph:
    """Return what the ``.onnx`` file at ``path`` takes and gives; weights in external files are not read.

    Raises:
        NotReady: the file cannot be read or is no ONNX model.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except OSError as error:
        raise NotReady(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        # The parser's error class is not part of the interface of the library that calls it.
        raise NotReady(f"{path} cannot be read as an ONNX model: it is damaged, incomplete or not ONNX") from error
    if not model.graph.output:
        raise NotReady(f"{path} is not a usable ONNX model: its graph has no outputs; the file may be incomplete")
    graph = _graph(model)
    if any(tensor.dims is None for tensor in graph.outputs):
        graph = _with_inferred_outputs(model, graph)
    return graph


def derive_manifest(path: Path) -> Manifest:
    """Return a manifest for the bare ``.onnx`` file at ``path``.

    Raises:
        NotReady: the file is no model, or needs a manifest; the message says why and, where it helps, holds one.
    """
    graph = read_graph(path)
    _refuse(graph, path)
    dynamic_batch = any(tensor.dims and tensor.dims[0] == -1 for tensor in graph.inputs)
    rows = 0 if dynamic_batch else _static_rows(graph)
    inputs = tuple(_spec(tensor, dynamic_batch=dynamic_batch, rows=rows) for tensor in graph.inputs)
    outputs = tuple(_spec(tensor, dynamic_batch=dynamic_batch, rows=rows) for tensor in graph.outputs)
    batch_sizes = DEFAULT_BATCH_SIZES if dynamic_batch else (rows,)
    manifest = Manifest(
        "model", "auto", inputs, outputs, inputs, outputs, batch_sizes, model_file=path.name, derived=True
    )
    axes = variable_axes(inputs)
    if axes:
        example = replace(manifest, input_shapes=((EXAMPLE_SIZE,) * len(axes),))
        order = ", ".join(f"{inputs[index].name} axis {axis}" for index, axis in axes)
        raise NotReady(
            f"{path}: sizes of {order} are dynamic; a manifest must list the sizes to serve under input_shapes. "
            f"Save this as manifest.yaml and replace {EXAMPLE_SIZE} by your sizes, one list per served combination in "
            f"the order {order} (where such an axis is the batch axis, write n for it instead):\n{to_yaml(example)}"
        )
    return manifest


def disagreements(manifest: Manifest, graph: Graph, file: str) -> tuple[Problem, ...]:
    """Return every way in which a manifest contradicts its model file; ``file`` names the manifest in messages.

    A static axis in the file may stand for one of the same size only; a dynamic one for any.
    """
    problems: list[Problem] = []
    lists = (
        ("executable_inputs", manifest.inputs, graph.inputs),
        ("executable_outputs", manifest.outputs, graph.outputs),
    )
    for key, specs, tensors in lists:
        by_name = {tensor.name: tensor for tensor in tensors}
        for index, spec in enumerate(specs):
            tensor = by_name.get(spec.name)
            if tensor is None:
                names = ", ".join(by_name)
                meant = close_match(spec.name, by_name) or (names if len(by_name) == 1 else "one of these")
                here = f"{key}[{index}].name"
                problems.append(
                    Problem(file, here, f"a tensor of the model: {names}", repr(spec.name), f"write {meant}")
                )
                continue
            problems += _tensor_disagreements(spec, tensor, f"{key}[{index}]", manifest, file)
        missing = [name for name in by_name if name not in {spec.name for spec in specs}]
        # Outputs may be left out, they are just not asked for; a model cannot run without one of its inputs.
        if missing and key == "executable_inputs":
            expected = f"every input of the model, also {', '.join(missing)}"
            problems.append(Problem(file, key, expected, "no entry for it", "add an entry for each"))
    return tuple(problems)


def _tensor_disagreements(
    spec: TensorSpec, tensor: GraphTensor, at: str, manifest: Manifest, file: str
) -> list[Problem]:
    problems: list[Problem] = []
    if spec.dtype != tensor.dtype:
        fix = f"write {tensor.dtype}" if tensor.dtype else "this type cannot be served"
        problems.append(Problem(file, f"{at}.dtype", f"{tensor.dtype or tensor.kind} as in the model", spec.dtype, fix))
    if tensor.dims is None:
        return problems
    if len(tensor.dims) != len(spec.shape):
        expected = f"{len(tensor.dims)} axes as in the model: {list(tensor.dims)}"
        problems.append(Problem(file, f"{at}.shape", expected, f"{len(spec.shape)} axes", "correct the letters"))
        return problems
    for axis, (size, real) in enumerate(zip(spec.shape, tensor.dims, strict=True)):
        if real == -1 or size == real or (axis == spec.batch_axis and manifest.batch_sizes == (real,)):
            continue
        if axis == spec.batch_axis:
            fix = f"write compiled_batch_sizes: [{real}], or export the model with a dynamic axis"
            found = f"batch sizes {list(manifest.batch_sizes)}"
            problems.append(Problem(file, f"{at}.shape", f"{real} rows on axis {axis} as in the model", found, fix))
        else:
            found = "-1" if size == -1 else str(size)
            expected = f"{real} on axis {axis} as in the model"
            problems.append(Problem(file, f"{at}.dims", expected, found, f"write {real}"))
    return problems


def _graph(model: Any) -> Graph:
    weights = {tensor.name for tensor in model.graph.initializer}
    weights |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    inputs = tuple(_tensor(value) for value in model.graph.input if value.name not in weights)
    return Graph(inputs, tuple(_tensor(value) for value in model.graph.output))


def _tensor(value: Any) -> GraphTensor:
    which = value.type.WhichOneof("value")
    if which not in ("tensor_type", None):
        return GraphTensor(value.name, which.removesuffix("_type"), "", None)
    tensor = value.type.tensor_type
    number = tensor.elem_type
    kind = TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else str(number)
    dims: tuple[int, ...] | None = None
    if tensor.HasField("shape"):
        # Sizes below 1 are how some exporters write "dynamic".
        dims = tuple(dim.dim_value if dim.dim_value > 0 else -1 for dim in tensor.shape.dim)
    return GraphTensor(value.name, kind, ONNX_DTYPES.get(number, ""), dims)


def _with_inferred_outputs(model: Any, graph: Graph) -> Graph:
    """Fill in output types and shapes the file leaves out, as far as they follow from its nodes."""
    try:
        inferred = _graph(onnx.shape_inference.infer_shapes(model))
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return graph
    pairs = zip(graph.outputs, inferred.outputs, strict=True)
    return Graph(graph.inputs, tuple(old if old.dims is not None else new for old, new in pairs))


def _refuse(graph: Graph, path: Path) -> None:
    """Raise for a graph that no manifest can be derived for."""
    if not graph.inputs:
        raise NotReady(f"{path} takes no inputs, so there is nothing to serve")
    for what, tensors in (("input", graph.inputs), ("output", graph.outputs)):
        if len(tensors) > MAX_TENSORS:
            raise NotReady(f"{path} has {len(tensors)} {what}s, the limit is {MAX_TENSORS}")
        for tensor in tensors:
            if tensor.kind == "STRING":
                raise NotReady(
                    f"{path}: {what} '{tensor.name}' holds strings, whose sizes differ, so they cannot be batched in "
                    "shared memory; turn text into numbers in model.py (preprocess, postprocess) and export the rest"
                )
            if not tensor.dtype:
                known = ", ".join(ONNX_DTYPES.values())
                raise NotReady(f"{path}: {what} '{tensor.name}' is of type {tensor.kind}, expected one of {known}")
            if tensor.dims is None:
                raise NotReady(f"{path} does not tell the rank of {what} '{tensor.name}'; write a manifest.yaml for it")
            if len(tensor.dims) > MAX_TENSOR_AXES or any(size > MAX_AXIS_SIZE for size in tensor.dims):
                limit = f"{MAX_TENSOR_AXES} axes of at most {MAX_AXIS_SIZE}"
                raise NotReady(f"{path}: {what} '{tensor.name}' has shape {list(tensor.dims)}, the limit is {limit}")
            if not tensor.name:
                raise NotReady(f"{path} has an {what} without a name")


def _static_rows(graph: Graph) -> int:
    """Return the leading size that every tensor of a fully static model shares, or 0."""
    leading = {tensor.dims[0] if tensor.dims else 0 for tensor in graph.inputs + graph.outputs}
    rows = leading.pop() if len(leading) == 1 else 0
    return rows if 1 <= rows <= MAX_BATCH_SIZE else 0


def _spec(tensor: GraphTensor, *, dynamic_batch: bool, rows: int) -> TensorSpec:
    dims = tensor.dims or ()
    batched = bool(dims) and (dims[0] == -1 if dynamic_batch else rows > 0)
    return TensorSpec(tensor.name, tensor.dtype, (-1, *dims[1:]) if batched else dims, 0 if batched else None)
