"""Small ONNX files for tests: each function writes one model and returns its path.

``directory`` is created; the file is called ``model.onnx`` unless ``file_name`` says otherwise, so that a bundle is
``mlp(tmp_path / "name")``. Batch axis: axis 0 and called ``n`` unless the function's docstring says otherwise. All
files keep ``IR_VERSION`` and ``OPSET``, which ONNX Runtime 1.20 and later accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

IR_VERSION = 8
OPSET = 18
POISON = 666.0
"""A row holding this value makes ``poison`` fail."""

ONNX_DTYPES: dict[str, int] = {
    "bool": TensorProto.BOOL, "u8": TensorProto.UINT8, "u16": TensorProto.UINT16, "u32": TensorProto.UINT32,
    "u64": TensorProto.UINT64, "i8": TensorProto.INT8, "i16": TensorProto.INT16, "i32": TensorProto.INT32,
    "i64": TensorProto.INT64, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16, "f32": TensorProto.FLOAT,
    "f64": TensorProto.DOUBLE,
}  # fmt: skip
"""Manifest dtype names and the ONNX element types they stand for."""

Dims = Sequence[int | str | None]


def value(name: str, dtype: str, dims: Dims) -> Any:
    """Return a graph input or output; a ``str`` names a dynamic axis, None leaves it unnamed."""
    return helper.make_tensor_value_info(name, ONNX_DTYPES[dtype], list(dims))


def constant(name: str, array: Any) -> Any:
    """Return an initializer holding ``array``."""
    return numpy_helper.from_array(np.asarray(array), name)


def write(
    directory: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    initializers: Sequence[Any] = (),
    *,
    file_name: str = "model.onnx",
    opset: int = OPSET,
) -> Path:
    """Write a graph as a model file and return its path; a name with the wrong operator or link still gets written."""
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / file_name
    onnx.save_model(model, str(path))
    return path


def identity(directory: Path, dtype: str = "f32", columns: int = 4) -> Path:
    """``OUTPUT = INPUT``, any dtype, [n, columns]."""
    return write(
        directory,
        [helper.make_node("Identity", ["INPUT"], ["OUTPUT"])],
        [value("INPUT", dtype, ["n", columns])],
        [value("OUTPUT", dtype, ["n", columns])],
    )


def simple(directory: Path, columns: int = 16) -> Path:
    """``OUTPUT0 = INPUT0 + INPUT1`` and ``OUTPUT1 = INPUT0 - INPUT1``, i32 [n, columns]: what client examples use."""
    return write(
        directory,
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        [value("INPUT0", "i32", ["n", columns]), value("INPUT1", "i32", ["n", columns])],
        [value("OUTPUT0", "i32", ["n", columns]), value("OUTPUT1", "i32", ["n", columns])],
    )


def affine(directory: Path, scale: float = 2.0, bias: float = 1.0, columns: int = 8) -> Path:
    """``OUTPUT = INPUT * scale + bias``, f32 [n, columns]: every element's answer is known."""
    return write(
        directory,
        [
            helper.make_node("Mul", ["INPUT", "scale"], ["scaled"]),
            helper.make_node("Add", ["scaled", "bias"], ["OUTPUT"]),
        ],
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", columns])],
        [constant("scale", np.float32(scale)), constant("bias", np.float32(bias))],
    )


