"""An upper bound on how many requests any schedule could finish in time, knowing the whole trace in advance."""

from __future__ import annotations

from heapq import heappop, heappush


def most_meetable(jobs: list[tuple[int, int]], slot_ns: int) -> int:
    """Return a bound on how many (arrival, deadline) jobs of ``slot_ns`` each one device can finish in time.

    Any schedule maps to one on a grid of slots: a job that starts at t takes the slot t // slot_ns. Starts are at least
    a slot apart, so slots are distinct; the slot begins at or after the arrival rounded down and ends before the
    deadline. On the grid, jobs are unit jobs, for which soonest-deadline-first with dropping is optimal. A batch of k
    jobs that takes at least k slots maps the same way. So the result is never below the true optimum.
    """
    pending = sorted((arrival_ns // slot_ns, deadline_ns // slot_ns) for arrival_ns, deadline_ns in jobs)
    waiting: list[int] = []
    met = slot = index = 0
    while index < len(pending) or waiting:
        if not waiting:
            slot = max(slot, pending[index][0])
        while index < len(pending) and pending[index][0] <= slot:
            heappush(waiting, pending[index][1])
            index += 1
        deadline = heappop(waiting)
        if deadline > slot:
            met += 1
            slot += 1
    return met
