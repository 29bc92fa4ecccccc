"""Attempts to learn from what was answered, rationed: of requests that never repeat each would cost as much as an
answer. Pure.
"""

from __future__ import annotations

from typing import Final

MAX_ATTEMPTS: Final = 256
"""Saved up while nothing new comes."""
ATTEMPTS_PER_S: Final = 32
_SECOND_NS: Final = 1_000_000_000


class Attempts:
    """What is left of one frontend's attempts for one protocol."""

    __slots__ = ("_left", "_renewed_ns")

    def __init__(self) -> None:
        self._left = MAX_ATTEMPTS
        self._renewed_ns = 0

    def take(self, now_ns: int) -> bool:
        """Return whether one more may be made now, and count it."""
        seconds = (now_ns - self._renewed_ns) // _SECOND_NS
        if seconds > 0:
            self._renewed_ns += seconds * _SECOND_NS
            self._left = min(MAX_ATTEMPTS, self._left + seconds * ATTEMPTS_PER_S)
        if not self._left:
            return False
        self._left -= 1
        return True
