"""Manifests: wrong ones get every mistake told, right ones read as what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from bundle_strategies import VALUES, manifests
from hypothesis import given
from hypothesis import strategies as st

from engines.bundle import manifest as limits
from engines.bundle.manifest import Manifest, ManifestError
from engines.bundle.render import to_yaml
from engines.bundle.validate import KEYS, model_file_name, parse_manifest, read_manifest
from engines.errors import Kind
from engines.tensor import BY_NAME, TensorSpec

GOOD: dict[str, Any] = {
    "format_version": "1",
    "executable_inputs": [{"name": "x", "dtype": "f32", "shape": "nc", "dims": {"c": 3}}],
    "executable_outputs": [{"name": "y", "dtype": "f32", "shape": "nk", "dims": {"k": 5}}],
}
EXAMPLE = """
format_version: "1"
kind: model
engine: auto
executable_inputs:
  - {name: pixels, dtype: f32, shape: nchw, dims: {c: 3, h: -1, w: -1}}
executable_outputs:
  - {name: logits, dtype: f32, shape: nk, dims: {k: 1000}}
batching: {compiled_batch_sizes: [1, 8, 32]}
input_shapes: [[224, 224], [320, 320]]
client_inputs:
  - {name: IMAGE, dtype: bytes, shape: n}
client_outputs:
  - {name: LABEL, dtype: bytes, shape: n}
  - {name: SCORE, dtype: f32, shape: n}
