"""The management API on a real port, over a store that the test can fill: the gateway's own wiring, its own thread.

What batches do is written straight into the store, as a runner would; only answers over HTTP are looked at.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast

from frontend.batches.keys import make_key
from frontend.batches.store.rows import WorkspaceKind
from frontend.dispatcher import Dispatcher
from frontend.gateway_settings import GatewayModel, GatewaySettings, RouteSettings
from frontend.http import HttpServer
from frontend.openai.principal import Role
from frontend.openai.service import GatewayService
from frontend.serving import Serving
from frontend.settings import EndpointSettings
from store_world import World

T = TypeVar("T")
WAIT_S = 30.0
ROUTE_PATH = "/api/v1/platform/deployments/{}/batch-scheduling"
PINNED = ("10.0.0.5",)


@dataclass(frozen=True)
class Answer:
    """An answer with its JSON."""

    status: int
    json: Any
    headers: Mapping[str, str]
    raw: bytes = b""

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])

    @property
    def param(self) -> str | None:
        found = self.json["error"].get("param")
        return None if found is None else str(found)


@dataclass(frozen=True)
class Key:
    id: str
    secret: str
    workspace: str


class NoServing:
    """What the API asks of the worker's side: which bundles there are."""

    def entries(self) -> list[Any]:
        return [SimpleNamespace(name="double", task="")]


def settings(state_dir: Path, store: str) -> GatewaySettings:
    """Return a gateway with a route of every kind."""
    vllm = RouteSettings(id="R", kind="vllm", endpoint="http://10.0.0.5:8000/v1", addresses=PINNED)
    other = RouteSettings(id="R2", kind="openai_compatible", endpoint="https://proxy.example/vllm/v1", addresses=PINNED)
    cloud = RouteSettings(id="cloud", kind="openai")
    own = RouteSettings(id="own", kind="local", upstream_model="double")
    quiet = tuple(RouteSettings(id=name, kind="local", upstream_model="double") for name in ("queue-1", "queue-2"))
    return GatewaySettings(
        enabled=True,
        state_dir=str(state_dir),
        store=store,
        models=(
            GatewayModel(name="m", routes=(vllm, other)),
            GatewayModel(name="n", routes=(cloud, own)),
            GatewayModel(name="q", routes=quiet),
        ),
    )


class PlatformWorld:
    """Attributes: ``store``: a second look at the database, with the short ways of ``store_world``."""

    def __init__(self, kind: Literal["sqlite", "postgresql"], state_dir: Path, url: str) -> None:
        self.kind = kind
        self.port = 0
        self.state_dir = state_dir
        state_dir.mkdir(parents=True, exist_ok=True)
        self.store = World(kind, url if kind == "postgresql" else str(state_dir / "store.sqlite3"))
        self.settings = settings(state_dir, url if kind == "postgresql" else "")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._names = 0
        self.service: GatewayService
        self._server: HttpServer

    def start(self) -> None:
        self._thread.start()
        self.run(self._start())

    def stop(self) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
        self.store.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def workspace(self, kind: WorkspaceKind = "team") -> str:
        """Return the id of a new workspace."""
        self._names += 1
        name = f"ws_{self._names:032x}"
        self.store.run(self.store.store.keys.create_workspace(name, f"name {self._names}", kind))
        return name

    def key(self, role: Role = Role.PLATFORM_ADMIN, workspace: str | None = None) -> Key:
        """Return a fresh key, by default in a workspace of its own."""
        workspace = workspace or self.workspace()
        made = make_key()
        self.store.run(
            self.store.store.keys.create_key(
                made.id, workspace, role.value, f"key {made.id}", made.prefix, made.key_hash
            )
        )
        return Key(made.id, made.secret, workspace)

    def call(
        self, method: str, path: str, key: Key | None = None, body: Any = None, *, data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:  # fmt: skip
        """Make a request; ``data`` are bytes as they are, ``body`` is sent as JSON."""
        sent = dict(headers or {})
        if key is not None:
            sent["Authorization"] = f"Bearer {key.secret}"
        if body is not None:
            data = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            raw = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()
        return Answer(answer.status, json.loads(raw) if raw else None, found, raw)

    def put(self, key: Key, document: Any, route: str = "R") -> Answer:
        return self.call("PUT", ROUTE_PATH.format(route), key, document)

    def get(self, key: Key, route: str = "R") -> Answer:
        return self.call("GET", ROUTE_PATH.format(route), key)

    def audit(self, subject: str) -> list[tuple[str, str | None, dict[str, Any]]]:
        """Return (action, key, details) of the audit rows about something, oldest first."""
        rows = self.store.run(self.store.store.scheduling.audit_log(1000))
        return [(row.action, row.actor_key_id, json.loads(row.details)) for row in rows[::-1] if row.subject == subject]

    async def _start(self) -> None:
        self.service = GatewayService(self.settings, cast("Serving", NoServing()), {})
        await self.service.start()
        await self.service.door.opened.wait()
        limits = EndpointSettings(max_request_bytes=1 << 20)
        app = Dispatcher(self.service.applications(), self.service.app)
        self._server = HttpServer(app, "127.0.0.1", 0, limits)
        self.port = await self._server.start()

    async def _stop(self) -> None:
        await self._server.drain(5)
        await self.service.close()
