"""Our own worker behind /v1: a real node with the MiniLM bundle, driven by the SDK; and the parts that need none."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from serving_double import DoubleServing, entry, spec

import openai
from engines.errors import Kind
from frontend.openai import bodies, local
from frontend.openai.calls import Sent
from real_node import Node

ROOT = Path(__file__).resolve().parents[2]
LATER_NS = 1 << 62


def embedder() -> DoubleServing:
    """Return a double whose model ``lengths`` embeds: the FP32 [n, 2] of the texts' lengths."""
    serving = DoubleServing()
    made = entry("lengths", (spec("TEXT", "bytes", -1),), (spec("VECTOR", "f32", -1, 2),))
    serving.models["lengths"] = msgspec.structs.replace(made, task="embedding")
    return serving


def embed(serving: Any, **body: Any) -> tuple[int, dict[str, Any]]:
    fields = bodies.read_fields(json.dumps({"model": "lengths", **body}).encode())
    answer = asyncio.run(local.embed(serving, "lengths", "public", fields, 0, LATER_NS, background=False))
    return answer.status, json.loads(answer.body)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "must provide"),
        ({"input": None}, "input", "must provide"),
        ({"input": []}, "input", "1 to 2048"),
        ({"input": ["a"] * 2049}, "input", "2049"),
        ({"input": ""}, "input", "text 0 is empty"),
        ({"input": ["a", ""]}, "input", "text 1 is empty"),
        ({"input": [1, 2]}, "input", "token numbers"),
        ({"input": [[1, 2], [3]]}, "input", "token numbers"),
        ({"input": {"a": 1}}, "input", "a text or a list of texts"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float or base64"),
        ({"input": "a", "dimensions": 3}, "dimensions", "2 dimensions"),
        ({"input": "a", "dimensions": "2"}, "dimensions", "whole number"),
    ],
)
def test_what_embeddings_refuse(body: dict[str, Any], param: str, said: str) -> None:
    status, told = embed(embedder(), **body)
    assert status == 400
    assert told["error"]["param"] == param
    assert said in told["error"]["message"]


def test_a_bundle_that_does_not_embed_says_what_is_missing() -> None:
    serving = embedder()
    fields = bodies.read_fields(b'{"input":"a"}')
    answer = asyncio.run(local.embed(serving, "simple", "simple", fields, 0, LATER_NS, background=False))
    assert answer.status == 400
    assert b"task: embedding" in answer.body


@pytest.mark.parametrize(("name", "status", "sent"), [("full", 429, Sent.DECLINED), ("broken", 500, Sent.MAYBE_RUN)])
def test_infer_lines_fail_in_that_endpoints_own_shape(name: str, status: int, sent: Sent) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
    answer = asyncio.run(local.infer(DoubleServing(), name, body, 0, LATER_NS, background=True))
    assert (answer.status, answer.sent) == (status, sent)
    assert isinstance(json.loads(answer.body)["error"], str)


def test_infer_lines_answer_in_json_and_give_memory_back() -> None:
    serving = DoubleServing()
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
    answer = asyncio.run(local.infer(serving, "echo_f32", body, 0, LATER_NS, background=True))
    assert json.loads(answer.body)["outputs"][0]["data"] == [1, 2, 3, 4]
    assert serving.responses_out == 0
    assert serving.last_request is not None
    assert serving.last_request.background


def test_an_infer_line_cannot_ask_for_binary_or_client_memory() -> None:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    for body in (
        {"inputs": [given], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]},
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": region}]},
        {"inputs": [given], "outputs": [{"name": "y", "parameters": region}]},
    ):
        answer = asyncio.run(
            local.infer(DoubleServing(), "echo_f32", json.dumps(body).encode(), 0, LATER_NS, background=True)
        )
        assert answer.status in (400, 501), body
        assert answer.kind in (Kind.INVALID_INPUT, Kind.UNSUPPORTED)


# A real node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    subprocess.run([ROOT / "scripts" / "demo_bundles", "minilm"], check=True)
    models = tmp_path_factory.mktemp("models")
    (models / "minilm").symlink_to(ROOT / "demo" / "models" / "minilm")
    node_file = tmp_path_factory.mktemp("conf") / "node.yaml"
    node_file.write_text(
        "gateway:\n  models:\n    - {name: text-embedding, routes: [{id: own, kind: local, upstream_model: minilm}]}\n"
    )
    run_dir = tmp_path_factory.mktemp("run")
    with Node(models, run_dir, frontends=2, node_file=node_file, arguments=("--development",)) as running:
        yield running


def key_of(node: Node) -> str:
    found = re.search(r"sk-ring-\S+", node.wait_line("development key"))
    assert found is not None
    return found[0]


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{node.ports['http_port']}/v1"
    with openai.OpenAI(base_url=url, api_key=key_of(node), timeout=60) as made:
        yield made


@pytest.mark.process
def test_embeddings_of_a_real_model_in_both_encodings(client: openai.OpenAI) -> None:
    assert {one.id for one in client.models.list()} == {"text-embedding", "minilm"}
    texts = ["The sea is calm today.", "Today the ocean is quiet.", "Stock prices fell."]
    packed = client.embeddings.create(model="text-embedding", input=texts)
    plain = client.embeddings.create(model="minilm", input=texts, encoding_format="float", dimensions=384)
    assert (packed.model, plain.model) == ("text-embedding", "minilm")
    first, second = (np.array([one.embedding for one in found.data]) for found in (packed, plain))
    np.testing.assert_allclose(first, second, atol=1e-6)
    near, far = first[0] @ first[1], first[0] @ first[2]
    assert near > 0.6 > 0.3 > far
    assert (packed.usage.prompt_tokens, packed.usage.total_tokens) == (0, 0)


@pytest.mark.process
def test_more_texts_than_any_batch_size_are_split(client: openai.OpenAI) -> None:
    texts = [f"sentence number {index}" for index in range(40)]
    found = client.embeddings.create(model="text-embedding", input=texts)
    assert [one.index for one in found.data] == list(range(40))
    alone = client.embeddings.create(model="text-embedding", input=texts[33])
    np.testing.assert_allclose(found.data[33].embedding, alone.data[0].embedding, atol=1e-3)


@pytest.mark.process
def test_errors_of_a_real_node(node: Node, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nothing", input="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="text-embedding", messages=[])
    assert caught.value.code == "unsupported_endpoint"
    # A call of its own: tests run in any order, and the figures below are to show one.
    assert client.embeddings.create(model="text-embedding", input="a").data
    port = node.ports["http_port"]
    assert client.files.list().data == []
    with httpx2.Client(trust_env=False) as plain:
        assert plain.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
        assert isinstance(plain.get(f"http://127.0.0.1:{port}/nothing").json()["error"], str)
        assert plain.get(f"http://127.0.0.1:{port}/v2/models/minilm").status_code == 200
        figures = plain.get(f"http://127.0.0.1:{node.ports['metrics_port']}/metrics").text
    assert re.search(r'gateway_calls_total\{kind="local",outcome="\w+",traffic="live"\} [1-9]', figures)
    assert 'gateway_in_flight{route="own",traffic="live"} 0.0' in figures
    assert key_of(node) not in figures
    assert node.log().count(key_of(node)) == 1
