"""How long one batch leaves one route alone after overload answers. Pure.

Theory
    Every overload answer (429, 503) or failed connection lengthens the pause: 1, 2, 4 ... 60 s by how many there were
    in a row; the upstream's ``Retry-After`` counts if it asks for more, up to 300 s. Any success resets the row, but
    never shortens the pause that runs. Lines run together: those that had started before the pause began say nothing
    new when they fail as well, so one refused burst counts once, however wide it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from frontend.batches.runner.timings import Timings, ns

MAX_STREAK = 63
"""More in a row change nothing; keeps the shift small."""


@dataclass(frozen=True, slots=True)
class Pause:
    """State of one (batch, route).

    Attributes:
        streak: overload answers in a row.
        since_ns, until_ns: of the latest pause.
        declined: the upstream said so itself; False if it could not be reached.
    """

    streak: int = 0
    since_ns: int = -1
    until_ns: int = -1
    declined: bool = True

    def runs(self, now_ns: int) -> bool:
        return now_ns < self.until_ns


IDLE = Pause()


def after_overload(
    pause: Pause, now_ns: int, started_ns: int, retry_after_s: float | None, times: Timings, *, declined: bool
) -> Pause:
    """Return the pause after an overload answer to a line that was sent at ``started_ns``."""
    asked_s = min(max(retry_after_s or 0.0, 0.0), times.longest_retry_after_s)
    if pause.streak and started_ns <= pause.since_ns:
        until_ns = max(pause.until_ns, now_ns + ns(asked_s))
        return Pause(pause.streak, pause.since_ns, until_ns, declined)
    streak = min(pause.streak + 1, MAX_STREAK)
    wait_s = max(min(times.first_pause_s * (1 << (streak - 1)), times.longest_pause_s), asked_s)
    return Pause(streak, now_ns, max(pause.until_ns, now_ns + ns(wait_s)), declined)


def after_success(pause: Pause) -> Pause:
    """Return the pause after a line got an answer that is no overload."""
    return Pause(0, pause.since_ns, pause.until_ns, pause.declined) if pause.streak else pause
