"""When a connection has been in one phase for too long. Pure.

Time is observed by one tick per server instead of one timer per connection: the request path pays nothing, a timeout
is never early and late by at most one tick.
"""

from __future__ import annotations

from enum import Enum, auto

from frontend.settings import EndpointSettings

LINGER_NS = 10_000_000_000
"""How long an unread request is swallowed after its refusal, so that the client reads the answer instead of a reset."""
WRITE_PROGRESS_BYTES = 64 * 1024
"""A client must take this much of its answer per ``write_timeout_seconds``."""


class Phase(Enum):
    """What a connection waits for."""

    IDLE = auto()
    """A request."""
    READING = auto()
    """The rest of a request."""
    WAITING = auto()
    """The application; bounded by the request's own deadline."""
    WRITING = auto()
    """The client, to read."""
    LINGERING = auto()
    """The client, to close."""


class Pace:
    """Remembers since when a connection is where it is."""

    __slots__ = ("_mark", "_since_ns")

    def __init__(self) -> None:
        self._mark: tuple[Phase, int] | None = None
        self._since_ns = 0

    def overdue(self, phase: Phase, step: int, now_ns: int, limits: EndpointSettings) -> bool:
        """Return whether ``phase`` lasted longer than allowed; a new ``step`` of the same phase starts anew."""
        mark = (phase, step)
        if mark != self._mark:
            self._mark = mark
            self._since_ns = now_ns
            return False
        if phase is Phase.WAITING:
            return False
        return now_ns - self._since_ns > limit_ns(phase, limits)


def limit_ns(phase: Phase, limits: EndpointSettings) -> int:
    """Return how long a phase may last."""
    if phase is Phase.IDLE:
        return int(limits.idle_timeout_seconds * 1e9)
    if phase is Phase.READING:
        return int(limits.read_timeout_seconds * 1e9)
    if phase is Phase.WRITING:
        return int(limits.write_timeout_seconds * 1e9)
    return LINGER_NS
