"""The rules as slow, literal code: scans instead of heaps, plans afresh instead of caching. An oracle for the tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.scheduling.batching import plan_batch
from worker.scheduling.types import (
    NO_DEADLINE,
    BatchPlan,
    Discipline,
    Dispatch,
    ModelSpec,
    Request,
    SchedulerOptions,
    Sizing,
)


@dataclass
class ReferenceModel:
    spec: ModelSpec
    weight: float
    waiting: list[Request] = field(default_factory=list)
    costs: dict[tuple[int, int], float] = field(default_factory=dict)
    runs: list[tuple[int, int]] = field(default_factory=list)

    def used(self, now_ns: int, halflife_ns: int) -> float:
        return sum(compute_ns * 0.5 ** ((now_ns - at_ns) / halflife_ns) for at_ns, compute_ns in self.runs)


class ReferenceScheduler:
    """Same calls as ``Scheduler``, returning keys."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options
        self.models: dict[int, ReferenceModel] = {}

    def add_model(self, spec: ModelSpec) -> None:
        self.models[spec.model_id] = ReferenceModel(spec, spec.weight)

    def remove_model(self, model_id: int) -> set[int]:
        return {one.key for one in self.models.pop(model_id).waiting}

    def offer(self, request: Request, now_ns: int) -> bool:
        model = self.models.get(request.model_id)
        if model is None or request.deadline_ns <= now_ns or len(model.waiting) >= self.options.max_queue_depth:
            return False
        place = sum(one.committed for one in model.waiting) if request.committed else len(model.waiting)
        model.waiting.insert(place, request)
        return True

    def cancel(self, key: int) -> bool:
        for model in self.models.values():
            for one in model.waiting:
                if one.key == key:
                    model.waiting.remove(one)
                    return True
        return False

    def expire(self, now_ns: int) -> set[int]:
        expired = set()
        for model in self.models.values():
            expired |= {one.key for one in model.waiting if one.deadline_ns <= now_ns}
            model.waiting = [one for one in model.waiting if one.deadline_ns > now_ns]
        return expired

    def next_expiry_ns(self) -> int:
        return min((one.deadline_ns for model in self.models.values() for one in model.waiting), default=NO_DEADLINE)

    def next(self, now_ns: int) -> tuple[int, BatchPlan, list[int], set[int]] | None:
        """Return (model id, plan, keys taken, keys dropped on the way), or None when idle."""
        dropped = self.expire(now_ns)
        while busy := [model for model in self.models.values() if model.waiting]:
            # Among committed requests the order of offering rules: each was promised the next turn when it came.
            committed = [(one.key, model) for model in busy for one in model.waiting if one.committed]
            model = min(committed, key=lambda pair: pair[0])[1] if committed else self._choose(busy, now_ns)
            plan = self._plan(model)
            taken = model.waiting[: plan.taken]
            if self.options.discipline is Discipline.EDF:
                cost_ns = model.costs.get((plan.variant, plan.batch_size), 0.0)
                late = [one for one in taken if now_ns + cost_ns > one.deadline_ns and not one.committed]
                if late:
                    dropped |= {one.key for one in late}
                    model.waiting = [one for one in model.waiting if one not in late]
                    continue
            del model.waiting[: plan.taken]
            return model.spec.model_id, plan, [one.key for one in taken], dropped
        return None

    def record(self, dispatch: Dispatch, compute_ns: int, now_ns: int) -> None:
        model = self.models.get(dispatch.model_id)
        if model is not None and dispatch.batch_size >= 0:
            pair = (dispatch.variant, dispatch.batch_size)
            known = model.costs.get(pair)
            alpha = self.options.cost_ema_alpha
            model.costs[pair] = compute_ns if known is None else known + alpha * (compute_ns - known)
            model.runs.append((now_ns, compute_ns))

    def priorities(self, now_ns: int) -> dict[int, float]:
        """Return every contending model's priority under ``fair``, for comparison with a tolerance."""
        busy = [model for model in self.models.values() if model.waiting]
        weights = sum(model.weight for model in busy)
        used = {model.spec.model_id: model.used(now_ns, self.options.ema_halflife_ns) for model in busy}
        total = sum(used.values())
        cap = self.options.recency_penalty_cap
        priorities = {}
        for model in busy:
            deficit = model.weight / weights - (used[model.spec.model_id] / total if total else 0.0)
            plan = self._plan(model)
            cost_ns = model.costs.get((plan.variant, plan.batch_size), self.options.default_cost_ns)
            discount = self.options.coalescing_discount if plan.taken > 1 else 0.0
            priorities[model.spec.model_id] = max(-cap, min(cap, deficit)) / (cost_ns * (1 - discount))
        return priorities

    def _plan(self, model: ReferenceModel) -> BatchPlan:
        cost_of = None if self.options.sizing is Sizing.FILL else lambda variant, size: model.costs.get((variant, size))
        return plan_batch(model.spec, model.waiting, cost_of)

    def _choose(self, busy: list[ReferenceModel], now_ns: int) -> ReferenceModel:
        if self.options.discipline is Discipline.FIFO:
            return min(busy, key=lambda model: (model.waiting[0].arrival_ns, model.spec.name))
        if self.options.discipline is Discipline.EDF:
            return min(
                busy,
                key=lambda model: (
                    min(one.deadline_ns for one in model.waiting),
                    model.waiting[0].arrival_ns,
                    model.spec.name,
                ),
            )
        priorities = self.priorities(now_ns)
        best = max(priorities.values())
        tied = [model for model in busy if priorities[model.spec.model_id] == best]
        return min(tied, key=lambda model: (model.waiting[0].arrival_ns, model.spec.name))
