"""What the connections of one server share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from frontend.httpd.exchange import Application
from frontend.httpd.hangup import HangupWatch
from frontend.httpd.outlet import Turn
from frontend.settings import EndpointSettings

if TYPE_CHECKING:
    from frontend.httpd.protocol import Connection


@dataclass(slots=True)
class Counters:
    """Monotonic counts, except ``open`` and ``in_flight``. ``answers[c]`` counts status class c; [0] is unused."""

    accepted: int = 0
    refused: int = 0
    open: int = 0
    requests: int = 0
    in_flight: int = 0
    disconnects: int = 0
    timeouts: int = 0
    answers: list[int] = field(default_factory=lambda: [0] * 6)


@dataclass(slots=True)
class ServerState:
    """One per server; every connection holds a reference.

    Attributes:
        clock: monotonic ns; injectable so that tests move time.
        date: the Date header line, renewed by the server's tick.
        buffered_bytes: room announced or used by request bodies that are collected in memory.
        refused_open: connections over the limit that still read their refusal.
        body_budget_bytes: limit of that, over all connections; more is refused with 503.
        emptied: called when the last connection is gone.
        closed: called when any connection is gone.
    """

    app: Application
    limits: EndpointSettings
    clock: Callable[[], int]
    hangups: HangupWatch
    body_budget_bytes: int
    emptied: Callable[[], None]
    date: bytes = b""
    draining: bool = False
    buffered_bytes: int = 0
    refused_open: int = 0
    counters: Counters = field(default_factory=Counters)
    turn: Turn = field(default_factory=Turn)
    connections: set[Connection] = field(default_factory=set)
    closed: Callable[[], None] = lambda: None
