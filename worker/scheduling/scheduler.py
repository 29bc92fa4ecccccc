"""The scheduler: queues of requests in, one dispatch after another out. Pure: no clock, no I/O, no threads.

Theory
    The owner of the device calls ``offer`` and ``cancel`` as records arrive, ``next`` when the device is free,
    ``record`` when an execution ended, and ``expire`` when ``next_expiry_ns`` has come while the device is busy. Every
    request that ``offer`` accepted comes back exactly once: in a Dispatch, or in a Shed that ``cancel``, ``expire``
    or ``take_sheds`` returns.

    Order of a decision: one committed request, if any waits; else the discipline chooses a model; then the batch is
    planned from that model's front (rule 3). Requests that expired, or under ``edf`` cannot finish in time, are dropped
    first and the decision is made again without them, so the batch is filled by live ones (rules 19 and 20).

    Cost: O(requests taken), plus O(log n) in the models with queued work under ``fifo`` and ``edf``, plus one pass over
    the models with queued work under ``fair``, where one dispatch moves every model's deficit. Models that are loaded
    but have nothing queued cost nothing (rule 4).

Invariants
    ``len(_requests)`` is the sum of all queue depths; ``_busy`` holds exactly the models with a depth above 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engines.errors import AlreadyExists, Kind, NotFound
from worker.scheduling import admission
from worker.scheduling.edf import edf_key, too_late
from worker.scheduling.fair import pick_fair
from worker.scheduling.fifo import fifo_key
from worker.scheduling.model import ModelState
from worker.scheduling.order import Key, LazyOrder
from worker.scheduling.types import (
    NO_DEADLINE,
    BatchPlan,
    Discipline,
    Dispatch,
    Idle,
    ModelSpec,
    Request,
    SchedulerOptions,
    SchedulerSnapshot,
    Shed,
    WaitUntil,
)

_IDLE = Idle()
_NONE_PASSED_OVER: frozenset[int] = frozenset()
_SWEEP_SLACK = 64


class Scheduler:
    """Decides what one device runs next. Not thread-safe: one loop owns it."""

    def __init__(self, settings: SchedulerOptions) -> None:
        """Raises InvalidInput for options outside their range."""
        admission.check_options(settings)
        self._options = settings
        self._models: dict[int, ModelState] = {}
        self._busy: dict[int, ModelState] = {}
        self._patient: dict[int, ModelState] = {}
        self._requests: dict[int, Request] = {}
        self._committed: deque[Request] = deque()
        self._sheds: list[Shed] = []
        self._expiries = LazyOrder(self._expiry_key)
        self._no_expiry_before_ns = NO_DEADLINE
        self._turns = None if settings.discipline is Discipline.FAIR else LazyOrder(self._turn_key)
        self._key = edf_key if settings.discipline is Discipline.EDF else fifo_key
        self._seq = 0
        self._running_seq = 0

    # Models

    def add_model(self, spec: ModelSpec) -> None:
        """Make a model known. Raises InvalidInput for an impossible spec, AlreadyExists for an id in use."""
        admission.check_spec(spec)
        if spec.model_id in self._models:
            raise AlreadyExists(f"model id {spec.model_id} is in use by {self._models[spec.model_id].spec.name!r}")
        model = self._models[spec.model_id] = ModelState(spec, self._options)
        if spec.max_queue_delay_ns:
            self._patient[spec.model_id] = model

    def remove_model(self, model_id: int, now_ns: int) -> None:
        """Forget a model; what waited for it comes back from ``take_sheds`` as NOT_READY.

        An execution of it that runs now may still be recorded, to no effect. Raises NotFound for an unknown id.
        """
        model = self._model(model_id)
        text = f"model {model.spec.name!r} was unloaded while the request waited"
        for request in model.queue.take(model.queue.depth):
            self._left(request)
            self._sheds.append(Shed(request, Kind.NOT_READY, "unloaded", text))
        del self._models[model_id]
        self._busy.pop(model_id, None)
        self._patient.pop(model_id, None)
        self._expiries.forget(model_id)
        if self._turns is not None:
            self._turns.forget(model_id)

    def set_weight(self, model_id: int, weight: float, now_ns: int) -> None:
        """Change a model's share from the next decision on. Raises NotFound, or InvalidInput for a weight <= 0."""
        model = self._model(model_id)
        admission.check_weight(model.spec.name, weight)
        model.weight = weight

    # Requests in

    def offer(self, request: Request, now_ns: int) -> Shed | None:
        """Queue a request; None if it was accepted, else its outcome, with nothing kept."""
        model = self._models.get(request.model_id)
        shed = admission.refusal(request, model, self._options.max_queue_depth, now_ns)
        if shed is not None:
            if model is not None:
                model.count_shed(shed.reason)
            return shed
        assert model is not None
        assert request.key not in self._requests, f"request key {request.key} is in use"
        queue = model.queue
        was_not_before_ns = queue.not_before_ns
        request.gone = False
        queue.push(request)
        self._requests[request.key] = request
        if request.committed:
            self._committed.append(request)
        self._grew(model, was_not_before_ns, committed=request.committed)
        return None

    def offer_many(self, requests: Sequence[Request], now_ns: int) -> list[Shed]:
        """Queue requests in the order given; return the outcomes of those that were not accepted.

        Ordinary requests of one model that all fit in, which is what a busy frontend sends, are queued together.
        """
        # For one or two, queueing together costs more than it saves.
        model = self._models.get(requests[0].model_id) if len(requests) > 2 else None
        if model is None or not admission.all_fit(requests, model, self._options.max_queue_depth, now_ns):
            return [shed for request in requests if (shed := self.offer(request, now_ns)) is not None]
        was_not_before_ns = model.queue.not_before_ns
        model.queue.extend(requests)
        self._requests.update([(request.key, request) for request in requests])
        self._grew(model, was_not_before_ns, committed=False)
        return []

    def cancel(self, key: int, now_ns: int) -> Shed | None:
        """Withdraw a waiting request; None if it does not wait: dispatched, answered or never accepted."""
        request = self._requests.get(key)
        if request is None:
            return None
        model = self._models[request.model_id]
        self._withdraw(model, request)
        model.count_shed("cancelled")
        return Shed(request, Kind.CANCELLED, "cancelled", "the caller cancelled the request before it ran")

    def expire(self, now_ns: int) -> list[Shed]:
        """Drop and return every waiting request whose deadline is at or before ``now_ns``, device busy or not."""
        sheds: list[Shed] = []
        if now_ns < self._no_expiry_before_ns:
            return sheds
        while self.next_expiry_ns() <= now_ns:
            key = self._expiries.first()
            assert key is not None
            model = self._models[key[3]]
            for request in model.queue.take_expired(now_ns):
                self._left(request)
                model.count_shed("deadline")
                sheds.append(admission.expired(request, model))
            self._queue_shrank(model)
        return sheds

    def next_expiry_ns(self) -> int:
        """Return when ``expire`` will have something to drop; ``NO_DEADLINE`` if never."""
        key = self._expiries.first()
        self._no_expiry_before_ns = NO_DEADLINE if key is None else key[0]
        return self._no_expiry_before_ns

    @property
    def queued(self) -> int:
        """Requests that wait, over all models."""
        return len(self._requests)

    @property
    def no_expiry_before_ns(self) -> int:
        """A time before which ``expire`` has nothing to drop, at no cost; ``expire`` at that time makes it exact."""
        return self._no_expiry_before_ns

    # Decisions

    def next(self, now_ns: int) -> Dispatch | WaitUntil | Idle:
        """Return what the device should run now; its requests are no longer queued. Call ``take_sheds`` after it.

        WaitUntil comes only while an earlier dispatch was not recorded yet and all queued work may wait for more rows
        (rule 16): a free device never waits for company.
        """
        if now_ns >= self._no_expiry_before_ns:
            self._sheds.extend(self.expire(now_ns))
        while self._busy:
            model = self._choose(now_ns)
            if isinstance(model, WaitUntil):
                return model
            plan = model.plan()
            if self._options.discipline is Discipline.EDF:
                late = too_late(model, plan, now_ns)
                if late:
                    self._drop_hopeless(model, late, model.cost_ns(plan), now_ns)
                    continue
            return self._dispatched(model, plan, now_ns)
        return _IDLE

    def next_settled(self, start_ns: int) -> Dispatch | None:
        """Return what ``next`` would return at ``start_ns``, a moment from now, if that is certain enough; else None.

        For a caller who prepares a batch while an earlier one still runs. Certain: one model alone has work, its batch
        is as large as it can get, and no deadline gets in the way. Only the first request of another model, arriving
        in that moment, may come one dispatch later than it would have.
        """
        if len(self._busy) != 1 or self._committed:
            return None
        (model,) = self._busy.values()
        plan = model.plan()
        if plan.growable or plan.batch_size < 0:
            return None
        if model.queue.not_before_ns <= start_ns and model.queue.soonest_ns() <= start_ns:
            return None
        if self._options.discipline is Discipline.EDF and too_late(model, plan, start_ns):
            return None
        return self._dispatched(model, plan, start_ns)

    def take_sheds(self) -> list[Shed]:
        """Return, once, what ``next`` dropped and what ``remove_model`` left without a model."""
        sheds, self._sheds = self._sheds, []
        return sheds

    # Executions

    def record(self, dispatch: Dispatch, compute_ns: int, now_ns: int) -> None:
        """Take note that an execution ended: learn its cost, charge its model, count it.

        Call it once per Dispatch. ``compute_ns`` is device time only, without weight loading; 0 if nothing ran (no
        executable, or it failed before the device): then nothing is learned, charged or counted.
        """
        if dispatch.seq == self._running_seq:
            self._running_seq = 0
        model = self._models.get(dispatch.model_id)
        if model is not None and compute_ns > 0 and dispatch.batch_size >= 0:
            model.ran(dispatch, compute_ns, now_ns)

    def seed_cost(self, model_id: int, variant: int, batch_size: int, compute_ns: int) -> None:
        """Learn a cost from an execution that served nobody, as in warm-up. Raises NotFound for an unknown model."""
        model = self._model(model_id)
        model.costs.observe(variant, batch_size, compute_ns)
        model.changed()

    def estimate_ns(self, model_id: int, variant: int, batch_size: int) -> int | None:
        """Return the learned cost, None if that size never ran. Raises NotFound for an unknown model."""
        known = self._model(model_id).costs.get(variant, batch_size)
        return None if known is None else round(known)

    def snapshot(self, now_ns: int) -> SchedulerSnapshot:
        """Return counters and gauges of every loaded model; O(models)."""
        return SchedulerSnapshot(
            discipline=self._options.discipline,
            sizing=self._options.sizing,
            queued=len(self._requests),
            dispatches=self._seq,
            models=tuple(self._models[model_id].snapshot(now_ns) for model_id in sorted(self._models)),
        )

    # Inside

    def _model(self, model_id: int) -> ModelState:
        model = self._models.get(model_id)
        if model is None:
            raise NotFound(f"model {model_id} is not loaded")
        return model

    def _dispatched(self, model: ModelState, plan: BatchPlan, start_ns: int) -> Dispatch:
        """Take a plan's requests out of the queue."""
        requests = model.queue.take(plan.taken)
        waiting = self._requests
        for request in requests:
            del waiting[request.key]
        model.waits.observe([start_ns - request.arrival_ns for request in requests])
        if self._committed:
            self._trim_committed()
        self._queue_shrank(model)
        self._seq += 1
        self._running_seq = self._seq
        return Dispatch(self._seq, model.spec.model_id, plan.variant, plan.batch_size, plan.rows, requests, plan.reason)

    def _grew(self, model: ModelState, was_not_before_ns: int, *, committed: bool) -> None:
        """Take note that a model's queue got more requests, and of what its bound was before."""
        queue = model.queue
        model_id = model.spec.model_id
        model.grew(committed=committed)
        soonest_ns = queue.not_before_ns
        if soonest_ns < was_not_before_ns:
            self._expiries.update((soonest_ns, 0, "", model_id))
            self._no_expiry_before_ns = min(self._no_expiry_before_ns, soonest_ns)
        elif model_id in self._busy and not committed:
            return
        self._busy[model_id] = model
        if self._turns is not None:
            self._note_turn(model)

    def _choose(self, now_ns: int) -> ModelState | WaitUntil:
        """Return the model to run; something is queued."""
        if self._committed:
            return self._models[self._committed[0].model_id]
        if len(self._busy) == 1 and not self._patient:
            # Every discipline picks the only candidate; scoring it would be half the cost of a lone dispatch.
            (model,) = self._busy.values()
            return model
        passed_over: frozenset[int] | set[int] = _NONE_PASSED_OVER
        if self._patient:
            held = {
                model_id: until_ns
                for model_id, model in self._patient.items()
                if model.queue.depth and (until_ns := model.held_until_ns()) > now_ns
            }
            if len(held) < len(self._busy):
                passed_over = set(held)
            elif self._running_seq:
                return WaitUntil(min(held.values()))
        if self._turns is None:
            return pick_fair(self._busy.values(), passed_over, now_ns, self._options.recency_penalty_cap)
        key = self._turns.first_outside(passed_over)
        assert key is not None, "a model is busy but has no turn"
        return self._models[key[3]]

    def _drop_hopeless(self, model: ModelState, late: list[Request], cost_ns: float, now_ns: int) -> None:
        for request in late:
            self._withdraw(model, request)
            model.count_shed("laxity")
            self._sheds.append(admission.hopeless(request, model, cost_ns, now_ns))

    def _withdraw(self, model: ModelState, request: Request) -> None:
        model.queue.withdraw(request)
        self._left(request)
        self._queue_shrank(model)

    def _left(self, request: Request) -> None:
        del self._requests[request.key]
        if request.committed:
            self._trim_committed()

    def _trim_committed(self) -> None:
        """Let the first committed request that still waits be the first entry."""
        committed = self._committed
        while committed and committed[0].gone:
            committed.popleft()
        if len(committed) > 2 * len(self._requests) + _SWEEP_SLACK:
            self._committed = deque([request for request in committed if not request.gone])

    def _queue_shrank(self, model: ModelState) -> None:
        model.changed()
        if model.queue.depth:
            self._note_turn(model)
        else:
            self._busy.pop(model.spec.model_id, None)

    def _note_turn(self, model: ModelState) -> None:
        if self._turns is not None:
            key = self._key(model)
            assert key is not None
            self._turns.update(key)

    def _turn_key(self, model_id: int) -> Key | None:
        return self._key(self._models[model_id])

    def _expiry_key(self, model_id: int) -> Key | None:
        soonest_ns = self._models[model_id].queue.soonest_ns()
        return None if soonest_ns == NO_DEADLINE else (soonest_ns, 0, "", model_id)
