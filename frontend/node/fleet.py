"""Every process that belongs to the node now, started by it or joined by hand: what each said last, and asking all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from frontend.node.exposition import Figures
from frontend.node.hang_state import Watch, stall_reason
from frontend.node.link import AsyncLink
from frontend.node.node_state import Condition
from worker.channel.node_link import ChannelStatus, ModelStatus, Order, Report, State, Status
from worker.channel.pulse import Pulse

ANSWER_WAIT_S = 0.5
"""How long a scrape or a status waits for a process; a busy one is then shown as it last was."""


@dataclass(slots=True, eq=False)
class Member:
    """One life of one process.

    Attributes:
        life: unique to this life; a restarted process gets another.
        managed: started by the node, which restarts it; False for a frontend that joined.
        started_at: Unix seconds.
        up_ns: when it first said that it works; None until then.
        reported_ns: when it last said anything.
        ended: set once it is gone.
        pulse: a worker's page, None for a frontend.
    """

    life: int
    role: str
    name: str
    pid: int
    managed: bool
    started_at: float
    started_ns: int
    watch: Watch
    pulse: Pulse | None = None
    link: AsyncLink[Report] | None = None
    state: State = State.STARTING
    detail: str = ""
    stalled: str = ""
    up_ns: int | None = None
    reported_ns: int | None = None
    status: Status = field(default_factory=Status)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def observe(self, now_ns: int, *, stopped: bool) -> None:
        """Note one look of the watcher."""
        self.watch.look(now_ns, stopped=stopped)
        heartbeat_ns = self.pulse.heartbeat_ns if self.pulse else (self.reported_ns or 0)
        self.stalled = stall_reason(heartbeat_ns, now_ns, stopped=stopped) or ""


class Fleet:
    """The members, and the one place where their reports arrive."""

    def __init__(self, figures: Figures, on_change: Callable[[], None]) -> None:
        self._figures = figures
        self._on_change = on_change
        self._next_order = 1
        self._waiting: dict[tuple[int, int], asyncio.Event] = {}
        self.members: dict[int, Member] = {}
        self.next_life = 1

    def new_life(self) -> int:
        life, self.next_life = self.next_life, self.next_life + 1
        return life

    def add(self, member: Member) -> None:
        self.members[member.life] = member
        self._on_change()

    def remove(self, member: Member) -> None:
        """Forget a process that has ended; its counters stay in the totals."""
        if self.members.pop(member.life, None) is None:
            return
        member.ended.set()
        self._figures.end(member.life)
        for (life, _), event in self._waiting.items():
            if life == member.life:
                event.set()
        self._on_change()

    def named(self, name: str) -> Member | None:
        return next((member for member in self.members.values() if member.name == name), None)

    def on_report(self, member: Member, report: Report) -> None:
        """Take what a process says."""
        if member.life not in self.members:
            return
        now_ns = time.monotonic_ns()
        member.reported_ns = now_ns
        if report.series is not None:
            self._figures.update(member.life, report.series)
        if report.status is not None:
            member.status = report.status
        if report.id and (event := self._waiting.get((member.life, report.id))) is not None:
            event.set()
        if report.state is not None and (report.state, report.detail) != (member.state, member.detail):
            member.state, member.detail = report.state, report.detail
            if member.up_ns is None and report.state in (State.READY, State.DEGRADED):
                member.up_ns = now_ns
            self._on_change()

    async def ask(self, do: Literal["series", "status"]) -> None:
        """Have every process renew its series or its status; returns when all have, or after ANSWER_WAIT_S."""
        number, self._next_order = self._next_order, self._next_order + 1
        events = {}
        for member in self.members.values():
            if member.link is not None and member.link.send(Order(do=do, id=number)):
                events[(member.life, number)] = asyncio.Event()
        self._waiting.update(events)
        try:
            async with asyncio.timeout(ANSWER_WAIT_S):
                for event in events.values():
                    await event.wait()
        except TimeoutError:
            pass
        finally:
            for key in events:
                del self._waiting[key]

    def conditions(self, managed_names: Iterable[tuple[str, str]]) -> list[Condition]:
        """Return every process as the state machine sees it; ``managed_names`` are (role, name) that should run."""
        found = [Condition(m.role, m.name, m.state, m.detail, m.stalled) for m in self.members.values()]
        running = {member.name for member in self.members.values()}
        return found + [Condition(role, name, None) for role, name in managed_names if name not in running]

    def models(self) -> tuple[ModelStatus, ...]:
        return tuple(model for m in self.members.values() if m.role == "worker" for model in m.status.models)

    def channels(self) -> tuple[ChannelStatus, ...]:
        return tuple(channel for m in self.members.values() if m.role == "frontend" for channel in m.status.channels)
