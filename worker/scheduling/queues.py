"""One model's waiting requests: arrival order, withdrawal from the middle, and the soonest deadline among them.

Theory
    Two double-ended queues: committed requests, then the others; together they are *the queue*, in service order.
    A request leaves the middle by being marked ``gone``; the mark is skipped when met and swept out once half of what
    is held is gone. The soonest deadline comes from a heap whose entries are dropped the same way. So every operation
    is O(1) or O(log n) amortised, and what is held is at most twice what waits plus ``SWEEP_SLACK``.

    Most requests leave long before anybody asks for the soonest deadline, so they enter the heap only then; until then
    a lower bound is known (which saves 1 us per request).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain

from worker.scheduling.types import NO_DEADLINE, Request

SWEEP_SLACK = 64
"""Entries of requests that left which are tolerated before a sweep, so that short queues are not swept all the time."""


class RequestQueue:
    """The requests of one model that wait, oldest first, committed ones before all others.

    Attributes:
        not_before_ns: no waiting request has a deadline before this.
    """

    __slots__ = ("_committed", "_deadlines", "_fresh", "_ordinary", "_serial", "depth", "not_before_ns")

    def __init__(self) -> None:
        self._committed: deque[Request] = deque()
        self._ordinary: deque[Request] = deque()
        self._deadlines: list[tuple[int, int, Request]] = []
        self._fresh: list[Request] = []
        self._serial = 0
        self.depth = 0
        self.not_before_ns = NO_DEADLINE

    def push(self, request: Request) -> None:
        """Add a request at the end of its class."""
        (self._committed if request.committed else self._ordinary).append(request)
        self.depth += 1
        self._fresh.append(request)
        if request.deadline_ns < self.not_before_ns:
            self.not_before_ns = request.deadline_ns
        if len(self._fresh) > 2 * self.depth + SWEEP_SLACK:
            self._sweep_fresh()

    def extend(self, requests: Sequence[Request]) -> None:
        """Add requests that are not committed, in this order; at least one."""
        self._ordinary.extend(requests)
        self.depth += len(requests)
        self._fresh += requests
        self.not_before_ns = min(self.not_before_ns, min([request.deadline_ns for request in requests]))
        if len(self._fresh) > 2 * self.depth + SWEEP_SLACK:
            self._sweep_fresh()

    def front(self) -> Request | None:
        """Return the request to be served next, or None."""
        for requests in (self._committed, self._ordinary):
            while requests and requests[0].gone:
                requests.popleft()
            if requests:
                return requests[0]
        return None

    def waiting(self) -> Iterable[Request]:
        """Yield the requests in service order. The queue must not change meanwhile."""
        if self._committed:
            return _still_waiting(chain(self._committed, self._ordinary))
        if self.depth == len(self._ordinary):
            return self._ordinary
        return _still_waiting(self._ordinary)

    def take(self, count: int) -> list[Request]:
        """Remove and return the first ``count`` requests; there must be that many."""
        if not self._committed and count == self.depth == len(self._ordinary):
            taken = list(self._ordinary)
            for request in taken:
                request.gone = True
            self.depth = 0
            self._clear()
            return taken
        taken = []
        for requests in (self._committed, self._ordinary):
            while requests and len(taken) < count:
                request = requests.popleft()
                if not request.gone:
                    request.gone = True
                    taken.append(request)
        assert len(taken) == count, f"{count} requests asked of a queue of {self.depth}"
        self.depth -= count
        if not self.depth:
            self._clear()
        return taken

    def withdraw(self, request: Request) -> None:
        """Remove one waiting request, wherever it stands."""
        assert not request.gone, f"request {request.key} left the queue before"
        request.gone = True
        self.depth -= 1
        if not self.depth:
            self._clear()
        elif len(self._ordinary) + len(self._committed) > 2 * self.depth + SWEEP_SLACK:
            self._committed = deque([request for request in self._committed if not request.gone])
            self._ordinary = deque([request for request in self._ordinary if not request.gone])

    def take_expired(self, now_ns: int) -> list[Request]:
        """Remove and return the requests whose deadline is at or before ``now_ns``, soonest deadline first."""
        expired: list[Request] = []
        while self.soonest_ns() <= now_ns:
            request = heappop(self._deadlines)[2]
            self.withdraw(request)
            expired.append(request)
        return expired

    def soonest_ns(self) -> int:
        """Return the soonest deadline of any waiting request, ``NO_DEADLINE`` if there is none."""
        heap = self._deadlines
        for request in self._fresh:
            if not request.gone and request.deadline_ns != NO_DEADLINE:
                self._serial += 1
                heappush(heap, (request.deadline_ns, self._serial, request))
        self._fresh.clear()
        while heap and heap[0][2].gone:
            heappop(heap)
        if len(heap) > 2 * self.depth + SWEEP_SLACK:
            heap = self._deadlines = [entry for entry in heap if not entry[2].gone]
            heapify(heap)
        self.not_before_ns = heap[0][0] if heap else NO_DEADLINE
        return self.not_before_ns

    def held(self) -> int:
        """Return how many entries are held, of requests that wait and of ones that left and were not swept yet."""
        return max(len(self._committed) + len(self._ordinary), len(self._deadlines) + len(self._fresh))

    def _sweep_fresh(self) -> None:
        self._fresh = [request for request in self._fresh if not request.gone]

    def _clear(self) -> None:
        self._committed.clear()
        self._ordinary.clear()
        self._deadlines.clear()
        self._fresh.clear()
        self.not_before_ns = NO_DEADLINE


def _still_waiting(requests: Iterable[Request]) -> Iterator[Request]:
    for request in requests:
        if not request.gone:
            yield request
