"""A gateway with files and batches on a real port, in a thread of its own: real HTTP server, store, keys and routes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import openai
from frontend.batches.keys import make_key
from frontend.batches.scheduling.forecast import Forecaster
from frontend.batches.service import BatchesService
from frontend.batches.store.protocol import Store, open_store
from frontend.dispatcher import Dispatcher
from frontend.gateway_settings import BatchSettings, FileSettings, GatewayModel, GatewaySettings, RouteSettings
from frontend.http import HttpServer
from frontend.openai.app import OpenAiApp
from frontend.openai.auth import Authenticator
from frontend.openai.execution import Gateway
from frontend.openai.principal import Role
from frontend.openai.routes import Routes
from frontend.openai.upstream import UpstreamClient
from frontend.settings import EndpointSettings
from store_world import migrate

T = TypeVar("T")
LIMIT = 1_000_000
QUOTA = 3_000_000


def gateway_settings(state_dir: Path, **changed: Any) -> GatewaySettings:
    route = RouteSettings(id="r", kind="vllm", endpoint="http://127.0.0.1:9/v1", addresses=("127.0.0.1",))
    files = {"max_file_bytes": LIMIT, "quota_bytes_per_workspace": QUOTA, **changed.pop("files", {})}
    batches = {"max_lines": 500, "active_batches_per_workspace": 50, **changed.pop("batches", {})}
    return GatewaySettings(
        enabled=True,
        development=True,
        state_dir=str(state_dir),
        models=(GatewayModel(name="m", routes=(route,)), GatewayModel(name="n", routes=(_renamed(route),))),
        files=FileSettings(**files),
        batches=BatchSettings(**batches),
        **changed,
    )


def _renamed(route: RouteSettings) -> RouteSettings:
    return msgspec.structs.replace(route, id="r2")


class LiveGateway:
    """Attributes: port, base_url; ``now_us`` moves the store's clock forward when a test changes ``ahead_us``."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.port = 0
        self.store: Store
        self.service: BatchesService
        self.ahead_us = 0
        self.ahead_ns = 0
        self.loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._up = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._workspaces = 0
        self._http = openai.DefaultHttpxClient(timeout=30)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def files_dir(self) -> Path:
        return Path(self.settings.state_dir) / "files"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def key(self, workspace: str, role: Role = Role.MEMBER) -> str:
        """Return a fresh key of a workspace, which is made if need be."""

        async def make() -> str:
            if await self.store.keys.workspace(workspace) is None:
                await self.store.keys.create_workspace(workspace, workspace)
            key = make_key()
            await self.store.keys.create_key(key.id, workspace, role.value, key.id, key.prefix, key.key_hash)
            return key.secret

        return self.run(make())

    def new_workspace(self) -> str:
        self._workspaces += 1
        return f"ws_{self._workspaces:032x}"

    def client(self, workspace: str | None = None, role: Role = Role.MEMBER) -> openai.OpenAI:
        """Return the official SDK with a key of the workspace, by default of a new one."""
        key = self.key(workspace or self.new_workspace(), role)
        # One connection pool for all: making one reads certificates for a tenth of a second.
        return openai.OpenAI(base_url=self.base_url, api_key=key, max_retries=0, http_client=self._http)

    def stored(self) -> list[Path]:
        """Return every object and temporary file of the storage."""
        return [path for path in self.files_dir.rglob("*") if path.is_file()]

    def start(self) -> None:
        self._thread.start()
        self._up.wait(30)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._http.close()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def pass_time(self, seconds: float) -> None:
        """Let time pass for the HTTP server's timeouts."""

        async def tick() -> None:
            # Twice: the first one sees where connections are now, the second how long they have been there.
            self._server.tick()
            self.ahead_ns += int(seconds * 1e9)
            self._server.tick()

        self.run(tick())

    def _monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns

    def _clock(self, wall: Callable[[], int]) -> Callable[[], int]:
        return lambda: wall() + self.ahead_us

    async def _serve(self) -> None:
        try:
            await self._start()
        except BaseException as error:
            self._failure = error
            self._up.set()
            raise
        self._up.set()
        await self._stop.wait()
        await self._server.drain(5)
        await self.forecaster.close()
        await self.service.close()
        await self._gateway.close()
        await self.store.close()

    async def _start(self) -> None:
        from frontend.batches.store.sqlite import wall_clock_us

        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        settings = self.settings
        clock = None if settings.store else self._clock(wall_clock_us)
        self.store = open_store(settings, Path(settings.state_dir), clock=clock)
        if settings.store:
            await migrate(settings.store)
        await self.store.start()
        authenticator = Authenticator(self.store.keys)
        self._gateway = Gateway(Routes(settings, {}), UpstreamClient(), None)
        await self._gateway.start()
        self.forecaster = Forecaster(
            self.store, settings.batches, lambda endpoint, model: self._gateway.plan(endpoint, model).route
        )  # fmt: skip
        self.service = BatchesService(settings, self.store, authenticator, self._gateway, self.forecaster)
        await self.service.start()
        app = OpenAiApp(self._gateway, authenticator, settings.max_body_bytes, self.service.mounted())
        limits = EndpointSettings(max_request_bytes=1 << 20)
        self._server = HttpServer(Dispatcher({b"v1": app}, app), "127.0.0.1", 0, limits, clock=self._monotonic_ns)
        self.port = await self._server.start()


@contextmanager
def live_gateway(state_dir: Path, **changed: Any) -> Iterator[LiveGateway]:
    gateway = LiveGateway(gateway_settings(state_dir, **changed))
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.stop()
