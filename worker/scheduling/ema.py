"""A sum that forgets: what was added loses half of its value every half-life."""

from __future__ import annotations


class DecayedSum:
    """Exponentially decayed sum, decayed only when touched, so that idle models cost nothing."""

    __slots__ = ("_at_ns", "_half_lives_per_ns", "_value")

    def __init__(self, half_life_ns: int) -> None:
        self._half_lives_per_ns = 1.0 / half_life_ns
        self._value = 0.0
        self._at_ns = 0

    def read(self, now_ns: int) -> float:
        """Return the sum as of ``now_ns``; a time before the last addition counts as that one."""
        if self._value == 0.0 or now_ns <= self._at_ns:
            return self._value
        return float(self._value * 2.0 ** ((self._at_ns - now_ns) * self._half_lives_per_ns))

    def add(self, amount: float, now_ns: int) -> None:
        """Add ``amount``, spent at ``now_ns``."""
        self._value = self.read(now_ns) + amount
        self._at_ns = max(now_ns, self._at_ns)
