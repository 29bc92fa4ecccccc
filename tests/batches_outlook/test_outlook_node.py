"""A whole node, on either database: a webhook hears of a batch that failed, forecasts come from what was measured."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import onnx_models
import openai
from node_models import rows_manifest
from postgres_server import fresh_database
from real_node import Node, migrate, until
from stub_upstream import Say, Seen, StubUpstream, completion

pytestmark = [pytest.mark.process, pytest.mark.slow]

SECRET = "the key of the signatures"
WAIT_S = 150.0
NODE_FILE = """
gateway:
  enabled: true
  development: true
  store: "{store}"
  models:
    - name: chat
      routes:
        - {{id: chat-1, kind: vllm, endpoint: "{url}", addresses: ["127.0.0.1"], upstream_model: inner}}
  batches: {{workers: 8, validation: async}}
  alerts:
    # The development workspace is a personal one, which no rule for the installation watches.
    rules: [{{name: failed, kind: batch_failed, workspace: development}}]
    webhook: {{url: "{hook}", addresses: ["127.0.0.1"], secret_env: HOOK_SECRET}}
"""


class Receiver:
    """A webhook that keeps the messages it gets."""

    def __init__(self) -> None:
        self.messages: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.messages.append((dict(self.headers), body))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/hook"


class Around:
    """A node, its upstream, its webhook, and a client of it."""

    def __init__(self, node: Node, upstream: StubUpstream, receiver: Receiver) -> None:
        self.node, self.upstream, self.receiver = node, upstream, receiver
        self.key = node.wait_line("ringserve development key: ").rpartition(" ")[2]
        self.port = node.ports["http_port"]
        self.client = openai.OpenAI(api_key=self.key, base_url=f"http://127.0.0.1:{self.port}/v1", max_retries=4)

    def create(self, lines: list[dict[str, Any]]) -> Any:
        text = "\n".join(map(json.dumps, lines)).encode()
        file = self.client.files.create(file=("in.jsonl", text), purpose="batch")
        return self.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

    def ended(self, batch_id: str) -> Any:
        def probe() -> Any:
            found = self.client.batches.retrieve(batch_id)
            return found if found.status in ("completed", "failed", "expired", "cancelled") else None

        return until("the batch ends", probe, WAIT_S)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {"Authorization": f"Bearer {self.key}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            found = json.loads(answer.read())
            assert answer.status == 200, found
            return found
        finally:
            connection.close()

    def metric(self, series: str) -> float | None:
        url = f"http://127.0.0.1:{self.node.ports['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = re.search(rf"^{re.escape(series)} (\S+)$", answer.read().decode(), re.MULTILINE)
        return None if found is None else float(found[1])


@pytest.fixture(params=["sqlite", "postgresql"])
def around(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Around]:
    models = tmp_path / "models"
    path = onnx_models.affine(models / "double", columns=4)
    (path.parent / "manifest.yaml").write_text(rows_manifest())
    server = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
    node_file = tmp_path / "node.yaml"
    with fresh_database(server) as store, StubUpstream() as upstream, Receiver() as receiver:
        node_file.write_text(NODE_FILE.format(url=upstream.url, store=store, hook=receiver.url))
        if store:
            migrate(node_file, models)
        with Node(models, tmp_path / "run", frontends=2, node_file=node_file, env={"HOOK_SECRET": SECRET}) as node:
            made = Around(node, upstream, receiver)
            yield made
            made.client.close()


def line(number: int) -> dict[str, Any]:
    body = {"model": "chat", "messages": [{"role": "user", "content": f"hi {number}"}]}
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_alerts_forecasts_and_adaptive_caps_of_a_node(around: Around) -> None:
    upstream = around.upstream

    def answer(seen: Seen) -> Say:
        if upstream.in_flight > 3:
            return Say(status=429, body={"error": {"message": "busy"}})
        return Say(body=completion("inner", seen.json["messages"][0]["content"]), delay_s=0.2)

    upstream.default = answer
    route = "/api/v1/platform/deployments/chat-1/batch-scheduling"
    saved = around.call("PUT", route, {"max_concurrency": {"min": 1, "max": 8}})
    assert saved["settings"]["max_concurrency"] == {"min": 1, "max": 8}

    failing = around.create([{"custom_id": "c", "method": "GET", "url": "/v1/chat/completions", "body": {}}])
    assert around.ended(failing.id).status == "failed"
    running = around.create([line(number) for number in range(900)])

    (headers, body), *_ = until("the webhook hears of it", lambda: list(around.receiver.messages), WAIT_S)
    message = json.loads(body)
    assert (message["batch"], message["event"], message["rule"]) == (failing.id, "opened", "failed")
    signed = hmac.new(SECRET.encode(), headers["Ringserve-Timestamp"].encode() + b"." + body, hashlib.sha256)
    assert headers["Ringserve-Signature"] == "v1=" + signed.hexdigest()
    assert abs(int(headers["Ringserve-Timestamp"]) - time.time()) < 60
    # Three processes could tell it; one does.
    until("it is on the metrics page", lambda: around.metric('gateway_batch_alerts_open{rule="failed"}') == 1, 30)
    assert len(around.receiver.messages) == 1

    def forecast() -> Any:
        shown: Any = around.client.batches.retrieve(running.id)
        found = (shown.model_extra or {}).get("forecast")
        return found if found and found["eta_p50"] else None

    found = until("what was measured becomes a forecast", forecast, WAIT_S)
    assert found["measured_lines"] >= 5
    assert 0 < found["eta_p50"] - time.time() < 3600
    assert found["at_risk"] is False

    grown = 'gateway_batch_cap_changes_total{reason="clean_windows"}'
    until("the cap grows", lambda: (around.metric(grown) or 0) >= 3, WAIT_S)
    halved = 'gateway_batch_cap_changes_total{reason="overload"}'
    until("the server refuses and the cap is halved", lambda: around.metric(halved), WAIT_S)
    assert upstream.max_in_flight <= 8
    around.client.batches.cancel(running.id)
    assert around.ended(running.id).status == "cancelled"
    assert SECRET not in around.node.log()
    assert "/hook" not in around.node.log()
