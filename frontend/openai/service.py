"""The gateway of one process: store, keys, routes, connections, the ``/v1`` application; started and closed together.

The store may come later than the process (a database that restarts): until then ``/v1`` answers 503 and everything else
serves; it is asked for again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from engines.errors import ServingError, Unavailable
from frontend.batches.scheduling.batch_watch import BatchWatch
from frontend.batches.scheduling.live_counts import LiveCounts
from frontend.batches.service import BatchesService
from frontend.batches.store.protocol import Store, open_store
from frontend.batches.store.rows import KeyRow
from frontend.gateway_settings import GatewaySettings
from frontend.httpd.exchange import Application
from frontend.openai import development
from frontend.openai.app import OpenAiApp
from frontend.openai.auth import Authenticator
from frontend.openai.execution import Gateway
from frontend.openai.routes import Routes
from frontend.openai.upstream import UpstreamClient
from frontend.platform.pages.front_door import FrontDoor
from frontend.platform.pages.service import PagesService
from frontend.platform.service import PlatformService
from frontend.serving import Serving
from worker.channel.series import Series

log = logging.getLogger("gateway")

STORE_RETRY_S: Final = 2.0


class StoreDoor:
    """A store that is being opened. Also where keys are looked up: closed until the store is there.

    Attributes:
        opened: set while the store can be used.
    """

    def __init__(self, store: Store, settings: GatewaySettings) -> None:
        self.store = store
        self._settings = settings
        self.opened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._told = ""

    def start(self) -> None:
        """Begin to open; returns at once."""
        self._task = asyncio.get_running_loop().create_task(self._until_open())

    async def close(self) -> None:
        """Close the store; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.opened.clear()
        await self.store.close()

    async def find_key(self, key_hash: str) -> KeyRow | None:
        """See ``KeySource``."""
        if not self.opened.is_set():
            raise Unavailable("the gateway's store is not open")
        return await self.store.keys.find_key(key_hash)

    async def _until_open(self) -> None:
        while True:
            try:
                await self.store.start()
                if self._settings.development:
                    key = development.read_development_key(Path(self._settings.state_dir))
                    await development.register(self.store.keys, key)
            except (ServingError, OSError, development.DevelopmentKeyError) as error:
                # Once per reason: the next attempts say the same.
                if str(error) != self._told:
                    self._told = str(error)
                    log.error("gateway.store_not_open %s", error)
                await asyncio.sleep(STORE_RETRY_S)
            else:
                self.opened.set()
                log.info("gateway.store_open kind=%s", self.store.kind)
                return


class GatewayService:
    """What a frontend holds for ``/v1``.

    Args:
        run_dir: where the processes of this machine tell each other of their live calls; empty to tell nobody.
    """

    def __init__(
        self, settings: GatewaySettings, serving: Serving, environ: Mapping[str, str], run_dir: str = ""
    ) -> None:
        self.door = StoreDoor(open_store(settings, Path(settings.state_dir)), settings)
        self.authenticator = Authenticator(self.door)
        routes = Routes(settings, environ)
        self.live = (
            LiveCounts(Path(run_dir), routes, self.door.store, self.door.opened, reads=False) if run_dir else None
        )
        self.gateway = Gateway(
            routes,
            UpstreamClient(),
            serving,
            allow_client_priority=settings.allow_client_priority,
        )
        self.watch = BatchWatch(
            self.door.store, settings, lambda endpoint, model: self.gateway.plan(endpoint, model).route, environ,
            self.door.opened,
        )  # fmt: skip
        self.batches = BatchesService(
            settings, self.door.store, self.authenticator, self.gateway, self.watch.forecaster
        )  # fmt: skip
        self.app = OpenAiApp(self.gateway, self.authenticator, settings.max_body_bytes, mounted=self.batches.mounted())
        self.platform = PlatformService(
            settings, self.door.store, self.authenticator, lambda: {entry.name for entry in serving.entries()},
            self.watch.forecaster,
        )  # fmt: skip
        self.pages: PagesService | None = None
        if settings.pages.enabled:
            self.pages = PagesService(
                settings, self.door, self.authenticator, self.platform.views, self.platform.changes, self.batches.files,
                environ,
            )  # fmt: skip
            self.platform.callers.sessions = self.pages.sessions

    def applications(self) -> dict[bytes, Application]:
        """Return what is served, by first segment of the path."""
        served: dict[bytes, Application] = {b"v1": self.app, b"api": self.platform.app}
        if self.pages is not None:
            served |= {b"ui": self.pages.app, b"": FrontDoor()}
        return served

    async def start(self) -> None:
        """Be ready to answer; the store may still be on its way."""
        if self.live is not None:
            self.live.start()
        await self.gateway.start()
        self.door.start()
        await self.batches.start()
        await self.watch.start()
        if self.pages is not None:
            self.pages.start()

    async def close(self) -> None:
        """Withdraw what is under way and close everything; idempotent."""
        await self.app.close()
        await self.platform.close()
        if self.pages is not None:
            await self.pages.close()
        await self.watch.close()
        await self.batches.close()
        await self.gateway.close()
        if self.live is not None:
            await self.live.close()
        await self.door.close()

    def series(self) -> Iterable[Series]:
        """Yield every figure of the gateway in this process."""
        yield from self.gateway.traffic.series(self.gateway.routes)
        yield from self.watch.series()
        yield from self.batches.series()
