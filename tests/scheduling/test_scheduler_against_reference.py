"""The scheduler against a slow, literal reading of the rules, over random sequences of calls."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scheduler import ReferenceScheduler
from scheduling_cases import MS, SECOND

from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import (
    NO_DEADLINE,
    Discipline,
    Dispatch,
    Idle,
    ModelSpec,
    Request,
    SchedulerOptions,
    Sizing,
)

SIZES = [(1,), (1, 8, 32), (4, 16), (0,), (2, 3)]


def draw_spec(rng: random.Random, model_id: int) -> ModelSpec:
    sizes = rng.choice(SIZES)
    return ModelSpec(
        model_id=model_id, name=f"m{model_id}", batch_sizes=sizes, variants=2,
        coalesces=sizes != (0,) and rng.random() < 0.8, weight=rng.choice([1.0, 2.0, 8.0]),
        max_batch_size=rng.choice([0, 0, 3]),
    )  # fmt: skip


def draw_request(rng: random.Random, key: int, model_id: int, now_ns: int) -> Request:
    return Request(
        key=key, model_id=model_id, variant=rng.choice([0, 0, 0, 0, 1, -1]), rows=rng.choice([1, 1, 1, 2, 5, 40]),
        arrival_ns=now_ns - rng.choice([0, 0, MS]),
        deadline_ns=now_ns + rng.choice([0, MS, 3 * MS, 20 * MS, SECOND, NO_DEADLINE - now_ns]),
        committed=rng.random() < 0.02,
    )  # fmt: skip


def play(discipline: Discipline, sizing: Sizing, seed: int, steps: int) -> int:
    """Make the same random calls on both and compare every answer; return how many dispatches there were."""
    rng = random.Random(seed)
    options = SchedulerOptions(discipline, sizing, ema_halflife_ns=50 * MS, max_queue_depth=20)
    real, reference = Scheduler(options), ReferenceScheduler(options)
    now_ns = key = dispatches = 0
    specs = {model_id: draw_spec(rng, model_id) for model_id in range(1, 6)}
    for one in specs.values():
        real.add_model(one)
        reference.add_model(one)
    for _ in range(steps):
        now_ns += rng.choice([0, 0, MS // 10, MS])
        action = rng.random()
        if action < 0.6:
            # One drained ring: mostly of one model, which the scheduler queues together if all fit in.
            model_id = rng.randint(1, 6)
            drained = []
            for _ in range(rng.choice([1, 1, 1, 2, 4])):
                key += 1
                drained.append(draw_request(rng, key, model_id if rng.random() < 0.9 else rng.randint(1, 6), now_ns))
            if rng.random() < 0.5:
                refused = {shed.request.key for shed in real.offer_many(drained, now_ns)}
            else:
                refused = {one.key for one in drained if real.offer(one, now_ns) is not None}
            assert refused == {one.key for one in drained if not reference.offer(one, now_ns)}
        elif action < 0.7:
            chosen = rng.randint(max(1, key - 60), max(1, key))
            assert (real.cancel(chosen, now_ns) is not None) == reference.cancel(chosen)
        elif action < 0.73:
            assert {shed.request.key for shed in real.expire(now_ns)} == reference.expire(now_ns)
        elif action < 0.74:
            model_id = rng.randint(1, 5)
            weight = rng.choice([0.5, 4.0])
            real.set_weight(model_id, weight, now_ns)
            reference.models[model_id].weight = weight
        elif action < 0.745:
            model_id = rng.randint(1, 5)
            real.remove_model(model_id, now_ns)
            assert {shed.request.key for shed in real.take_sheds()} == reference.remove_model(model_id)
            real.add_model(specs[model_id])
            reference.add_model(specs[model_id])
        else:
            dispatches += compare_decision(real, reference, rng, now_ns)
        assert real.next_expiry_ns() == reference.next_expiry_ns()
    return dispatches


def compare_decision(real: Scheduler, reference: ReferenceScheduler, rng: random.Random, now_ns: int) -> int:
    priorities = reference.priorities(now_ns) if reference.options.discipline is Discipline.FAIR else {}
    decision, expected = real.next(now_ns), reference.next(now_ns)
    sheds = {shed.request.key for shed in real.take_sheds()}
    if expected is None:
        assert isinstance(decision, Idle)
        return 0
    assert isinstance(decision, Dispatch)
    model_id, plan, taken, dropped = expected
    assert decision.model_id == model_id, f"priorities {priorities}"
    assert sheds == dropped
    assert [one.key for one in decision.requests] == taken
    assert (decision.variant, decision.batch_size, decision.rows) == (plan.variant, plan.batch_size, plan.rows)
    compute_ns = rng.choice([MS // 10, MS, 7 * MS])
    real.record(decision, compute_ns, now_ns)
    reference.record(decision, compute_ns, now_ns)
    return 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sizing", list(Sizing))
@pytest.mark.parametrize("discipline", list(Discipline))
def test_decisions_equal_the_literal_rules(discipline: Discipline, sizing: Sizing, seed: int) -> None:
    assert play(discipline, sizing, seed, 1500) > 100


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([Discipline.FIFO, Discipline.EDF]), st.sampled_from(list(Sizing)), st.integers(0, 2**32))
def test_decisions_equal_the_literal_rules_for_any_seed(discipline: Discipline, sizing: Sizing, seed: int) -> None:
    assert play(discipline, sizing, seed, 300) > 0


def edf_equals_fifo(seed: int, steps: int, *, one_deadline: bool) -> None:
    """Equal deadlines, or equal budgets from arrivals in order: the two disciplines decide alike."""
    rng = random.Random(seed)
    both = [Scheduler(SchedulerOptions(discipline)) for discipline in (Discipline.FIFO, Discipline.EDF)]
    for model_id in range(1, 8):
        one = draw_spec(rng, model_id)
        for scheduler in both:
            scheduler.add_model(one)
    now_ns = key = dispatches = 0
    for _ in range(steps):
        now_ns += rng.choice([0, MS])
        if rng.random() < 0.65:
            key += 1
            fields = {
                "model_id": rng.randint(1, 7), "variant": rng.choice([0, 0, 1]), "rows": rng.choice([1, 2, 5]),
                "arrival_ns": now_ns, "deadline_ns": NO_DEADLINE - 1 if one_deadline else now_ns + 10_000 * SECOND,
            }  # fmt: skip
            refused = [scheduler.offer(Request(key=key, **fields), now_ns) is not None for scheduler in both]
            assert refused[0] == refused[1]
        elif rng.random() < 0.2:
            chosen = rng.randint(1, key + 1)
            found = [scheduler.cancel(chosen, now_ns) is not None for scheduler in both]
            assert found[0] == found[1]
        else:
            one, other = (scheduler.next(now_ns) for scheduler in both)
            assert type(one) is type(other)
            if isinstance(one, Dispatch) and isinstance(other, Dispatch):
                dispatches += 1
                assert [request.key for request in one.requests] == [request.key for request in other.requests]
                compute_ns = rng.randrange(1, MS)
                for scheduler, decision in zip(both, (one, other), strict=True):
                    scheduler.record(decision, compute_ns, now_ns)
    assert dispatches > steps / 20


@pytest.mark.parametrize("one_deadline", [True, False])
def test_rule_9_edf_with_equal_deadlines_is_fifo(one_deadline: bool) -> None:
    edf_equals_fifo(1, 4_000, one_deadline=one_deadline)


@pytest.mark.parametrize("one_deadline", [True, False])
@pytest.mark.slow
def test_rule_9_edf_with_equal_deadlines_is_fifo_for_100_000_steps(one_deadline: bool) -> None:
    edf_equals_fifo(2, 100_000, one_deadline=one_deadline)
