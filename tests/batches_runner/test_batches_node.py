"""A whole node with batches: the official SDK sends them, an upstream and our own worker run them."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import onnx_models
import openai
from node_models import rows_manifest
from real_node import Node, until
from stub_upstream import Say, StubUpstream, completion

pytestmark = pytest.mark.process

NODE_FILE = """
gateway:
  enabled: true
  development: true
  models:
    - name: chat
      routes:
        - {{id: chat-1, kind: vllm, endpoint: "{url}", addresses: ["127.0.0.1"], upstream_model: inner}}
  batches: {{workers: 8, lease_seconds: 2, lease_renew_seconds: 0.5}}
"""


class Surroundings:
    """A node with one upstream and one bundle, and a client of its gateway."""

    def __init__(self, node: Node, upstream: StubUpstream) -> None:
        self.node = node
        self.upstream = upstream
        key = node.wait_line("ringserve development key: ").rpartition(" ")[2]
        base = f"http://127.0.0.1:{node.ports['http_port']}/v1"
        self.client = openai.OpenAI(api_key=key, base_url=base, max_retries=4)

    def batch(self, endpoint: str, bodies: list[dict[str, Any]]) -> Any:
        lines = [
            {"custom_id": f"c{i}", "method": "POST", "url": endpoint, "body": body} for i, body in enumerate(bodies)
        ]
        text = "\n".join(map(json.dumps, lines)).encode()
        file = self.client.files.create(file=("in.jsonl", text), purpose="batch")
        return self.client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]

    def ended(self, batch_id: str) -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
        def probe() -> Any:
            found = self.client.batches.retrieve(batch_id)
            return found if found.status in ("completed", "failed", "expired", "cancelled") else None

        batch = until("the batch ends", probe, 60)
        return batch, self._lines(batch.output_file_id), self._lines(batch.error_file_id)

    def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(line) for line in self.client.files.content(file_id).text.splitlines()]

    def process(self) -> dict[str, Any]:
        status = self.node.status()
        assert status is not None
        return next(process for process in status["processes"] if process["role"] == "batches")


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    directory = tmp_path_factory.mktemp("batches")
    models = directory / "models"
    # Twice each value, plus one.
    path = onnx_models.affine(models / "double", columns=4)
    (path.parent / "manifest.yaml").write_text(rows_manifest())
    with StubUpstream() as upstream:
        upstream.default = lambda seen: Say(body=completion("inner", seen.json["messages"][0]["content"]))
        node_file = directory / "node.yaml"
        node_file.write_text(NODE_FILE.format(url=upstream.url))
        with Node(models, directory / "run", frontends=1, node_file=node_file) as node:
            found = Surroundings(node, upstream)
            yield found
            found.client.close()


def chat(text: str) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": text}], "unknown_field": [1.50]}


def test_role_batches_is_part_of_the_node(around: Surroundings) -> None:
    until("the runner is ready", lambda: around.process()["state"] == "ready", 30)
    until("its series are there", lambda: "gateway_batch_workers" in _metrics(around.node), 30)
    assert 'gateway_batch_workers{state="capacity"} 8' in _metrics(around.node)


def _metrics(node: Node) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{node.ports['metrics_port']}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def test_lines_for_an_upstream_carry_the_public_model_name(around: Surroundings) -> None:
    batch = around.batch("/v1/chat/completions", [chat(f"hello {i}") for i in range(20)])
    done, output, errors = around.ended(batch.id)
    assert done.status == "completed" and not errors
    assert (done.request_counts.total, done.request_counts.completed) == (20, 20)
    for line in output:
        body = line["response"]["body"]
        assert body["model"] == "chat" and body["choices"][0]["message"]["content"] == f"hello {line['custom_id'][1:]}"
    sent = around.upstream.bodies()[-1]
    assert sent["model"] == "inner" and sent["unknown_field"] == [1.5]
    assert around.upstream.calls[-1].headers["x-ringserve-traffic"] == "batch"


def test_lines_for_our_own_worker_run_in_the_background(around: Surroundings) -> None:
    bodies = [
        {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1, 4], "data": [float(i)] * 4}]} for i in range(30)
    ]
    batch = around.batch("/v2/models/double/infer", bodies)
    done, output, errors = around.ended(batch.id)
    assert done.status == "completed" and not errors, errors[:1]
    for line in output:
        number = int(line["custom_id"][1:])
        assert line["response"]["body"]["outputs"][0]["data"] == [2.0 * number + 1.0] * 4


def test_a_killed_runner_is_started_again_and_goes_on(around: Surroundings) -> None:
    until("the runner is ready", lambda: around.process()["state"] == "ready", 30)
    around.upstream.default = lambda seen: Say(
        body=completion("inner", seen.json["messages"][0]["content"]), delay_s=0.02
    )  # fmt: skip
    before = len(around.upstream.calls)
    batch = around.batch("/v1/chat/completions", [chat(f"kill {i}") for i in range(300)])
    around.upstream.wait(lambda stub: len(stub.calls) >= before + 50, 30)
    os.kill(around.process()["pid"], signal.SIGKILL)
    done, output, errors = around.ended(batch.id)
    texts = [call.json["messages"][0]["content"] for call in around.upstream.calls[before:]]
    assert len(texts) == len(set(texts)), "no line was sent twice"
    assert done.status == "completed" and len(output) + len(errors) == 300 and len(errors) <= 8
    assert {one["error"]["code"] for one in errors} <= {"result_unavailable"}
    assert (done.request_counts.completed, done.request_counts.failed) == (len(output), len(errors))
    assert around.process()["restarts"] == 1
