"""Facts read from an ONNX file's bytes agree with the onnx library's, and damage is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import onnx_models
from engines.onnx_file import NotOnnx, OnnxFacts, facts_of


def test_weights_of_initializers(tmp_path: Path) -> None:
    path = onnx_models.mlp(tmp_path / "m", layers=2, width=16)
    assert facts_of(path) == OnnxFacts(opset=18, weights_bytes=2 * (16 * 16 + 16) * 4, weights_count=4)


def test_weights_of_constants_in_subgraphs_and_every_encoding(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["inner"], value=numpy_helper.from_array(np.zeros((3, 5), np.float16)))],
        "branch", [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT16, [3, 5])],
    )  # fmt: skip
    path = onnx_models.write(
        tmp_path / "m",
        [
            helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.zeros(7, np.int64))),
            helper.make_node("If", ["CONDITION"], ["OUTPUT"], then_branch=branch, else_branch=branch),
        ],
        [onnx_models.value("CONDITION", "bool", [])],
        [onnx_models.value("OUTPUT", "f16", [3, 5])],
        [
            # Values in typed fields instead of raw bytes.
            helper.make_tensor("typed", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0]),
            helper.make_tensor("nibbles", TensorProto.UINT4, [5], [1, 2, 3, 4, 5]),
            helper.make_tensor("scalar", TensorProto.DOUBLE, [], [1.0]),
        ],
    )
    assert facts_of(path) == OnnxFacts(18, 7 * 8 + 2 * 15 * 2 + 4 * 4 + 3 + 8, 6)


def test_weights_in_another_file_count_without_being_read(tmp_path: Path) -> None:
    model = onnx.load(str(onnx_models.mlp(tmp_path / "m", layers=1, width=64)))
    path = tmp_path / "external.onnx"
    onnx.save_model(model, str(path), save_as_external_data=True, location="data.bin", size_threshold=0)
    (tmp_path / "data.bin").unlink()
    assert facts_of(path).weights_bytes == (64 * 64 + 64) * 4


def test_opset_of_the_default_domain_only(tmp_path: Path) -> None:
    model = onnx.load(str(onnx_models.identity(tmp_path / "m")))
    model.opset_import.insert(0, helper.make_opsetid("com.example", 3))
    (tmp_path / "two.onnx").write_bytes(model.SerializeToString())
    assert facts_of(tmp_path / "two.onnx").opset == 18


@pytest.mark.parametrize("raw", [b"", b"\x00", b"not a model at all", b"\x3a\xff\xff\xff\xff\x0f", b"\x08\x07"])
def test_other_bytes_are_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.onnx").write_bytes(raw)
    with pytest.raises(NotOnnx):
        facts_of(tmp_path / "x.onnx")


@given(raw=st.binary(max_size=200), cut=st.integers(0, 2000))
@settings(max_examples=200, deadline=None)
def test_no_bytes_do_worse_than_a_refusal(tmp_path_factory: pytest.TempPathFactory, raw: bytes, cut: int) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    whole = onnx_models.mlp(folder, layers=1, width=8).read_bytes()
    for data in (raw, whole[:cut], whole[:cut] + raw + whole[cut:]):
        (folder / "x.onnx").write_bytes(data)
        try:
            facts = facts_of(folder / "x.onnx")
        except NotOnnx:
            continue
        assert facts.weights_bytes >= 0
