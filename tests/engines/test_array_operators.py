"""Every operator of the array engine gives what ONNX Runtime gives, on drawn shapes, values and attributes."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from engines.array.graph import Graph, UnusableGraph, read_graph
from engines.array.interpreter import OPERATORS, Interpreter, NodeFailed, to_host
from engines.device.host import HostDevice
from engines.tensor import NDArray

_OPTIONS = onnxruntime.SessionOptions()
_OPTIONS.log_severity_level = 4
_OPTIONS.intra_op_num_threads = 1
# What is compared is the operator as written, not what an optimiser makes of it.
_OPTIONS.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Seeds = st.integers(0, 2**32 - 1)


def model_of(operator: str, inputs: list[NDArray], outputs: int, opset: int, attributes: dict[str, Any]) -> bytes:
    names = [f"in{index}" for index in range(len(inputs))]
    made = [f"out{index}" for index in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(operator, names, made, name="it", **attributes)],
        "graph",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(names, inputs, strict=True)
        ],
        # An output type is not needed to run; giving none lets one function serve all operators.
        [helper.make_empty_tensor_value_info(name) for name in made],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return model.SerializeToString()


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("operators") / "model.onnx"


def compare(
    scratch: Any,
    operator: str,
    inputs: list[NDArray],
    *,
    outputs: int = 1,
    opset: int = 18,
    rtol: float = 2e-6,
    atol: float = 1e-6,
    **attributes: Any,
) -> None:
    """Run one node in both and compare shapes, types and values."""
    inputs = [np.asarray(array) for array in inputs]
    raw = model_of(operator, inputs, outputs, opset, attributes)
    feeds = {f"in{index}": array for index, array in enumerate(inputs)}
    expected = onnxruntime.InferenceSession(raw, _OPTIONS, providers=["CPUExecutionProvider"]).run(None, feeds)
    scratch.write_bytes(raw)
    graph = read_graph(scratch, OPERATORS)
    for got in (Interpreter(graph, np).run(feeds), run_on_device(graph, feeds)):
        for name, want in zip((f"out{index}" for index in range(outputs)), expected, strict=True):
            assert got[name].dtype == want.dtype, f"{operator}: {got[name].dtype} instead of {want.dtype}"
            assert got[name].shape == want.shape, f"{operator}: {got[name].shape} instead of {want.shape}"
            if want.dtype.kind == "f":
                if want.dtype == np.float16:
                    rtol, atol = 2e-3, 2e-3
                np.testing.assert_allclose(got[name], want, rtol=rtol, atol=atol)
            else:
                np.testing.assert_array_equal(got[name], want)


def run_on_device(graph: Graph, feeds: dict[str, NDArray]) -> dict[str, NDArray]:
    """Run with an array module that takes no host arrays and lacks what a GPU's lacks."""
    device, results = HostDevice(), {}

    def work() -> None:
        made = Interpreter(graph, device.xp).run({name: device.xp.asarray(array) for name, array in feeds.items()})
        results.update({name: to_host(array) for name, array in made.items()})

    device.launch(device.stream("compute"), work, reads=[], writes=[])
    device.synchronize()
    device.close()
    return results


def floats(seed: int, *shape: int, dtype: Any = np.float32) -> NDArray:
    return np.random.default_rng(seed).uniform(-3, 3, shape).astype(dtype)


Shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def broadcast_pair(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full = draw(Shapes)

    def thinned() -> tuple[int, ...]:
        kept = [1 if draw(st.booleans()) else size for size in full]
        return tuple(kept[draw(st.integers(0, len(full))) :])

    return full, thinned()


@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div", "Pow", "Equal", "Greater", "Less", "Min", "Max"])
@given(shapes=broadcast_pair(), seed=Seeds, kind=st.sampled_from(["f4", "f8", "i4", "i8"]), swap=st.booleans())
@quick
def test_binary(scratch: Any, operator: str, shapes: Any, seed: int, kind: str, swap: bool) -> None:
    random = np.random.default_rng(seed)
    left, right = (
        random.integers(-9, 10, shape).astype(kind) if kind[0] == "i" else random.uniform(-3, 3, shape).astype(kind)
        for shape in (reversed(shapes) if swap else shapes)
    )
    if operator == "Div" and kind[0] == "i":
        right = np.asarray(np.where(right == 0, 3, right), kind)
    if operator == "Pow":
        left = np.asarray(np.abs(left), kind)
        right = np.asarray(np.abs(right) % 4, kind)
    compare(scratch, operator, [left, right], rtol=1e-5)


@pytest.mark.parametrize(
    "operator", ["Sqrt", "Relu", "Sigmoid", "Tanh", "Erf", "Exp", "Log", "Neg", "Abs", "Identity", "Reciprocal"]
)
@given(shape=Shapes, seed=Seeds, kind=st.sampled_from(["f4", "f2"]))
@quick
def test_unary(scratch: Any, operator: str, shape: tuple[int, ...], seed: int, kind: str) -> None:
    array = floats(seed, *shape)
    if operator in ("Sqrt", "Log", "Reciprocal"):
        array = np.abs(array) + np.float32(0.1)
    if kind == "f2" and operator in ("Erf", "Log", "Reciprocal", "Exp", "Sqrt"):
        kind = "f4"  # no CPU kernel to compare with
    compare(scratch, operator, [array.astype(kind)], rtol=1e-5)


@pytest.mark.parametrize("extreme", [0.0, -0.0, 1e-30, 5.9, 6.1, 40.0, -40.0, 100.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("operator", ["Erf", "Sigmoid", "Tanh", "Relu", "Exp"])
def test_extremes(scratch: Any, operator: str, extreme: float) -> None:
    compare(scratch, operator, [np.array([extreme, 1.0], np.float32)], rtol=1e-5)


def test_erf_holds_all_digits_of_f64(scratch: Any) -> None:
    x = np.concatenate([np.linspace(-7, 7, 4001), [1e-9, -1e-300, 0.5]])
    scratch.write_bytes(model_of("Erf", [x], 1, 18, {}))
    got = Interpreter(read_graph(scratch, OPERATORS), np).run({"in0": x})["out0"]
    np.testing.assert_allclose(got, [math.erf(value) for value in x], rtol=1e-14, atol=0)


@given(seed=Seeds, approximate=st.sampled_from(["none", "tanh"]))
@quick
def test_gelu(scratch: Any, seed: int, approximate: str) -> None:
    compare(scratch, "Gelu", [floats(seed, 3, 7)], opset=20, approximate=approximate)


@given(
    rows=st.integers(1, 6), inner=st.integers(1, 9), columns=st.integers(1, 6),
    lead=st.sampled_from([((), ()), ((2,), (2,)), ((2,), ()), ((), (3,)), ((2, 1), (3,))]), seed=Seeds,
)  # fmt: skip
@quick
def test_matmul(scratch: Any, rows: int, inner: int, columns: int, lead: Any, seed: int) -> None:
    left, right = floats(seed, *lead[0], rows, inner), floats(seed + 1, *lead[1], inner, columns)
    compare(scratch, "MatMul", [left, right], rtol=1e-4, atol=1e-5)


def test_matmul_of_vectors(scratch: Any) -> None:
    compare(scratch, "MatMul", [floats(0, 4), floats(1, 4, 3)], atol=1e-5)
    compare(scratch, "MatMul", [floats(0, 3, 4), floats(1, 4)], atol=1e-5)


@given(
    trans_a=st.integers(0, 1), trans_b=st.integers(0, 1), alpha=st.sampled_from([1.0, 0.5]),
    beta=st.sampled_from([1.0, 2.0, 0.0]), bias=st.sampled_from([None, (), (5,), (1, 5), (3, 1), (3, 5)]), seed=Seeds,
)  # fmt: skip
@quick
def test_gemm(scratch: Any, trans_a: int, trans_b: int, alpha: float, beta: float, bias: Any, seed: int) -> None:
    left = floats(seed, *((4, 3) if trans_a else (3, 4)))
    right = floats(seed + 1, *((5, 4) if trans_b else (4, 5)))
    inputs = [left, right] if bias is None else [left, right, floats(seed + 2, *bias)]
    compare(scratch, "Gemm", inputs, atol=1e-5, transA=trans_a, transB=trans_b, alpha=alpha, beta=beta)


@pytest.mark.parametrize("operator", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2"])
@given(
    axes=st.sampled_from([None, [0], [1], [-1], [0, 2], [1, 2]]), keepdims=st.integers(0, 1), noop=st.integers(0, 1),
    old=st.booleans(), kind=st.sampled_from(["f4", "i4"]), seed=Seeds,
)  # fmt: skip
@quick
def test_reductions(
    scratch: Any, operator: str, axes: Any, keepdims: int, noop: int, old: bool, kind: str, seed: int
) -> None:
    array = (floats(seed, 2, 3, 4) * 10).astype(kind)
    if old:
        attributes = {} if axes is None else {"axes": axes}
        compare(scratch, operator, [array], opset=11, keepdims=keepdims, atol=1e-5, **attributes)
    else:
        inputs = [array] if axes is None else [array, np.array(axes, np.int64)]
        compare(scratch, operator, inputs, keepdims=keepdims, noop_with_empty_axes=noop, atol=1e-5)


@given(axis=st.integers(-3, 2), opset=st.sampled_from([11, 13, 18]), seed=Seeds)
@quick
def test_softmax(scratch: Any, axis: int, opset: int, seed: int) -> None:
    compare(scratch, "Softmax", [floats(seed, 2, 3, 4) * 20], opset=opset, axis=axis)


@given(axis=st.sampled_from([-1, 1, 2]), bias=st.booleans(), outputs=st.sampled_from([1, 3]), seed=Seeds)
@quick
def test_layer_normalization(scratch: Any, axis: int, bias: bool, outputs: int, seed: int) -> None:
    shape = (2, 3, 4)
    parts = [floats(seed + index, *shape[axis:]) for index in range(2 if bias else 1)]
    compare(scratch, "LayerNormalization", [floats(seed, *shape), *parts], outputs=outputs, axis=axis, atol=1e-5)


@given(seed=Seeds, spatial=st.sampled_from([(), (5,), (4, 5)]))
@quick
def test_batch_normalization(scratch: Any, seed: int, spatial: tuple[int, ...]) -> None:
    scale, bias, mean = (floats(seed + index, 3) for index in range(3))
    compare(
        scratch, "BatchNormalization", [floats(seed, 2, 3, *spatial), scale, bias, mean, np.abs(mean) + 1],
        epsilon=1e-3, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("operator", ["ArgMax", "ArgMin"])
@given(axis=st.integers(-3, 2), keepdims=st.integers(0, 1), last=st.integers(0, 1), seed=Seeds)
@quick
def test_arguments(scratch: Any, operator: str, axis: int, keepdims: int, last: int, seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 3, (2, 3, 4)).astype(np.float32)
    compare(scratch, operator, [array], axis=axis, keepdims=keepdims, select_last_index=last)


@pytest.mark.parametrize("to", ["FLOAT", "DOUBLE", "FLOAT16", "INT32", "INT64", "UINT8", "BOOL"])
@pytest.mark.parametrize("kind", ["f4", "f8", "i4", "i8", "u1", "?"])
def test_cast(scratch: Any, to: str, kind: str) -> None:
    array = (np.array([0, 1, 2, 3, 100]) if kind != "?" else np.array([True, False])).astype(kind)
    if kind[0] == "f":
        array = np.abs(array + 0.7).astype(kind)
    compare(scratch, "Cast", [array], to=TensorProto.DataType.Value(to))


@pytest.mark.parametrize(
    ("operator", "shape", "extra", "attributes", "opset"),
    [
        ("Reshape", (2, 3, 4), [[0, -1]], {}, 18),
        ("Reshape", (2, 3, 4), [[4, 6]], {}, 18),
        ("Reshape", (2, 3, 4), [[-1]], {}, 18),
        ("Transpose", (2, 3, 4), [], {}, 18),
        ("Transpose", (2, 3, 4), [], {"perm": [0, 2, 1]}, 18),
        ("Flatten", (2, 3, 4), [], {}, 18),
        ("Flatten", (2, 3, 4), [], {"axis": 0}, 18),
        ("Flatten", (2, 3, 4), [], {"axis": 3}, 18),
        ("Flatten", (2, 3, 4), [], {"axis": -1}, 18),
        ("Squeeze", (2, 1, 4, 1), [], {}, 18),
        ("Squeeze", (2, 1, 4, 1), [[1]], {}, 18),
        ("Squeeze", (2, 1, 4, 1), [[-1]], {}, 18),
        ("Squeeze", (2, 1, 4, 1), [], {"axes": [3]}, 11),
        ("Unsqueeze", (2, 4), [[0, -1]], {}, 18),
        ("Unsqueeze", (2, 4), [[1]], {}, 18),
        ("Unsqueeze", (2, 4), [], {"axes": [0, 3]}, 11),
        ("Shape", (2, 3, 4), [], {}, 18),
        ("Shape", (2, 3, 4), [], {"start": -2}, 18),
        ("Shape", (2, 3, 4), [], {"start": 0, "end": -1}, 18),
        ("Expand", (3, 1), [[2, 1, 6]], {}, 18),
        ("Expand", (3, 4), [[1]], {}, 18),
        ("Expand", (3, 1), [[3, 4]], {}, 18),
    ],
)
def test_shapes(
    scratch: Any, operator: str, shape: tuple[int, ...], extra: list[list[int]], attributes: Any, opset: int
) -> None:
    inputs = [floats(0, *shape), *(np.array(values, np.int64) for values in extra)]
    compare(scratch, operator, inputs, opset=opset, **attributes)


@given(
    starts=st.tuples(st.integers(-7, 7), st.integers(-7, 7)), ends=st.tuples(st.integers(-7, 7), st.integers(-7, 7)),
    steps=st.tuples(st.sampled_from([1, 2, -1, -2]), st.sampled_from([1, 2, -1, -2])),
    axes=st.sampled_from([[0, 1], [1, 0], [-1, 0], [2, 1]]), seed=Seeds,
)  # fmt: skip
@quick
def test_slice(scratch: Any, starts: Any, ends: Any, steps: Any, axes: Any, seed: int) -> None:
    vectors = [np.array(values, np.int64) for values in (starts, ends, axes, steps)]
    compare(scratch, "Slice", [floats(seed, 4, 5, 3), *vectors])


def test_slice_to_the_end_and_backwards(scratch: Any) -> None:
    far = np.iinfo(np.int64)
    for start, end, step in ((0, far.max, 1), (-1, far.min, -1), (2, far.max, 2), (far.max, far.min, -3)):
        vectors = [np.array([value], np.int64) for value in (start, end, 0, step)]
        compare(scratch, "Slice", [floats(0, 7, 2), *vectors])
    compare(scratch, "Slice", [floats(0, 7, 2)], opset=9, starts=[1], ends=[5], axes=[0])


@given(axis=st.integers(-3, 2), indices=st.lists(st.integers(-3, 2), min_size=1, max_size=4), seed=Seeds)
@quick
def test_gather(scratch: Any, axis: int, indices: list[int], seed: int) -> None:
    compare(scratch, "Gather", [floats(seed, 3, 3, 3), np.array(indices, np.int64)], axis=axis)
    compare(scratch, "Gather", [floats(seed, 3, 3, 3), np.array([indices], np.int32)], axis=axis)
    compare(scratch, "Gather", [floats(seed, 3, 3, 3), np.array(indices[0], np.int64)], axis=axis)


@given(axis=st.integers(-2, 1), seed=Seeds, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
@quick
def test_concat_and_split(scratch: Any, axis: int, seed: int, sizes: list[int]) -> None:
    parts = [floats(seed, *((size, 4) if axis % 2 == 0 else (4, size))) for size in sizes]
    compare(scratch, "Concat", parts, axis=axis)
    whole = np.concatenate(parts, axis=axis)
    compare(scratch, "Split", [whole, np.array(sizes, np.int64)], outputs=len(sizes), axis=axis)
    compare(scratch, "Split", [whole], outputs=len(sizes), opset=11, axis=axis, split=sizes)


@pytest.mark.parametrize(("size", "parts"), [(6, 3), (7, 3), (5, 2), (4, 4)])
def test_split_into_equal_parts(scratch: Any, size: int, parts: int) -> None:
    compare(scratch, "Split", [floats(0, 2, size)], outputs=parts, axis=1, num_outputs=parts)


@given(
    pads=st.lists(st.integers(-1, 2), min_size=4, max_size=4), mode=st.sampled_from(["constant", "edge", "reflect"]),
    seed=Seeds,
)  # fmt: skip
@quick
def test_pad(scratch: Any, pads: list[int], mode: str, seed: int) -> None:
    if mode != "constant":
        pads = [abs(pad) for pad in pads]
    inputs = [floats(seed, 4, 5), np.array(pads, np.int64)]
    if mode == "constant":
        inputs.append(np.float32(2.5).reshape(()))
    compare(scratch, "Pad", inputs, mode=mode)
    if mode == "constant":
        compare(scratch, "Pad", [*inputs[:1], np.array(pads[:2], np.int64), inputs[2], np.array([1], np.int64)])


@given(low=st.sampled_from([None, -1.0]), high=st.sampled_from([None, 0.5]), seed=Seeds)
@quick
def test_clip(scratch: Any, low: float | None, high: float | None, seed: int) -> None:
    array = floats(seed, 3, 4)
    bounds = {name: value for name, value in (("min", low), ("max", high)) if value is not None}
    compare(scratch, "Clip", [array], opset=7, **bounds)
    if low is not None:
        given_bounds = [np.float32(low).reshape(())] + ([np.float32(high).reshape(())] if high is not None else [])
        compare(scratch, "Clip", [array, *given_bounds])


@given(shapes=broadcast_pair(), seed=Seeds)
@quick
def test_where(scratch: Any, shapes: Any, seed: int) -> None:
    condition = np.random.default_rng(seed).random(shapes[0]) > 0.5
    compare(scratch, "Where", [np.asarray(condition), floats(seed, *shapes[1]), floats(seed, *shapes[0])])


@pytest.mark.parametrize("fill", [None, np.array([7], np.int64), np.array([1.5], np.float32), np.array([True])])
@pytest.mark.parametrize("shape", [[2, 3], [1], []])
def test_constant_of_shape(scratch: Any, fill: NDArray | None, shape: list[int]) -> None:
    attributes = {} if fill is None else {"value": onnx.numpy_helper.from_array(fill)}
    compare(scratch, "ConstantOfShape", [np.array(shape, np.int64)], **attributes)


def test_non_zero_and_logic(scratch: Any) -> None:
    array = np.array([[1, 0, 2], [0, 0, 3]], np.float32)
    compare(scratch, "NonZero", [array])
    mask, other = array > 0, array > 1
    for operator in ("And", "Or"):
        compare(scratch, operator, [mask, other])
    compare(scratch, "Not", [mask])
    compare(scratch, "GreaterOrEqual", [array, array.T.copy().T])
    compare(scratch, "LessOrEqual", [array, np.float32(1).reshape(())])
    compare(scratch, "Sum", [array, array, array])


@st.composite
def window(draw: st.DrawFn) -> dict[str, Any]:
    kernel = [draw(st.integers(1, 3)) for _ in range(2)]
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": [draw(st.integers(1, 3)) for _ in range(2)],
    }
    auto = draw(st.sampled_from(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if auto == "NOTSET":
        # A pad as wide as the kernel is refused by the runtime's pooling.
        attributes["pads"] = [draw(st.integers(0, kernel[axis % 2] - 1)) for axis in range(4)]
    else:
        attributes["auto_pad"] = auto
        # The runtime's pooling refuses steps that skip elements with this padding: it would be negative.
        attributes["strides"] = [min(pair) for pair in zip(attributes["strides"], kernel, strict=True)]
    return attributes


@given(
    attributes=window(), dilation=st.integers(1, 2), group=st.sampled_from([1, 2, 4]), bias=st.booleans(), seed=Seeds
)
@quick
def test_conv(scratch: Any, attributes: Any, dilation: int, group: int, bias: bool, seed: int) -> None:
    if "auto_pad" not in attributes:
        attributes = {**attributes, "dilations": [dilation, dilation]}
    weights = floats(seed + 1, 8, 4 // group, *attributes["kernel_shape"])
    inputs = [floats(seed, 2, 4, 9, 8), weights] + ([floats(seed + 2, 8)] if bias else [])
    compare(scratch, "Conv", inputs, group=group, rtol=1e-4, atol=1e-4, **attributes)


def test_conv_over_one_and_three_axes(scratch: Any) -> None:
    compare(scratch, "Conv", [floats(0, 2, 3, 9), floats(1, 5, 3, 3)], atol=1e-4, pads=[1, 1], strides=[2])
    compare(scratch, "Conv", [floats(0, 1, 2, 5, 6, 7), floats(1, 3, 2, 2, 3, 2)], atol=1e-4)


@given(attributes=window(), ceil=st.integers(0, 1), seed=Seeds)
@quick
def test_max_pool(scratch: Any, attributes: Any, ceil: int, seed: int) -> None:
    compare(scratch, "MaxPool", [floats(seed, 2, 3, 9, 8)], ceil_mode=ceil, **attributes)


@given(attributes=window(), include=st.integers(0, 1), seed=Seeds)
@quick
def test_average_pool(scratch: Any, attributes: Any, include: int, seed: int) -> None:
    compare(scratch, "AveragePool", [floats(seed, 2, 3, 9, 8)], count_include_pad=include, atol=1e-5, **attributes)


def test_average_pool_rounding_up(scratch: Any) -> None:
    compare(
        scratch, "AveragePool", [floats(0, 1, 2, 6, 7)], opset=19, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1,
        atol=1e-5,
    )  # fmt: skip


def test_global_average_pool(scratch: Any) -> None:
    compare(scratch, "GlobalAveragePool", [floats(0, 2, 3, 4, 5)])
    compare(scratch, "GlobalAveragePool", [floats(0, 2, 3, 7)])
    compare(scratch, "GlobalMaxPool", [floats(0, 2, 3, 4, 5)])
    compare(scratch, "GlobalMaxPool", [floats(0, 2, 3, 7)])


def test_failing_node_is_named(scratch: Any) -> None:
    inputs = [floats(0, 3), np.array([5], np.int64)]
    scratch.write_bytes(model_of("Gather", inputs, 1, 18, {}))
    with pytest.raises(NodeFailed, match="Gather node 'it' failed: index 5 is out of bounds"):
        Interpreter(read_graph(scratch, OPERATORS), np).run({"in0": inputs[0], "in1": inputs[1]})


def test_unsupported_operators_are_all_named(scratch: Any) -> None:
    nodes = [
        helper.make_node("Frobnicate", ["x"], ["y"], name="strange"),
        helper.make_node("FusedThing", ["y"], ["z"], domain="com.example"),
    ]
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    scratch.write_bytes(model.SerializeToString())
    with pytest.raises(
        UnusableGraph, match=r"Frobnicate \(node 'strange'\), operator com.example.FusedThing \(node 1\)"
    ):
        read_graph(scratch, OPERATORS)


def test_values_are_forgotten_after_their_last_use(scratch: Any) -> None:
    steps = 20
    nodes = [helper.make_node("Exp", [f"v{step}"], [f"v{step + 1}"]) for step in range(steps)]
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info("v0", TensorProto.FLOAT, [1000])],
        [helper.make_tensor_value_info(f"v{steps}", TensorProto.FLOAT, [1000])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    scratch.write_bytes(model.SerializeToString())
    interpreter = Interpreter(read_graph(scratch, OPERATORS), np)
    interpreter.run({"v0": np.zeros(1000, np.float32)})
    assert interpreter.peak_bytes <= 3 * 4000


@pytest.mark.parametrize(
    ("operator", "shapes"),
    [("Add", [(3, 4), (4,)]), ("MatMul", [(3, 4), (4, 2)]), ("Gemm", [(3, 4), (4, 2), (2,)]), ("Softmax", [(3, 4)]),
     ("Relu", [(3, 4)]), ("Erf", [(3, 4)]), ("ReduceMean", [(3, 4)]), ("GlobalMaxPool", [(1, 2, 5)]),
     ("LayerNormalization", [(3, 4), (4,), (4,)]), ("Conv", [(1, 2, 6), (3, 2, 3)])],
)  # fmt: skip
def test_bfloat16_computes_and_stays_bfloat16(scratch: Any, operator: str, shapes: list[tuple[int, ...]]) -> None:
    """The runtime has no bfloat16 kernels on a CPU, so f32 on the same rounded values is the reference."""
    halves = [floats(index, *shape, dtype=ml_dtypes.bfloat16) for index, shape in enumerate(shapes)]
    scratch.write_bytes(model_of(operator, halves, 1, 18, {}))
    feeds = {f"in{index}": array for index, array in enumerate(halves)}
    got = Interpreter(read_graph(scratch, OPERATORS), np).run(feeds)["out0"]
    assert got.dtype == np.dtype(ml_dtypes.bfloat16)
    wide = [array.astype(np.float32) for array in halves]
    scratch.write_bytes(model_of(operator, wide, 1, 18, {}))
    want = Interpreter(read_graph(scratch, OPERATORS), np).run({f"in{i}": array for i, array in enumerate(wide)})
    np.testing.assert_allclose(got.astype(np.float32), want["out0"], rtol=1e-2, atol=1e-2)
