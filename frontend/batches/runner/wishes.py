"""What the runner's batches want to start now, as groups of claims, and what was answered. No I/O.

Every batch of this process that could start a line on a route is in the route's group: one that is first in the fair
order and does not ask would hold up all others.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from frontend.batches.runner.gates import Ask, Gate, Reason, first_closed
from frontend.batches.runner.job import Execution, Job
from frontend.batches.runner.lanes import Lane, Wish
from frontend.batches.runner.limits import RouteLimits
from frontend.batches.store.rows import ClaimBatch, ClaimGroup, ClaimLine, ClaimResult

T = TypeVar("T")

_PROCESS: Final = secrets.token_hex(10)
_numbers = itertools.count()
MAX_LINES_PER_GROUP = 1024
"""Lines asked for on one route in one turn."""


@dataclass(slots=True)
class Room:
    """What this process can take on now.

    Attributes:
        permits: free worker permits.
        bytes: of lines in memory.
        running: lines of this process by route whose end is not on its way to the store.
    """

    permits: int
    bytes: int
    running: dict[str, int]


@dataclass(slots=True)
class Seeker:
    """One lane that wants to start lines on one route; ``before``: why nothing of it started there until now."""

    job: Job
    lane: Lane
    before: Reason | None
    wishes: list[Wish] = field(default_factory=list)


@dataclass(slots=True)
class Round:
    """The claims of one turn; ``groups[g].batches[b].lines[l]`` belongs to ``seekers[g][b].wishes[l]``."""

    groups: list[ClaimGroup] = field(default_factory=list)
    seekers: list[list[Seeker]] = field(default_factory=list)


def new_execution_id() -> str:
    """Return an id that no other execution has: 32 hex digits, this process's part and a number."""
    return f"{_PROCESS}{next(_numbers):012x}"


def seekers_of(
    jobs: Sequence[Job], start: int, gates: Sequence[Gate], resting: Collection[str], now_ns: int
) -> dict[str, list[Seeker]]:
    """Return who wants to start lines where, gates passed; notes the reasons of those who may not.

    Args:
        start: rotates who comes first.
        resting: routes that just refused everybody; not asked again yet, and why still holds.
    """
    found: dict[str, list[Seeker]] = {}
    for job in _rotated(jobs, start):
        if job.stop is not None or job.lost or job.draining or job.handed_back:
            continue
        for lane in _rotated(job.lanes, start):
            wanted = _wanted(lane, now_ns)
            for route in lane.demand():
                if route not in wanted:
                    # Only lines behind a pause of their own; they must not count as ready.
                    lane.reasons[route] = Reason.ROUTE_COOLING if lane.cooling else Reason.RATE_LIMITED
            for route in wanted:
                before = lane.reasons.get(route)
                reason = _closed(job, lane, route, gates, now_ns)
                if reason is None and route in resting:
                    continue
                lane.reasons[route] = reason
                if reason is None:
                    found.setdefault(route, []).append(Seeker(job, lane, before))
    return found


