"""Manifests derived from model files, and written manifests compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx_models
from engines.bundle.derive import derive_manifest, disagreements, read_graph
from engines.bundle.manifest import DEFAULT_BATCH_SIZES, Manifest
from engines.bundle.render import to_yaml
from engines.bundle.validate import parse_manifest
from engines.errors import NotReady
from engines.tensor import TensorSpec

Dims = Sequence[int | str | None]


def relu(directory: Path, taken: Dims, given: Dims | None, dtype: str = "f32") -> Path:
    """Write a model of one node; ``given`` None leaves the output's shape out."""
    output = (
        helper.make_tensor_value_info("y", onnx_models.ONNX_DTYPES[dtype], None)
        if given is None
        else onnx_models.value("y", dtype, given)
    )
    node = helper.make_node("Relu", ["x"], ["y"])
    return onnx_models.write(directory, [node], [onnx_models.value("x", dtype, taken)], [output])


@pytest.mark.parametrize("first", ["n", "?", None, "p2o.DynamicDimension.0"])
def test_dynamic_leading_axis_is_the_batch_whatever_its_name(tmp_path: Path, first: str | None) -> None:
    manifest = derive_manifest(relu(tmp_path, [first, 3, 8], ["other", 3, 8]))
    assert manifest.inputs == (TensorSpec("x", "f32", (-1, 3, 8), 0),)
    assert manifest.outputs == (TensorSpec("y", "f32", (-1, 3, 8), 0),)
    assert (manifest.client_inputs, manifest.client_outputs) == (manifest.inputs, manifest.outputs)
    assert manifest.batch_sizes == DEFAULT_BATCH_SIZES
    assert manifest.derived


@pytest.mark.parametrize(("taken", "given", "sizes"), [([4, 2], [4, 2], (4,)), ([1, 2], [1, 2], (1,))])
def test_static_leading_size_shared_by_all_is_the_only_batch_size(
    tmp_path: Path, taken: Dims, given: Dims, sizes: tuple[int, ...]
) -> None:
    manifest = derive_manifest(relu(tmp_path, taken, given))
    assert manifest.batch_sizes == sizes
    assert manifest.inputs[0] == TensorSpec("x", "f32", (-1, 2), 0)


@pytest.mark.parametrize(("taken", "given"), [([4, 2], [2, 4]), ([4], []), ([], []), ([4, 2], ["k", 2])])
def test_static_model_without_a_shared_leading_size_has_no_batch_axis(tmp_path: Path, taken: Dims, given: Dims) -> None:
    manifest = derive_manifest(relu(tmp_path, taken, given))
    assert manifest.batch_sizes == (0,)
    assert [spec.batch_axis for spec in manifest.inputs + manifest.outputs] == [None, None]


def test_input_without_a_batch_axis_stands_beside_batched_ones(tmp_path: Path) -> None:
    values = [onnx_models.value("x", "f32", ["n", 4]), onnx_models.value("rate", "i64", [])]
    node = helper.make_node("Relu", ["x"], ["y"])
    path = onnx_models.write(tmp_path, [node], values, [onnx_models.value("y", "f32", ["n", 4])])
    assert [spec.batch_axis for spec in derive_manifest(path).inputs] == [0, None]


def test_other_dynamic_axes_need_a_manifest_and_the_message_holds_one(tmp_path: Path) -> None:
    path = relu(tmp_path, ["n", 3, "h", "w"], ["n", 3, "h", "w"])
    with pytest.raises(NotReady, match="list the sizes to serve under input_shapes") as caught:
        derive_manifest(path)
    head, _, text = str(caught.value).partition("\n")
    assert "x axis 2, x axis 3" in head
    manifest = parse_manifest(text.encode(), "pasted", has_model_py=False)
    assert manifest.inputs == (TensorSpec("x", "f32", (-1, 3, -1, -1), 0),)
    assert manifest.input_shapes == ((64, 64),)
    assert "shape: nchw" in text
    assert disagreements(manifest, read_graph(path), "pasted") == ()


