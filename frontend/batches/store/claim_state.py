"""The claim's decision: who starts next on a route. Pure: rows in, answers out.

Rule (in ascending order, never served first): running lines of the workspace on the route; the workspace's last claim
there; running lines of the batch there; the batch's last claim there; how long it waits; its id.

Weights extend it: whoever waits with weight 3 gets three lines where weight 1 gets one. Weights are taken relative to
their greatest common divisor, so that equal ones, whatever they are, give exactly the rule above. With unequal ones
    * running lines count in whole turns of ``weight`` lines: finer, small caps would go in equal parts to everybody,
      since each gets a slot as soon as it has none;
    * among equals, the one goes first whose pass is least: virtual time, of which a line costs 1/weight turn. A pass
      stays within two turns of the slowest waiting workspace: nobody saves up turns while it waits for nothing, and
      nobody pays long for lines that it was given while the others could not start any.

A group of claims is decided as if each asked when its turn came. A batch that asks for no more in this group stops
contending within it. A batch of another process keeps its turn and the slot that comes with it, but holds up nobody
whose turn would still come with the slots that are left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from frontend.batches.store.rows import ClaimBatch, ClaimGroup, ClaimLine, ClaimResult

TURN: Final = 232_792_560
"""A turn of virtual time: divisible by every weight up to 20, so that their passes meet exactly."""

Rank = tuple[int, int, int, int, int, int, str]


@dataclass(slots=True)
class Pass:
    """A workspace's virtual time on a route, and the least of its rivals' when it last moved."""

    at: int = 0
    base: int = 0


@dataclass(slots=True)
class Contender:
    """A fresh, ready wait row."""

    batch_id: str
    workspace_id: str
    since: int
    last_claim_at: int | None
    waiting_lines: int


@dataclass(slots=True)
class RouteView:
    """What the lock holder sees of a route.

    Attributes:
        running: lines by (workspace, batch).
        contenders: by batch.
        turns: a workspace's last claim on the route.
        weights: of workspaces; absent = 1.
        passes: of workspaces that claimed in the company of unequal weights; absent = never.
    """

    running: dict[tuple[str, str], int]
    contenders: dict[str, Contender]
    turns: dict[str, int]
    weights: dict[str, int] = field(default_factory=dict)
    passes: dict[str, Pass] = field(default_factory=dict)
    running_of_workspace: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.running_of_workspace = {}
        for (workspace_id, _), lines in self.running.items():
            self.running_of_workspace[workspace_id] = self.running_of_workspace.get(workspace_id, 0) + lines

    def running_total(self) -> int:
        return sum(self.running_of_workspace.values())

    def shares(self) -> dict[str, int] | None:
        """Return the turns' sizes of the workspaces that wait, in lowest terms; None = all alike."""
        if not self.weights:
            return None
        weights = {one.workspace_id: self.weights.get(one.workspace_id, 1) for one in self.contenders.values()}
        if len(set(weights.values())) <= 1:
            return None
        unit = math.gcd(*weights.values())
        return {workspace_id: weight // unit for workspace_id, weight in weights.items()}

    def virtual_times(self, shares: Mapping[str, int]) -> dict[str, int]:
        """Return the passes of the waiting workspaces, none before the present and none far ahead of it."""
        known = [self.passes[workspace_id] for workspace_id in shares if workspace_id in self.passes]
        present = max((one.base for one in known), default=0)
        never = Pass(present)
        at = {workspace_id: max(present, self.passes.get(workspace_id, never).at) for workspace_id in shares}
        slowest = min(at.values())
        return {
            workspace_id: min(at[workspace_id], slowest + 2 * TURN - TURN // share)
            for workspace_id, share in shares.items()
        }

    def take_turn(self, workspace_id: str) -> None:
        """Move a workspace's virtual time on by one line, before it counts as running."""
        shares = self.shares()
        if shares is None:
            return
        times = self.virtual_times(shares)
        self.passes[workspace_id] = Pass(times[workspace_id] + TURN // shares[workspace_id], min(times.values()))

    def start(self, workspace_id: str, batch_id: str) -> None:
        """Count one more running line."""
        place = (workspace_id, batch_id)
        self.running[place] = self.running.get(place, 0) + 1
        self.running_of_workspace[workspace_id] = self.running_of_workspace.get(workspace_id, 0) + 1

    def serve(self, batch_id: str, stamp_us: int) -> int:
        """Let a waiting batch start one line; return how many it still waits with."""
        contender = self.contenders[batch_id]
        self.take_turn(contender.workspace_id)
        self.start(contender.workspace_id, batch_id)
        self.turns[contender.workspace_id] = contender.last_claim_at = stamp_us
        contender.waiting_lines -= 1
        return contender.waiting_lines

    def copy(self) -> RouteView:
        """Return a view that goes its own way from here."""
        contenders = {batch_id: replace(contender) for batch_id, contender in self.contenders.items()}
        return RouteView(dict(self.running), contenders, dict(self.turns), self.weights, dict(self.passes))


@dataclass(frozen=True, slots=True)
class Existing:
    """A line that has a row already."""

    state: str
    attempts: int
    execution_id: str
    segment: int | None


@dataclass(slots=True)
class Decision:
    """Answers by batch and position, and what to write for them: ``starts`` in order, each with its own time."""

    answers: dict[str, list[ClaimResult]]
    starts: list[tuple[ClaimBatch, ClaimLine, int]] = field(default_factory=list)


def decide(
    group: ClaimGroup,
    view: RouteView,
    existing: Mapping[tuple[str, int], Existing],
    stopped: frozenset[str],
    now_us: int,
) -> Decision:
    """Return the answers of a group; ``view`` is used up.

    The time of a start is after every earlier claim on the route, so that two claims never tie and a clock that
    stepped back does not reverse the turns.
    """
    decision = Decision({})
    asks: dict[str, list[int]] = {}
    for batch in group.batches:
        start = ClaimResult.STOPPED if batch.batch_id in stopped else ClaimResult.WAIT
        answers = decision.answers[batch.batch_id] = [start] * len(batch.lines)
        if batch.batch_id in stopped:
            view.contenders.pop(batch.batch_id, None)
            continue
        asks[batch.batch_id] = [
            i for i, line in enumerate(batch.lines) if not _settle_known(batch, i, line, existing, answers)
        ]
        if asks[batch.batch_id]:
            _contend(view, batch, now_us)
        else:
            view.contenders.pop(batch.batch_id, None)
    _hand_out(group, view, asks, decision, _after_last_claim(view, now_us))
    if view.running_total() >= group.cap:
        for batch_id, left in asks.items():
            for position in left:
                decision.answers[batch_id][position] = ClaimResult.FULL
    return decision


def _hand_out(
    group: ClaimGroup, view: RouteView, asks: dict[str, list[int]], decision: Decision, stamp_us: int
) -> None:
    """Give the free slots away in the fair order; those of batches that did not ask stay free for them."""
    batches = {batch.batch_id: batch for batch in group.batches}
    ahead = view
    free = group.cap - view.running_total()
    while free > 0 and len(decision.starts) < group.limit and any(asks.values()):
        batch_id = fair_first(ahead)
        pending = asks.get(batch_id)
        if pending is None:
            ahead = ahead if ahead is not view else view.copy()
            left = ahead.serve(batch_id, stamp_us)
        else:
            batch, position = batches[batch_id], pending.pop(0)
            decision.answers[batch_id][position] = ClaimResult.CLAIMED
            decision.starts.append((batch, batch.lines[position], stamp_us))
            view.serve(batch_id, stamp_us)
            if ahead is not view:
                ahead.serve(batch_id, stamp_us)
            left = len(pending)
        if left <= 0:
            del ahead.contenders[batch_id]
            if pending is not None:
                view.contenders.pop(batch_id, None)
        stamp_us += 1
        free -= 1


def fair_first(view: RouteView) -> str:
    """Return the batch that starts next."""
    ranks = fair_ranks(view)
    return min(view.contenders, key=ranks.__getitem__)


def fair_order(view: RouteView) -> list[str]:
    """Return the waiting batches as they stand in the queue."""
    return sorted(view.contenders, key=fair_ranks(view).__getitem__)


def fair_rank(contender: Contender, view: RouteView) -> Rank:
    """Return one contender's sort key among those of its view; the smallest starts next."""
    shares = view.shares()
    return _rank(contender, view, shares, {} if shares is None else view.virtual_times(shares))


def fair_ranks(view: RouteView) -> dict[str, Rank]:
    """Return every contender's ``fair_rank``, by batch."""
    shares = view.shares()
    times = {} if shares is None else view.virtual_times(shares)
    return {batch_id: _rank(one, view, shares, times) for batch_id, one in view.contenders.items()}


def _rank(contender: Contender, view: RouteView, shares: dict[str, int] | None, times: dict[str, int]) -> Rank:
    workspace = contender.workspace_id
    running = view.running_of_workspace.get(workspace, 0)
    return (
        running if shares is None else running // shares[workspace],
        times.get(workspace, 0),
        view.turns.get(workspace, -1),
        view.running.get((workspace, contender.batch_id), 0),
        -1 if contender.last_claim_at is None else contender.last_claim_at,
        contender.since,
        contender.batch_id,
    )


def _settle_known(
    batch: ClaimBatch,
    position: int,
    line: ClaimLine,
    existing: Mapping[tuple[str, int], Existing],
    answers: list[ClaimResult],
) -> bool:
    """Answer a line whose row decides it: our own repeated question, someone's line, an unexpected retry."""
    row = existing.get((batch.batch_id, line.line_no))
    if row is not None and row.execution_id == line.execution_id and row.state == "running":
        answers[position] = ClaimResult.CLAIMED
        return True
    if line.attempt == 1:
        as_expected = row is None
    else:
        as_expected = (
            row is not None and row.state == "failed" and row.attempts == line.attempt - 1 and row.segment is None
        )
    if not as_expected:
        answers[position] = ClaimResult.TAKEN
    return not as_expected


def _contend(view: RouteView, batch: ClaimBatch, now_us: int) -> None:
    known = view.contenders.get(batch.batch_id)
    if known is None:
        view.contenders[batch.batch_id] = Contender(
            batch.batch_id, batch.workspace_id, now_us, None, batch.waiting_lines
        )
    else:
        known.waiting_lines = batch.waiting_lines


def _after_last_claim(view: RouteView, now_us: int) -> int:
    last = list(view.turns.values())
    last += [contender.last_claim_at for contender in view.contenders.values() if contender.last_claim_at is not None]
    return max(now_us, max(last, default=0) + 1)
