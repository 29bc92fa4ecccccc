"""Why a line may not start now: reasons, and the seam for whatever decides about them.

Order of the steps (the first that fails is *the* reason): a stopped batch; ``rate_limited``; then what gates there are
(window, live traffic, load of the server); ``workers``; and within the claim ``concurrency`` and ``fair_share``. Gates
look at what they have been told before: they are asked on every pass and never wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol


class Reason(StrEnum):
    """What a waiting line waits for; the store and the API use the values."""

    RATE_LIMITED = "rate_limited"
    OUTSIDE_WINDOW = "outside_window"
    LIVE_TRAFFIC = "live_traffic"
    METRICS_UNAVAILABLE = "metrics_unavailable"
    SERVER_BUSY = "server_busy"
    WORKERS = "workers"
    CONCURRENCY = "concurrency"
    FAIR_SHARE = "fair_share"
    ROUTE_COOLING = "route_cooling"
    """No route of the model can be reached now: circuit breakers hold, or connections fail."""


READY: Final = frozenset({None, Reason.CONCURRENCY, Reason.FAIR_SHARE})
"""With these the batch would start a line at once if it were its turn, so it takes part in the fair order."""
NOT_LEGITIMATE: Final = frozenset({Reason.METRICS_UNAVAILABLE, Reason.ROUTE_COOLING})
"""Faults: a batch that waits for these counts as stalled."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One batch wants to start lines on one route."""

    batch_id: str
    workspace_id: str
    route_id: str
    now_ns: int


class Gate(Protocol):
    """One step; ``closed`` is called often, from the event loop."""

    def closed(self, ask: Ask) -> Reason | None:
        """Return why nothing may start, None if the gate is open."""
        ...


def first_closed(gates: Sequence[Gate], ask: Ask) -> Reason | None:
    """Return the first reason; gates behind it are not asked."""
    for gate in gates:
        reason = gate.closed(ask)
        if reason is not None:
            return reason
    return None
