"""What the gateway counts, and its snapshot as series. Only the event loop writes here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, Literal

from frontend.gateway_settings import UpstreamKind
from frontend.metrics import LATENCY_BOUNDS_S
from frontend.openai.breaker_state import Phase
from frontend.openai.calls import Sent, UpstreamAnswer
from frontend.openai.routes import Route, Routes
from worker.channel.series import Series

Outcome = Literal[
    "ok", "client_error", "busy", "upstream_error", "unreachable", "timeout", "broken_stream", "cancelled"
]
BOUNDS_S: Final = (*LATENCY_BOUNDS_S, 120.0, 300.0, 600.0)
KINDS: Final[tuple[UpstreamKind, ...]] = ("vllm", "openai_compatible", "openai", "local")


class GatewayTraffic:
    """Counters of one process's calls."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, Outcome], int] = {}
        self._counts = {kind: [0] * (len(BOUNDS_S) + 1) for kind in KINDS}
        self._sums_ns = dict.fromkeys(KINDS, 0)
        self.failovers = 0
        self.unrouted = 0

    def count(self, route: Route, outcome: Outcome, *, batch: bool) -> None:
        """Count one attempt on a route, when it is over."""
        key = (route.settings.kind, "batch" if batch else "live", outcome)
        self._calls[key] = self._calls.get(key, 0) + 1

    def answered(self, route: Route, waited_ns: int) -> None:
        """Count how long the first byte of an answer took."""
        self._counts[route.settings.kind][bisect_left(BOUNDS_S, waited_ns / 1e9)] += 1
        self._sums_ns[route.settings.kind] += waited_ns

    def series(self, routes: Routes) -> Iterator[Series]:
        """Yield every series."""
        for (kind, traffic, outcome), value in sorted(self._calls.items()):
            yield Series(
                name="gateway_calls_total", kind="counter", value=value,
                help="Calls of model servers by the kind of upstream, live or of a batch job, and outcome.",
                labels={"kind": kind, "traffic": traffic, "outcome": outcome},
            )  # fmt: skip
        yield Series(
            name="gateway_failovers_total", kind="counter", value=self.failovers,
            help="Live calls that went on to another route before anything was sent to the client.",
        )  # fmt: skip
        yield Series(
            name="gateway_unrouted_total", kind="counter", value=self.unrouted,
            help="Calls of models that are not served, or whose routes were all cooling down.",
        )  # fmt: skip
        for kind in KINDS:
            yield Series(
                name="gateway_upstream_seconds", kind="histogram", labels={"kind": kind}, bounds=BOUNDS_S,
                help="Seconds from sending a call to the first byte of the upstream's answer.",
                counts=tuple(self._counts[kind]), sum=self._sums_ns[kind] / 1e9,
            )  # fmt: skip
        for route in list(routes.all()):
            for traffic, value in (("live", route.live), ("batch", route.batch)):
                yield Series(
                    name="gateway_in_flight", kind="gauge", value=value,
                    help="Calls under way on a route.", labels={"route": route.id, "traffic": traffic},
                )  # fmt: skip
            yield Series(
                name="gateway_breakers_open", kind="gauge", value=int(route.breaker.phase is not Phase.CLOSED),
                help="Processes whose circuit breaker holds a route back.", labels={"route": route.id},
            )  # fmt: skip


def outcome_of(answer: UpstreamAnswer) -> Outcome:
    """Return how an answer is counted."""
    if answer.ok:
        return "ok"
    if answer.status in (429, 503):
        return "busy"
    if answer.status < 500:
        return "client_error"
    if answer.status == 504:
        return "timeout"
    return "unreachable" if answer.sent is Sent.NOT_SENT else "upstream_error"
