"""A gateway with its real store and HTTP server on its own loop thread, for tests that drive it with real clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from serving_double import DoubleServing

import openai
from frontend.batches.keys import make_key
from frontend.dispatcher import Dispatcher
from frontend.gateway_settings import GatewayModel, GatewaySettings, RouteSettings
from frontend.http import HttpServer
from frontend.kserve.http_routes import KserveApp
from frontend.openai.development import development_key
from frontend.openai.routes import Route
from frontend.openai.service import GatewayService
from frontend.settings import EndpointSettings

T = TypeVar("T")
WAIT_S = 20.0


def route(route_id: str, url: str, **more: Any) -> RouteSettings:
    """Return a route to a stub."""
    return RouteSettings(id=route_id, kind=more.pop("kind", "openai_compatible"), endpoint=url, **more)


def model(name: str, *routes: RouteSettings, routing: Any = "ordered") -> GatewayModel:
    return GatewayModel(name=name, routes=routes, routing=routing)


class GatewayWorld:
    """Use as a context manager; the key of a member of workspace ``ws_a`` is ``key``."""

    def __init__(
        self, state_dir: Path, *models: GatewayModel, environ: dict[str, str] | None = None, **settings: Any
    ) -> None:
        # Stubs are on loopback, which only development mode allows.
        self.settings = GatewaySettings(
            enabled=True, development=True, models=models, state_dir=str(state_dir), **settings
        )
        self.development_key = development_key(state_dir)
        self._environ = environ or {}
        self.limits = EndpointSettings(max_request_bytes=64 * 1024 * 1024)
        self.key = ""
        self.port = 0
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.service: GatewayService
        self._server: HttpServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def client(self, **more: Any) -> openai.OpenAI:
        """Return the official SDK's client; close it."""
        more.setdefault("max_retries", 0)
        more.setdefault("timeout", WAIT_S)
        return openai.OpenAI(base_url=self.url, api_key=more.pop("key", self.key), **more)

    def route(self, route_id: str) -> Route:
        found = self.service.gateway.routes.route(route_id)
        assert found is not None
        return found

    def new_key(self, role: Any = "member", workspace: str = "ws_a") -> tuple[str, str]:
        """Return (id, key) of a new key."""
        made = make_key()
        keys = self.service.door.store.keys
        self.run(keys.create_key(made.id, workspace, role, "test", made.prefix, made.key_hash))
        return made.id, made.secret

    def raw(self, data: bytes) -> bytes:
        """Send bytes, return everything that comes until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), WAIT_S) as sock:
            sock.sendall(data)
            found = b""
            while piece := sock.recv(65536):
                found += piece
        return found

    def __enter__(self) -> GatewayWorld:
        self._thread.start()
        try:
            self.run(self._start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self._end()

    async def _start(self) -> None:
        serving = DoubleServing(self.limits)
        self.service = GatewayService(self.settings, serving, self._environ)
        await self.service.start()
        await self.service.door.opened.wait()
        await self.service.door.store.keys.create_workspace("ws_a", "a")
        made = make_key()
        await self.service.door.store.keys.create_key(made.id, "ws_a", "member", "test", made.prefix, made.key_hash)
        self.key = made.secret
        app = Dispatcher({b"v1": self.service.app}, KserveApp(serving))
        self._server = HttpServer(app, "127.0.0.1", 0, self.limits)
        self.port = await self._server.start()

    async def _stop(self) -> None:
        await self._server.close()
        await self.service.close()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
