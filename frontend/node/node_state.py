"""What a node as a whole is, from what its processes are; and why it is not ready. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.channel.node_link import State


@dataclass(frozen=True, slots=True)
class Condition:
    """One process as the node sees it.

    Attributes:
        role: ``worker``, ``frontend``, or ``batches``, without which a node answers requests all the same.
        state: what it says of itself; None while it does not run.
        detail: why it is not READY, as far as it says so.
        stalled: why it does not serve whatever it says; empty if it does.
    """

    role: str
    name: str
    state: State | None
    detail: str = ""
    stalled: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The node's state, and what keeps it from being ready; no reasons exactly when it is READY."""

    state: State
    reasons: tuple[str, ...]


def verdict(conditions: Sequence[Condition], *, was_ready: bool, draining: bool) -> Verdict:
    """Return READY only if every worker and at least one frontend are: a node that cannot answer is not ready.

    Before it was ever ready it is STARTING, unless a process says that it has started and misses something.
    """
    if draining:
        return Verdict(State.DRAINING, ("the node is draining",))
    workers = [c for c in conditions if c.role == "worker"]
    frontends = [c for c in conditions if c.role == "frontend"]
    reasons = [_reason(c) for c in workers if not _serves(c)]
    if not workers:
        reasons.append("no worker")
    if not any(_serves(c) for c in frontends):
        reasons += [_reason(c) for c in frontends] or ["no frontend"]
    if not reasons:
        return Verdict(State.READY, ())
    settled = was_ready or any(c.role == "worker" and c.state is State.DEGRADED for c in conditions)
    return Verdict(State.DEGRADED if settled else State.STARTING, tuple(reasons))


def _serves(condition: Condition) -> bool:
    return condition.state is State.READY and not condition.stalled


def _reason(condition: Condition) -> str:
    if condition.state is None:
        return f"{condition.name} is not running"
    if condition.stalled:
        return f"{condition.name} {condition.stalled}"
    return f"{condition.name} is {condition.state.value}" + (f": {condition.detail}" if condition.detail else "")
