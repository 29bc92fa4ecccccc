"""How many requests one execution takes, and at which compiled batch size (rules 10 to 15)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice, takewhile
from typing import Final

from worker.channel.records import Reason
from worker.scheduling.types import BatchPlan, ModelSpec, Request

_PIECE: Final = 32
"""Requests looked at in one go."""


def plan_batch(
    spec: ModelSpec, waiting: Iterable[Request], cost_of: Callable[[int, int], float | None] | None
) -> BatchPlan:
    """Return what to take from the front of a queue now, and the compiled size to run it at.

    The *window* is the leading run of requests with the front's variant. ``fill`` (``cost_of`` is None) runs the
    largest compiled size that the window's rows fill, else the smallest, padded; ``learned`` the size with the least
    known cost per row carried, and ``fill`` until every size was measured. Either way the front is taken: if it is
    larger than the size chosen, it gets the smallest size that holds it. Requests are never split and never reordered,
    and a front that no executable can hold comes back alone with size -1.

    Args:
        waiting: at least one request, in service order; read only as far as one dispatch can reach.
        cost_of: learned cost of (variant, batch size) in ns, None for one never measured.
    """
    requests = iter(waiting)
    front = next(requests)
    variant = front.variant
    sizes = spec.batch_sizes
    if variant < 0:
        return BatchPlan(variant, -1, 1, front.rows, Reason.NONE, growable=False)
    if sizes[0] == 0:
        return BatchPlan(variant, 0, 1, front.rows, Reason.NOT_COALESCING, growable=False)
    if front.rows > sizes[-1]:
        return BatchPlan(variant, -1, 1, front.rows, Reason.OVERSIZE, growable=False)
    if not spec.coalesces:
        size = sizes[bisect_left(sizes, front.rows)]
        return BatchPlan(variant, size, 1, front.rows, Reason.NOT_COALESCING, growable=False)

    cap = spec.max_batch_size or sizes[-1]
    reach = min(cap, sizes[-1])
    ends, other_shape = _window(front, requests, reach)
    least = bisect_left(sizes, front.rows)
    by_queue = max(bisect_right(sizes, min(ends[-1], cap)) - 1, 0)
    index = max(by_queue, least)
    if cost_of is not None:
        learned = _cheapest(spec, variant, ends, cap, least, cost_of)
        index = index if learned is None else learned
    size = sizes[index]
    taken = max(bisect_right(ends, min(size, cap)), 1)
    rows = ends[taken - 1]
    if taken == 1 and index == least > by_queue:
        reason = Reason.OVERSIZE
    elif rows == size:
        reason = Reason.FILLED
    elif rows >= cap or (taken < len(ends) and cap < size):
        reason = Reason.CAPPED
    elif taken < len(ends):
        # Enough rows wait to fill the size, but the next request does not fit in whole.
        reason = Reason.FILLED
    else:
        reason = Reason.OTHER_SHAPE if other_shape else Reason.QUEUE_DRAINED
    return BatchPlan(variant, size, taken, rows, reason, growable=ends[-1] < reach and not other_shape)


def max_batch_rows(spec: ModelSpec) -> int:
    """Return how many rows one dispatch may coalesce: the cap, or the largest compiled size; 1 without a batch axis."""
    largest = spec.batch_sizes[-1]
    return min(spec.max_batch_size or largest, largest) if largest else 1


def _window(front: Request, others: Iterator[Request], reach: int) -> tuple[list[int], bool]:
    """Return the running row totals of the window up to ``reach`` rows, and whether another shape ended it."""
    variant = front.variant
    ends = [front.rows]
    while ends[-1] < reach:
        # Every request has a row at least. In pieces: the next few may fill the batch, the queue may be long.
        piece = list(islice(others, min(reach - ends[-1], _PIECE)))
        if not piece:
            break
        same = [request.rows for request in piece if request.variant == variant]
        if len(same) < len(piece):
            same = [request.rows for request in takewhile(lambda request: request.variant == variant, piece)]
        totals = list(accumulate(same, initial=ends[-1]))[1:]
        enough = bisect_left(totals, reach) + 1
        ends += totals[:enough]
        if enough <= len(totals):
            break
        if len(same) < len(piece):
            return ends, True
    return ends, False


def _cheapest(
    spec: ModelSpec, variant: int, ends: list[int], cap: int, least: int, cost_of: Callable[[int, int], float | None]
) -> int | None:
    """Return the index of the size with the least cost per row carried, from ``least`` on; None if one is unmeasured.

    A size is taken to cost no more than any larger one. Otherwise a measurement that something disturbed would rule a
    size out for good: it would not run again, and so not be measured again. Of equal ones the size that carries more
    rows wins, then the smaller size.
    """
    costs_ns: list[float] = []
    for size in spec.batch_sizes:
        cost_ns = cost_of(variant, size)
        if cost_ns is None:
            return None
        costs_ns.append(cost_ns)
    best: tuple[float, int, int] | None = None
    bound_ns = costs_ns[-1]
    for index in range(len(costs_ns) - 1, least - 1, -1):
        bound_ns = min(bound_ns, costs_ns[index])
        rows = ends[max(bisect_right(ends, min(spec.batch_sizes[index], cap)), 1) - 1]
        score = (bound_ns / rows, -rows, index)
        if best is None or score < best:
            best = score
    return None if best is None else best[2]