def mlp(directory: Path, layers: int = 3, width: int = 64, *, seed: int = 0, batch: int | str = "n") -> Path:
    """``layers`` of Gemm and Relu (none after the last), f32 [batch, width]; an int ``batch`` freezes the axis."""
    random = np.random.default_rng(seed)
    nodes: list[Any] = []
    weights: list[Any] = []
    at = "INPUT"
    for layer in range(layers):
        weights.append(constant(f"w{layer}", (random.standard_normal((width, width)) / width**0.5).astype(np.float32)))
        weights.append(constant(f"b{layer}", (random.standard_normal(width) / 10).astype(np.float32)))
        last = layer == layers - 1
        nodes.append(helper.make_node("Gemm", [at, f"w{layer}", f"b{layer}"], ["OUTPUT" if last else f"gemm{layer}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"gemm{layer}"], [f"relu{layer}"]))
            at = f"relu{layer}"
    return write(
        directory, nodes, [value("INPUT", "f32", [batch, width])], [value("OUTPUT", "f32", [batch, width])], weights
    )


def half_mlp(directory: Path, width: int = 32, *, seed: int = 0) -> Path:
    """One f16 MatMul, [n, width]."""
    weight = (np.random.default_rng(seed).standard_normal((width, width)) / width**0.5).astype(np.float16)
    return write(
        directory,
        [helper.make_node("MatMul", ["INPUT", "w"], ["OUTPUT"])],
        [value("INPUT", "f16", ["n", width])],
        [value("OUTPUT", "f16", ["n", width])],
        [constant("w", weight)],
    )


def sequence(directory: Path, vocabulary: int = 100, width: int = 8, *, seed: int = 0) -> Path:
    """Variable length: ``IDS`` i64 [n, length] -> ``HIDDEN`` f32 [n, length, width] and ``MEAN`` f32 [n, width].

    Serve it with ``input_shapes: [[4], [8]]`` or the like. Ids lie in 0..vocabulary-1.
    """
    table = np.random.default_rng(seed).standard_normal((vocabulary, width)).astype(np.float32)
    return write(
        directory,
        [
            helper.make_node("Gather", ["table", "IDS"], ["HIDDEN"]),
            helper.make_node("ReduceMean", ["HIDDEN", "axes"], ["MEAN"], keepdims=0),
        ],
        [value("IDS", "i64", ["n", "length"])],
        [value("HIDDEN", "f32", ["n", "length", width]), value("MEAN", "f32", ["n", width])],
        [constant("table", table), constant("axes", np.array([1], np.int64))],
    )


def batch_axis_one(directory: Path, columns: int = 3) -> Path:
    """Batch on axis 1: ``STATE`` f32 [2, n, columns] -> ``NEXT`` f32 [2, n, columns], each element plus 1."""
    return write(
        directory,
        [helper.make_node("Add", ["STATE", "one"], ["NEXT"])],
        [value("STATE", "f32", [2, "n", columns])],
        [value("NEXT", "f32", [2, "n", columns])],
        [constant("one", np.float32(1))],
    )


def unbatched(directory: Path, columns: int = 6) -> Path:
    """No batch axis: ``INPUT`` f32 [columns] -> ``OUTPUT`` f32 [columns], each element times 2."""
    return write(
        directory,
        [helper.make_node("Add", ["INPUT", "INPUT"], ["OUTPUT"])],
        [value("INPUT", "f32", [columns])],
        [value("OUTPUT", "f32", [columns])],
    )


def flag(directory: Path, columns: int = 4) -> Path:
    """A scalar beside rows: ``INPUT`` f32 [n, columns], ``NEGATE`` bool [] -> ``OUTPUT`` f32 [n, columns]."""
    return write(
        directory,
        [
            helper.make_node("Neg", ["INPUT"], ["negative"]),
            helper.make_node("Where", ["NEGATE", "negative", "INPUT"], ["OUTPUT"]),
        ],
        [value("INPUT", "f32", ["n", columns]), value("NEGATE", "bool", [])],
        [value("OUTPUT", "f32", ["n", columns])],
    )


def batch_mixing(directory: Path, columns: int = 4) -> Path:
    """Rows depend on their neighbours: ``OUTPUT = INPUT - mean over the batch``, f32 [n, columns]."""
    return write(
        directory,
        [
            helper.make_node("ReduceMean", ["INPUT", "axes"], ["mean"], keepdims=1),
            helper.make_node("Sub", ["INPUT", "mean"], ["OUTPUT"]),
        ],
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", columns])],
        [constant("axes", np.array([0], np.int64))],
    )


def first_row_only(directory: Path, columns: int = 4) -> Path:
    """Right for one row, wrong above: ``OUTPUT = INPUT * 2`` in row 0 and 0 in every other, f32 [n, columns]."""
    return write(
        directory,
        [
            helper.make_node("Slice", ["INPUT", "zero", "one"], ["first"]),
            helper.make_node("Add", ["first", "first"], ["doubled"]),
            helper.make_node("Slice", ["INPUT", "one", "end"], ["others"]),
            helper.make_node("Mul", ["others", "nothing"], ["blank"]),
            helper.make_node("Concat", ["doubled", "blank"], ["OUTPUT"], axis=0),
        ],
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", columns])],
        [
            constant("zero", np.array([0], np.int64)),
            constant("one", np.array([1], np.int64)),
            constant("end", np.array([2**31 - 1], np.int64)),
            constant("nothing", np.float32(0)),
        ],
    )


def lost_row(directory: Path, columns: int = 4, limit: int = 3) -> Path:
    """Declares [n, columns] but never returns more than ``limit`` rows: a probe at ``limit`` rows cannot see it."""
    return write(
        directory,
        [helper.make_node("Slice", ["INPUT", "zero", "limit"], ["OUTPUT"])],
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", columns])],
        [constant("zero", np.array([0], np.int64)), constant("limit", np.array([limit], np.int64))],
    )


def surplus_row(directory: Path, columns: int = 4, limit: int = 3) -> Path:
    """Declares [n, columns] but returns n + 1 rows once there are more than ``limit``."""
    return write(
        directory,
        [
            helper.make_node("Slice", ["INPUT", "limit", "next"], ["again"]),
            helper.make_node("Concat", ["INPUT", "again"], ["OUTPUT"], axis=0),
        ],
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", columns])],
        [constant("limit", np.array([limit], np.int64)), constant("next", np.array([limit + 1], np.int64))],
    )


def miscounting(directory: Path, columns: int = 4, *, surplus: bool = False) -> Path:
    """``OUTPUT = INPUT``, but rows with ``POISON`` in column 0 are left out, or given twice with ``surplus``.

    No probe can see it, so it is what a running server meets: n - 1 or n + 1 rows for n.
    """
    nodes = [
        helper.make_node("Gather", ["INPUT", "column"], ["first"], axis=1),
        helper.make_node("Equal", ["first", "poison"], ["hit"]),
        helper.make_node("Not", ["hit"], ["miss"]),
        helper.make_node("NonZero", ["hit" if surplus else "miss"], ["found"]),
        helper.make_node("Squeeze", ["found", "column_axis"], ["rows"]),
        helper.make_node("Gather", ["INPUT", "rows"], ["some" if surplus else "OUTPUT"], axis=0),
    ]
    if surplus:
        nodes.append(helper.make_node("Concat", ["INPUT", "some"], ["OUTPUT"], axis=0))
    return write(
        directory,
        nodes,
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", columns])],
        [
            constant("column", np.array(0, np.int64)),
            constant("column_axis", np.array([0], np.int64)),
            constant("poison", np.float32(POISON)),
        ],
    )


def total(directory: Path, columns: int = 4) -> Path:
    """``EACH`` f32 [n, columns] = INPUT, and ``TOTAL`` f32 [columns], the sum over the batch: an output without one."""
    return write(
        directory,
        [
            helper.make_node("Identity", ["INPUT"], ["EACH"]),
            helper.make_node("ReduceSum", ["INPUT", "axes"], ["TOTAL"], keepdims=0),
        ],
        [value("INPUT", "f32", ["n", columns])],
        [value("EACH", "f32", ["n", columns]), value("TOTAL", "f32", [columns])],
        [constant("axes", np.array([0], np.int64))],
    )


def row_sum(directory: Path, columns: int = 4) -> Path:
    """``OUTPUT`` f32 [n, 1], the sum over each row of ``INPUT``: much in, little out."""
    return write(
        directory,
        [helper.make_node("ReduceSum", ["INPUT", "axes"], ["OUTPUT"])],
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", 1])],
        [constant("axes", np.array([1], np.int64))],
    )


def poison(directory: Path, columns: int = 4) -> Path:
    """``OUTPUT = INPUT``, f32 [n, columns]; the runtime fails if any element of column 0 equals ``POISON``.

    The comparison is an index into a table of one element, so a poisoned row gathers out of range.
    """
    return write(
        directory,
        [
            helper.make_node("Slice", ["INPUT", "zero", "one", "axis"], ["column"]),
            helper.make_node("Equal", ["column", "poison"], ["hit"]),
            helper.make_node("Cast", ["hit"], ["index"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "index"], ["nothing"]),
            helper.make_node("Add", ["INPUT", "nothing"], ["OUTPUT"]),
        ],
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", columns])],
        [
            constant("zero", np.array([0], np.int64)),
            constant("one", np.array([1], np.int64)),
            constant("axis", np.array([1], np.int64)),
            constant("poison", np.float32(POISON)),
            constant("table", np.zeros(1, np.float32)),
        ],
    )


def steps(directory: Path, columns: int = 4) -> Path:
    """``OUTPUT = INPUT`` after as many 64 x 64 matrix products, some 5 us each, as INPUT's largest value says.

    Zeros, as in a warm-up, take no time; 1e9 hangs for more than an hour. f32 [n, columns].
    """
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_in"], ["go_out"]),
            helper.make_node("MatMul", ["state_in", "rotation"], ["state_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_in", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_in", TensorProto.FLOAT, [64, 64]),
        ],
        [
            helper.make_tensor_value_info("go_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_out", TensorProto.FLOAT, [64, 64]),
        ],
    )
    orthogonal = np.linalg.qr(np.random.default_rng(0).standard_normal((64, 64)))[0].astype(np.float32)
    return write(
        directory,
        [
            helper.make_node("ReduceMax", ["INPUT"], ["peak"], keepdims=0),
            helper.make_node("Cast", ["peak"], ["count"], to=TensorProto.INT64),
            helper.make_node("Loop", ["count", "go", "rotation"], ["last"], body=body),
            helper.make_node("ReduceMax", ["last"], ["largest"], keepdims=0),
            helper.make_node("Clip", ["largest", "low", "low"], ["nothing"]),
            helper.make_node("Add", ["INPUT", "nothing"], ["OUTPUT"]),
        ],
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", columns])],
        [constant("low", np.float32(0)), constant("go", np.array(True)), constant("rotation", orthogonal)],
    )


def slow(directory: Path, milliseconds: float = 50.0, columns: int = 4) -> Path:
    """``OUTPUT = INPUT`` after about ``milliseconds`` of work that does not depend on the batch size; f32 [n, columns].

    A Loop of 64 x 64 matrix products, some 5 us each on one core; the count is fixed, so the time is only roughly
    right. Nothing in a test may depend on more than "takes a while".
    """
    count = max(1, round(milliseconds / 0.005))
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_in"], ["go_out"]),
            helper.make_node("MatMul", ["state_in", "rotation"], ["state_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_in", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_in", TensorProto.FLOAT, [64, 64]),
        ],
        [
            helper.make_tensor_value_info("go_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_out", TensorProto.FLOAT, [64, 64]),
        ],
    )
    orthogonal = np.linalg.qr(np.random.default_rng(0).standard_normal((64, 64)))[0].astype(np.float32)
    return write(
        directory,
        [
            # The state hangs on the input, or the whole loop would be folded into a constant when the file is loaded.
            helper.make_node("ReduceMax", ["INPUT"], ["peak"], keepdims=0),
            helper.make_node("Clip", ["peak", "low", "low"], ["zero"]),
            helper.make_node("Add", ["rotation", "zero"], ["start"]),
            helper.make_node("Loop", ["count", "go", "start"], ["last"], body=body),
            helper.make_node("ReduceMax", ["last"], ["largest"], keepdims=0),
            helper.make_node("Clip", ["largest", "low", "low"], ["nothing"]),
            helper.make_node("Add", ["INPUT", "nothing"], ["OUTPUT"]),
        ],
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", columns])],
        [
            constant("low", np.float32(0)),
            constant("count", np.array(count, np.int64)),
            constant("go", np.array(True)),
            constant("rotation", orthogonal),
        ],
    )


def positives(directory: Path, columns: int = 8, threshold: float = 0.0) -> Path:
    """Data-dependent size: ``SCORES`` f32 [columns] -> ``KEPT`` f32 [k] and ``INDEX`` i64 [k], those above threshold.

    No batch axis. Serve it with ``shape: k``, ``dims: {k: -1}`` and ``max: {k: columns}``.
    """
    return write(
        directory,
        [
            helper.make_node("Greater", ["SCORES", "threshold"], ["above"]),
            helper.make_node("NonZero", ["above"], ["index_row"]),
            helper.make_node("Squeeze", ["index_row", "axis"], ["INDEX"]),
            helper.make_node("Gather", ["SCORES", "INDEX"], ["KEPT"]),
        ],
        [value("SCORES", "f32", [columns])],
        [value("KEPT", "f32", ["k"]), value("INDEX", "i64", ["k"])],
        [constant("threshold", np.float32(threshold)), constant("axis", np.array([0], np.int64))],
    )


def frozen_batch(directory: Path, columns: int = 4) -> Path:
    """Declares [n, columns] but reshapes to 1 row inside, so any other row count fails in the runtime."""
    return write(
        directory,
        [
            helper.make_node("Reshape", ["INPUT", "shape"], ["OUTPUT"]),
        ],
        [value("INPUT", "f32", ["n", columns])],
        [value("OUTPUT", "f32", ["n", columns])],
        [constant("shape", np.array([1, columns], np.int64))],
    )


def not_a_model(directory: Path) -> Path:
    """A file that is no ONNX model at all."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.onnx"
    path.write_bytes(b"this is not an ONNX model")
    return path


def unknown_opset(directory: Path, opset: int = 99) -> Path:
    """An identity that asks for an operator set no runtime has."""
    return write(
        directory,
        [helper.make_node("Identity", ["INPUT"], ["OUTPUT"])],
        [value("INPUT", "f32", ["n", 4])],
        [value("OUTPUT", "f32", ["n", 4])],
        opset=opset,
    )


def unknown_operator(directory: Path) -> Path:
    """A graph with an operator nobody implements, in the node called ``strange``."""
    return write(
        directory,
        [helper.make_node("Frobnicate", ["INPUT"], ["OUTPUT"], name="strange")],
        [value("INPUT", "f32", ["n", 4])],
        [value("OUTPUT", "f32", ["n", 4])],
    )