def round_of(
    seekers: dict[str, list[Seeker]],
    room: Room,
    limits: RouteLimits,
    batch_concurrency: int,
    now_ns: int,
    *,
    counted: Callable[[str], int] = lambda route: 0,
) -> Round:
    """Return the claims to make, within ``room``, which is used up; notes ``concurrency`` and ``workers``.

    Args:
        counted: lines that ran on a route, here and elsewhere, when last counted: a full route must read as one also
            when this process has no permit left to find that out.
    """
    result = Round()
    left = len(seekers)
    for route, asking in seekers.items():
        cap = limits.cap(route)
        free = cap - room.running.get(route, 0)
        full = free <= 0 or counted(route) >= cap
        # Each route its part of the permits, so that a slow one cannot keep them all from the others.
        share = -(-room.permits // left)
        left -= 1
        limit = min(free, share, room.permits)
        if limit <= 0:
            for seeker in asking:
                seeker.lane.reasons[route] = _full(seeker) if full else Reason.WORKERS
            continue
        group = _group(route, asking, limit, cap, room, batch_concurrency, now_ns, full=full)
        if group is not None:
            room.permits -= group[0]
            result.groups.append(group[1])
            result.seekers.append(group[2])
    return result


def started(
    seeker: Seeker,
    route: str,
    asked: Sequence[ClaimLine],
    answers: Sequence[ClaimResult],
    priority: int | None,
    *,
    others: bool,
) -> list[Execution]:
    """Take what was claimed out of the lane and return it; a line that is somebody else's is dropped.

    Args:
        others: in this turn, other batches were given room on the route.
    """
    executions = []
    new = 0
    reason: Reason | None = None
    refused = False
    for wish, line, answer in zip(seeker.wishes, asked, answers, strict=True):
        if answer not in (ClaimResult.CLAIMED, ClaimResult.TAKEN):
            refused = True
            if answer is ClaimResult.FULL:
                # There was room when it asked; that it is full now is because it was others' turn.
                reason = Reason.FAIR_SHARE if others else _full(seeker)
            elif answer is ClaimResult.WAIT:
                reason = reason or Reason.FAIR_SHARE
            continue
        if wish.retry is not None:
            seeker.lane.take_retry(wish.retry)
        elif not refused:
            new += 1
        else:
            # Somebody else's, behind one that may not start yet: it is asked for again, and dropped then.
            assert answer is ClaimResult.TAKEN, "a batch's lines are claimed in their order"
        if answer is ClaimResult.CLAIMED:
            size = seeker.job.work.index.span(wish.line_no)[1]
            executions.append(
                Execution(
                    seeker.job, seeker.lane, wish.line_no, wish.attempt, line.execution_id, route, size, priority
                )
            )  # fmt: skip
    if new:
        seeker.lane.take_new(new)
    seeker.lane.reasons[route] = None if executions else reason
    return executions


def _wanted(lane: Lane, now_ns: int) -> list[str]:
    routes = [lane.route] if lane.new and lane.route and lane.refusal is None and not lane.cooling else []
    for retry in lane.due(now_ns):
        if retry.route not in routes and lane.refusal is None:
            routes.append(retry.route)
    return routes


def _closed(job: Job, lane: Lane, route: str, gates: Sequence[Gate], now_ns: int) -> Reason | None:
    pause = job.pause(route)
    if pause.runs(now_ns) and pause.declined:
        return Reason.RATE_LIMITED
    reason = first_closed(gates, Ask(job.id, job.batch.workspace_id, route, now_ns))
    if reason is not None:
        # Also of a route that is away: behind a closed gate nobody tries it, so cooling would be told for ever.
        return reason
    if pause.runs(now_ns) or route in job.probing or (route in job.away and route not in job.reached):
        return Reason.ROUTE_COOLING
    return None


def _full(seeker: Seeker) -> Reason:
    """Return why a batch waits for a route that is full: it was others' turn, and that has not come to an end yet."""
    return Reason.FAIR_SHARE if seeker.before is Reason.FAIR_SHARE else Reason.CONCURRENCY


def _group(
    route: str,
    asking: list[Seeker],
    limit: int,
    cap: int,
    room: Room,
    batch_concurrency: int,
    now_ns: int,
    *,
    full: bool,
) -> tuple[int, ClaimGroup, list[Seeker]] | None:
    """Return (most lines that can be claimed, the group, its seekers)."""
    batches_of = Counter(seeker.job.batch.workspace_id for seeker in asking)
    # A workspace's share of what is free, and one more if it has company, whatever its number of batches: every line
    # asked for costs the claim time under the route's lock, and most are told to wait.
    share = -(-limit // len(batches_of)) + (1 if len(asking) > 1 else 0)
    asked: list[Seeker] = []
    batches: list[ClaimBatch] = []
    lines = 0
    for seeker in asking:
        each = -(-share // batches_of[seeker.job.batch.workspace_id])
        each = max(1, min(each, MAX_LINES_PER_GROUP // len(asking)))
        most = each if batch_concurrency == 0 else min(each, batch_concurrency - seeker.job.active)
        away = route in seeker.job.away
        most = min(most, 1) if away else most
        seeker.wishes = list(_wishes(seeker.lane, route, most if room.bytes > 0 else 0, now_ns))
        # With more than it may start, its place would hold up the others.
        waiting = len(seeker.wishes) if away else seeker.lane.startable(route, now_ns)
        if not seeker.wishes:
            # Its batch has its share. It still says so: with its place left standing it would hold up the others.
            seeker.lane.reasons[route] = Reason.CONCURRENCY if full else Reason.WORKERS
            seeker.job.published_ns = 0
            waiting = 0
        span = seeker.job.work.index.span
        room.bytes -= sum(span(wish.line_no)[1] for wish in seeker.wishes)
        batches.append(
            ClaimBatch(
                seeker.job.id,
                seeker.job.batch.workspace_id,
                waiting,
                tuple(ClaimLine(wish.line_no, new_execution_id(), wish.attempt) for wish in seeker.wishes),
            )
        )
        asked.append(seeker)
        lines += len(seeker.wishes)
    if not lines:
        return None
    return min(lines, limit), ClaimGroup(route, cap, tuple(batches), limit), asked


def _wishes(lane: Lane, route: str, most: int, now_ns: int) -> Iterator[Wish]:
    """Yield what the lane wants to start on a route: retries that are due, then new lines."""
    for retry in lane.due(now_ns):
        if retry.route == route and most > 0:
            most -= 1
            yield Wish(retry.line_no, retry.attempt, retry)
    if most > 0 and lane.route == route and not lane.cooling:
        for line_no in lane.next_new(most):
            yield Wish(line_no)


def _rotated(items: Sequence[T], start: int) -> Iterator[T]:
    count = len(items)
    for offset in range(count):
        yield items[(start + offset) % count]
