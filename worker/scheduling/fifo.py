"""``fifo``: the model whose front request is the oldest runs next; weights are ignored (rule 8)."""

from __future__ import annotations

from worker.scheduling.model import ModelState
from worker.scheduling.order import Key


def fifo_key(model: ModelState) -> Key | None:
    """Return the model's place: arrival of its front, then its name; None when nothing waits.

    No starvation: each dispatch takes the oldest front, so a request accepted when n others wait runs after at most n
    dispatches, plus one for each request of the same instant (names decide among those), each committed request, and
    each time its model steps aside to wait for more rows under ``max_queue_delay_ms``.
    """
    front = model.queue.front()
    return None if front is None else (front.arrival_ns, front.arrival_ns, model.spec.name, model.spec.model_id)
