"""What a frontend counts, as plain integers, and their snapshot as series.

Only the event loop writes here. Requests are counted once, when they are answered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from engines.errors import Kind
from worker.channel.series import Series

LATENCY_BOUNDS_S: Final[tuple[float, ...]] = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_BOUNDS_NS: Final = tuple(int(bound * 1e9) for bound in LATENCY_BOUNDS_S)
MAX_MODELS: Final = 4096
"""Models counted apart; names that do not exist are counted as one, so that clients cannot grow the table."""


@dataclass(slots=True)
class ModelTraffic:
    """Requests of one model by outcome, and how long the successful ones took."""

    kinds: dict[Kind, int] = field(default_factory=dict)
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    latency_ns: int = 0


class Traffic:
    """Counters of one frontend."""

    def __init__(self, frontend: str) -> None:
        self._frontend = frontend
        self._models: dict[str, ModelTraffic] = {}
        self._other = ModelTraffic()
        self.in_flight = 0

    def known(self, models: Iterable[str]) -> None:
        """Make every served model's series exist, with 0 (MO-04)."""
        for model in models:
            if len(self._models) < MAX_MODELS:
                self._models.setdefault(model, ModelTraffic())

    def count(self, model: str, kind: Kind, latency_ns: int) -> None:
        """Count one answered request."""
        traffic = self._models.get(model, self._other)
        traffic.kinds[kind] = traffic.kinds.get(kind, 0) + 1
        if kind is Kind.OK:
            traffic.latency_counts[bisect_left(_BOUNDS_NS, latency_ns)] += 1
            traffic.latency_ns += latency_ns

    def series(self) -> Iterable[Series]:
        """Yield every series of this process."""
        yield Series(
            name="frontend_in_flight", kind="gauge", help="Inference requests being processed.",
            labels={"frontend": self._frontend}, value=self.in_flight,
        )  # fmt: skip
        for model, traffic in [*self._models.items(), ("", self._other)]:
            if traffic is self._other and not traffic.kinds:
                continue
            for kind in sorted({Kind.OK, *traffic.kinds}):
                yield Series(
                    name="frontend_requests_total", kind="counter", help="Inference requests answered, by outcome.",
                    labels={"model": model, "outcome": kind.name.lower()}, value=traffic.kinds.get(kind, 0),
                )  # fmt: skip
            yield Series(
                name="frontend_request_seconds", kind="histogram",
                help="Seconds from a request's arrival to its answer, successful ones only.",
                labels={"model": model}, bounds=LATENCY_BOUNDS_S,
                counts=tuple(traffic.latency_counts), sum=traffic.latency_ns / 1e9,
            )  # fmt: skip
