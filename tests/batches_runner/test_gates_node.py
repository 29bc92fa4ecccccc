"""A whole node whose batches give way: to live calls through real frontends, and to a server that is busy."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import openai
from frontend.batches.runner.gates import Reason
from frontend.batches.scheduling.live_table import LiveTable
from real_node import Node, until
from stub_upstream import Say, Seen, StubUpstream, chunk, completion, plausible, sse

pytestmark = [pytest.mark.process, pytest.mark.slow]

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


class GatedNode:
    """A node with one upstream, which also tells its load."""

    def __init__(self, node: Node, upstream: StubUpstream) -> None:
        self.node = node
        self.upstream = upstream
        self.waiting = 0
        self._key = node.wait_line("ringserve development key: ").rpartition(" ")[2]
        self.base = f"http://127.0.0.1:{node.ports['http_port']}"
        self.client = openai.OpenAI(api_key=self._key, base_url=self.base + "/v1", max_retries=4)
        upstream.default = self.answer
        self.stream_open = threading.Event()

    def answer(self, seen: Seen) -> Say:
        if seen.path == "/metrics":
            return Say(body=f"vllm:num_requests_waiting {self.waiting}\n".encode(), content_type="text/plain")
        if seen.json.get("stream"):
            pieces = [sse(chunk("inner", word)) for word in ("one", "two")]
            return Say(pieces=[*pieces, b"data: [DONE]\n\n"], hold=self.stream_open, content_type="text/event-stream")
        return Say(body=completion("inner")) if "messages" in seen.json else plausible(seen)

    def lines(self) -> int:
        """Return how many batch lines the upstream has seen."""
        return sum(call.headers.get("x-ringserve-traffic") == "batch" for call in self.upstream.calls)

    def put(self, **settings: Any) -> dict[str, Any]:
        document = {"max_concurrency": 2} | settings
        return self.ask("PUT", "/platform/deployments/chat-1/batch-scheduling", document)

    def yield_to_one(self) -> None:
        """Let lines give way to one live call, and return when they do (rule 21: within 5 s, and nothing tells)."""
        self.put(yield_live_threshold=1)
        self.stream_open.clear()
        probes: list[str] = []

        def held_back() -> bool:
            if not probes or self.client.batches.retrieve(probes[-1]).status == "completed":
                probes.append(self.batch(1))
            return bool(self.status()["paused_reason"] == "live_traffic")

        with ThreadPoolExecutor(1) as threads:
            live = threads.submit(self.stream)
            self.upstream.wait(lambda stub: stub.in_flight == 1, 30)
            until("the setting is in force", held_back)
            self.stream_open.set()
            live.result(30)
        for probe in probes:
            assert self.ended(probe).status == "completed"

    def status(self) -> dict[str, Any]:
        found = self.ask("GET", "/platform/deployments/chat-1/batch-scheduling")["status"]
        assert isinstance(found, dict)
        return found

    def ask(self, method: str, path: str, document: Any = None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.base}/api/v1{path}", method=method,
            data=None if document is None else json.dumps(document).encode(),
            headers={"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=20) as answer:
            found = json.load(answer)
        assert isinstance(found, dict)
        return found

    def batch(self, count: int) -> str:
        body = {"model": "chat", "messages": [{"role": "user", "content": "x"}]}
        texts = [
            json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
            for i in range(count)
        ]
        file = self.client.files.create(file=("in.jsonl", "\n".join(texts).encode()), purpose="batch")
        made = self.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )  # fmt: skip
        return made.id

    def ended(self, batch_id: str) -> Any:
        def probe() -> Any:
            found = self.client.batches.retrieve(batch_id)
            return found if found.status in ("completed", "failed", "expired", "cancelled") else None

        return until("the batch ends", probe, 60)

    def stream(self) -> None:
        """Read a live stream to its end; whatever becomes of it."""
        try:
            with openai.OpenAI(api_key=self._key, base_url=self.base + "/v1", max_retries=0) as client:
                for _ in client.chat.completions.create(
                    model="chat", messages=[{"role": "user", "content": "live"}], stream=True
                ):
                    pass
        except (openai.APIError, OSError):
            pass

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.node.ports['metrics_port']}/metrics", timeout=20) as told:
            return str(told.read().decode())


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedNode]:
    directory = tmp_path_factory.mktemp("gates")
    (directory / "models").mkdir()
    with StubUpstream() as upstream:
        node_file = directory / "node.yaml"
        node_file.write_text(NODE_FILE.format(url=upstream.url))
        with Node(directory / "models", directory / "run", frontends=2, node_file=node_file) as node:
            found = GatedNode(node, upstream)
            yield found
            found.stream_open.set()
            found.client.close()


def test_rule_30_a_stream_counts_until_its_last_piece_and_lines_yield_to_it(around: GatedNode) -> None:
    around.yield_to_one()
    around.stream_open.clear()
    before = around.lines()
    with ThreadPoolExecutor(1) as threads:
        live = threads.submit(around.stream)
        around.upstream.wait(lambda stub: stub.in_flight == 1, 30)
        batch = around.batch(2)
        until("the route yields", lambda: around.status()["paused_reason"] == "live_traffic", 30)
        until("its lines are counted", lambda: around.status()["queued_lines"] == 2, 15)
        status = around.status()
        assert (status["live_in_flight"], status["queued_lines"], status["running_lines"]) == (1, 2, 0)
        assert around.client.batches.retrieve(batch).status == "in_progress"
        assert around.lines() == before
        around.stream_open.set()
        live.result(30)
    assert around.ended(batch).request_counts.completed == 2
    assert around.lines() == before + 2
    told = around.metrics()
    assert 'gateway_batch_route_pauses_total{reason="live_traffic"} ' in told
    assert 'gateway_batches_total{event="created",mode="gateway"} ' in told
    assert all(f'gateway_batch_paused_routes{{reason="{reason}"}} ' in told for reason in Reason)


def test_rule_31_killed_frontends_stop_counting(around: GatedNode) -> None:
    around.yield_to_one()
    around.stream_open.clear()
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            threads.submit(around.stream)
        around.upstream.wait(lambda stub: stub.in_flight == 3, 30)
        before = around.lines()
        batch = around.batch(2)
        until("the route yields", lambda: around.status()["live_in_flight"] == 3, 30)
        table = LiveTable(around.node.run_dir, 1)
        table.start()
        with closing(table):
            assert table.live("chat-1") == 3
            # The node starts them again; what they had under way is gone.
            killed = around.node.pids("frontend")
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            until("they are gone", lambda: not any(Path(f"/proc/{pid}/fd").exists() for pid in killed), 30)
            assert table.live("chat-1") == 0
        around.upstream.wait(lambda stub: around.lines() > before, 30)
        around.stream_open.set()
    assert around.ended(batch).request_counts.completed == 2


def test_rules_17_and_20_lines_wait_for_the_servers_own_load(around: GatedNode) -> None:
    around.waiting = 3
    around.put(metrics={"url": around.upstream.url.removesuffix("/v1") + "/metrics", "max_waiting": 0})
    # Settings are read anew within 5 s; until then a line may start as before.
    until("the gate is in force", lambda: any(call.path == "/metrics" for call in _after_a_line(around)), 30)
    before = around.lines()
    batch = around.batch(2)
    until("the server is busy", lambda: around.status()["paused_reason"] == "server_busy", 30)
    reading = around.status()["metrics"]
    assert (reading["ok"], reading["waiting"], around.lines()) == (True, 3, before)
    around.waiting = 0
    assert around.ended(batch).request_counts.completed == 2


def _after_a_line(around: GatedNode) -> list[Seen]:
    around.batch(1)
    return around.upstream.calls