def test_weights_listed_as_inputs_are_not_inputs(tmp_path: Path) -> None:
    weights = onnx_models.constant("w", np.zeros((4, 4), np.float32))
    values = [onnx_models.value("x", "f32", ["n", 4]), onnx_models.value("w", "f32", [4, 4])]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = onnx_models.write(tmp_path, [node], values, [onnx_models.value("y", "f32", ["n", 4])], [weights])
    assert [spec.name for spec in derive_manifest(path).inputs] == ["x"]


def test_weights_in_a_missing_external_file_do_not_matter(tmp_path: Path) -> None:
    weights = onnx_models.constant("w", np.zeros((64, 64), np.float32))
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    taken, given = onnx_models.value("x", "f32", ["n", 64]), onnx_models.value("y", "f32", ["n", 64])
    path = onnx_models.write(tmp_path, [node], [taken], [given], [weights])
    onnx.save_model(onnx.load(path), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    assert derive_manifest(path).inputs == (TensorSpec("x", "f32", (-1, 64), 0),)


def test_missing_output_shape_is_inferred(tmp_path: Path) -> None:
    assert derive_manifest(relu(tmp_path, ["n", 4], None)).outputs == (TensorSpec("y", "f32", (-1, 4), 0),)


def test_unknown_rank_is_told(tmp_path: Path) -> None:
    node = helper.make_node("Mystery", ["x"], ["y"], domain="elsewhere")
    given = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    path = onnx_models.write(tmp_path, [node], [onnx_models.value("x", "f32", ["n"])], [given])
    with pytest.raises(NotReady, match="does not tell the rank of output 'y'"):
        derive_manifest(path)


@pytest.mark.parametrize("dtype", list(onnx_models.ONNX_DTYPES))
def test_every_served_dtype(tmp_path: Path, dtype: str) -> None:
    assert derive_manifest(relu(tmp_path, ["n"], ["n"], dtype)).inputs[0].dtype == dtype


@pytest.mark.parametrize(
    ("element", "message"),
    [
        (TensorProto.STRING, "input 'x' holds strings, .* turn text into numbers in model.py"),
        (TensorProto.COMPLEX64, "input 'x' is of type COMPLEX64, expected one of bool, u8"),
        (TensorProto.INT4, "input 'x' is of type INT4"),
    ],
)
def test_types_that_cannot_be_served_are_refused_with_the_reason(tmp_path: Path, element: int, message: str) -> None:
    value = helper.make_tensor_value_info("x", element, ["n"])
    node = helper.make_node("Identity", ["x"], ["y"])
    path = onnx_models.write(tmp_path, [node], [value], [helper.make_tensor_value_info("y", element, ["n"])])
    with pytest.raises(NotReady, match=message):
        derive_manifest(path)


def test_sequences_are_refused(tmp_path: Path) -> None:
    value = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)
    node = helper.make_node("SequenceLength", ["x"], ["y"])
    path = onnx_models.write(tmp_path, [node], [value], [onnx_models.value("y", "i64", [])])
    with pytest.raises(NotReady, match="input 'x' is of type sequence"):
        derive_manifest(path)


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"\x08\x07", bytes(range(256)) * 40])
def test_a_file_that_is_no_model_is_not_ready(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(NotReady, match=r"model\.onnx (cannot be read as an ONNX model|is not a usable ONNX model)"):
        derive_manifest(path)


def test_every_prefix_of_a_model_file_is_not_ready_or_the_whole_signature(tmp_path: Path) -> None:
    """A half-copied file never gives a wrong signature: cut anywhere, it is refused or tells the same tensors."""
    path = relu(tmp_path, ["n", 4], ["n", 4])
    whole, content = derive_manifest(path), path.read_bytes()
    refused = 0
    for length in range(len(content)):
        path.write_bytes(content[:length])
        try:
            manifest = derive_manifest(path)
        except NotReady:
            refused += 1
        else:
            assert manifest == whole
    assert refused > len(content) // 2


def test_missing_file_is_not_ready(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="cannot be read: No such file"):
        derive_manifest(tmp_path / "model.onnx")


def test_model_without_inputs_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("Constant", [], ["y"], value=onnx_models.constant("c", np.zeros(2, np.float32)))
    path = onnx_models.write(tmp_path, [node], [], [onnx_models.value("y", "f32", [2])])
    with pytest.raises(NotReady, match="takes no inputs"):
        derive_manifest(path)


def test_derived_manifest_can_be_saved(tmp_path: Path) -> None:
    manifest = derive_manifest(relu(tmp_path, ["n", 3, 2, 2], ["n", 3, 2, 2]))
    parsed = parse_manifest(to_yaml(manifest).encode(), "m.yaml", has_model_py=False)
    assert (parsed.inputs, parsed.outputs, parsed.batch_sizes) == (
        manifest.inputs,
        manifest.outputs,
        manifest.batch_sizes,
    )


def written(**changes: Any) -> Manifest:
    taken, given = (TensorSpec("x", "f32", (-1, 4), 0),), (TensorSpec("y", "f32", (-1, 4), 0),)
    fields = {"inputs": taken, "outputs": given, "batch_sizes": (1, 8), **changes}
    return Manifest(
        kind="model", engine="auto", client_inputs=fields["inputs"], client_outputs=fields["outputs"], **fields
    )


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"inputs": (TensorSpec("X", "f32", (-1, 4), 0),)}, "executable_inputs[0].name", "fix: write x"),
        (
            {"inputs": (TensorSpec("x", "f16", (-1, 4), 0),)},
            "executable_inputs[0].dtype",
            "expected f32 as in the model",
        ),
        ({"inputs": (TensorSpec("x", "f32", (-1, 5), 0),)}, "executable_inputs[0].dims", "expected 4 on axis 1"),
        (
            {"inputs": (TensorSpec("x", "f32", (-1,), 0),)},
            "executable_inputs[0].shape",
            "expected 2 axes as in the model",
        ),
        ({"outputs": (TensorSpec("y", "f32", (-1, -1), 0),)}, "executable_outputs[0].dims", "found -1; fix: write 4"),
    ],
)
def test_manifest_that_contradicts_the_file_is_told_by_key(
    tmp_path: Path, changes: dict[str, Any], key: str, message: str
) -> None:
    graph = read_graph(relu(tmp_path, ["n", 4], ["n", 4]))
    found = disagreements(written(**changes), graph, "m.yaml")
    assert (key, True) in [(problem.key, message in str(problem)) for problem in found]


def test_manifest_that_agrees_has_no_disagreement(tmp_path: Path) -> None:
    assert disagreements(written(), read_graph(relu(tmp_path, ["n", 4], ["n", 4])), "m.yaml") == ()


def test_manifest_with_other_batch_sizes_than_the_static_file(tmp_path: Path) -> None:
    graph = read_graph(relu(tmp_path, [2, 4], [2, 4]))
    (first, _) = disagreements(written(), graph, "m.yaml")
    assert "write compiled_batch_sizes: [2]" in first.fix
    assert disagreements(written(batch_sizes=(2,)), graph, "m.yaml") == ()


def test_manifest_that_leaves_out_an_input(tmp_path: Path) -> None:
    values = [onnx_models.value(name, "f32", ["n", 4]) for name in ("x", "mask")]
    node = helper.make_node("Add", ["x", "mask"], ["y"])
    graph = read_graph(onnx_models.write(tmp_path, [node], values, [onnx_models.value("y", "f32", ["n", 4])]))
    (problem,) = disagreements(written(), graph, "m.yaml")
    assert (problem.key, problem.expected) == ("executable_inputs", "every input of the model, also mask")
