"""All that the scheduler keeps of one loaded model."""

from __future__ import annotations

from bisect import bisect_left

from worker.scheduling.batching import max_batch_rows, plan_batch
from worker.scheduling.cost import LearnedCosts
from worker.scheduling.ema import DecayedSum
from worker.scheduling.queues import RequestQueue
from worker.scheduling.types import BatchPlan, Dispatch, ModelSnapshot, ModelSpec, SchedulerOptions, Sizing
from worker.scheduling.waits import ROW_BOUNDS, WaitHistogram


class ModelState:
    """Queue, learned costs, recent use and counters of one model."""

    __slots__ = (
        "_compute_ns", "_dispatches", "_effective_cost_ns", "_options", "_padding_rows", "_plan", "_requests",
        "_row_counts", "_rows", "_sheds", "_sizes", "costs", "queue", "spec", "used", "waits", "weight",
    )  # fmt: skip

    def __init__(self, spec: ModelSpec, options: SchedulerOptions) -> None:
        self.spec = spec
        self.weight = spec.weight
        self.queue = RequestQueue()
        self.costs = LearnedCosts(options.cost_ema_alpha)
        self.used = DecayedSum(options.ema_halflife_ns)
        self.waits = WaitHistogram()
        self._options = options
        self._plan: BatchPlan | None = None
        self._effective_cost_ns = 0.0
        self._dispatches = 0
        self._requests = 0
        self._rows = 0
        self._padding_rows = 0
        self._compute_ns = 0
        self._sizes: dict[int, int] = {}
        self._row_counts = [0] * (len(ROW_BOUNDS) + 1)
        self._sheds: dict[str, int] = {}

    def plan(self) -> BatchPlan:
        """Return what would be dispatched now; something must be queued. Kept until the queue or a cost changes."""
        plan = self._plan
        if plan is None:
            cost_of = self.costs.get if self._options.sizing is Sizing.LEARNED else None
            plan = self._plan = plan_batch(self.spec, self.queue.waiting(), cost_of)
            self._effective_cost_ns = 0.0
        return plan

    def effective_cost_ns(self) -> float:
        """Return the planned dispatch's expected cost, less the discount for coalescing (rule 7); > 0."""
        plan = self._plan or self.plan()
        if not self._effective_cost_ns:
            # Only models that contend are compared.
            discount = self._options.coalescing_discount if plan.taken > 1 else 0.0
            self._effective_cost_ns = max(self.cost_ns(plan), 1.0) * (1.0 - discount)
        return self._effective_cost_ns

    def cost_ns(self, plan: BatchPlan) -> float:
        """Return the learned cost of a plan, or the default for one that never ran."""
        known = self.costs.get(plan.variant, plan.batch_size)
        return self._options.default_cost_ns if known is None else known

    def grew(self, *, committed: bool) -> None:
        """A request was queued: a plan that could not have taken it stays as it is."""
        if committed or (self._plan is not None and self._plan.growable):
            self._plan = None

    def changed(self) -> None:
        """The queue's front part, or a cost, changed."""
        self._plan = None

    def held_until_ns(self) -> int:
        """Return until when the planned batch may wait for more rows (rule 16); a past time if it may not.

        Until the front is ``max_queue_delay_ns`` old, but never so long that the soonest deadline in the batch would
        be missed by the learned cost.
        """
        plan = self.plan()
        front = self.queue.front()
        if front is None or front.committed or not plan.growable:
            return 0
        latest_start_ns = self.queue.soonest_ns() - int(self.cost_ns(plan))
        return min(front.arrival_ns + self.spec.max_queue_delay_ns, latest_start_ns)

    def count_shed(self, reason: str) -> None:
        """Count a request that was refused or dropped."""
        self._sheds[reason] = self._sheds.get(reason, 0) + 1

    def ran(self, dispatch: Dispatch, compute_ns: int, now_ns: int) -> None:
        """Learn from an execution and count it."""
        self.costs.observe(dispatch.variant, dispatch.batch_size, compute_ns)
        self.used.add(compute_ns / 1e9, now_ns)
        self._plan = None
        self._dispatches += 1
        self._requests += len(dispatch.requests)
        self._rows += dispatch.rows
        self._padding_rows += max(dispatch.batch_size - dispatch.rows, 0)
        self._compute_ns += compute_ns
        self._sizes[dispatch.batch_size] = self._sizes.get(dispatch.batch_size, 0) + 1
        self._row_counts[bisect_left(ROW_BOUNDS, dispatch.rows)] += 1

    def snapshot(self, now_ns: int) -> ModelSnapshot:
        """Return the model's counters and gauges."""
        return ModelSnapshot(
            model_id=self.spec.model_id,
            name=self.spec.name,
            weight=self.weight,
            queue_depth=self.queue.depth,
            dispatches=self._dispatches,
            requests=self._requests,
            rows=self._rows,
            padding_rows=self._padding_rows,
            compute_ns=self._compute_ns,
            recent_compute_s=self.used.read(now_ns),
            wait_p50_ns=self.waits.quantile_ns(0.50),
            wait_p99_ns=self.waits.quantile_ns(0.99),
            wait_sum_ns=self.waits.sum_ns,
            wait_counts=self.waits.counts(),
            row_counts=tuple(self._row_counts),
            dispatched_sizes=dict(self._sizes),
            sheds=dict(self._sheds),
            max_batch_rows=max_batch_rows(self.spec),
        )
