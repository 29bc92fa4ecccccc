"""One runner's care for its routes: the gates, what is told of them, and what is measured.

Everything here is beside the runner's own loop: it reads what the gates have been told, and writes signals, edges and
samples; if the store is away, lines go on as before and the figures wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from frontend.batches.periodic import Periodic
from frontend.batches.runner.limits import StoredLimits
from frontend.batches.scheduling.effective_caps import EffectiveCaps
from frontend.batches.scheduling.gates import Evaluation, LoadReader, RouteGates, evaluate
from frontend.batches.scheduling.reopening import LiveTraffic, Reopening
from frontend.batches.scheduling.route_figures import RouteFigures
from frontend.batches.scheduling.samples import Samples
from frontend.batches.scheduling.signals import Signals
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.protocol import Store
from worker.channel.series import Series

log = logging.getLogger("batches")

LOOK_S: Final = 0.05
"""How soon lines start again after live traffic has gone, or lines of another process have left room."""
ASKED_NS: Final = 2_000_000_000
"""A route that no batch has asked for that long yields to nobody any more."""
FORGOTTEN_NS: Final = 60_000_000_000
"""A route that nobody has asked for that long is of no interest any more."""
HINT_REFUSED: Final = "priority_refused"
"""In the explain log of a route."""
SIGNALS_S: Final = 0.1
EDGES_S: Final = 1.0
SAMPLE_S: Final = 1.0
COUNT_S: Final = 2.0
WRITE_SAMPLES_S: Final = 15.0
PRUNE_S: Final = 60.0
CLOSE_S: Final = 2.0
"""Of waiting for the store, twice at most, when all ends."""


class Runner(Protocol):
    def wake(self) -> None: ...

    def freed(self, route_id: str) -> None: ...


class Machine(LiveTraffic, Protocol):
    """See ``LiveCounts``."""

    def add_freed(self, route_id: str) -> None: ...

    def freed(self, route_id: str) -> int: ...


class RouteWatch:
    """Between ``start`` and ``close``; used on one event loop.

    Attributes:
        gates: for the runner.
        limits: for the runner; ``caps`` may adapt them.

    Args:
        provider_of: kind of a route.
        now_us: Unix time in microseconds.
    """

    def __init__(
        self,
        process_id: str,
        store: Store,
        default_cap: int,
        live: Machine,
        load: LoadReader,
        caps: EffectiveCaps,
        provider_of: Callable[[str], str],
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.limits = StoredLimits(store, default_cap, caps)
        self.figures = RouteFigures(process_id, store, provider_of)
        self._reopening = Reopening(live)
        self.gates = RouteGates(self.limits, live, load, self._reopening, self._note, now_us=now_us)
        self._process_id = process_id
        self._store = store
        self._live = live
        self._load = load
        self._caps = caps
        self._clock_ns = clock_ns
        self._now_us = now_us
        self._signals = Signals(process_id, store, self.limits.cap, now_us)
        self._samples = Samples(store, self.limits.cap, now_us)
        self._on_freed: Callable[[str], None] = lambda route_id: None
        self._asked: dict[str, tuple[int, int]] = {}
        """When a route was last asked for, and what ``freed`` said when it was last looked at."""
        self._parts: list[Periodic] = []

    def start(self, runner: Runner) -> None:
        """Begin to watch, for a runner whose store is open."""
        self.gates.wake = runner.wake
        self._on_freed = runner.freed
        for interval_s, work in (
            (LOOK_S, self._look),
            (SIGNALS_S, self._write_signals),
            (EDGES_S, self._signals.write_edges),
            (SAMPLE_S, self._sample),
            (COUNT_S, self._count),
            (WRITE_SAMPLES_S, self._samples.write),
            (PRUNE_S, self._prune),
        ):
            part = Periodic("batches.watch", work, interval_s)
            part.start()
            self._parts.append(part)

    async def close(self) -> None:
        """Write what is left and stop; idempotent."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        # Not in the middle of a write: it would have to be done again, and counted twice if it was done.
        await asyncio.gather(*(part.close(CLOSE_S) for part in parts))
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._write_signals()
                await self._signals.write_edges()
                await self._samples.write()
                await self._store.alerts.release_duties(self._process_id)

    # What the runner tells

    def line(self, route_id: str, seconds: float) -> None:
        """A line has got an answer of its upstream."""
        self._samples.line(route_id, seconds)

    def overload(self, route_id: str) -> None:
        """A line has got 429 or 503."""
        self._samples.overload(route_id)
        self._caps.overload(route_id)

    def hint_refused(self, route_id: str) -> None:
        """A line has failed because the server takes no priority hint."""
        if self._signals.tell(route_id, HINT_REFUSED):
            log.error(
                "batches.priority_refused route=%s: its server refuses the priority hint, so its lines fail: take the"
                " hint away, or start vLLM with --scheduling-policy priority", route_id,
            )  # fmt: skip

    def freed(self, route_id: str) -> None:
        """Lines of this process have ended in the store."""
        self._live.add_freed(route_id)

    def running(self, route_id: str) -> int:
        """Return how many lines ran on a route when they were last counted, in all processes."""
        return self.figures.running(route_id)

    def series(self) -> Iterable[Series]:
        """Yield every figure."""
        for reason, value in self._signals.pauses.items():
            yield Series(
                name="gateway_batch_route_pauses_total", kind="counter", value=value,
                help="Times that a route's gates closed, or closed for another reason.", labels={"reason": reason},
            )  # fmt: skip
        yield from self.figures.series()

    # Inside

    def _note(self, route_id: str, found: Evaluation, now_ns: int) -> None:
        known = self._asked.get(route_id)
        self._asked[route_id] = (now_ns, self._live.freed(route_id) if known is None else known[1])
        self._signals.note(route_id, found, now_ns)
        self._samples.note(route_id, found)

    async def _look(self) -> None:
        now_ns = self._clock_ns()
        self._reopening.look(self.limits.rows(), now_ns)
        self.gates.look(now_ns, ASKED_NS)
        for route_id, (asked_ns, before) in list(self._asked.items()):
            if now_ns - asked_ns > FORGOTTEN_NS:
                del self._asked[route_id]
            elif (freed := self._live.freed(route_id)) != before:
                self._asked[route_id] = (asked_ns, freed)
                self._on_freed(route_id)

    async def _write_signals(self) -> None:
        await self._signals.write(self._clock_ns())

    async def _sample(self) -> None:
        """Look at gates that cost nothing also while nothing waits: what is usual at this hour is worth knowing."""
        for row in self.limits.rows():
            if row.metrics_url is None and self._samples.silent(row.route_id):
                found = evaluate(
                    row.route_id, row, self._now_us(), self._clock_ns(), self._live, self._load, self._reopening
                )
                self._samples.note(row.route_id, found)

    async def _count(self) -> None:
        await self.figures.refresh()
        self._samples.counts(self.figures.counts)

    async def _prune(self) -> None:
        if self.figures.exports:
            await self._store.explain.prune()
