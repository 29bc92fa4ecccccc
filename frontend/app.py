"""One frontend process: the life of a request between the protocols and the worker's channel.

    protocol codec -> start() -> checks against the signature -> [preprocess] -> rows into the arena -> worker
                   <- done()  <- response over the arena      <- [postprocess] <- reply record

Every request that is started gets exactly one ``done``, or is cancelled: an error, a result, or its deadline, whichever
comes first. Whoever receives a response releases it; that gives the shared memory back.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, Final

from engines.errors import Unavailable
from frontend.deadlines import Deadlines
from frontend.hooked import HookedModels
from frontend.httpd.exchange import Exchange
from frontend.httpd.wire import Part
from frontend.infer_call import InferCall
from frontend.inference import InferRequest, InferResponse
from frontend.kserve.checks import Checked
from frontend.kserve.http_options import Options
from frontend.kserve.memory_store import ClientMemory
from frontend.kserve.repeats import Plan
from frontend.late_call import LateCall
from frontend.metrics import Traffic
from frontend.node.run_dir import CLIENT_MEMORY_FILE
from frontend.repeat_call import Refuse, RepeatCall
from frontend.serving import Call, Done, Receiving, awaited
from frontend.settings import EndpointSettings, FrontendSettings
from frontend.table import LOADING, READY, ModelTable
from worker.channel.client import WorkerChannel
from worker.channel.messages import ModelEntry

STATISTICS_TIMEOUT_S: Final = 5.0
MAX_RECEIVING_SHARE: Final = 0.5
"""Of the arena: with more in use, requests are placed only when they have come whole, so that slow senders leave room
for those that are ready to run."""


class FrontendApp:
    """Provides ``frontend.serving.Serving`` over one worker channel."""

    def __init__(
        self,
        settings: FrontendSettings,
        loop: asyncio.AbstractEventLoop,
        channel: WorkerChannel,
        table: ModelTable,
        hooked: HookedModels,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.loop = loop
        self.channel = channel
        self.hooked = hooked
        self.clock_ns = clock_ns
        self.traffic = Traffic(settings.name)
        self.memory = ClientMemory(
            settings.endpoints.system_shared_memory, os.path.join(settings.run_dir, CLIENT_MEMORY_FILE)
        )
        self.deadlines = Deadlines(loop, clock_ns)
        self._settings = settings
        self._table = table
        self._draining = False
        self._default_timeout_ns = int(settings.dispatch_timeout_seconds * 1e9)

    @property
    def limits(self) -> EndpointSettings:
        return self._settings.endpoints

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return not self.unready_reason()

    def unready_reason(self) -> str:
        """Return why the frontend is not ready; empty if it is."""
        if self._draining:
            return "draining"
        if self.channel.state != "attached":
            return f"worker {self.channel.state}"
        failed = [entry for entry in self._table.unready() if entry.state != LOADING]
        if failed:
            return "; ".join(f"{entry.name}/{entry.version} {entry.state}: {entry.reason}" for entry in failed)
        if self.loading():
            return "models are loading"
        return self.hooked.broken()

    def loading(self) -> bool:
        """Whether something that will end by itself keeps the frontend from being ready."""
        return (
            not self._table.heard
            or self.hooked.loading()
            or any(entry.state == LOADING for entry in self._table.unready())
        )

    def drain(self) -> None:
        """Stop being ready; requests under way go on."""
        self._draining = True

    def draining(self) -> bool:
        return self._draining

    def entries(self) -> list[ModelEntry]:
        return self._table.entries()

    def entry(self, model: str, version: str = "") -> ModelEntry:
        return self._table.entry(model, version)

    def find(self, model: str, version: str = "") -> ModelEntry:
        return self._table.find(model, version)

    def versions(self, model: str) -> list[str]:
        return self._table.versions(model)

    def start(self, request: InferRequest, arrival_ns: int, done: Done) -> Call:
        call = InferCall(self, request, arrival_ns, done)
        call.begin()
        return call

    def receive(self, request: InferRequest, arrival_ns: int, done: Done) -> Receiving | None:
        call = LateCall(self, request, arrival_ns, done)
        return call if call.expect() else None

    async def infer(self, request: InferRequest, arrival_ns: int) -> InferResponse:
        return await awaited(lambda done: self.start(request, arrival_ns, done))

    def crowded(self) -> bool:
        """Whether requests that have not come whole should leave the arena to others."""
        return self.channel.arena_bytes_used > MAX_RECEIVING_SHARE * self._settings.channel.arena_bytes

    async def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        if model:
            self._table.find(model, version)
        try:
            async with asyncio.timeout(STATISTICS_TIMEOUT_S):
                found = await self.channel.ask("statistics", model=model, version=version)
        except TimeoutError:
            raise Unavailable("the worker did not answer in time") from None
        assert isinstance(found, list)
        return found

    def repeat(self, plan: Plan, options: Options, exchange: Exchange, elements: Part, refuse: Refuse) -> None:
        """Begin a request that a plan describes: the exchange is answered by its outputs, or by ``refuse``, or gone."""
        RepeatCall(self, plan, options, exchange, elements, refuse)

    def repeat_deadline_ns(self, timeout_us: int, arrival_ns: int) -> int:
        """Return the deadline of a request without further options."""
        deadline_ns = arrival_ns + self._default_timeout_ns
        return min(deadline_ns, arrival_ns + timeout_us * 1000) if timeout_us else deadline_ns

    def deadline_ns(self, request: InferRequest, checked: Checked, arrival_ns: int) -> int:
        """Return the earliest of all deadlines of a request (rule 18)."""
        deadline_ns = arrival_ns + self._default_timeout_ns
        if request.deadline_ns is not None:
            deadline_ns = min(deadline_ns, request.deadline_ns)
        if request.timeout_us:
            deadline_ns = min(deadline_ns, arrival_ns + request.timeout_us * 1000)
        return deadline_ns


def ready_models(entries: list[ModelEntry]) -> list[str]:
    """Return the names of models with a ready version."""
    return sorted({entry.name for entry in entries if entry.state == READY})
