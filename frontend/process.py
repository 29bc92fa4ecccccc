"""One frontend process from start to end: attach to the worker, listen, serve, drain.

Order at the start: channel first, so that the ports open as soon as the process can answer anything truthfully; a
frontend whose worker is away listens too and says so. Order at the end: not ready, stop accepting, finish, detach.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from engines.errors import ServingError
from frontend.adoption import Adopt, Adoption
from frontend.app import FrontendApp, ready_models
from frontend.dispatcher import Dispatcher
from frontend.grpc_server import AdoptingGrpcServer, RunningGrpcServer, make_grpc_server
from frontend.hooked import HookedModels
from frontend.http import HttpServer
from frontend.httpd.outlet import Turn
from frontend.kserve.http_routes import KserveApp
from frontend.node.acceptor import GRPC_TAG, HTTP_TAG
from frontend.node.link import AsyncLink
from frontend.settings import FrontendSettings
from frontend.table import ModelTable
from worker.channel.client import WorkerChannel
from worker.channel.messages import ModelEntry
from worker.channel.node_link import (
    EXIT_NODE_GONE,
    NODE_GONE_GRACE_S,
    ChannelStatus,
    Leash,
    Order,
    Report,
    State,
    Status,
)
from worker.channel.series import Series

if TYPE_CHECKING:
    from frontend.openai.service import GatewayService

log = logging.getLogger("frontend")

HOOK_THREAD_PREFIX = "hook"
"""Of the threads that ``HookedModels`` makes."""
HOOK_END_GRACE_S = 1.0
"""How long a hook that still runs may take to return once everything else has ended."""
EXIT_NO_ACCEPTOR = 1


class NoAcceptor(Exception):
    """The node does not hand over connections, so that this process has nothing to do."""


class FrontendProcess:
    """Everything one frontend holds; ``run`` returns its exit status."""

    def __init__(self, settings: FrontendSettings, link_socket: socket.socket) -> None:
        self._settings = settings
        self._link = AsyncLink(link_socket, Order, self._on_order)
        self._table = ModelTable()
        self._hooked = HookedModels(settings.hook_threads, self._report)
        self._stop = asyncio.Event()
        self._node_gone = False
        self._reported: tuple[State, str] | None = None
        self._ports: dict[str, int] = {}
        self._app: FrontendApp | None = None
        self._gateway: GatewayService | None = None
        self._http: HttpServer | None = None
        self._adoption: Adoption | None = None
        self._grpc: RunningGrpcServer | None = None

    async def run(self) -> int:
        """Serve until told to drain or until the node is gone."""
        loop = asyncio.get_running_loop()
        settings = self._settings
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        await self._link.start()
        turn = Turn()
        channel = WorkerChannel(
            settings.worker_sockets[0], settings.name, settings.channel, self._on_models, lambda _: self._report(), turn
        )
        app = self._app = FrontendApp(settings, loop, channel, self._table, self._hooked)
        self._hooked.start(app)
        attaching = loop.create_task(channel.start())
        gateway = None
        if settings.gateway.enabled:
            # Here, not above: a frontend without a gateway loads no HTTP client and no database.
            from frontend.openai.service import GatewayService

            gateway = self._gateway = GatewayService(settings.gateway, app, os.environ, settings.run_dir)
            await gateway.start()
        self._http = HttpServer(
            Dispatcher(gateway.applications() if gateway else {}, KserveApp(app, app.repeat)),
            settings.endpoints.host,
            settings.endpoints.http_port,
            settings.endpoints,
            turn=turn,
        )
        self._grpc = make_grpc_server(
            app, settings.endpoints.host, settings.endpoints.grpc_port, settings.grpc, settings.endpoints, app
        )
        try:
            await self._start_servers(self._http, self._grpc)
            # What was loaded stays: the collector need not look through it again while requests wait.
            gc.collect()
            gc.freeze()
            self._report()
            await self._until_stopped(loop)
            await self._drain(app)
        finally:
            attaching.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServingError):
                await attaching
            await self._http.close()
            if gateway is not None:
                await gateway.close()
            await self._grpc.close()
            await channel.close()
            self._hooked.close()
            app.memory.close()
            self._link.close()
        return EXIT_NODE_GONE if self._node_gone else 0

    async def _start_servers(self, http: HttpServer, grpc: RunningGrpcServer) -> None:
        path = self._settings.accept_socket
        if not path:
            self._ports["http_port"] = await http.start()
            self._ports["grpc_port"] = await grpc.start()
            return
        adopt: dict[bytes, Adopt] = {HTTP_TAG: http.adopt}
        if isinstance(grpc, AdoptingGrpcServer):
            adopt[GRPC_TAG] = grpc.adopt
        self._adoption = Adoption(path, adopt)
        self._ports["http_port"] = await http.start(listen=False, closed=self._adoption.closed)
        if isinstance(grpc, AdoptingGrpcServer):
            self._ports["grpc_port"] = await grpc.start(listen=False, closed=self._adoption.closed)
        else:
            self._ports["grpc_port"] = await grpc.start()
        try:
            self._adoption.start()
        except OSError as error:
            # As when the node ended or drains while this process was starting.
            raise NoAcceptor(f"the node hands over no connections at {path}: {error.strerror or error}") from None

    async def _until_stopped(self, loop: asyncio.AbstractEventLoop) -> None:
        gone = loop.create_task(self._link.gone.wait())
        stop = loop.create_task(self._stop.wait())
        try:
            await asyncio.wait((gone, stop), return_when=asyncio.FIRST_COMPLETED)
            self._node_gone = self._link.gone.is_set()
        finally:
            for task in (gone, stop):
                task.cancel()

    async def _drain(self, app: FrontendApp) -> None:
        app.drain()
        self._report()
        timeout_s = NODE_GONE_GRACE_S / 2 if self._node_gone else self._settings.endpoints.drain_timeout_seconds
        assert self._http is not None and self._grpc is not None
        if self._adoption is not None:
            await self._adoption.stop()
        await asyncio.gather(self._http.drain(timeout_s), self._grpc.drain(timeout_s))
        self._link.send(Report(series=tuple(self.series())))

    def series(self) -> list[Series]:
        """Return every figure of this process."""
        app, http = self._app, self._http
        if app is None or http is None:
            return []
        labels = {"frontend": self._settings.name}
        gauges = [
            ("frontend_arena_bytes_used", "Bytes of shared memory holding requests.", app.channel.arena_bytes_used),
            ("frontend_http_connections", "HTTP connections open.", http.counters.open),
        ]
        found = [Series(name=name, kind="gauge", help=text, labels=labels, value=value) for name, text, value in gauges]
        found.append(
            Series(
                name="frontend_late_replies_total",
                kind="counter",
                help="Replies whose caller had been answered already.",
                value=app.channel.late_replies,
            )
        )
        found.extend(app.traffic.series())
        if self._gateway is not None:
            found.extend(self._gateway.series())
        return found

    def _status(self) -> Status:
        app = self._app
        if app is None:
            return Status()
        channel = ChannelStatus(
            frontend=self._settings.name,
            worker=Path(self._settings.worker_sockets[0]).stem,
            in_flight=app.channel.in_flight,
            arena_bytes_used=app.channel.arena_bytes_used,
            arena_bytes=self._settings.channel.arena_bytes,
        )
        return Status(channels=(channel,))

    def _on_models(self, entries: list[ModelEntry]) -> None:
        self._table.update(entries)
        self._hooked.update(entries)
        if self._app is not None:
            self._app.traffic.known(ready_models(entries))
        self._report()

    def _on_order(self, order: Order) -> None:
        match order.do:
            case "drain":
                self._stop.set()
            case "series":
                self._link.send(Report(series=tuple(self.series()), id=order.id))
            case "status":
                self._link.send(Report(status=self._status(), id=order.id))

    def _report(self) -> None:
        """Tell the node what this process is, when that has changed."""
        app = self._app
        if app is None or not self._ports:
            return
        reason = app.unready_reason()
        if app.draining():
            state = State.DRAINING
        elif reason:
            state = State.STARTING if app.loading() else State.DEGRADED
        else:
            state = State.READY
        if (state, reason) != self._reported:
            self._reported = (state, reason)
            self._link.send(Report(state=state, detail=reason, ports=self._ports))
            log.info("frontend.%s %s", state.value, reason)


def run(settings: FrontendSettings, link_socket: socket.socket) -> int:
    """Run a frontend on this process's main thread; return the exit status."""
    Leash(link_socket.fileno()).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> int:
        return await FrontendProcess(settings, link_socket).run()

    try:
        status = uvloop.run(main())
    except NoAcceptor as error:
        log.error("frontend.cannot_start reason=%s", error)
        status = EXIT_NO_ACCEPTOR
    _leave_stuck_hooks(status)
    return status


def _leave_stuck_hooks(status: int) -> None:
    """End this process now if a hook still runs: the interpreter would wait for it, for ever if it never returns."""
    give_up = time.monotonic() + HOOK_END_GRACE_S
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(HOOK_THREAD_PREFIX)]
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))
    stuck = sum(thread.is_alive() for thread in threads)
    if stuck:
        log.warning("frontend.hooks_left running=%d", stuck)
        logging.shutdown()
        os._exit(status)
