"""What people are told of a route's gates: the last evaluation, every edge, and how often they closed.

An edge is a change of the reason. It is written at once, with what was read at that moment, and kept, so that "why did
nothing run at 03:00" has an answer; in between, the last evaluation is written every 5 s while lines wait.

Source: batches.md 1.5, rules 22 and 23.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from frontend.batches.runner.gates import Reason
from frontend.batches.scheduling.gates import Evaluation
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.protocol import Store
from frontend.batches.store.route_rows import EdgeRow, SignalRow

log = logging.getLogger("batches")

PAUSES: Final = (
    Reason.OUTSIDE_WINDOW, Reason.LIVE_TRAFFIC, Reason.METRICS_UNAVAILABLE, Reason.SERVER_BUSY,
)  # fmt: skip
"""Reasons that close a route for every batch."""
EVERY_NS: Final = 5_000_000_000
"""Between writes of a signal that has not changed."""
AT_ONCE_NS: Final = 200_000_000
"""Between writes of one that has: a gate that flaps must not become a load of its own."""
MAX_EDGES: Final = 10_000
"""Kept while the store is away; the oldest go."""
TELL_US: Final = 60_000_000
"""Between notes of the same kind on a route: the first line tells what the other thousand would."""
EDGES_AT_ONCE: Final = 1000
WRITES_AT_ONCE: Final = 16


@dataclass(slots=True)
class _Signal:
    found: Evaluation
    noted_ns: int
    changed: bool = True
    written_ns: int | None = None


class Signals:
    """Gate evaluations of one process on their way to the store; used on one event loop.

    Attributes:
        pauses: how often gates closed, or closed for another reason, by reason.

    Args:
        cap: lines that a route may run at once now.
        now_us: Unix time in microseconds.
    """

    def __init__(self, process_id: str, store: Store, cap: Callable[[str], int], now_us: Callable[[], int]) -> None:
        self.pauses: dict[Reason, int] = dict.fromkeys(PAUSES, 0)
        self._process_id = process_id
        self._store = store
        self._cap = cap
        self._now_us = now_us
        self._signals: dict[str, _Signal] = {}
        self._edges: deque[EdgeRow] = deque(maxlen=MAX_EDGES)
        self._told_us: dict[tuple[str, str], int] = {}

    def note(self, route_id: str, found: Evaluation, now_ns: int) -> None:
        """Take an evaluation."""
        signal = self._signals.get(route_id)
        if signal is not None and signal.found.reason is found.reason:
            # That the last call has gone and the gate waits is told at once; each new call moves that time.
            signal.changed |= (signal.found.reopens_us is None) != (found.reopens_us is None)
            signal.found, signal.noted_ns = found, now_ns
            return
        if signal is None:
            self._signals[route_id] = _Signal(found, now_ns)
        else:
            signal.found, signal.noted_ns, signal.changed = found, now_ns, True
        if found.reason is not None:
            self.pauses[found.reason] += 1
        self._edges.append(self._edge(route_id, found))

    def tell(self, route_id: str, why: str) -> bool:
        """Put a note that is about no gate into the explain log; False if it was there within the last minute."""
        now_us = self._now_us()
        if not 0 <= now_us - self._told_us.get((route_id, why), -TELL_US) < TELL_US:
            self._told_us[route_id, why] = now_us
            self._edges.append(EdgeRow(route_id, now_us, self._process_id, None, cap=self._cap(route_id), why=why))
            return True
        return False

    async def write(self, now_ns: int) -> None:
        """Bring to the store what is due. Raises: StoreUnavailable; it is tried again the next time."""
        due = [(route_id, signal) for route_id, signal in self._signals.items() if _is_due(signal, now_ns)]
        for start in range(0, len(due), WRITES_AT_ONCE):
            await asyncio.gather(
                *(self._write_one(route_id, signal, now_ns) for route_id, signal in due[start : start + WRITES_AT_ONCE])
            )

    async def write_edges(self) -> None:
        """Bring edges to the store. Raises: StoreUnavailable; they are kept."""
        while self._edges:
            edges = [self._edges.popleft() for _ in range(min(EDGES_AT_ONCE, len(self._edges)))]
            try:
                await self._store.explain.add_edges(edges)
            except StoreUnavailable:
                self._edges.extendleft(reversed(edges))
                raise

    async def _write_one(self, route_id: str, signal: _Signal, now_ns: int) -> None:
        written_ns, signal.written_ns, signal.changed = signal.written_ns, now_ns, False
        found, reading = signal.found, signal.found.reading
        row = SignalRow(route_id, found.reason, live_in_flight=found.live, reopens_at=found.reopens_us)
        if reading is not None:
            ok = found.error is None
            row = SignalRow(
                route_id, found.reason, live_in_flight=found.live, metrics_checked_at=reading.checked_at_us,
                metrics_ok=ok, metrics_waiting=reading.waiting, metrics_running=reading.running,
                metrics_kv_cache_permille=reading.kv_cache_permille, metrics_error=found.error,
            )  # fmt: skip
        try:
            await self._store.scheduling.put_signal(row)
        except StoreUnavailable:
            signal.written_ns, signal.changed = written_ns, True
            raise

    def _edge(self, route_id: str, found: Evaluation) -> EdgeRow:
        reading = found.reading
        edge = EdgeRow(
            route_id, self._now_us(), self._process_id, found.reason, live_in_flight=found.live, cap=self._cap(route_id)
        )
        if reading is None:
            return edge
        return EdgeRow(
            route_id, edge.at, self._process_id, found.reason, found.live, reading.waiting, reading.running,
            reading.kv_cache_permille, found.error, edge.cap,
        )  # fmt: skip


def _is_due(signal: _Signal, now_ns: int) -> bool:
    if signal.written_ns is None:
        return True
    age_ns = now_ns - signal.written_ns
    if signal.changed:
        return age_ns >= AT_ONCE_NS
    return signal.noted_ns > signal.written_ns and age_ns >= EVERY_NS
