"""A whole node, on either database: settings made over HTTP hold lines back and let them go, and people see why."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import onnx_models
import openai
from installation import closed_window
from node_models import rows_manifest
from postgres_server import fresh_database
from real_node import Node, migrate, until
from stub_upstream import Say, StubUpstream, completion

pytestmark = pytest.mark.process

NODE_FILE = """
gateway:
  enabled: true
  development: true
  store: "{store}"
  models:
    - name: chat
      routes:
        - {{id: chat-1, kind: vllm, endpoint: "{url}", addresses: ["127.0.0.1"], upstream_model: inner}}
  batches: {{workers: 8}}
"""
DASHBOARD = Path(__file__).parents[2] / "scripts" / "grafana" / "batches.json"
EIGHT_REASONS = {
    "rate_limited", "outside_window", "live_traffic", "metrics_unavailable", "server_busy", "workers", "concurrency",
    "fair_share",
}  # fmt: skip
ROUTE = "/api/v1/platform/deployments/chat-1/batch-scheduling"
WAIT_S = 60.0


class Running:
    """A node, its upstream, and ways to ask it."""

    def __init__(self, node: Node, node_file: Path, upstream: StubUpstream) -> None:
        self.node = node
        self.upstream = upstream
        self._node_file = node_file
        self.key = node.wait_line("ringserve development key: ").rpartition(" ")[2]
        self.port = node.ports["http_port"]
        self.workspace = str(self.call("GET", "/api/v1/me")[1]["workspace_id"])

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"Authorization": f"Bearer {key or self.key}"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        found = self.call("GET", ROUTE)[1]["status"]
        assert isinstance(found, dict)
        return found

    def exposition(self) -> str:
        url = f"http://127.0.0.1:{self.node.ports['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())

    def labels(self, series: str) -> list[dict[str, str]]:
        """Return the labels of every series of this name on the metrics page."""
        lines = re.findall(rf"^{series}(?:\{{(.*)\}})? ", self.exposition(), re.MULTILINE)
        return [dict(re.findall(r'(\w+)="([^"]*)"', labels)) for labels in lines]

    def metrics(self) -> dict[str, list[frozenset[str]]]:
        """Return the names of the labels that come together, by series, as the metrics page has them now."""
        found: dict[str, list[frozenset[str]]] = {}
        for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? ", self.exposition(), re.MULTILINE):
            found.setdefault(name, []).append(frozenset(re.findall(r'(\w+)="', labels)))
        return found

    def page(self, batch_id: str) -> dict[str, Any]:
        status, found = self.call("GET", f"/api/v1/workspaces/{self.workspace}/batches/{batch_id}")
        assert status == 200, found
        assert isinstance(found, dict)
        return found

    def submit(self, lines: int) -> str:
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
        line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        text = "\n".join(json.dumps({"custom_id": f"c{number}", **line}) for number in range(lines)).encode()
        with openai.OpenAI(api_key=self.key, base_url=f"http://127.0.0.1:{self.port}/v1", max_retries=4) as client:
            file = client.files.create(file=("in.jsonl", text), purpose="batch")
            made = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        return made.id

    def ringserve(self, *words: str) -> str:
        command = [sys.executable, "-m", "frontend.cli", *words]
        environment = os.environ | {
            "RINGSERVE_API_KEY": self.key, "RINGSERVE_BASE_URL": f"http://127.0.0.1:{self.port}/v1",
        }  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def new_key(self, role: str, workspace: str) -> str:
        return self.ringserve(
            "keys", "create", "--node", str(self._node_file), "--run-dir", str(self.node.run_dir),
            "--models", str(self.node.models), "--workspace", workspace, "--role", role,
        ).strip()  # fmt: skip


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("node")
    models = directory / "models"
    path = onnx_models.affine(models / "double", columns=4)
    (path.parent / "manifest.yaml").write_text(rows_manifest())
    server = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
    node_file = directory / "node.yaml"
    with fresh_database(server) as store, StubUpstream() as upstream:
        upstream.default = lambda seen: Say(body=completion("inner", seen.json["messages"][0]["content"]))
        node_file.write_text(NODE_FILE.format(url=upstream.url, store=store))
        if store:
            migrate(node_file, models)
        with Node(models, directory / "run", frontends=2, node_file=node_file) as node:
            yield Running(node, node_file, upstream)


@pytest.fixture
def opened(running: Running) -> Iterator[Running]:
    """The node, its route open again at the end, whatever becomes of the test."""
    yield running
    assert running.call("PUT", ROUTE, {"max_concurrency": 2})[0] == 200


def test_a_closed_window_holds_lines_back_and_everybody_sees_why(opened: Running) -> None:
    running = opened
    status, saved = running.call("PUT", ROUTE, {"max_concurrency": 3, "window": closed_window()})
    assert status == 200 and running.call("GET", ROUTE)[1]["settings"] == saved["settings"]
    # Within 5 s in the runner, which is another process.
    until("the route is closed", lambda: _closed(running), WAIT_S)
    calls = len(running.upstream.calls)
    batch_id = running.submit(5)

    def waits() -> dict[str, Any] | None:
        page = running.page(batch_id)
        return page if page["batch"]["waiting_reason"] == "outside_window" else None

    page = until("the batch says why it waits", waits, WAIT_S)
    assert page["batch"]["status"] == "in_progress" and page["batch"]["mine"] is True
    lane = page["scheduling"][0]
    assert (lane["model"], lane["reason"], lane["waiting_lines"], lane["running_lines"]) == (
        "chat", "outside_window", 5, 0,
    )  # fmt: skip
    assert (lane["position"], lane["queue"]) == (1, 1)
    found = running.status()
    assert (found["paused_reason"], found["queued_lines"], found["waiting_batches"]) == ("outside_window", 5, 1)
    assert "Queued — waiting for capacity: Outside its time window" in running.ringserve("batch", "show", batch_id)
    assert len(running.upstream.calls) == calls, "nothing was sent"

    assert running.call("PUT", ROUTE, {"max_concurrency": 2})[0] == 200
    until("the batch ends", lambda: running.page(batch_id)["batch"]["ended_at"], WAIT_S)
    page = running.page(batch_id)
    assert page["batch"]["state"] == "completed" and page["batch"]["completed"] == 5
    assert page["outcomes"] == [{"state": "succeeded", "code": None, "lines": 5}] and page["scheduling"] == []


def _closed(running: Running) -> bool:
    """Whether a line sent for this purpose waits: the runner has heard of the settings."""
    batch_id = running.submit(1)

    def probe() -> str | None:
        batch = running.page(batch_id)["batch"]
        return batch["ended_at"] or batch["waiting_reason"]

    found = until("the line ran or waits", probe, WAIT_S)
    if found == "outside_window":
        status, _ = running.call("POST", f"/api/v1/workspaces/{running.workspace}/batches/{batch_id}/cancel")
        assert status == 200
        until("it is gone", lambda: running.page(batch_id)["batch"]["ended_at"], WAIT_S)
        return True
    return False


def test_rule_83_the_dashboard_names_series_that_exist(running: Running) -> None:
    # One of each: some series are there from the first event on.
    batch_id = running.submit(2)
    until("the batch ends", lambda: running.page(batch_id)["batch"]["ended_at"], WAIT_S)
    chat = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
    assert running.call("POST", "/v1/chat/completions", chat)[0] == 200
    dashboard = json.loads(DASHBOARD.read_text())
    used = {name for expression in _expressions(dashboard) for name in _series(expression)}
    assert len(used) > 15

    def missing() -> set[tuple[str, frozenset[str]]]:
        page = running.metrics()
        return {(name, labels) for name, labels in used if not any(labels <= found for found in page.get(name, ()))}

    # The sums over the installation come with the next look of whichever process tells them.
    until("every series of the dashboard is there", lambda: not missing(), WAIT_S)
    reasons = {labels["reason"] for labels in running.labels("gateway_batch_paused_routes")}
    assert reasons >= EIGHT_REASONS
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"] if "datasource" in panel} == {"${datasource}"}


def _expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def _series(expression: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield every series that an expression reads, with the labels it relies on; ``instance`` is the scraper's."""
    grouped = {name.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for name in group.split(",")}
    for name, matchers in re.findall(r"\b((?:gateway|ringserve|frontend|worker)_\w+)(?:\{([^}]*)\})?", expression):
        labels = set(re.findall(r"(\w+)(?:=~|=)", matchers)) | grouped
        yield name, frozenset(labels - {"instance"})


def test_roles_of_real_keys(running: Running) -> None:
    keys = {role: running.new_key(role, "people") for role in ("member", "workspace_admin", "auditor")}
    assert running.call("GET", ROUTE, key=keys["member"])[0] == 403
    assert running.call("GET", ROUTE, key=keys["workspace_admin"])[0] == 403
    assert running.call("GET", ROUTE, key=keys["auditor"])[0] == 200
    assert running.call("PUT", ROUTE, {"max_concurrency": 9}, key=keys["auditor"])[0] == 403
    assert running.call("GET", ROUTE)[1]["settings"]["max_concurrency"] != 9
    assert running.call("GET", "/api/v1/workspaces/people/batches", key=keys["member"])[1] == {
        "data": [], "has_more": False, "scope": "own",
    }  # fmt: skip


def test_the_document_is_served_by_every_frontend(running: Running) -> None:
    documents = {json.dumps(running.call("GET", "/api/v1/openapi.json")[1], sort_keys=True) for _ in range(8)}
    assert len(documents) == 1
