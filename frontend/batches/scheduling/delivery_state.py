"""When to tell the outside of an incident again, and when to give up. Pure.

Per event: attempts with a pause that grows, up to ``MAX_ATTEMPTS``; nothing older than ``MAX_AGE_US`` is told any more.
A receiver that cannot be reached is asked with one event only until it answers. An incident's end waits for its
opening.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from frontend.batches.store.route_rows import IncidentEvent, IncidentRow
from frontend.batches.store.rows import SECOND_US

FIRST_PAUSE_S: Final = 10.0
GROWTH: Final = 3.0
LONGEST_PAUSE_S: Final = 3600.0
MAX_ATTEMPTS: Final = 10
"""Over about 6 hours."""
MAX_AGE_US: Final = 24 * 3600 * SECOND_US

Event = tuple[IncidentRow, IncidentEvent]
Name = tuple[str, IncidentEvent]


def happened_us(event: Event) -> int:
    """Return when an event happened."""
    incident, name = event
    return incident.opened_at if name == "opened" else incident.resolved_at or incident.opened_at


def is_stale(event: Event, now_us: int) -> bool:
    """Return whether it is too old to be told."""
    return now_us - happened_us(event) > MAX_AGE_US


def pause_ns(attempts: int) -> int:
    """Return how long to wait after so many failed attempts."""
    return int(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * GROWTH ** (attempts - 1)) * 1e9)


@dataclass(slots=True)
class _Tried:
    attempts: int = 0
    next_ns: int = 0


@dataclass(slots=True)
class Deliveries:
    """What has been tried. Forgotten with the process: its successor begins again, which bounds nothing less."""

    tried: dict[Name, _Tried] = field(default_factory=dict)
    away: int = 0
    away_until_ns: int = 0

    def due(self, untold: Iterable[Event], now_ns: int) -> list[Event]:
        """Return what to tell now, oldest first."""
        found: list[Event] = []
        held: set[str] = set()
        names: set[Name] = set()
        for incident, event in untold:
            names.add((incident.id, event))
            tried = self.tried.get((incident.id, event))
            if incident.id in held:
                continue
            # Also if it is told now: its end is looked at again once that is known to have come.
            held.add(incident.id)
            if tried is None or now_ns >= tried.next_ns:
                found.append((incident, event))
        for name in self.tried.keys() - names:
            del self.tried[name]
        if now_ns < self.away_until_ns:
            return []
        return found[:1] if self.away else found

    def told(self, name: Name) -> None:
        """It has been taken."""
        self.tried.pop(name, None)
        self.away = 0
        self.away_until_ns = 0

    def failed(self, name: Name, now_ns: int, *, reached: bool) -> bool:
        """Note a failed attempt; return whether to give the event up."""
        tried = self.tried.setdefault(name, _Tried())
        tried.attempts += 1
        tried.next_ns = now_ns + pause_ns(tried.attempts)
        if reached:
            self.away, self.away_until_ns = 0, 0
        else:
            self.away += 1
            self.away_until_ns = now_ns + pause_ns(self.away)
        gives_up = tried.attempts >= MAX_ATTEMPTS
        if gives_up:
            self.tried.pop(name, None)
        return gives_up
