"""``fifo``: the model whose front request is the oldest runs next; weights are ignored (rule 8)."""

from __future__ import annotations

from worker.scheduling.model import ModelState
from worker.scheduling.order import Key


def fifo_key(model: ModelState) -> Key | None:
    """Return the model's place: arrival of its front, then its name; None when nothing waits.

    A request accepted when n others wait runs after at most n dispatches (committed ones, and ones that pass a model
    which waits for more rows under ``max_queue_delay_ms``, come on top): each dispatch takes the oldest front.
    """
    front = model.queue.front()
    return None if front is None else (front.arrival_ns, front.arrival_ns, model.spec.name, model.spec.model_id)
