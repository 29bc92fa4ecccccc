"""One batch that this process holds the lease of, while its lines run. Used on one event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from frontend.batches.runner.gates import NOT_LEGITIMATE, READY
from frontend.batches.runner.lanes import Lane
from frontend.batches.runner.pause_state import IDLE, Pause
from frontend.batches.runner.results import InputLine
from frontend.batches.store.rows import BatchRow, Demand
from frontend.batches.work_file import WorkFile
from frontend.openai.principal import Principal


class Stop(Enum):
    """Why no further line of a batch starts; the value is the code of the lines that never ran."""

    INPUT_LOST = "batch_failed"
    """Its private copy cannot be read."""
    CANCELLED = "batch_cancelled"
    EXPIRED = "batch_expired"


@dataclass(slots=True, eq=False)
class Execution:
    """One attempt of a line, from its claim until its end is stored.

    Attributes:
        line: its parts; None until read.
        bytes: of the line in memory.
        started_ns: when it was last handed to the executor.
        probe: it alone tries whether the route can be reached again.
    """

    job: Job
    lane: Lane
    line_no: int
    attempt: int
    execution_id: str
    route: str
    bytes: int
    priority: int | None = None
    line: InputLine | None = None
    started_ns: int = 0
    probe: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """A leased batch.

    Attributes:
        principal: whose lines these are; None: the key was revoked.
        running: claimed lines whose end, or return, is not stored.
        active: those of them with a worker permit.
        stop, lost: see ``Stop``; lost means that another process may hold the lease.
        handed_back: another runner has to go on, once what runs here has ended.
        suspect: a claim was refused because the batch stopped; its lease says why.
        away: routes that gave lines back unsent since they last answered one.
        reached: those of them whose server accepts connections again: one line may try.
        probing: those that a connection or a line is trying now.
        kept: lines whose final result is in the store and in no segment yet, in the order of their ends.
        changed: set when its own task has something to do.
    """

    batch: BatchRow
    work: WorkFile
    lanes: list[Lane]
    principal: Principal | None
    running: int = 0
    active: int = 0
    stop: Stop | None = None
    lost: bool = False
    suspect: bool = False
    draining: bool = False
    handed_back: bool = False
    pauses: dict[str, Pause] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    probing: set[str] = field(default_factory=set)
    kept: list[int] = field(default_factory=list)
    kept_bytes: int = 0
    next_segment: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    published: tuple[Demand, ...] = ()
    published_ns: int = 0

    @property
    def id(self) -> str:
        return self.batch.id

    @property
    def waiting(self) -> int:
        """Lines that want to start, now or after a pause."""
        return sum(lane.waiting for lane in self.lanes)

    @property
    def over(self) -> bool:
        """Nothing runs and nothing will start."""
        halted = self.stop is not None or self.lost or self.draining or self.handed_back
        return self.running == 0 and (halted or self.waiting == 0)

    def pause(self, route: str) -> Pause:
        return self.pauses.get(route, IDLE)

    def keep(self, line_no: int, record_bytes: int) -> None:
        """Note a final result that is in the store."""
        self.kept.append(line_no)
        self.kept_bytes += record_bytes

    def halt(self, stop: Stop) -> None:
        """Start nothing more. A retry that waits is given up: its failure stands."""
        if self.stop is None or stop is Stop.CANCELLED:
            self.stop = stop
        self.changed.set()

    def demands(self) -> tuple[Demand, ...]:
        """Return what waits for which route, and why; nothing once the batch has stopped."""
        if self.stop is not None or self.lost or self.draining or self.handed_back:
            return ()
        found = []
        for lane in self.lanes:
            for route, lines in lane.demand().items():
                reason = lane.reasons.get(route)
                found.append(Demand(route, lines, reason, reason in READY))
        return tuple(found)


def legitimate(demands: tuple[Demand, ...]) -> bool:
    """Whether a batch waits for good reasons only, so that it is not stalled."""
    reasons = [demand.reason for demand in demands]
    return any(reasons) and not any(reason in NOT_LEGITIMATE for reason in reasons)
