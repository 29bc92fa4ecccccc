"""``python -m worker.check`` says what a bundle offers, or file, key and fix of each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onnx_models
from worker.check import Report, check, main, rendered
from worker.config import RuntimeSettings

ONE_THREAD = RuntimeSettings(threads=1)


def only(directory: Path) -> Report:
    (report,) = check(directory, ONE_THREAD)
    return report


def write_manifest(directory: Path, **changes: Any) -> None:
    """Write the manifest of ``onnx_models.sequence`` with some lines changed (None removes one)."""
    lines: dict[str, Any] = {
        "format_version": '"1"',
        "executable_inputs": "[{name: IDS, dtype: i64, shape: ns, dims: {s: -1}}]",
        "executable_outputs": (
            "[{name: HIDDEN, dtype: f32, shape: nsd, dims: {s: -1, d: -1}}, "
            "{name: MEAN, dtype: f32, shape: nd, dims: {d: 8}}]"
        ),
        "batching": "{compiled_batch_sizes: [1, 4]}",
        "input_shapes": "[[4], [8]]",
    }
    lines.update(changes)
    text = "".join(f"{key}: {value}\n" for key, value in lines.items() if value is not None)
    (directory / "manifest.yaml").write_text(text)


def test_derived_bundle(tmp_path: Path) -> None:
    onnx_models.mlp(tmp_path / "mlp")
    report = only(tmp_path / "mlp")
    assert report.ok
    assert report.derived
    assert report.engine == "onnxruntime"
    assert report.batch_sizes == [1, 2, 4, 8, 16, 32]
    assert report.coalesces
    assert report.weights_bytes == 3 * (64 * 64 + 64) * 4
    (difference,) = report.differences
    assert difference["output"] == "OUTPUT"
    assert difference["largest"] <= difference["allowed"]
    text = rendered(report)
    for part in ("mlp version 1: OK", "derived from the model file", "compiled_batch_sizes", "INPUT FP32 [n, 64]"):
        assert part in text


def test_variants_and_resolved_outputs(tmp_path: Path) -> None:
    onnx_models.sequence(tmp_path / "seq")
    write_manifest(tmp_path / "seq")
    report = only(tmp_path / "seq")
    assert report.mistakes == []
    assert not report.derived
    assert [variant["outputs"] for variant in report.variants] == [[(-1, 4, 8), (-1, 8)], [(-1, 8, 8), (-1, 8)]]
    assert [(run["sizes"], run["batch_size"]) for run in report.compute_ms] == [([4], 1), ([4], 4), ([8], 1), ([8], 4)]
    assert "variant       [8]: [n, 8] -> [n, 8, 8], [n, 8]" in rendered(report)


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        (
            {"executable_inputs": "[{name: ID, dtype: i64, shape: ns, dims: {s: -1}}]"},
            "executable_inputs[0].name",
            "IDS",
        ),
        (
            {"executable_inputs": "[{name: IDS, dtype: i32, shape: ns, dims: {s: -1}}]"},
            "executable_inputs[0].dtype",
            "write i64",
        ),
        (
            {
                "executable_outputs": "[{name: HIDDEN, dtype: f32, shape: nsd, dims: {s: -1, d: 8}}, "
                "{name: MEAN, dtype: f32, shape: nd, dims: {d: 9}}]"
            },
            "executable_outputs[1].dims",
            "write 8",
        ),
        (
            {
                "executable_outputs": "[{name: HIDDEN, dtype: f32, shape: nsd, dims: {s: 8, d: 8}}, "
                "{name: MEAN, dtype: f32, shape: nd, dims: {d: 8}}]"
            },
            "executable_outputs[0].dims",
            "axis 1 of 'HIDDEN' is 4 when run (input_shapes [4]), 8 in the manifest",
        ),
        ({"input_shapes": None}, "input_shapes", "IDS axis 1"),
        ({"batching": "{compiled_sizes: [1]}"}, "batching.compiled_sizes", ""),
        ({"engine": "tensorrt"}, "", "TensorRT cannot be imported"),
    ],
)
def test_each_mistake_names_file_key_and_fix(tmp_path: Path, changes: Any, key: str, words: str) -> None:
    onnx_models.sequence(tmp_path / "seq")
    write_manifest(tmp_path / "seq", **changes)
    report = only(tmp_path / "seq")
    # A wrong name is two mistakes: one that the file does not know, and one of its own that is missing.
    mistake = next(mistake for mistake in report.mistakes if mistake.key == key)
    assert len(report.mistakes) == (2 if key.endswith(".name") else 1), report.mistakes
    assert mistake.file == str(tmp_path / "seq" / "manifest.yaml")
    assert words in mistake.message
    assert f"{mistake.file}: {key}" in rendered(report)


def test_contradictions_are_told_together(tmp_path: Path) -> None:
    onnx_models.sequence(tmp_path / "seq")
    hidden, mean = "name: HIDDEN, dtype: f16, shape: nsd, dims: {s: -1, d: 8}", "name: M, dtype: f32, shape: n"
    outputs = f"[{{{hidden}}}, {{{mean}}}]"
    write_manifest(tmp_path / "seq", executable_outputs=outputs)
    assert {mistake.key for mistake in only(tmp_path / "seq").mistakes} == {
        "executable_outputs[0].dtype",
        "executable_outputs[1].name",
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (onnx_models.batch_mixing, "output 'OUTPUT': row "),
        (onnx_models.first_row_only, "of a batch of 3 differs"),
        (onnx_models.lost_row, "3 entries when run with 32 rows"),
        (onnx_models.frozen_batch, "compiled_batch_sizes"),
        (onnx_models.not_a_model, "cannot be read as an ONNX model"),
        (onnx_models.unknown_opset, "opset"),
        (onnx_models.unknown_operator, "Frobnicate"),
    ],
)
def test_nd_04_nd_07_models_that_cannot_be_batched_or_loaded(
    tmp_path: Path, make: Callable[[Path], Path], words: str
) -> None:
    make(tmp_path / "bad")
    (mistake,) = only(tmp_path / "bad").mistakes
    assert mistake.file == str(tmp_path / "bad" / "model.onnx")
    assert words in mistake.message


def test_dtype_without_kernels(tmp_path: Path) -> None:
    onnx_models.write(
        tmp_path / "brain",
        [onnx_models.helper.make_node("MatMul", ["INPUT", "INPUT"], ["OUTPUT"])],
        [onnx_models.value("INPUT", "bf16", ["n", 4, 4])],
        [onnx_models.value("OUTPUT", "bf16", ["n", 4, 4])],
    )
    (mistake,) = only(tmp_path / "brain").mistakes
    assert "has no CPU kernel for this operator and data type; export the model as f32" in mistake.message


def test_repository_versions_and_one_version(tmp_path: Path) -> None:
    onnx_models.affine(tmp_path / "two" / "1")
    onnx_models.batch_mixing(tmp_path / "two" / "2")
    onnx_models.identity(tmp_path / "one")
    found = [(report.name, report.version, report.ok) for report in check(tmp_path, ONE_THREAD)]
    assert found == [("one", "1", True), ("two", "1", True), ("two", "2", False)]
    assert [(r.version, r.ok) for r in check(tmp_path / "two", ONE_THREAD)] == [("1", True), ("2", False)]
    assert [(r.name, r.version) for r in check(tmp_path / "two" / "2", ONE_THREAD)] == [("two", "2")]


def test_places_without_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, words in (("empty", "manifest.yaml"), ("gone", "does not exist"), ("file", "is a file")):
        (mistake,) = only(tmp_path / name).mistakes
        assert words in mistake.message


def test_hooks_with_a_syntax_error(tmp_path: Path) -> None:
    onnx_models.affine(tmp_path / "m")
    (tmp_path / "m" / "model.py").write_text("import os\n\ndef preprocess(inputs, ctx:\n    return inputs\n")
    (mistake,) = only(tmp_path / "m").mistakes
    assert mistake.file == str(tmp_path / "m" / "model.py")
    assert "line 3" in mistake.message
    (tmp_path / "m" / "model.py").write_text("def preprocess(inputs, ctx):\n    return inputs\n")
    report = only(tmp_path / "m")
    assert report.ok
    assert any("model.py compiles" in note for note in report.notes)


def test_json_and_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx_models.simple(tmp_path / "good")
    assert main([str(tmp_path / "good"), "--json", "--threads", "1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is True
    assert [tensor["datatype"] for tensor in shown["bundles"][0]["inputs"]] == ["INT32", "INT32"]
    onnx_models.batch_mixing(tmp_path / "bad")
    assert main([str(tmp_path), "--json", "--threads", "1"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert [(bundle["name"], bundle["ok"]) for bundle in shown["bundles"]] == [("bad", False), ("good", True)]


@pytest.mark.process
def test_as_a_command(tmp_path: Path) -> None:
    onnx_models.affine(tmp_path / "m")
    command = [sys.executable, "-m", "worker.check", str(tmp_path / "m")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("m version 1: OK\n")
    assert run.stderr == ""
