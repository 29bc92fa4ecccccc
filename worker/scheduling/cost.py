"""What one execution of a model is expected to take, learned from what executions took (rules 25 and 26)."""

from __future__ import annotations


class LearnedCosts:
    """Device time of one model per (variant, batch size), in ns.

    The first measurement becomes the estimate, so that it never has to climb from zero; later ones move it by
    ``alpha``. Holds at most variants x sizes entries.
    """

    __slots__ = ("_alpha", "_costs_ns")

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._costs_ns: dict[tuple[int, int], float] = {}

    def observe(self, variant: int, batch_size: int, compute_ns: int) -> None:
        """Learn from one execution."""
        pair = (variant, batch_size)
        known = self._costs_ns.get(pair)
        self._costs_ns[pair] = float(compute_ns) if known is None else known + self._alpha * (compute_ns - known)

    def get(self, variant: int, batch_size: int) -> float | None:
        """Return the estimate, None if this pair never ran."""
        return self._costs_ns.get((variant, batch_size))
