"""What the end-to-end tests of scheduling share: models by manifest, questions to a node, requests on each protocol."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import onnx_models
from bench.load import HttpConnection, binary_infer, connect, http_request
from frontend.kserve.proto import message_class
from frontend.node.link import Call, Told, call_node
from real_node import Node, until

ASK_TIMEOUT_S = 30.0
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


def manifest(sizes: list[int]) -> str:
    """Return the manifest of a model INPUT -> OUTPUT, f32 [n, 4]."""
    tensor = "dtype: f32, shape: nc, dims: {c: 4}"
    return (
        'format_version: "1"\nkind: model\n'
        f"executable_inputs:\n  - {{name: INPUT, {tensor}}}\n"
        f"executable_outputs:\n  - {{name: OUTPUT, {tensor}}}\n"
        f"batching: {{compiled_batch_sizes: {sizes}}}\n"
    )


def add_affine(root: Path, name: str = "affine", sizes: list[int] | None = None) -> None:
    """Add a model that answers ``2 x + 1`` at once."""
    onnx_models.affine(root / name, columns=4)
    (root / name / "manifest.yaml").write_text(manifest(sizes or [1, 8, 32]))


def add_slow(root: Path, name: str, milliseconds: float, sizes: list[int] | None = None) -> None:
    """Add a model that answers its input after about that time, whatever the batch."""
    onnx_models.slow(root / name, milliseconds)
    (root / name / "manifest.yaml").write_text(manifest(sizes or [1]))


def add_steps(root: Path, name: str, sizes: list[int] | None = None) -> None:
    """Add a model whose input says how long it takes."""
    onnx_models.steps(root / name)
    (root / name / "manifest.yaml").write_text(manifest(sizes or [1]))


def node_file(directory: Path, **scheduler: Any) -> Path:
    """Write a node file with these settings under ``global.scheduler``."""
    path = directory / "node.yaml"
    path.write_text(json.dumps({"global": {"scheduler": scheduler}}))
    return path


# Questions


def ask(node: Node, what: str, **args: Any) -> Any:
    """Return the node's answer to ``policy`` or ``metrics``; fail if it refused."""
    sock, line = call_node(str(node.run_dir), Call(ask=what, args=args), ASK_TIMEOUT_S)
    sock.close()
    told = msgspec.json.decode(line, type=Told)
    assert told.kind == 0, told.text
    return told.value


def counted(node: Node, model: str, version: str = "1") -> dict[str, Any]:
    """Return ``scheduler_metrics`` of one model."""
    return ask(node, "metrics", model=model)["worker0"][f"{model}/{version}"]


def ringserve(*arguments: str) -> tuple[int, str, str]:
    """Run the command; return exit status, output and errors."""
    command = [sys.executable, "-m", "frontend.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def scrape(ports: dict[str, int]) -> list[Sample]:
    """Return every sample of the metrics port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics_port']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(samples: list[Sample], name: str, **labels: str) -> float:
    """Return the sum of the samples with these labels; at least one must exist."""
    found = [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]
    assert found, f"no sample {name} {labels}"
    return sum(found)


# Requests


def rows(count: int, value: float = 1.0) -> np.ndarray:
    return np.full((count, 4), value, np.float32)


def request(model: str, array: np.ndarray, headers: dict[str, str] | None = None, **parameters: Any) -> bytes:
    """Render a request in the binary extension, with more headers and request parameters."""
    rendered = binary_infer(model, {"INPUT": ("FP32", array)}, **parameters)
    if not headers:
        return rendered
    head, _, body = rendered.partition(b"\r\n\r\n")
    length = re.search(rb"Inference-Header-Content-Length: (\d+)", head)
    assert length is not None
    own = {"Inference-Header-Content-Length": length[1].decode(), **headers}
    return http_request(f"/v2/models/{model}/infer", body, own)


def grpc_request(model: str, array: np.ndarray, request_id: str = "", timeout_us: int = 0) -> bytes:
    """Render a ModelInferRequest."""
    message: Any = message_class("ModelInferRequest")(model_name=model, id=request_id)
    message.inputs.add(name="INPUT", datatype="FP32", shape=array.shape)
    message.raw_input_contents.append(array.tobytes())
    if timeout_us:
        message.parameters["timeout"].int64_param = timeout_us
    data: bytes = message.SerializeToString()
    return data


def post(port: int, model: str, array: np.ndarray) -> tuple[int, dict[str, str], bytes]:
    """Send one request on a connection of its own; return status, headers (lower case) and body."""
    head, _, body = binary_infer(model, {"INPUT": ("FP32", array)}).partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        answer = connection.getresponse()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


async def connections(port: int, count: int) -> list[HttpConnection]:
    return list(await asyncio.gather(*(connect("127.0.0.1", port) for _ in range(count))))


def close_all(opened: list[HttpConnection]) -> None:
    for connection in opened:
        if connection.transport is not None:
            connection.transport.close()


async def until_queued(node: Node, model: str, depth: int) -> None:
    """Wait until that many requests wait in a model's queue."""

    def deep_enough() -> bool:
        return bool(counted(node, model)["queue_depth"] >= depth)

    await asyncio.get_running_loop().run_in_executor(None, until, f"{depth} requests queued", deep_enough)
