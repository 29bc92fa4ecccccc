"""Hooks that never return or raise what nobody expects: their frontend lives on, and the node still drains."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import onnx_models
from real_node import Node, shared_memory_unchanged

MANIFEST = """format_version: "1"
kind: model
executable_inputs: [{name: INPUT, dtype: f32, shape: nc, dims: {c: 4}}]
executable_outputs: [{name: OUTPUT, dtype: f32, shape: nc, dims: {c: 4}}]
batching: {compiled_batch_sizes: [1, 8]}
client_inputs: [{name: TEXT, dtype: bytes, shape: n}]
client_outputs: [{name: OUTPUT, dtype: f32, shape: nc, dims: {c: 4}}]
"""
MODEL_PY = """
import threading

import numpy as np


def preprocess(inputs, ctx):
    said = inputs["TEXT"][0]
    if said == b"interrupt":
        raise KeyboardInterrupt
    if said == b"never":
        threading.Event().wait()
    rows = len(inputs["TEXT"])
    if said.isdigit():
        rows = int(said)
    return {"INPUT": np.ones((rows, 4), np.float32)}
"""


@pytest.fixture
def hooked_models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    onnx_models.affine(root / "hooked", columns=4)
    (root / "hooked" / "manifest.yaml").write_text(MANIFEST)
    (root / "hooked" / "model.py").write_text(MODEL_PY)
    return root


def ask(port: int, text: str, timeout_ms: int = 20_000) -> tuple[int, dict[str, object]]:
    """Return status and JSON of one inference whose TEXT is ``text``."""
    body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": [text]}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/hooked/infer",
        json.dumps(body).encode(),
        {"x-request-timeout-ms": str(timeout_ms)},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_hooks_that_never_return_or_interrupt_cost_only_their_own_request(hooked_models: Path, tmp_path: Path) -> None:
    with shared_memory_unchanged(), Node(hooked_models, tmp_path / "run", frontends=1) as node:
        port = node.ports["http_port"]
        frontend = node.pids("frontend")
        status, answer = ask(port, "interrupt")
        assert (status, "KeyboardInterrupt" in str(answer["error"])) == (500, True)
        assert ask(port, "never", timeout_ms=300)[0] == 504
        assert ask(port, "fine")[0] == 200
        assert node.pids("frontend") == frontend
        # The thread that hangs is left to the end of its process.
        assert node.stop() == 0
        assert "frontend.hooks_left running=1" in node.log()
        assert "drain_cut" not in node.log()


def test_rule_17_rows_that_a_hook_has_made_are_not_split(hooked_models: Path, tmp_path: Path) -> None:
    with Node(hooked_models, tmp_path / "run", frontends=1) as node:
        port = node.ports["http_port"]
        status, answer = ask(port, "8")
        outputs = answer["outputs"]
        assert isinstance(outputs, list)
        assert (status, outputs[0]["shape"]) == (200, [8, 4])
        status, answer = ask(port, "9")
        assert status == 400
        assert "no compiled program for input shape [9, 4]" in str(answer["error"])
        assert "preprocess made 9 rows of 1" in str(answer["error"])


def test_a_load_that_never_returns_leaves_the_node_able_to_drain(hooked_models: Path, tmp_path: Path) -> None:
    (hooked_models / "hooked" / "model.py").write_text(
        "import threading\nprint('stuck here', flush=True)\nthreading.Event().wait()\n"
    )
    with Node(hooked_models, tmp_path / "run", frontends=1, wait_ready=False) as node:
        node.wait_line("stuck here", timeout_s=60)
        assert node.stop() == 0
        assert "drain_cut" not in node.log()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["node.lock"]
