"""A whole installation on either database: a node without a runner, runner processes beside it, and a look at all.

The node brings real frontends (and a worker, if there are models); the runners are processes of the test's own, their
intervals a tenth as long, so that they can be killed, stopped and counted. The upstreams are stubs of this process.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import openai
from frontend.batches.keys import make_key
from frontend.batches.settings import BatchesSettings, batches_settings
from frontend.config import load
from frontend.openai.principal import Role
from real_node import Node, migrate, until
from runner_process import RunnerProcess
from runner_world import RunnerWorld
from store_world import world_of

Kind = Literal["sqlite", "postgresql"]
WAIT_S = 240.0
"""When a test is given up: far beyond what a busy machine takes."""
LEASE_S = 2.0
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
ENDED = ("completed", "failed", "expired", "cancelled")


class Installation:
    """Attributes:
    node: serves the gateway; it starts again whatever of it is killed, but runs no batches.
    runners: runner processes, started.
    world: store and storage, past every process.
    """

    def __init__(self, node: Node, world: RunnerWorld, runners: Sequence[RunnerProcess]) -> None:
        self.node = node
        self.world = world
        self.runners = list(runners)
        self.port = node.ports["http_port"]
        self.admin = node.wait_line("ringserve development key: ").rpartition(" ")[2]
        self._http = openai.DefaultHttpxClient(timeout=30)
        self._clients: dict[str, openai.OpenAI] = {}

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        """Return status and JSON of a call of the gateway, by default with the platform admin's key."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"Authorization": f"Bearer {key or self.admin}"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def put(self, route: str, **settings: Any) -> dict[str, Any]:
        """Save a route's settings; return the answer."""
        document = {"max_concurrency": 2} | settings
        status, answer = self.call("PUT", scheduling_path(route), document)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def status(self, route: str) -> dict[str, Any]:
        """Return what everybody is told of a route now."""
        found = self.call("GET", scheduling_path(route))[1]["status"]
        assert isinstance(found, dict)
        return found

    def until_status(self, route: str, **expected: Any) -> dict[str, Any]:
        """Wait until a route's status has these values."""
        found: dict[str, Any] = {}

        def probe() -> dict[str, Any] | None:
            nonlocal found
            found = self.status(route)
            return found if all(found[name] == value for name, value in expected.items()) else None

        try:
            return until(f"{route} is {expected}", probe, WAIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {found}") from None

    def new_key(self, workspace: str, role: Role = Role.MEMBER) -> str:
        """Return a key of a workspace, which is made if need be."""

        async def make() -> str:
            keys, made = self.world.store.keys, make_key()
            if await keys.workspace(workspace) is None:
                await keys.create_workspace(workspace, workspace)
            await keys.create_key(made.id, workspace, role.value, made.id, made.prefix, made.key_hash)
            return made.secret

        return self.world.world.run(make())

    def client(self, key: str = "") -> openai.OpenAI:
        """Return the official SDK, by default with the platform admin's key."""
        key = key or self.admin
        if key not in self._clients:
            # One connection pool for all: making one reads certificates for a tenth of a second.
            self._clients[key] = openai.OpenAI(
                api_key=key, base_url=f"http://127.0.0.1:{self.port}/v1", max_retries=4, http_client=self._http
            )
        return self._clients[key]

    def submit(self, *lines: tuple[str, str] | dict[str, Any], key: str = "") -> str:
        """Send a batch of (model, text) or whole bodies; return its id."""
        bodies = [one if isinstance(one, dict) else chat(*one) for one in lines]
        text = "\n".join(
            json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
            for i, body in enumerate(bodies)
        ).encode()
        client = self.client(key)
        file = client.files.create(file=("in.jsonl", text), purpose="batch")
        return client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id  # fmt: skip

    def ended(self, batch_id: str, key: str = "") -> Any:
        """Wait for a batch's end; return it as the SDK does."""

        def probe() -> Any:
            found = self.client(key).batches.retrieve(batch_id)
            return found if found.status in ENDED else None

        try:
            return until(f"{batch_id} ends", probe, WAIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.told()}") from None

    def waits(self, batch_id: str) -> dict[str, str | None]:
        """Return why a batch waits, by model, as its page says."""
        return {lane["model"]: lane["reason"] for lane in self.page(batch_id)["scheduling"]}

    def page(self, batch_id: str) -> dict[str, Any]:
        """Return what a batch's page shows."""
        batch = self.world.world.run(self.world.store.batches.get(None, batch_id))
        assert batch is not None
        status, found = self.call("GET", f"/api/v1/workspaces/{batch.workspace_id}/batches/{batch_id}")
        assert status == 200, found
        assert isinstance(found, dict)
        return found

    def until_waiting(self, batch_id: str, model: str, reason: str) -> None:
        """Wait until a batch says that it waits for this."""
        found: dict[str, str | None] = {}

        def probe() -> bool:
            nonlocal found
            found = self.waits(batch_id)
            return found.get(model) == reason

        try:
            until(f"{batch_id} waits on {model} for {reason}", probe, WAIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; it waits for {found}; {self.told()}") from None

    @contextmanager
    def streaming(self, model: str, calls: int = 1, key: str = "") -> Iterator[None]:
        """Hold live streams open that the upstream does not end; they are over when it does, whatever comes of them."""
        threads = [threading.Thread(target=self._stream, args=(model, key)) for _ in range(calls)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for thread in threads:
                thread.join(WAIT_S)

    def told(self) -> str:
        """Return what the store says of waiting lines, and the ends of all logs."""
        scheduling = self.world.store.scheduling
        rows = [self.world.world.run(read()) for read in (scheduling.fresh_waits, scheduling.route_counts)]
        logs = {"node": self.node.log()} | {runner.log.name: runner.tail() for runner in self.runners}
        return "\n".join([*map(str, rows), *(f"{name}:\n{log[-1500:]}" for name, log in logs.items())])

    def post(self, connection: http.client.HTTPConnection, body: Any, key: str = "") -> None:
        """Send a chat completion and leave the answer to the caller."""
        headers = {"Authorization": f"Bearer {key or self.admin}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)

    def _stream(self, model: str, key: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with suppress(http.client.HTTPException, OSError), closing(connection):
            self.post(connection, chat(model, "live") | {"stream": True}, key)
            connection.getresponse().read()


@contextmanager
def installation(
    kind: Kind, store: str, directory: Path, gateway: Mapping[str, Any], *, runners: int, frontends: int = 1,
    batches: Mapping[str, Any] | None = None, settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Installation]:  # fmt: skip
    """Start an installation.

    Args:
        store: of PostgreSQL, an empty database; unused with SQLite.
        directory: whatever lies in its ``models`` is served.
        gateway: section of the node file.
        batches: settings of the runners.
        settings: how routes are scheduled, by route; known before the first runner starts.
    """
    (directory / "models").mkdir(exist_ok=True)
    run_dir = directory / "run"
    own = {"workers": 16, "lease_seconds": LEASE_S, "lease_renew_seconds": LEASE_S / 4} | dict(batches or {})
    section = {"enabled": True, "development": True, "store": store, "pages": {"enabled": False}} | gateway
    node_file, runner_file = directory / "node.yaml", directory / "runner.yaml"
    # JSON is YAML.
    node_file.write_text(json.dumps({"gateway": section | {"batches": {"workers": 0}}}))
    runner_file.write_text(json.dumps({"gateway": section | {"batches": own}, "run_dir": str(run_dir)}))
    if store:
        migrate(node_file, directory / "models")
    with ExitStack() as stack:
        node = stack.enter_context(Node(directory / "models", run_dir, frontends=frontends, node_file=node_file))
        state = run_dir / "gateway"
        world = stack.enter_context(world_of(kind, store or str(state / "store.sqlite3")))
        around = RunnerWorld(world, state / "files")
        world.run(around.prepare())
        stack.callback(lambda: world.run(around.objects.close()))
        processes = [
            RunnerProcess(_settings(runner_file, run_dir, i), directory / f"runner{i}.log") for i in range(runners)
        ]
        found = Installation(node, around, processes)
        stack.callback(found.close)
        for route, chosen in (settings or {}).items():
            found.put(route, **chosen)
        for process in processes:
            stack.callback(process.kill)
            process.start()
        for process in processes:
            process.wait_ready()
        yield found


def chat(model: str, text: str) -> dict[str, Any]:
    """Return the body of a chat completion."""
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def closed_window() -> dict[str, Any]:
    """Return a window that no clock is near."""
    day = (datetime.now(UTC) + timedelta(days=3)).strftime("%a").lower()
    return {"timezone": "UTC", "days": [day], "start": "12:00", "end": "13:00"}


def open_window() -> dict[str, Any]:
    """Return a window that is open all day."""
    return {"timezone": "Europe/Berlin", "days": list(DAYS), "start": "00:00", "end": "00:00"}


def scheduling_path(route: str) -> str:
    """Return where a route's settings and status are."""
    return f"/api/v1/platform/deployments/{route}/batch-scheduling"


def _settings(node_file: Path, run_dir: Path, number: int) -> BatchesSettings:
    """Return what a runner of this machine is told, beside the node."""
    node = load(node_file, os.environ, {}, lambda: 1, need_models=False).settings
    has_models = any((run_dir.parent / "models").iterdir())
    sockets = tuple(str(run_dir / f"{name}.sock") for name in node.workers) if has_models else ()
    return batches_settings(node, f"batches{number}", str(run_dir), sockets)
