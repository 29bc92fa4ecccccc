"""A batch runner's way to our own worker: a frontend without ports, whose requests are background work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from engines.errors import ServingError
from frontend.app import FrontendApp
from frontend.batches.runner.gates import Ask, Reason
from frontend.batches.settings import BatchesSettings
from frontend.hooked import HookedModels
from frontend.table import ModelTable
from worker.channel.client import WorkerChannel
from worker.channel.messages import ModelEntry

log = logging.getLogger("batches")


class WorkerGate:
    """Starts no line for our own worker while that is away: it would fail without having been sent."""

    def __init__(self, worker: LocalWorker, is_local: Callable[[str], bool]) -> None:
        self._worker = worker
        self._is_local = is_local

    def closed(self, ask: Ask) -> Reason | None:
        return Reason.ROUTE_COOLING if self._is_local(ask.route_id) and not self._worker.attached else None


class LocalWorker:
    """Provides ``serving`` between ``start`` and ``close``; the worker may come and go."""

    def __init__(self, settings: BatchesSettings, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._table = ModelTable()
        self._hooked = HookedModels(settings.hook_threads, on_change)
        self._channel = WorkerChannel(
            settings.worker_sockets[0], settings.name, settings.channel, self._on_models, lambda _: on_change()
        )
        self._settings = settings.frontend()
        self._attaching: asyncio.Task[None] | None = None
        self.serving: FrontendApp | None = None

    @property
    def attached(self) -> bool:
        """Whether requests can be sent now."""
        return self._channel.state == "attached"

    @property
    def in_flight(self) -> int:
        """Requests with the worker."""
        return self._channel.in_flight

    @property
    def arena_bytes_used(self) -> int:
        return self._channel.arena_bytes_used

    async def start(self, known_s: float) -> FrontendApp:
        """Return the serving part once the worker has told its models, or after ``known_s`` without it."""
        loop = asyncio.get_running_loop()
        app = self.serving = FrontendApp(self._settings, loop, self._channel, self._table, self._hooked)
        self._hooked.start(app)
        self._attaching = loop.create_task(self._channel.start())
        await asyncio.wait([self._attaching], timeout=known_s)
        return app

    async def close(self) -> None:
        """Detach; idempotent."""
        attaching, self._attaching = self._attaching, None
        if attaching is not None:
            attaching.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServingError):
                await attaching
        await self._channel.close()
        self._hooked.close()
        if self.serving is not None:
            self.serving.memory.close()

    def _on_models(self, entries: list[ModelEntry]) -> None:
        self._table.update(entries)
        self._hooked.update(entries)
        self._on_change()
