"""Deterministic simulation of one worker: the real scheduler, a virtual clock, a fake device, seeded randomness.

The simulator owns the only clock (an integer) and an event heap. It draws arrivals, bursts, cancels, costs and slow
loads from one seeded generator, plays the device, and after each step checks what must always hold (``check``). Every
event goes into a hash: the same scenario and seed give the same hash.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from engines.errors import Kind
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import (
    NO_DEADLINE,
    Discipline,
    Dispatch,
    Idle,
    ModelSpec,
    Request,
    SchedulerOptions,
    Shed,
    Sizing,
)

MS = 1_000_000
SECOND = 1_000_000_000
SCENARIOS = Path(__file__).parent / "scenarios"


@dataclass(frozen=True, slots=True)
class SimModel:
    """A model and its traffic. Costs: one run takes ``run_ms + row_ms * size``, times a jitter.

    ``backlog`` keeps that many requests waiting from ``from_s`` on; ``rate`` is Poisson arrivals per second (with
    ``heavy_tail`` the gaps are Pareto); ``burst`` requests come at once every ``burst_every_s``. ``load_ms`` is how
    long the first run waits for weights: the device is taken, but it is not compute. ``arrivals`` are recorded ones,
    as (seconds, rows).
    """

    name: str
    sizes: tuple[int, ...] = (1, 8, 32)
    run_ms: float = 1.0
    row_ms: float = 0.0
    jitter: float = 0.0
    variants: int = 1
    coalesces: bool = True
    weight: float = 1.0
    max_batch_size: int = 0
    max_queue_delay_ms: float = 0.0
    rate: float = 0.0
    heavy_tail: bool = False
    burst: int = 0
    burst_every_s: float = 1.0
    backlog: int = 0
    arrivals: tuple[tuple[float, int], ...] = ()
    from_s: float = 0.0
    until_s: float = 1e9
    rows: tuple[int, ...] = (1,)
    budget_ms: tuple[float, float] = (30_000.0, 30_000.0)
    no_deadline: float = 0.0
    cancels: float = 0.0
    committed: float = 0.0
    unknown_shape: float = 0.0
    load_ms: float = 0.0
    remove_at_s: float = 0.0
    back_at_s: float = 0.0
    new_weight_at_s: float = 0.0
    new_weight: float = 1.0

    def cost_ns(self, size: int) -> int:
        """Return the device time of one run without jitter."""
        return round((self.run_ms + self.row_ms * max(size, 1)) * MS)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate, and in ``expect`` what must come out (read by the tests)."""

    name: str
    models: tuple[SimModel, ...]
    discipline: Discipline = Discipline.FAIR
    sizing: Sizing = Sizing.FILL
    duration_s: float = 1.0
    halflife_s: float = 30.0
    max_queue_depth: int = 1024
    warm: bool = False
    seed: int = 0
    expect: dict[str, Any] = field(default_factory=dict)


def load_scenario(path: Path) -> Scenario:
    """Return the scenario of a YAML file; unknown keys raise TypeError with their name."""
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    models = []
    for entry in raw.pop("models"):
        for key in ("sizes", "rows", "budget_ms"):
            if key in entry:
                entry[key] = tuple(entry[key])
        models.append(SimModel(**entry))
    discipline = Discipline(raw.pop("discipline", "fair"))
    sizing = Sizing(raw.pop("sizing", "fill"))
    return Scenario(name=path.stem, models=tuple(models), discipline=discipline, sizing=sizing, **raw)


