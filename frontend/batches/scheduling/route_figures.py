"""How many lines wait and run on routes, and why routes are paused, over the whole installation, as series.

Every runner reads the sums; one exports them, so that they can be added up over processes like everything else. It
holds a duty of the store; when it dies another runner takes that over.

Source: batches.md 1.18, rule 83.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from frontend.batches.runner.gates import Reason
from frontend.batches.store.protocol import Store
from frontend.batches.store.route_rows import RouteCount
from frontend.batches.store.rows import WaitRow
from frontend.openai.series import KINDS
from worker.channel.series import Series

DUTY: Final = "route_figures"
DUTY_LEASE_US: Final = 10_000_000


class RouteFigures:
    """The installation's counts as one process last saw them.

    Attributes:
        exports: whether this process tells them.
    """

    def __init__(self, process_id: str, store: Store, provider_of: Callable[[str], str]) -> None:
        self.exports = False
        self.counts: tuple[RouteCount, ...] = ()
        self._process_id = process_id
        self._store = store
        self._provider_of = provider_of
        self._running: dict[str, int] = {}
        self._waits: Sequence[WaitRow] = ()

    def running(self, route_id: str) -> int:
        """Return how many lines ran on a route when they were last counted, in all processes."""
        return self._running.get(route_id, 0)

    async def refresh(self) -> None:
        """Count again. Raises: StoreUnavailable."""
        self.exports = False
        exports = await self._store.alerts.hold_duty(DUTY, self._process_id, DUTY_LEASE_US)
        if exports:
            self.counts, self._waits = await asyncio.gather(
                self._store.scheduling.route_counts(), self._store.scheduling.fresh_waits()
            )
        else:
            self.counts, self._waits = await self._store.scheduling.route_counts(), ()
        self._running = {count.route_id: count.running_lines for count in self.counts}
        self.exports = exports

    def series(self) -> Iterable[Series]:
        """Yield what only one process of the installation may tell."""
        if not self.exports:
            return
        lines = {(kind, state): 0 for kind in KINDS for state in ("waiting", "running")}
        for count in self.counts:
            provider = self._provider_of(count.route_id)
            for state, value in (("waiting", count.waiting_lines), ("running", count.running_lines)):
                if (provider, state) in lines:
                    lines[provider, state] += value  # type: ignore[index]
        for (provider, state), value in lines.items():
            yield Series(
                name="gateway_batch_route_lines", kind="gauge", value=value,
                help="Lines of batches that wait or run, by kind of route.",
                labels={"provider": provider, "state": state},
            )  # fmt: skip
        paused: dict[str, set[str]] = {reason: set() for reason in Reason}
        for wait in self._waits:
            if wait.reason in paused and wait.waiting_lines:
                paused[wait.reason].add(wait.route_id)
        for reason, routes in paused.items():
            yield Series(
                name="gateway_batch_paused_routes", kind="gauge", value=len(routes),
                help="Routes with waiting lines, by why they wait.", labels={"reason": reason},
            )  # fmt: skip
        yield Series(
            name="gateway_batch_queue_depth", kind="gauge", value=sum(count.waiting_lines for count in self.counts),
            help="Lines of batches that wait for a route.", labels={"mode": "gateway"},
        )  # fmt: skip
