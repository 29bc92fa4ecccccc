"""Circuit breaker of one route: after so many failures in a row it is left alone for a while. Pure.

    CLOSED --failures_to_open-th FAILED in a row--> OPEN --cooldown over, ADMITTED--> PROBING
    PROBING --SUCCEEDED--> CLOSED      PROBING --FAILED--> OPEN      PROBING --WITHDRAWN--> OPEN, over at once

What counts as FAILED is whatever tells about the route and not about the request: no connection, an answer cut off, no
answer in time, 502 and 504. Not 500: that is the answer of a server that works, and counting it would let one caller's
broken requests shut a model for everyone. Not 429 and 503: a busy server is alive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto


class Phase(Enum):
    """What a route is trusted with."""

    CLOSED = auto()
    """Everything."""
    OPEN = auto()
    """Nothing until ``until_ns``, then one call."""
    PROBING = auto()
    """Nothing besides the one call under way; another if that tells nothing until ``until_ns``."""


class Event(Enum):
    """What happened to a call."""

    ADMITTED = auto()
    SUCCEEDED = auto()
    FAILED = auto()
    WITHDRAWN = auto()
    """The caller left first; nothing was learnt."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """State of one breaker. ``failures`` counts those in a row; ``until_ns`` is monotonic."""

    phase: Phase = Phase.CLOSED
    failures: int = 0
    until_ns: int = 0


def admits(breaker: Breaker, now_ns: int) -> bool:
    """Return whether a call may go there now."""
    return breaker.phase is Phase.CLOSED or now_ns >= breaker.until_ns


def wait_ns(breaker: Breaker, now_ns: int) -> int:
    """Return how long no call may go there; 0 if one may now."""
    return 0 if admits(breaker, now_ns) else breaker.until_ns - now_ns


def after(breaker: Breaker, event: Event, now_ns: int, failures_to_open: int, cooldown_ns: int) -> Breaker:
    """Return the breaker after an event.

    Calls that were under way when it opened may still end; in OPEN their outcome changes nothing, since it is older
    than what opened it.
    """
    match breaker.phase, event:
        case Phase.CLOSED, Event.FAILED:
            failures = breaker.failures + 1
            if failures >= failures_to_open:
                return Breaker(Phase.OPEN, failures, now_ns + cooldown_ns)
            return replace(breaker, failures=failures)
        case Phase.CLOSED, Event.SUCCEEDED:
            return Breaker() if breaker.failures else breaker
        case ((Phase.OPEN | Phase.PROBING), Event.ADMITTED):
            return Breaker(Phase.PROBING, breaker.failures, now_ns + cooldown_ns)
        case Phase.PROBING, Event.SUCCEEDED:
            return Breaker()
        case Phase.PROBING, Event.FAILED:
            return Breaker(Phase.OPEN, breaker.failures + 1, now_ns + cooldown_ns)
        case Phase.PROBING, Event.WITHDRAWN:
            return Breaker(Phase.OPEN, breaker.failures, now_ns)
        case _:
            return breaker
