"""Live traffic per route as gates see it: of this process, of the others of the machine, and of other machines.

What a process counts on its routes goes to the machine's table at once. For other machines one process of the machine
writes the table's sums to the store: on change, at most every 200 ms, and every 2 s as a sign of life. Sums that are
6 s old no longer count there. With SQLite there is one machine and the store is not asked.

Source: batches.md 1.7.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from frontend.batches.periodic import Periodic
from frontend.batches.scheduling.live_table import OTHERS, LiveTable, NoLiveTable
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.protocol import Store
from frontend.openai.routes import Route, Routes

log = logging.getLogger("batches")

CHANGED_NS: Final = 200_000_000
HEARTBEAT_NS: Final = 2_000_000_000
STOPPED_NS: Final = 2_600_000_000
"""Of silence of the process that writes to the store: another one does it then."""
LOOK_S: Final = 0.1
READ_S: Final = 0.5
OPEN_RETRY_S: Final = 2.0


class LiveCounts:
    """The live calls of an installation, and one process's own report of them; used on one event loop.

    Args:
        directory: the run directory, the same for all processes of a machine.
        routes: whose live calls are reported; ``on_change`` and ``on_answer`` of it are taken.
        opened: set while the store can be asked.
        reads: whether counts of other machines are wanted here.
    """

    def __init__(
        self,
        directory: Path,
        routes: Routes,
        store: Store,
        opened: asyncio.Event,
        *,
        reads: bool,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.table = LiveTable(directory, len(list(routes.all())))
        self._routes = routes
        self._store = store
        self._opened = opened
        self._reads = reads
        self._clock_ns = clock_ns
        self._elsewhere: dict[str, int] = {}
        self._read_ns: int | None = None
        self._opening = Periodic("batches.live_table", self._open, OPEN_RETRY_S, at_once=False)
        self._exchange = Periodic("batches.live_counts", self._exchange_counts, LOOK_S, retry_s=OPEN_RETRY_S)
        self._told = ""

    def start(self) -> None:
        """Begin to count for others. A table that cannot be opened now is tried again, and said so."""
        self._open_now()
        self._routes.on_change = self._on_change
        self._routes.on_answer = self._on_answer
        if not self.table.is_open:
            self._opening.start()
        if self._store.kind == "postgresql":
            self._exchange.start()

    async def close(self) -> None:
        """Stop counting for others; idempotent."""
        await self._opening.close()
        await self._exchange.close()
        if self.table.is_open:
            if self._opened.is_set() and self._store.kind == "postgresql" and self.table.alone():
                with contextlib.suppress(StoreUnavailable):
                    await self._store.processes.leave(self.table.machine)
            self.table.close()

    def count(self, route_id: str) -> int | None:
        """Return the live calls under way on a route everywhere; None while that cannot be told."""
        if not self.table.is_open:
            return None
        elsewhere = self._elsewhere
        if not elsewhere:
            return self.table.live(route_id)
        return self.table.live(route_id) + elsewhere.get(route_id, 0) + elsewhere.get(OTHERS, 0)

    def moved_ns(self, route_id: str) -> int | None:
        """See ``LiveTraffic``. Calls of other machines are seen while they are under way, and not when they end."""
        return self.table.moved_ns(route_id) if self.table.is_open else None

    def add_freed(self, route_id: str) -> None:
        """Batch lines of this process have left room on a route."""
        if self.table.is_open:
            self.table.add_freed(route_id)

    def freed(self, route_id: str) -> int:
        """Return a number that changes whenever a process of this machine has left room on a route."""
        return self.table.freed(route_id) if self.table.is_open else 0

    def latency_counts(self, route_id: str) -> tuple[int, ...]:
        """See ``LiveLatencies``: live calls of this machine by their time to the first byte of the answer."""
        if not self.table.is_open:
            return (0,) * (len(self.latency_bounds_s) + 1)
        return self.table.latency_counts(route_id)

    @property
    def latency_bounds_s(self) -> tuple[float, ...]:
        return self.table.latency_bounds_s

    async def _open(self) -> None:
        if not self.table.is_open:
            self._open_now()

    def _open_now(self) -> None:
        try:
            self.table.start()
        except NoLiveTable as error:
            if str(error) != self._told:
                self._told = str(error)
                log.error("batches.live_table %s", error)
            return
        for route in self._routes.all():
            if route.live:
                self.table.set_live(route.id, route.live, self._clock_ns())

    def _on_change(self, route: Route) -> None:
        if self.table.is_open:
            self.table.set_live(route.id, route.live, self._clock_ns())

    def _on_answer(self, route: Route, waited_ns: int) -> None:
        if self.table.is_open:
            self.table.observe(route.id, waited_ns / 1e9)

    async def _exchange_counts(self) -> None:
        """Tell other machines, and hear of them. Raises: StoreUnavailable."""
        await self._opened.wait()
        if not self.table.is_open:
            return
        now_ns = self._clock_ns()
        if self.table.to_publish(now_ns, CHANGED_NS, HEARTBEAT_NS, STOPPED_NS):
            await self._store.processes.heartbeat(self.table.machine, self.table.publishing(now_ns))
        if self._reads and (self._read_ns is None or now_ns - self._read_ns >= READ_S * 1e9):
            self._read_ns = now_ns
            self._elsewhere = await self._store.processes.live_elsewhere(self.table.machine)