def random_scenario(seed: int) -> Scenario:
    """Return a small scenario drawn from ``seed``: any discipline and sizing, one to six models with odd traffic."""
    rng = random.Random(seed)
    models = []
    for index in range(rng.randint(1, 6)):
        sizes = rng.choice([(1,), (1, 8, 32), (8,), (4, 16), (2, 3, 5), (0,), (1, 2, 4, 8)])
        model = SimModel(
            name=f"m{index}",
            sizes=sizes,
            run_ms=rng.choice([0.1, 1.0, 5.0, 20.0]),
            row_ms=rng.choice([0.0, 0.05, 0.5]),
            jitter=rng.choice([0.0, 0.2]),
            variants=rng.randint(1, 3),
            coalesces=sizes != (0,) and rng.random() < 0.8,
            weight=rng.choice([0.5, 1.0, 2.0, 8.0]),
            max_batch_size=rng.choice([0, 0, 1, 4, 6]),
            max_queue_delay_ms=rng.choice([0.0, 0.0, 0.0, 5.0]),
            rate=rng.choice([10.0, 200.0, 2000.0]),
            heavy_tail=rng.random() < 0.3,
            burst=rng.choice([0, 0, 30, 80]),
            burst_every_s=rng.uniform(0.05, 0.3),
            from_s=rng.choice([0.0, 0.1]),
            rows=(1,) if sizes == (0,) else rng.choice([(1,), (1, 8), (1, 2, 3, 7), (1, 40)]),
            budget_ms=rng.choice([(30_000.0, 30_000.0), (5.0, 100.0), (1.0, 10.0)]),
            no_deadline=rng.choice([0.0, 0.3]),
            cancels=rng.choice([0.0, 0.05, 0.5]),
            committed=rng.choice([0.0, 0.0, 0.1]),
            unknown_shape=rng.choice([0.0, 0.05]),
            load_ms=rng.choice([0.0, 30.0]),
            remove_at_s=rng.choice([0.0, 0.0, 0.0, 0.2]),
            back_at_s=rng.choice([0.0, 0.25]),
            new_weight_at_s=rng.choice([0.0, 0.15]),
            new_weight=3.0,
        )
        models.append(model)
    return Scenario(
        name=f"random-{seed}",
        models=tuple(models),
        discipline=rng.choice(list(Discipline)),
        sizing=rng.choice(list(Sizing)),
        duration_s=0.4,
        halflife_s=rng.choice([0.05, 1.0, 30.0]),
        max_queue_depth=rng.choice([5, 50, 1024]),
        warm=rng.random() < 0.5,
        seed=seed,
    )


@dataclass(slots=True)
class Result:
    """What a simulation did; counts by model name."""

    trace_hash: str = ""
    requests: int = 0
    dispatches: int = 0
    compute_ns: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    padding: dict[str, int] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    waits_ns: dict[str, list[int]] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    met: int = 0
    missed: int = 0
    worst_front_wait_ns: dict[str, int] = field(default_factory=dict)

    def share(self, name: str) -> float:
        """Return the model's part of all device time."""
        return self.compute_ns[name] / sum(self.compute_ns.values())


