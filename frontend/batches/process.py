"""One batch runner process from start to end: open store and storage, attach to the worker, run batches, drain.

The store may come later than the process, and go: nothing ends for that. Started by the node (with a link to it), or by
hand on any machine that reaches the PostgreSQL of the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import uvloop

from engines.errors import ServingError
from frontend.batches.local_worker import LocalWorker, WorkerGate
from frontend.batches.model_check import PlannedModels
from frontend.batches.objects import open_objects
from frontend.batches.runner.runner import BatchRunner
from frontend.batches.runner.timings import Timings
from frontend.batches.scheduling.adaptive import AdaptiveCaps
from frontend.batches.scheduling.batch_watch import BatchWatch
from frontend.batches.scheduling.live_counts import LiveCounts
from frontend.batches.scheduling.metrics_reader import HELD_S, MetricsReader, approved_endpoints
from frontend.batches.scheduling.route_watch import RouteWatch
from frontend.batches.settings import BatchesSettings
from frontend.batches.store.protocol import Store, open_store
from frontend.node.link import AsyncLink
from frontend.openai.execution import Gateway
from frontend.openai.routes import LOCAL_PREFIX, Routes
from frontend.openai.upstream import UpstreamClient
from worker.channel.node_link import (
    EXIT_NODE_GONE,
    NODE_GONE_GRACE_S,
    SERIES_INTERVAL_S,
    ChannelStatus,
    Leash,
    Order,
    Report,
    State,
    Status,
)
from worker.channel.series import Series

log = logging.getLogger("batches")

OPEN_RETRY_S: Final = 2.0
WORKER_KNOWN_S: Final = 10.0
"""How long the first look at batches waits for the worker to tell its models."""
EXIT_BROKEN: Final = 1
PASSIVE: Final = "another process runs the batches of this store"


class BatchesProcess:
    """Everything one batch runner holds; ``run`` returns its exit status."""

    def __init__(
        self,
        settings: BatchesSettings,
        link_socket: socket.socket | None,
        environ: Mapping[str, str],
        times: Timings | None = None,
    ) -> None:
        self._times = times
        self._runner_id = "runner-" + secrets.token_hex(8)
        self._settings = settings
        self._environ = environ
        self._link = None if link_socket is None else AsyncLink(link_socket, Order, self._on_order)
        self._stop = asyncio.Event()
        self._worker: LocalWorker | None = None
        self._gateway: Gateway | None = None
        self._watch: RouteWatch | None = None
        self._alerts: BatchWatch | None = None
        self._caps: AdaptiveCaps | None = None
        self._runner: BatchRunner | None = None
        self._why = "the store is not open yet"
        self._draining = False
        self._reported: tuple[State, str] | None = None
        self._kinds = {route.id: route.kind for model in settings.gateway.models for route in model.routes}

    async def run(self) -> int:
        """Run batches until told to drain or until the node is gone."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, *(() if self._link else (signal.SIGINT, signal.SIGHUP))):
            loop.add_signal_handler(number, self._stop.set)
        if self._link is not None:
            await self._link.start()
        self._report()
        stop = loop.create_task(self._stop.wait())
        gone = loop.create_task(self._link.gone.wait() if self._link else asyncio.Event().wait())
        ticker = loop.create_task(self._tick())
        try:
            async with contextlib.AsyncExitStack() as stack:
                work = loop.create_task(self._open(stack))
                try:
                    await asyncio.wait((work, stop, gone), return_when=asyncio.FIRST_COMPLETED)
                    if work.done():
                        work.result()
                        assert self._runner is not None
                        broken = loop.create_task(self._runner.broken.wait())
                        await asyncio.wait((stop, gone, broken), return_when=asyncio.FIRST_COMPLETED)
                        if broken.done():
                            return EXIT_BROKEN
                        broken.cancel()
                finally:
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                await self._drain(node_gone=gone.done())
        finally:
            for task in (stop, gone, ticker):
                task.cancel()
            if self._link is not None:
                self._link.close()
        return EXIT_NODE_GONE if gone.done() and not gone.cancelled() else 0

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Bring up everything that running batches needs, for as long as it takes."""
        settings, gateway_settings = self._settings, self._settings.gateway
        state_dir = Path(gateway_settings.state_dir)
        serving = None
        if settings.worker_sockets:
            self._worker = LocalWorker(settings, self._report)
            stack.push_async_callback(self._worker.close)
            serving = await self._worker.start(WORKER_KNOWN_S)
        store = open_store(gateway_settings, state_dir)
        stack.push_async_callback(store.close)
        objects = open_objects(gateway_settings, state_dir)
        stack.push_async_callback(objects.close)
        for open_it in (store.start, objects.start):
            while True:
                try:
                    await open_it()
                    break
                except (ServingError, OSError) as error:
                    self._tell(str(error))
                    await asyncio.sleep(OPEN_RETRY_S)
        routes = Routes(gateway_settings, self._environ)
        gateway = self._gateway = Gateway(routes, UpstreamClient(), serving)
        stack.push_async_callback(gateway.close)
        await gateway.start()
        models = PlannedModels(gateway)
        models.start()
        watch = self._watch = await self._open_watch(stack, store, routes)
        away = [WorkerGate(self._worker, lambda route: self._provider(route) == "local")] if self._worker else []
        runner = BatchRunner(
            gateway_settings, store, objects, gateway,
            models=models, provider_of=self._provider, has_worker=serving is not None, times=self._times,
            gates=[*away, watch.gates], limits=watch.limits, observer=watch, runner_id=self._runner_id,
            on_state=self._report,
        )  # fmt: skip
        stack.push_async_callback(watch.close)
        alerts = self._alerts = BatchWatch(
            store, gateway_settings, lambda endpoint, model: gateway.plan(endpoint, model).route, self._environ
        )
        stack.push_async_callback(alerts.close)
        stack.push_async_callback(runner.close)
        # What is here now stays: a full collection would look through it again and again, 40 ms at a time.
        gc.collect()
        gc.freeze()
        await runner.start()
        watch.start(runner)
        await alerts.start()
        self._runner = runner
        self._tell("")

    async def _open_watch(self, stack: contextlib.AsyncExitStack, store: Store, routes: Routes) -> RouteWatch:
        """Bring up what the gates look at."""
        settings, gateway = self._settings, self._settings.gateway
        opened = asyncio.Event()
        opened.set()
        # There is none where a runner is all that runs of the gateway.
        os.makedirs(settings.run_dir, 0o700, exist_ok=True)
        live = LiveCounts(Path(settings.run_dir), routes, store, opened, reads=True)
        live.start()
        stack.push_async_callback(live.close)
        held_s = HELD_S if self._times is None else self._times.reading_s
        load = MetricsReader(approved_endpoints(gateway), on_reading=lambda url: self._wake(), held_s=held_s)
        await load.start()
        stack.push_async_callback(load.close)
        caps = self._caps = AdaptiveCaps(self._runner_id, store, live)
        watch = RouteWatch(
            self._runner_id, store, gateway.batches.default_max_concurrency, live, load, caps, self._provider
        )
        caps.rows = watch.limits.rows
        caps.counts = lambda: watch.figures.counts
        stack.push_async_callback(caps.close)
        caps.start()
        return watch

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()

    async def _drain(self, *, node_gone: bool) -> None:
        self._draining = True
        self._report()
        timeout_s = NODE_GONE_GRACE_S / 2 if node_gone else self._settings.endpoints.drain_timeout_seconds
        if self._runner is not None:
            await self._runner.drain(timeout_s)
        self._send(Report(series=tuple(self.series())))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(SERIES_INTERVAL_S)
            self._report()
            self._send(Report(series=tuple(self.series())))

    def series(self) -> Iterable[Series]:
        """Yield every figure of this process."""
        if self._runner is not None:
            yield from self._runner.figures.series()
        if self._watch is not None:
            yield from self._watch.series()
        for part in (self._alerts, self._caps):
            if part is not None:
                yield from part.series()
        if self._gateway is not None:
            yield from self._gateway.traffic.series(self._gateway.routes)

    def _provider(self, route: str) -> str:
        return "local" if route.startswith(LOCAL_PREFIX) else self._kinds.get(route, "none")

    def _on_order(self, order: Order) -> None:
        match order.do:
            case "drain":
                self._stop.set()
            case "series":
                self._send(Report(series=tuple(self.series()), id=order.id))
            case "status":
                self._send(Report(status=self._status(), id=order.id))

    def _status(self) -> Status:
        if self._worker is None:
            return Status()
        return Status(
            channels=(
                ChannelStatus(
                    frontend=self._settings.name,
                    worker=Path(self._settings.worker_sockets[0]).stem,
                    in_flight=self._worker.in_flight,
                    arena_bytes_used=self._worker.arena_bytes_used,
                    arena_bytes=self._settings.channel.arena_bytes,
                ),
            )
        )

    def _tell(self, why: str) -> None:
        if why != self._why and why:
            log.error("batches.not_open %s", why)
        self._why = why
        self._report()

    def _report(self) -> None:
        """Tell the node what this process is, when that has changed."""
        if self._draining:
            state, detail = State.DRAINING, ""
        elif self._runner is None or not self._runner.asked:
            state, detail = State.STARTING, self._why
        elif self._runner.passive:
            state, detail = State.DEGRADED, PASSIVE
        else:
            state, detail = State.READY, ""
        if (state, detail) != self._reported:
            self._reported = (state, detail)
            self._send(Report(state=state, detail=detail))
            log.info("batches.%s %s", state.value, detail)

    def _send(self, report: Report) -> None:
        if self._link is not None:
            self._link.send(report)


def run(settings: BatchesSettings, link_socket: socket.socket | None, times: Timings | None = None) -> int:
    """Run batches on this process's main thread; return the exit status. ``times`` are for tests."""
    if link_socket is not None:
        Leash(link_socket.fileno()).start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> int:
        return await BatchesProcess(settings, link_socket, os.environ, times).run()

    return uvloop.run(main())
