"""The node: starts worker and frontends, keeps them running, tells their state, drains and stops them.

Theory of operation
    One asyncio loop, no data path. A keeper per managed process runs its lives; the fleet holds what each process says;
    a watch looks at pulses; everything else is an answer to a question (status, scrape, readiness, join).
    Signals only append to a queue. The first one drains: frontends stop accepting and finish, then the worker, and the
    exit status is 0 (1 if something had to be cut off). The second one kills everything: status 128 + its number.
    EXIT_CONFIG from a process stops the node with that status, since no restart can help.
    If the node itself is killed, its children see the end of their links and go (worker/channel/node_link.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from frontend.batches.settings import BatchesSettings, batches_settings
from frontend.config import NodeSettings
from frontend.control.listener import ControlListener
from frontend.node import ports
from frontend.node.acceptor import ACCEPT_SOCKET, GRPC_TAG, HTTP_TAG, Acceptor
from frontend.node.child import Command, is_stopped, python_command
from frontend.node.door import Door
from frontend.node.exposition import Figures, registry_of, render
from frontend.node.fleet import Fleet, Member
from frontend.node.hang_state import Watch
from frontend.node.keeper import CannotStart, Keeper
from frontend.node.link import NODE_SOCKET, AsyncLink, Call, Joined, Told
from frontend.node.metrics_server import MetricsServer, Sources
from frontend.node.node_state import Verdict, verdict
from frontend.node.output import Output
from frontend.node.own_series import own_series
from frontend.node.policy import Policy
from frontend.node.run_dir import RunDir, RunDirError
from frontend.node.status import Answer, NodeStatus, ProcessStatus
from frontend.openai.development import DevelopmentKeyError, development_key
from frontend.settings import FrontendSettings
from worker.channel.node_link import EXIT_CONFIG, SERIES_INTERVAL_S, Order, Report, State, encode
from worker.config import WorkerSettings

log = logging.getLogger("node")

WATCH_INTERVAL_S = 0.25
STATUS_TURNS = 10
DRAIN_MARGIN_S = 5.0
"""Beyond ``drain_timeout_seconds``, within which a frontend ends by itself."""
WORKER_DRAIN_S = 10.0
KILL_WAIT_S = 10.0
PORT_SETTINGS = ("http_port", "grpc_port", "metrics_port")


class Node:
    """One node; ``run`` is its whole life."""

    def __init__(
        self,
        settings: NodeSettings,
        output: Output,
        announce: Callable[[str], None],
        command: Command = python_command,
    ) -> None:
        self._settings = settings
        self._output = output
        self._announce = announce
        self._command = command
        self._run_dir = RunDir(settings.run_dir)
        self._figures = Figures()
        self._fleet = Fleet(self._figures, self._on_change)
        self._policy = Policy({name: self._run_dir.socket_path(f"{name}.sock") for name in settings.workers})
        self._control = ControlListener(settings.control, settings.run_dir, self._policy)
        self._keepers: list[Keeper] = []
        self._reserved: list[socket.socket] = []
        self._acceptor: Acceptor | None = None
        self._ports: dict[str, int] = {}
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._verdict = Verdict(State.STARTING, ())
        self._was_ready = False
        self._draining = False
        self._started_at = time.time()
        self._joined = 0

    async def run(self) -> int:
        """Serve until told to stop; return the exit status.

        Raises:
            RunDirError, PortError, ControlError: nothing was started.
        """
        settings = self._settings
        of_workers = (f"{name}.sock" for name in settings.workers)
        sockets = (NODE_SOCKET, ACCEPT_SOCKET, *self._control.socket_names, *of_workers)
        self._run_dir.open(sockets)
        door = Door(self._run_dir.socket_path(NODE_SOCKET), self._on_ask, self._on_join)
        metrics = None
        try:
            for key in PORT_SETTINGS:
                sock = ports.reserve(settings.endpoints.host, getattr(settings.endpoints, key), key)
                self._reserved.append(sock)
                self._ports[key] = int(sock.getsockname()[1])
            self._tell_development_key()
            self._catch_signals()
            log.info("node.started pid=%d run_dir=%s ports=%s", os.getpid(), self._run_dir.path, self._ports)
            sources = Sources(self._scrape, self._fresh_status, lambda: self._verdict)
            self._acceptor = Acceptor(self._listeners(), self._run_dir.socket_path(ACCEPT_SOCKET))
            await self._acceptor.start()
            metrics = MetricsServer(settings.endpoints.host, self._ports["metrics_port"], sources)
            await metrics.start()
            await door.start()
            await self._control.start()
            for notice in settings.notices:
                log.info("config.notice %s", notice)
            return await self._serve()
        finally:
            if self._acceptor is not None:
                self._acceptor.close()
            await self._control.close()
            await door.close()
            if metrics is not None:
                await metrics.close()
            for sock in self._reserved:
                sock.close()
            self._run_dir.close()

    def _tell_development_key(self) -> None:
        """Print the key of development mode; the frontends find it in the state directory."""
        gateway = self._settings.gateway
        if not (gateway.enabled and gateway.development):
            return
        try:
            key = development_key(Path(gateway.state_dir))
        except DevelopmentKeyError as error:
            raise RunDirError(f"gateway.state_dir: {error}") from error
        self._announce(f"ringserve development key: {key}")

    def _listeners(self) -> dict[bytes, socket.socket]:
        """Return the reserved sockets that the node accepts on; grpcio cannot take over an accepted connection."""
        reserved = dict(zip(PORT_SETTINGS, self._reserved, strict=True))
        listeners = {HTTP_TAG: reserved["http_port"]}
        if self._settings.grpc.server == "fast":
            listeners[GRPC_TAG] = reserved["grpc_port"]
        return listeners

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # nohup and its like have SIGHUP ignored on purpose.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._signals.put_nowait, number)

    def _make_keepers(self) -> list[Keeper]:
        settings = self._settings
        timeout_ns = int(settings.scheduler.dispatch_timeout_seconds * 1e9)
        keepers = []
        for name in settings.workers:
            of_worker = partial(self._worker_settings, name)
            keepers.append(Keeper("worker", name, of_worker, timeout_ns, self._command, self._fleet, self._output))
        for index in range(settings.frontends):
            name = f"frontend{index}"
            of_frontend = partial(self._frontend_settings, name)
            keepers.append(Keeper("frontend", name, of_frontend, timeout_ns, self._command, self._fleet, self._output))
        if settings.gateway.runs_batches:
            of_batches = self._batches_settings
            keepers.append(
                Keeper("batches", "batches0", of_batches, timeout_ns, self._command, self._fleet, self._output)
            )
        return keepers

    def _worker_settings(self, name: str, generation: int) -> WorkerSettings:
        return self._policy.worker_settings(self._settings.worker(name, self._run_dir.path, generation))

    def _batches_settings(self, generation: int) -> BatchesSettings:
        return batches_settings(self._settings, "batches0", self._run_dir.path, self._worker_sockets())

    def _worker_sockets(self) -> tuple[str, ...]:
        return tuple(self._run_dir.socket_path(f"{worker}.sock") for worker in self._settings.workers)

    def _frontend_settings(self, name: str, generation: int = 1) -> FrontendSettings:
        """Return what a frontend is told; it has no generation, since nothing of it outlives it."""
        sockets = self._worker_sockets()
        frontend = self._settings.frontend(name, self._run_dir.path, sockets, self._ports)
        return msgspec.structs.replace(frontend, accept_socket=self._run_dir.socket_path(ACCEPT_SOCKET))

    async def _serve(self) -> int:
        self._keepers = self._make_keepers()
        lives = {asyncio.ensure_future(keeper.run()): keeper for keeper in self._keepers}
        background = [asyncio.ensure_future(self._watch()), asyncio.ensure_future(self._poll())]
        told: asyncio.Future[Any] = asyncio.ensure_future(self._signals.get())
        try:
            # A keeper ends before it is told to only with an error, and a background task never ends.
            await asyncio.wait({told, *lives, *background}, return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                log.info("node.drain signal=%s", told.result().name)
                return await self._drain_unless_told_again(set(lives))
            failed = next(task for task in (*lives, *background) if task.done())
            try:
                failed.result()
            except CannotStart as error:
                log.error("node.stop reason=%s", error)
                await self._drain(set(lives))
                return EXIT_CONFIG
            raise AssertionError("a task of the node ended by itself")
        finally:
            told.cancel()
            for task in background:
                task.cancel()
            await self._kill_all(set(lives))
            await asyncio.gather(told, *background, return_exceptions=True)

    async def _drain_unless_told_again(self, lives: set[asyncio.Future[None]]) -> int:
        drained: asyncio.Future[Any] = asyncio.ensure_future(self._drain(lives))
        again: asyncio.Future[Any] = asyncio.ensure_future(self._signals.get())
        await asyncio.wait({drained, again}, return_when=asyncio.FIRST_COMPLETED)
        if drained.done():
            again.cancel()
            return 0 if drained.result() else 1
        number = again.result()
        log.warning("node.kill signal=%s", number.name)
        drained.cancel()
        return 128 + int(number)

    async def _drain(self, lives: set[asyncio.Future[None]]) -> bool:
        """Let every process finish and end; return whether none had to be cut off."""
        self._draining = True
        self._on_change()
        if self._acceptor is not None:
            self._acceptor.close()
        for keeper in self._keepers:
            keeper.stop_restarting()
        for roles, wait_s in (
            (("frontend", "batches"), self._settings.endpoints.drain_timeout_seconds + DRAIN_MARGIN_S),
            (("worker",), WORKER_DRAIN_S),
        ):
            members = [member for member in self._fleet.members.values() if member.role in roles]
            for member in members:
                if member.link is not None:
                    member.link.send(Order(do="drain"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    for member in members:
                        await member.ended.wait()
            cut = [member for member in members if not member.ended.is_set()]
            if cut:
                names, of_roles = ",".join(m.name for m in cut), ",".join(sorted({m.role for m in cut}))
                log.error("node.drain_cut role=%s names=%s after_s=%.0f", of_roles, names, wait_s)
                return False
        _, late = await asyncio.wait(lives, timeout=KILL_WAIT_S)
        return not late

    async def _kill_all(self, lives: set[asyncio.Future[None]]) -> None:
        """Leave no process of ours behind, whatever happened before."""
        for keeper in self._keepers:
            keeper.stop_restarting()
            keeper.kill()
        _, late = await asyncio.wait(lives, timeout=KILL_WAIT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        for member in list(self._fleet.members.values()):
            if member.link is not None:
                member.link.close()

    async def _watch(self) -> None:
        while True:
            now_ns = time.monotonic_ns()
            for keeper in self._keepers:
                keeper.look(now_ns)
            for member in self._fleet.members.values():
                if not member.managed:
                    member.observe(now_ns, stopped=is_stopped(member.pid))
            self._on_change()
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _poll(self) -> None:
        """Renew everybody's figures, so that a process that dies loses at most this interval's counts."""
        for turn in itertools.count():
            await asyncio.sleep(SERIES_INTERVAL_S)
            await self._fleet.ask("series")
            # Whoever asks for the status has it asked anew; this is what is told of a process that does not answer.
            if turn % STATUS_TURNS == 0:
                await self._fleet.ask("status")

    def _on_change(self) -> None:
        conditions = self._fleet.conditions((keeper.role, keeper.name) for keeper in self._keepers)
        new = verdict(conditions, was_ready=self._was_ready, draining=self._draining)
        old, self._verdict = self._verdict, new
        if new == old:
            return
        if new.state is not old.state:
            log.info("node.state %s%s", new.state.value, f" reasons={list(new.reasons)}" if new.reasons else "")
        if new.state is State.READY and not self._was_ready:
            self._was_ready = True
            self._announce(self._start_line())

    def _start_line(self) -> str:
        host = self._settings.endpoints.host
        shown = f"[{host}]" if ":" in host else host
        http, grpc, metrics = (self._ports[key] for key in PORT_SETTINGS)
        gateway = self._settings.gateway
        public_url = gateway.pages.public_url.rstrip("/") or f"http://{shown}:{http}"
        pages = f"  pages {public_url}/ui" if gateway.enabled and gateway.pages.enabled else ""
        return (
            f"ringserve is ready: HTTP http://{shown}:{http}  gRPC {shown}:{grpc}"
            f"  metrics http://{shown}:{metrics}/metrics{pages}  run dir {self._run_dir.path}"
        )

    # Questions

    async def _on_ask(self, call: Call) -> Answer | Told | Joined:
        if call.ask in ("policy", "metrics"):
            return await self._policy.answer(call)
        if call.ask != "status":
            return Joined(refused=f"unknown question {call.ask[:100]!r}, expected status, policy or metrics")
        status = await self._fresh_status()
        return Answer(status=status, reasons=self._verdict.reasons, control=self._control.address)

    async def _fresh_status(self) -> NodeStatus:
        await self._fleet.ask("status")
        node = ProcessStatus(
            role="supervisor", name="node", pid=os.getpid(), state=self._verdict.state.value, restarts=0,
            started_at=int(self._started_at),
        )  # fmt: skip
        return NodeStatus(
            run_dir=self._run_dir.path,
            state=self._verdict.state.value,
            **self._ports,
            processes=(node, *self._processes()),
            channels=self._fleet.channels(),
            models=self._fleet.models(),
        )

    def _processes(self) -> list[ProcessStatus]:
        restarts = {keeper.name: keeper.restarts for keeper in self._keepers}
        rows = [
            ProcessStatus(
                role=m.role, name=m.name, pid=m.pid, state="stalled" if m.stalled else m.state.value,
                restarts=restarts.pop(m.name, 0), started_at=int(m.started_at),
            )
            for m in sorted(self._fleet.members.values(), key=lambda member: (member.role != "worker", member.name))
        ]  # fmt: skip
        down = [k for k in self._keepers if k.name in restarts]
        return rows + [
            ProcessStatus(role=k.role, name=k.name, pid=0, state="down", restarts=k.restarts, started_at=0)
            for k in down
        ]

    async def _scrape(self, accept: str) -> tuple[bytes, str]:
        await self._fleet.ask("series")
        ready = self._verdict.state is State.READY
        own = own_series(self._fleet, self._keepers, ready=ready, dropped=self._figures.dropped)
        return render(registry_of(self._figures, own), accept)

    # Frontends started by hand

    async def _on_join(self, sock: socket.socket, pid: int) -> bool:
        loop = asyncio.get_running_loop()
        limit = self._settings.channel.max_channels
        frontends = sum(member.role in ("frontend", "batches") for member in self._fleet.members.values())
        refused = ""
        if self._draining:
            refused = "the node is draining"
        elif frontends >= limit:
            refused = f"{frontends} frontends run; global.channel.max_channels is {limit}"
        if refused:
            await loop.sock_sendall(sock, encode(Joined(refused=refused)))
            return False
        name = f"joined{self._joined}"
        self._joined += 1
        await loop.sock_sendall(sock, encode(Joined(settings=self._frontend_settings(name))))
        now_ns = time.monotonic_ns()
        member = Member(
            life=self._fleet.new_life(), role="frontend", name=name, pid=pid, managed=False,
            started_at=time.time(), started_ns=now_ns, watch=Watch(now_ns, now_ns),
        )  # fmt: skip
        member.link = AsyncLink(sock, Report, partial(self._fleet.on_report, member))
        member.link.on_gone = partial(self._on_left, member)
        # Known before it can say anything, or leave.
        self._fleet.add(member)
        await member.link.start()
        log.info("frontend.joined name=%s pid=%d", name, pid)
        if self._draining:
            member.link.send(Order(do="drain"))
        return True

    def _on_left(self, member: Member) -> None:
        log.info("frontend.left name=%s pid=%d", member.name, member.pid)
        self._fleet.remove(member)