hooks: {mode: inline}
model: net.onnx
"""


def parse(text: str, *, has_model_py: bool = False) -> Manifest:
    return parse_manifest(text.encode(), "m.yaml", has_model_py=has_model_py)


def good(**changes: Any) -> str:
    return yaml.safe_dump({**GOOD, **changes})


def problems_of(text: str, *, has_model_py: bool = False) -> list[tuple[str, str]]:
    with pytest.raises(ManifestError) as caught:
        parse(text, has_model_py=has_model_py)
    return [(problem.key, str(problem)) for problem in caught.value.problems]


def wrong_cases() -> list[Any]:
    return [
        pytest.param(case, id=f"{path.stem}: {case['case']}")
        for path in sorted(Path(__file__).with_name("cases").glob("*.yaml"))
        for case in yaml.safe_load(path.read_text())
    ]


def text_of(case: dict[str, Any]) -> str:
    if "text" in case:
        return str(case["text"])
    if "text_times" in case:
        head, piece, times = case["text_times"]
        return str(head + piece * times)
    value = {**GOOD, **case.get("set", {})}
    return yaml.safe_dump({key: value[key] for key in value if key not in case.get("drop", [])})


@pytest.mark.parametrize("case", wrong_cases())
def test_wrong_manifest_is_told_completely(case: dict[str, Any]) -> None:
    found = problems_of(text_of(case), has_model_py=case.get("model_py", False))
    expected = [tuple(problem) for problem in case["problems"]]
    assert sorted(key for key, _ in found) == sorted(key for key, _ in expected), found
    for key, piece in expected:
        assert any(key == told and piece in message for told, message in found), (key, piece, found)


def test_error_says_file_count_expected_found_and_fix() -> None:
    with pytest.raises(ManifestError) as caught:
        parse(good(engine="cuda", hooks={"mode": "x"}))
    lines = str(caught.value).splitlines()
    assert lines[0] == "m.yaml: 2 mistakes"
    assert lines[1] == (
        "  engine: expected one of auto, onnxruntime, tensorrt, array, found 'cuda'; fix: choose one, or remove it"
    )
    assert caught.value.kind is Kind.NOT_READY


def test_error_of_many_mistakes_is_bounded_but_keeps_them_all() -> None:
    tensors = [{"name": f"t{index}", "dtype": "no", "shape": "n"} for index in range(limits.MAX_TOLD_PROBLEMS + 10)]
    with pytest.raises(ManifestError) as caught:
        parse(good(executable_inputs=tensors))
    assert len(caught.value.problems) == limits.MAX_TOLD_PROBLEMS + 10
    assert str(caught.value).endswith("  and 10 more")


def test_example_of_the_format_page() -> None:
    manifest = parse(EXAMPLE, has_model_py=True)
    pixels = TensorSpec("pixels", "f32", (-1, 3, -1, -1), 0)
    assert manifest.inputs == (pixels,)
    assert manifest.outputs == (TensorSpec("logits", "f32", (-1, 1000), 0),)
    assert manifest.client_inputs == (TensorSpec("IMAGE", "bytes", (-1,), 0),)
    assert [spec.name for spec in manifest.client_outputs] == ["LABEL", "SCORE"]
    assert manifest.batch_sizes == (1, 8, 32)
    assert manifest.input_shapes == ((224, 224), (320, 320))
    assert (manifest.kind, manifest.engine, manifest.hooks, manifest.model_file) == (
        "model",
        "auto",
        "inline",
        "net.onnx",
    )
    assert not manifest.derived


def test_defaults() -> None:
    manifest = parse(good())
    assert manifest.batch_sizes == limits.DEFAULT_BATCH_SIZES
    assert manifest.client_inputs == manifest.inputs
    assert manifest.client_outputs == manifest.outputs
    assert (manifest.engine, manifest.hooks, manifest.task, manifest.model_file) == ("auto", "thread", "", "model.onnx")


def test_without_a_batch_axis_anywhere_there_is_one_size_0() -> None:
    tensors = [{"name": "x", "dtype": "f32", "shape": "c", "dims": {"c": 3}}]
    assert parse(good(executable_inputs=tensors, executable_outputs=tensors)).batch_sizes == (0,)


def test_batch_axis_may_stand_anywhere_or_be_missing_on_some_tensors() -> None:
    tensors = [
        {"name": "state", "dtype": "f32", "shape": "anb", "dims": {"a": 2, "b": 128}},
        {"name": "rate", "dtype": "i64", "shape": ""},
    ]
    manifest = parse(good(executable_inputs=tensors))
    assert [(spec.shape, spec.batch_axis) for spec in manifest.inputs] == [((2, -1, 128), 1), ((), None)]
    assert manifest.batch_sizes == limits.DEFAULT_BATCH_SIZES


def test_tools_that_write_aliases_for_equal_parts_are_understood() -> None:
    text = "format_version: 1\nexecutable_inputs: &t [{name: x, dtype: f32, shape: n}]\nexecutable_outputs: *t\n"
    assert parse(text).inputs == parse(text).outputs == (TensorSpec("x", "f32", (-1,), 0),)


def test_letters_that_yaml_could_take_for_booleans_stay_letters() -> None:
    text = "format_version: 1\nexecutable_inputs: [{name: on, dtype: f32, shape: no, dims: {o: 3}}]\n"
    manifest = parse(text + "executable_outputs: [{name: off, dtype: f32, shape: ny, dims: {y: 3}}]\n")
    assert manifest.inputs[0] == TensorSpec("on", "f32", (-1, 3), 0)
    assert manifest.outputs[0].name == "off"


def test_output_with_a_data_dependent_size_keeps_its_limit() -> None:
    outputs = [{"name": "boxes", "dtype": "f32", "shape": "kc", "dims": {"k": -1, "c": 4}, "max": {"k": 100}}]
    assert parse(good(executable_outputs=outputs)).outputs == (TensorSpec("boxes", "f32", (-1, 4), None, (100, 0)),)


def test_embedding_task() -> None:
    manifest = parse(
        good(
            task="embedding",
            client_inputs=[{"name": "TEXT", "dtype": "bytes", "shape": "n"}],
            client_outputs=[{"name": "EMBEDDING", "dtype": "f32", "shape": "nd", "dims": {"d": 384}}],
        ),
        has_model_py=True,
    )
    assert manifest.task == "embedding"


@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_dtype_is_accepted_where_it_may_stand(name: str) -> None:
    tensors = [{"name": "t", "dtype": name, "shape": "n"}]
    assert parse(good(client_inputs=tensors), has_model_py=True).client_inputs[0].dtype == name
    if name != "bytes":
        assert parse(good(executable_inputs=tensors)).inputs[0].dtype == name


@pytest.mark.parametrize(
    ("key", "value", "piece"),
    [
        (
            "executable_inputs",
            [{"name": f"t{i}", "dtype": "f32", "shape": "n"} for i in range(257)],
            "at most 256 tensors",
        ),
        ("batching", {"compiled_batch_sizes": list(range(1, 66))}, "at most 64 sizes"),
        ("input_shapes", [[i] for i in range(1, 1026)], "at most 1024 entries"),
        ("executable_inputs", [{"name": "é" * 513, "dtype": "f32", "shape": "n"}], "at most 1024 bytes"),
    ],
)
def test_limits_are_told_by_number(key: str, value: Any, piece: str) -> None:
    assert [message for _, message in problems_of(good(**{key: value})) if piece in message]


def test_not_utf8() -> None:
    with pytest.raises(ManifestError, match="expected UTF-8 text, found byte 6 is not UTF-8"):
        parse_manifest(b"name: \xff", "m.yaml", has_model_py=False)


def test_byte_order_mark_is_accepted() -> None:
    assert parse_manifest(b"\xef\xbb\xbf" + good().encode(), "m.yaml", has_model_py=False) == parse(good())


def test_unreadable_file_is_a_manifest_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"expected a readable file, found Is a directory"):
        read_manifest(tmp_path, has_model_py=False)


@pytest.mark.parametrize(
    ("text", "name"),
    [(EXAMPLE, "net.onnx"), ("model: ../x", "model.onnx"), ("[", "model.onnx"), ("model: a.plan\nzzz: 1", "a.plan")],
)
def test_model_file_name_is_told_even_of_a_wrong_manifest(text: str, name: str) -> None:
    assert model_file_name(text.encode()) == name


@given(manifests())
def test_written_manifest_reads_back_equal(manifest: Manifest) -> None:
    text = to_yaml(manifest)
    assert parse(text, has_model_py=True) == replace(manifest, derived=False), text


@given(manifests())
def test_written_manifest_reads_the_same_with_a_plain_yaml_reader(manifest: Manifest) -> None:
    value = yaml.safe_load(to_yaml(manifest))
    assert [entry["name"] for entry in value["executable_inputs"]] == [spec.name for spec in manifest.inputs]
    assert all(isinstance(entry["shape"], str) for entry in value["executable_inputs"] + value["executable_outputs"])


@given(st.binary(max_size=200) | st.text(alphabet="{}[]:,-&*!|>'\"#%@` \nab1", max_size=60).map(str.encode))
def test_any_bytes_give_a_manifest_or_its_mistakes(raw: bytes) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(raw, "m.yaml", has_model_py=False)
    assert caught.value.problems
    str(caught.value).encode()


@given(st.dictionaries(st.sampled_from(KEYS), VALUES), st.booleans())
def test_any_values_give_a_manifest_or_its_mistakes(value: dict[str, Any], has_model_py: bool) -> None:
    text = yaml.safe_dump(value)
    try:
        manifest = parse(text, has_model_py=has_model_py)
    except ManifestError:
        for _, message in problems_of(text, has_model_py=has_model_py):
            assert all(word in message for word in ("expected ", "found ", "fix: "))
            message.encode()
    else:
        assert parse(to_yaml(manifest), has_model_py=True) == manifest
