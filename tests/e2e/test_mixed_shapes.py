"""Requests of many lengths and sizes at once: each gets its own answer, only equal shapes share an execution."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from onnx import helper

import onnx_models
from real_node import Node

LENGTHS = {"clips": (5, 7, 9), "other": (3, 6)}


def lengths_manifest(lengths: tuple[int, ...]) -> str:
    return (
        'format_version: "1"\nkind: model\n'
        "executable_inputs: [{name: INPUT, dtype: f32, shape: nt, dims: {t: -1}}]\n"
        "executable_outputs: [{name: OUTPUT, dtype: f32, shape: nt, dims: {t: -1}}]\n"
        f"batching: {{compiled_batch_sizes: [1, 4, 16]}}\ninput_shapes: {[[length] for length in lengths]}\n"
    )


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    root = tmp_path_factory.mktemp("mixed")
    for name, lengths in LENGTHS.items():
        onnx_models.write(
            root / name,
            [helper.make_node("Neg", ["INPUT"], ["OUTPUT"])],
            [onnx_models.value("INPUT", "f32", ["n", "t"])],
            [onnx_models.value("OUTPUT", "f32", ["n", "t"])],
        )
        (root / name / "manifest.yaml").write_text(lengths_manifest(lengths))
    # Y = X + FLAG: FLAG has no batch axis, and two requests with other flags must not meet.
    onnx_models.write(
        root / "flagged",
        [helper.make_node("Add", ["X", "FLAG"], ["with_flag"]), helper.make_node("Add", ["with_flag", "Z"], ["Y"])],
        [
            onnx_models.value("X", "f32", ["n", 4]),
            onnx_models.value("Z", "f32", ["n", 4]),
            onnx_models.value("FLAG", "f32", [1]),
        ],
        [onnx_models.value("Y", "f32", ["n", 4])],
    )
    (root / "flagged" / "manifest.yaml").write_text(
        'format_version: "1"\nkind: model\nexecutable_inputs:\n'
        "  - {name: X, dtype: f32, shape: nc, dims: {c: 4}}\n  - {name: Z, dtype: f32, shape: nc, dims: {c: 4}}\n"
        "  - {name: FLAG, dtype: f32, shape: f, dims: {f: 1}}\n"
        "executable_outputs: [{name: Y, dtype: f32, shape: nc, dims: {c: 4}}]\n"
        "batching: {compiled_batch_sizes: [1, 4, 16]}\n"
    )
    with Node(root, tmp_path_factory.mktemp("run")) as node:
        yield node.ports["http_port"]


def infer(port: int, model: str, tensors: dict[str, tuple[list[int], list[float]]]) -> tuple[int, dict[str, Any]]:
    """Return status and JSON; each tensor is (shape, data)."""
    inputs = [
        {"name": name, "datatype": "FP32", "shape": shape, "data": data} for name, (shape, data) in tensors.items()
    ]
    body = json.dumps({"inputs": inputs, "parameters": {"ringserve_explain": True}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/models/{model}/infer", body)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_bs_05_bs_18_many_lengths_of_two_models_at_once(port: int) -> None:
    chance = random.Random(5)
    asked = []
    for number in range(96):
        model = chance.choice(list(LENGTHS))
        shape = [chance.randint(1, 3), chance.choice(LENGTHS[model])]
        asked.append((model, shape, [float(number)] * (shape[0] * shape[1])))
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda one: infer(port, one[0], {"INPUT": (one[1], one[2])}), asked))
    shapes_of_dispatch: dict[int, set[tuple[str, int]]] = {}
    for (model, shape, data), (status, answer) in zip(asked, answers, strict=True):
        assert status == 200, answer
        output = answer["outputs"][0]
        assert (output["shape"], output["data"]) == (shape, [-value for value in data])
        shapes_of_dispatch.setdefault(answer["parameters"]["dispatch"], set()).add((model, shape[1]))
    assert all(len(shapes) == 1 for shapes in shapes_of_dispatch.values())
    status, answer = infer(port, "clips", {"INPUT": ([1, 6], [0.0] * 6)})
    assert status == 400
    assert "no compiled program for input shape [1, 6]" in answer["error"]


def test_ml_13_only_compiled_sizes_run_whatever_is_sent(port: int) -> None:
    rows = list(range(1, 17))
    random.Random(13).shuffle(rows)
    for count in rows:
        status, answer = infer(port, "clips", {"INPUT": ([count, 5], [1.0] * (count * 5))})
        assert status == 200
        # The smallest that holds it, or a larger one that was learned to cost less.
        assert answer["parameters"]["batch_size"] in [size for size in (1, 4, 16) if size >= count]


def test_bs_04_flags_never_meet_and_unequal_rows_fail_alone(port: int) -> None:
    def ask(number: int) -> tuple[int, dict[str, Any]]:
        flag, rows = float(number % 2), 3 if number % 7 else 2
        x, z = [float(number)] * 12, [0.5] * (rows * 4)
        return infer(port, "flagged", {"X": ([3, 4], x), "Z": ([rows, 4], z), "FLAG": ([1], [flag])})

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(63)))
    for number, (status, answer) in enumerate(answers):
        if number % 7:
            assert status == 200, answer
            assert answer["outputs"][0]["data"] == [number + number % 2 + 0.5] * 12
            assert answer["parameters"]["batch_requests"] == 1
        else:
            assert status == 400
            assert "'Z'" in answer["error"]
