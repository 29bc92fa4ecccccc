"""``fair``: device time shared by weight, divided by cost (rules 5 to 7)."""

from __future__ import annotations

from collections.abc import Collection, Container

from worker.scheduling.model import ModelState


def pick_fair(
    models: Collection[ModelState], passed_over: Container[int], now_ns: int, deficit_cap: float
) -> ModelState:
    """Return the model furthest below its share of device time, per second that its next dispatch would cost.

    priority = clamp(weight / sum(weights) - used / sum(used), -deficit_cap, +deficit_cap) / effective cost

    Both sums run over ``models``, the ones with queued work: their deficits then add up to zero, so the winner never
    has a negative one, and dividing by cost always favours the cheaper model. (Summed over idle models too, every
    contender can be over its share, where dividing by cost favours the dearer.) The clamp bounds how long a burst
    locks a model out, or lets it dominate. Ties go to the older front request, then to the name.

    No starvation: while the set of contending models stays the same and their next dispatches together cost less than
    a third of (least share x half-life), no front waits for more device time than
    ``half-life * (1 + log2(1 / least share))`` plus one dispatch. After that time a model left out has at most half of
    its share in ``used``, every other model that had more than its share has decayed below it or was served since with
    a positive deficit, and deficits that add up to zero leave no room for all others to be ahead. In rounds: that time
    divided by the cost of the cheapest dispatch, plus one.

    Args:
        models: not empty, in any order.
        passed_over: ids of models that must not win although they contend; not all of them.

    Source: the scheduling page, "fair"; which models contend is our own rule 6.
    """
    weights = 0.0
    used_total = 0.0
    used: list[float] = []
    for model in models:
        weights += model.weight
        recent = model.used.read(now_ns)
        used.append(recent)
        used_total += recent
    per_used = 1.0 / used_total if used_total > 0.0 else 0.0
    winner: ModelState | None = None
    best = 0.0
    for model, recent in zip(models, used, strict=True):
        if model.spec.model_id in passed_over:
            continue
        deficit = model.weight / weights - recent * per_used
        priority = max(-deficit_cap, min(deficit_cap, deficit)) / model.effective_cost_ns()
        if winner is None or priority > best or (priority == best and _older(model, winner)):
            winner, best = model, priority
    assert winner is not None, "no model to pick from"
    return winner


def _older(model: ModelState, other: ModelState) -> bool:
    front, other_front = model.queue.front(), other.queue.front()
    assert front is not None
    assert other_front is not None
    mine = (front.arrival_ns, model.spec.name, model.spec.model_id)
    return mine < (other_front.arrival_ns, other.spec.name, other.spec.model_id)
