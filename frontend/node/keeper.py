"""Keeps one process running: starts it, watches it, kills it when it hangs, starts it again after a back-off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from frontend.node.child import Child, Command, is_stopped, start_child
from frontend.node.fleet import Fleet, Member
from frontend.node.hang_state import HANG_FACTOR, Watch, hang_reason
from frontend.node.link import AsyncLink
from frontend.node.output import Output
from frontend.node.restart_state import MAX_HISTORY, Life, next_restart
from worker.channel.node_link import EXIT_CONFIG, Order, Report
from worker.channel.pulse import Pulse

log = logging.getLogger("node")

FIRST_REPORT_NS = 60_000_000_000
"""A process that has said nothing at all for this long has failed to start."""
LINK_LOST_GRACE_S = 2.0
"""A process that closed its link is about to end; one that has not by then is killed."""


class CannotStart(Exception):
    """A process says that it can never start with this configuration; its own lines say why."""


class Keeper:
    """One place in the node that a process fills, life after life.

    ``run`` returns after ``stop_restarting`` once the current life has ended; it raises CannotStart.
    """

    def __init__(
        self,
        role: str,
        name: str,
        settings_of: Callable[[int], msgspec.Struct],
        dispatch_timeout_ns: int,
        command: Command,
        fleet: Fleet,
        output: Output,
    ) -> None:
        self.role = role
        self.name = name
        self.restarts = 0
        self._settings_of = settings_of
        self._limit_ns = HANG_FACTOR * dispatch_timeout_ns
        self._command = command
        self._fleet = fleet
        self._output = output
        self._lives: deque[Life] = deque(maxlen=MAX_HISTORY)
        self._stopping = asyncio.Event()
        self._child: Child | None = None
        self._member: Member | None = None

    def stop_restarting(self) -> None:
        self._stopping.set()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def drain(self) -> None:
        """Ask the process to finish what it has and end."""
        if self._member is not None and self._member.link is not None:
            self._member.link.send(Order(do="drain"))

    async def run(self) -> None:
        while not self._stopping.is_set():
            started_ns = time.monotonic_ns()
            up_ns = await self._live(started_ns)
            if self._stopping.is_set():
                return
            now_ns = time.monotonic_ns()
            self._lives.append(Life(started_ns, up_ns, now_ns))
            self.restarts += 1
            wait_s = max(0.0, (next_restart(self._lives, now_ns) - now_ns) / 1e9)
            log.info("process.restart name=%s in_s=%.1f restarts=%d", self.name, wait_s, self.restarts)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)

    async def _live(self, started_ns: int) -> int | None:
        """Run the process once, to its end; return when it was up, None if it never was.

        Raises:
            CannotStart: it ended with EXIT_CONFIG.
        """
        try:
            child = start_child(
                self.role,
                self.name,
                self._command(self.role),
                self._settings_of(self.restarts + 1),
                self._output,
                with_pulse=self.role == "worker",
            )
        except OSError as error:
            log.error("process.start_failed name=%s error=%s", self.name, error)
            return None
        member = Member(
            life=self._fleet.new_life(),
            role=self.role,
            name=self.name,
            pid=child.pid,
            managed=True,
            started_at=time.time(),
            started_ns=started_ns,
            watch=Watch(started_ns, started_ns),
            pulse=Pulse(child.pulse_fd) if child.pulse_fd >= 0 else None,
        )
        member.link = AsyncLink(child.link, Report, partial(self._fleet.on_report, member))
        self._child, self._member = child, member
        log.info("process.started name=%s pid=%d", self.name, child.pid)
        try:
            self._fleet.add(member)
            await member.link.start()
            if self._stopping.is_set():
                self.drain()
            status = await self._until_end(child, member.link)
        finally:
            self._child = self._member = None
            self._fleet.remove(member)
            member.link.close()
            if member.pulse is not None:
                member.pulse.close()
                member.pulse = None
                os.close(child.pulse_fd)
        level = logging.INFO if self._stopping.is_set() and status == 0 else logging.WARNING
        log.log(level, "process.ended name=%s pid=%d status=%d", self.name, child.pid, status)
        if status == EXIT_CONFIG:
            raise CannotStart(f"{self.name} cannot start with this configuration; its lines above say why")
        return member.up_ns

    async def _until_end(self, child: Child, link: AsyncLink[Report]) -> int:
        lost: asyncio.Future[Any] = asyncio.ensure_future(link.gone.wait())
        ended: asyncio.Future[Any] = child.exited
        try:
            await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not child.exited.done():
                await asyncio.wait({ended}, timeout=LINK_LOST_GRACE_S)
            if not child.exited.done():
                log.error("process.link_lost name=%s reason=%s", self.name, link.why or "closed by the process")
                child.kill()
            return await child.exited
        finally:
            lost.cancel()
            if not child.exited.done():
                child.kill()

    def look(self, now_ns: int) -> None:
        """Look at the process once; kill it if it hangs (rule 24), so that ``run`` starts it again."""
        child, member = self._child, self._member
        if child is None or member is None:
            return
        member.observe(now_ns, stopped=is_stopped(child.pid))
        if member.reported_ns is None:
            if now_ns - member.watch.runnable_since_ns > FIRST_REPORT_NS:
                log.error("process.silent name=%s action=kill", self.name)
                child.kill()
            return
        if member.pulse is not None:
            executing_ns, heartbeat_ns = member.pulse.executing_since_ns, member.pulse.heartbeat_ns
        else:
            executing_ns, heartbeat_ns = 0, member.reported_ns
        reason = hang_reason(executing_ns, heartbeat_ns, member.watch.runnable_since_ns, now_ns, self._limit_ns)
        if reason is not None:
            log.error("process.hang name=%s pid=%d reason=%r action=kill", self.name, child.pid, reason)
            child.kill()