class Simulation:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, emit: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.now_ns = 0
        self.result = Result()
        self.scheduler = Scheduler(
            SchedulerOptions(
                discipline=scenario.discipline,
                sizing=scenario.sizing,
                ema_halflife_ns=round(scenario.halflife_s * SECOND),
                max_queue_depth=scenario.max_queue_depth,
            )
        )
        self._rng = random.Random(scenario.seed)
        self._emit = emit
        self._hash = hashlib.blake2b(digest_size=16)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0
        self._next_id = 0
        self._ids: dict[str, int] = {}
        self._models: dict[int, SimModel] = {}
        self._cold: set[int] = set()
        self._running: Dispatch | None = None
        # The oracle: per model id, waiting requests in order, committed ones apart; and every key's state.
        self._waiting: dict[int, tuple[dict[int, Request], dict[int, Request]]] = {}
        self._state: dict[int, str] = {}
        self._accepted_at: dict[int, tuple[int, int]] = {}
        self._accepted_then: Counter[int] = Counter()
        self._front_since: dict[int, int] = {}
        self._committed_runs = 0
        self._patient = any(model.max_queue_delay_ms for model in scenario.models)

    def run(self) -> Result:
        """Play the scenario to its end, let the queues drain, and return what happened."""
        for model in self.scenario.models:
            result = self.result
            for table in (result.compute_ns, result.rows, result.padding, result.runs, result.worst_front_wait_ns):
                table[model.name] = 0
            result.waits_ns[model.name] = []
            self._add(model)
            self._plan_traffic(model)
        end_ns = round(self.scenario.duration_s * SECOND)
        while True:
            at_ns = min(self._events[0][0] if self._events else NO_DEADLINE, self.scheduler.next_expiry_ns())
            if at_ns == NO_DEADLINE or (at_ns > end_ns and self.scenario.expect.get("stop_at_end")):
                break
            assert at_ns >= self.now_ns, "time ran backwards"
            self.now_ns = at_ns
            while self._events and self._events[0][0] == at_ns:
                heappop(self._events)[2]()
            for shed in self.scheduler.expire(at_ns):
                assert shed.request.deadline_ns == at_ns, "an expiry was late"
                self._answer(shed)
            if self._running is None:
                self._decide()
            self._check()
        if not self.scenario.expect.get("stop_at_end"):
            self._check_at_rest()
        self.result.trace_hash = self._hash.hexdigest()
        return self.result

    def waiting_since_ns(self, name: str) -> int:
        """Return how long the model's front has waited, as of the simulation's end."""
        since_ns = self._front_since.get(self._ids[name], self.now_ns)
        return self.now_ns - since_ns

    # Events

    def _at(self, at_ns: int, event: Callable[[], None]) -> None:
        self._serial += 1
        heappush(self._events, (at_ns, self._serial, event))

    def _note(self, what: str, *values: object) -> None:
        line = f"{self.now_ns / MS:12.3f} ms  {what:<10} {' '.join(map(str, values))}"
        self._hash.update(line.encode())
        if self._emit is not None:
            self._emit(line)

    def _add(self, model: SimModel) -> None:
        self._next_id += 1
        model_id = self._ids[model.name] = self._next_id
        self._models[model_id] = model
        self._cold.add(model_id)
        self._waiting[model_id] = ({}, {})
        spec = ModelSpec(
            model_id=model_id, name=model.name, batch_sizes=model.sizes, variants=model.variants,
            coalesces=model.coalesces, weight=model.weight, max_batch_size=model.max_batch_size,
            max_queue_delay_ns=round(model.max_queue_delay_ms * MS),
        )  # fmt: skip
        self.scheduler.add_model(spec)
        if self.scenario.warm:
            for variant in range(model.variants):
                for size in model.sizes:
                    self.scheduler.seed_cost(model_id, variant, size, model.cost_ns(size))
        self._note("add", model.name)

    def _remove(self, model: SimModel) -> None:
        model_id = self._ids.pop(model.name)
        self._note("remove", model.name)
        self.scheduler.remove_model(model_id, self.now_ns)
        for shed in self.scheduler.take_sheds():
            assert shed.kind is Kind.NOT_READY
            self._answer(shed)
        assert not any(self._waiting.pop(model_id)), "a removed model kept requests"

    def _plan_traffic(self, model: SimModel) -> None:
        start_ns = round(model.from_s * SECOND)
        if model.rate:
            self._at(start_ns + self._gap_ns(model), lambda: self._arrive(model))
        if model.burst:
            self._at(start_ns + round(model.burst_every_s * SECOND), lambda: self._burst(model))
        for at_s, rows in model.arrivals:
            self._at(round(at_s * SECOND), lambda rows=rows: self._offer(replace(model, rows=(rows,))))
        if model.backlog:
            self._at(start_ns, lambda: self._refill(model))
        if model.remove_at_s:
            self._at(round(model.remove_at_s * SECOND), lambda: self._remove(model))
            if model.back_at_s > model.remove_at_s:
                self._at(round(model.back_at_s * SECOND), lambda: self._add(model))
        if model.new_weight_at_s:
            self._at(round(model.new_weight_at_s * SECOND), lambda: self._reweight(model))

    def _reweight(self, model: SimModel) -> None:
        if model.name in self._ids:
            self._note("weight", model.name, model.new_weight)
            self.scheduler.set_weight(self._ids[model.name], model.new_weight, self.now_ns)

    def _gap_ns(self, model: SimModel) -> int:
        # A Pareto gap with shape 1.5 has mean 3: a third of it keeps the rate.
        gap_s = self._rng.paretovariate(1.5) / 3 if model.heavy_tail else self._rng.expovariate(1.0)
        return max(1, round(gap_s / model.rate * SECOND))

    def _arriving(self, model: SimModel) -> bool:
        return self.now_ns < min(self.scenario.duration_s, model.until_s) * SECOND

    def _arrive(self, model: SimModel) -> None:
        if self._arriving(model):
            self._offer(model)
            self._at(self.now_ns + self._gap_ns(model), lambda: self._arrive(model))

    def _burst(self, model: SimModel) -> None:
        if self._arriving(model):
            for _ in range(model.burst):
                self._offer(model)
            self._at(self.now_ns + round(model.burst_every_s * SECOND), lambda: self._burst(model))

    def _refill(self, model: SimModel) -> None:
        while self._arriving(model) and len(self._waiting[self._ids[model.name]][1]) < model.backlog:
            self._offer(model)

    def _offer(self, model: SimModel) -> None:
        rng = self._rng
        self.result.requests += 1
        key = self.result.requests
        low, high = model.budget_ms
        budget_ns = round((low if low == high else rng.uniform(low, high)) * MS)
        request = Request(
            key=key,
            model_id=self._ids.get(model.name, 10**9),
            variant=-1 if rng.random() < model.unknown_shape else rng.randrange(model.variants),
            rows=rng.choice(model.rows),
            arrival_ns=self.now_ns,
            deadline_ns=NO_DEADLINE if rng.random() < model.no_deadline else self.now_ns + budget_ns,
            committed=rng.random() < model.committed,
        )
        self._note("offer", model.name, key, f"rows={request.rows} variant={request.variant}")
        queued = sum(len(committed) + len(ordinary) for committed, ordinary in self._waiting.values())
        shed = self.scheduler.offer(request, self.now_ns)
        self._state[key] = "waiting"
        if shed is not None:
            assert shed.request is request
            self._answer(shed)
            return
        self._waiting[request.model_id][0 if request.committed else 1][key] = request
        assert sum(map(len, self._waiting[request.model_id])) <= self.scenario.max_queue_depth
        self._accepted_then[self.now_ns] += 1
        self._accepted_at[key] = (self.result.dispatches, queued - self._committed_runs)
        self._front_since.setdefault(request.model_id, self.now_ns)
        if rng.random() < model.cancels:
            self._at(self.now_ns + round(rng.expovariate(1.0) * 10 * MS), lambda: self._cancel(key))

    def _cancel(self, key: int) -> None:
        shed = self.scheduler.cancel(key, self.now_ns)
        assert (shed is not None) == (self._state[key] == "waiting"), "cancel must find exactly what waits"
        self._note("cancel", key, shed is not None)
        if shed is not None:
            assert shed.kind is Kind.CANCELLED
            self._answer(shed)

    # The device

    def _decide(self) -> None:
        while self._running is None:
            decision = self.scheduler.next(self.now_ns)
            for shed in self.scheduler.take_sheds():
                self._answer(shed)
            if isinstance(decision, Idle):
                assert not any(any(queues) for queues in self._waiting.values()), "idle with work queued"
                return
            assert isinstance(decision, Dispatch), "a free device must not wait"
            self._start(decision)

    def _start(self, dispatch: Dispatch) -> None:
        assert self._running is None, "two dispatches at once"
        model = self._models[dispatch.model_id]
        self.result.dispatches += 1
        assert dispatch.seq == self.result.dispatches
        keys = [request.key for request in dispatch.requests]
        self._note(
            "dispatch", model.name, f"size={dispatch.batch_size} rows={dispatch.rows} {dispatch.reason.name}", *keys
        )
        self._check_dispatch(model, dispatch)
        waits = self.result.waits_ns[model.name]
        waits.extend(self.now_ns - request.arrival_ns for request in dispatch.requests)
        if dispatch.batch_size < 0:
            for request in dispatch.requests:
                self._finish_request(request, "no_program")
            self.scheduler.record(dispatch, 0, self.now_ns)
            return
        stall_ns = round(model.load_ms * MS) if dispatch.model_id in self._cold else 0
        self._cold.discard(dispatch.model_id)
        jitter = self._rng.uniform(1 - model.jitter, 1 + model.jitter) if model.jitter else 1.0
        compute_ns = max(1, round(model.cost_ns(dispatch.batch_size) * jitter))
        self._running = dispatch
        self._at(self.now_ns + stall_ns + compute_ns, lambda: self._finish(dispatch, compute_ns))
        if model.backlog:
            self._refill(model)

    def _finish(self, dispatch: Dispatch, compute_ns: int) -> None:
        assert self._running is dispatch
        self._running = None
        name = self._models[dispatch.model_id].name
        self._note("finish", name, dispatch.seq)
        self.scheduler.record(dispatch, compute_ns, self.now_ns)
        self.result.compute_ns[name] += compute_ns
        self.result.rows[name] += dispatch.rows
        self.result.padding[name] += max(dispatch.batch_size - dispatch.rows, 0)
        self.result.runs[name] += 1
        for request in dispatch.requests:
            on_time = self.now_ns <= request.deadline_ns
            self.result.met += on_time
            self.result.missed += not on_time
            self._finish_request(request, "ran")

    # What must hold

    def _check_dispatch(self, model: SimModel, dispatch: Dispatch) -> None:
        requests = dispatch.requests
        committed, ordinary = self._waiting[dispatch.model_id]
        expected = list(islice([*committed.values(), *islice(ordinary.values(), len(requests))], len(requests)))
        assert requests == expected, "not the front of the queue, in order"
        assert requests, "an empty dispatch"
        if any(queues[0] for queues in self._waiting.values()):
            assert requests[0].committed, "a committed request was passed over"
        rows = sum(request.rows for request in requests)
        assert dispatch.rows == rows
        assert {request.variant for request in requests} == {dispatch.variant}
        if dispatch.batch_size < 0:
            assert len(requests) == 1
            assert dispatch.variant < 0 or rows > model.sizes[-1] > 0
        else:
            assert dispatch.batch_size in model.sizes, "not a compiled size"
            assert rows <= dispatch.batch_size or dispatch.batch_size == 0
            assert len(requests) == 1 or (model.coalesces and rows <= (model.max_batch_size or rows))
        for request in requests:
            assert self._state[request.key] == "waiting", "dispatched what does not wait"
            assert request.deadline_ns > self.now_ns, "started after its deadline"
            self._state[request.key] = "running"
            (committed if request.committed else ordinary).pop(request.key)
            dispatches, ahead = self._accepted_at.pop(request.key)
            if self.scenario.discipline is Discipline.FIFO and not self._patient:
                rounds = self.result.dispatches - 1 - dispatches
                same_instant = self._accepted_then[request.arrival_ns]
                assert rounds <= ahead + same_instant + self._committed_runs, "overtaken under fifo"
        self._committed_runs += requests[0].committed
        worst = self.result.worst_front_wait_ns
        waited_ns = self.now_ns - self._front_since.pop(dispatch.model_id)
        worst[model.name] = max(worst[model.name], waited_ns)
        if committed or ordinary:
            self._front_since[dispatch.model_id] = self.now_ns

    def _answer(self, shed: Shed) -> None:
        request = shed.request
        model = self._models.get(request.model_id)
        assert shed.kind is not Kind.OK
        assert shed.text
        if shed.kind is Kind.DEADLINE_EXCEEDED and shed.reason == "laxity":
            assert self.scenario.discipline is Discipline.EDF
            assert not request.committed
        if shed.reason == "queue_full":
            assert model is not None
            assert sum(map(len, self._waiting[request.model_id])) == self.scenario.max_queue_depth
            assert model.name in shed.text
        for queue in self._waiting.get(request.model_id, ()):
            queue.pop(request.key, None)
        self._accepted_at.pop(request.key, None)
        if not any(self._waiting.get(request.model_id, ())):
            self._front_since.pop(request.model_id, None)
        if shed.kind is Kind.DEADLINE_EXCEEDED:
            self.result.missed += 1
        self._finish_request(request, shed.reason)

    def _finish_request(self, request: Request, outcome: str) -> None:
        assert self._state[request.key] in ("waiting", "running"), f"request {request.key} was answered twice"
        self._state[request.key] = outcome
        self.result.outcomes[outcome] = self.result.outcomes.get(outcome, 0) + 1
        self._note("answer", request.key, outcome)

    def _check(self) -> None:
        running = len(self._running.requests) if self._running is not None else 0
        waiting = sum(len(committed) + len(ordinary) for committed, ordinary in self._waiting.values())
        assert self.result.requests == sum(self.result.outcomes.values()) + running + waiting, "a request was lost"
        if self.result.requests % 64 == 0:
            snapshot = self.scheduler.snapshot(self.now_ns)
            assert snapshot.queued == waiting
            for model in snapshot.models:
                assert model.queue_depth == sum(map(len, self._waiting[model.model_id]))

    def _check_at_rest(self) -> None:
        assert set(self._state.values()) <= set(self.result.outcomes), "a request has no outcome"
        assert sum(self.result.outcomes.values()) == self.result.requests
        snapshot = self.scheduler.snapshot(self.now_ns)
        assert snapshot.queued == 0
        assert all(model.queue_depth == 0 for model in snapshot.models)
        assert self.scheduler.next_expiry_ns() == NO_DEADLINE
        assert isinstance(self.scheduler.next(self.now_ns), Idle)
        loaded = {model.name: model for model in snapshot.models if model.model_id <= len(self.scenario.models)}
        for name, model in loaded.items():
            if self._ids.get(name) == model.model_id:
                assert model.rows == self.result.rows[name]
                assert model.compute_ns == self.result.compute_ns[name]
                assert model.padding_rows == self.result.padding[name]


def simulate(scenario: Scenario, emit: Callable[[str], None] | None = None, **changes: Any) -> Result:
    """Run a scenario, with fields replaced by ``changes``; ``emit`` gets one line per event."""
    return Simulation(replace(scenario, **changes), emit).run()
