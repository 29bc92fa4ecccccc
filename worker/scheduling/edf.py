"""``edf``: the model with the soonest deadline anywhere in its queue runs next (rules 9 and 19)."""

from __future__ import annotations

from worker.scheduling.model import ModelState
from worker.scheduling.order import Key
from worker.scheduling.types import BatchPlan, Request


def edf_key(model: ModelState) -> Key | None:
    """Return the model's place: soonest deadline, then arrival of its front, then its name; None when nothing waits.

    Queues stay in arrival order, so a request with a soon deadline promotes its whole model. With equal deadlines the
    order is that of ``fifo``. A request never waits longer than its deadline: it runs or is dropped by then.
    """
    front = model.queue.front()
    if front is None:
        return None
    return (model.queue.soonest_ns(), front.arrival_ns, model.spec.name, model.spec.model_id)


def too_late(model: ModelState, plan: BatchPlan, now_ns: int) -> list[Request]:
    """Return the planned requests that would miss their deadline if the plan ran now: device time saved for others.

    A plan whose cost was never measured misses nothing. Committed requests are kept: their earlier stages already
    spent device time.
    """
    cost_ns = model.costs.get(plan.variant, plan.batch_size)
    if cost_ns is None:
        return []
    end_ns = now_ns + cost_ns
    late: list[Request] = []
    for request, _ in zip(model.queue.waiting(), range(plan.taken), strict=False):
        if end_ns > request.deadline_ns and not request.committed:
            late.append(request)
    return late
