"""Loading, unloading, weights, counters, and bad values on every path."""

from __future__ import annotations

import pytest
from scheduling_cases import MS, SECOND, accept, dispatch, keys, request, run, scheduler, spec

from engines.errors import AlreadyExists, InvalidInput, Kind, NotFound
from worker.scheduling.types import NO_DEADLINE, Discipline, Idle


@pytest.mark.parametrize("discipline", list(Discipline))
def test_remove_model_answers_what_waits_and_forgets_the_rest(discipline: Discipline) -> None:
    target = scheduler(spec(1, sizes=(2,)), spec(2, max_queue_delay_ns=MS), discipline=discipline)
    accept(target, [request(key, deadline_ns=SECOND, committed=key == 3) for key in range(4)])
    accept(target, [request(9, 2, deadline_ns=SECOND)])
    running = dispatch(target)
    target.remove_model(1, 0)
    sheds = target.take_sheds()
    assert sorted(shed.request.key for shed in sheds) == [1, 2]
    assert {(shed.kind, shed.reason) for shed in sheds} == {(Kind.NOT_READY, "unloaded")}
    assert all("'m1' was unloaded" in shed.text for shed in sheds)
    target.record(running, MS, 0)
    assert keys(run(target)) == [9]
    assert [model.name for model in target.snapshot(0).models] == ["m2"]
    target.remove_model(2, 0)
    assert isinstance(target.next(0), Idle)
    assert target.snapshot(0).queued == 0
    target.add_model(spec(1))
    accept(target, [request(20)])
    assert keys(run(target)) == [20]


def test_offer_to_a_model_that_is_gone() -> None:
    target = scheduler(spec(1))
    target.remove_model(1, 0)
    shed = target.offer(request(1), 0)
    assert shed is not None
    assert (shed.kind, shed.reason, shed.text) == (Kind.NOT_READY, "unloaded", "model 1 is not loaded any more")
    assert target.cancel(1, 0) is None


def test_rule_19_expired_on_arrival() -> None:
    target = scheduler(spec(1))
    shed = target.offer(request(1, at_ns=0, deadline_ns=2 * MS), 2 * MS)
    assert shed is not None
    assert (shed.kind, shed.reason) == (Kind.DEADLINE_EXCEEDED, "deadline")
    assert "2.0 ms" in shed.text
    assert target.snapshot(0).models[0].sheds == {"deadline": 1}


@pytest.mark.parametrize(("rows", "variant"), [(0, 0), (-1, 0), (1, 2), (1, -2)])
def test_bs_09_odd_values_are_answered_and_the_next_request_runs(rows: int, variant: int) -> None:
    target = scheduler(spec(1))
    shed = target.offer(request(1, rows=rows, variant=variant), 0)
    assert shed is not None
    assert shed.kind is Kind.INVALID_INPUT
    assert f"{rows} rows of shape variant {variant}" in shed.text
    accept(target, [request(1)])
    assert keys(run(target)) == [1]


def test_offer_many_returns_only_what_was_not_accepted() -> None:
    target = scheduler(spec(1), max_queue_depth=2)
    sheds = target.offer_many([request(1), request(2, 7), request(3), request(4)], 0)
    assert [(shed.request.key, shed.reason) for shed in sheds] == [(2, "unloaded"), (4, "queue_full")]


def test_rule_29_weights_change_at_run_time() -> None:
    target = scheduler(spec(1, "a", (1,)), spec(2, "b", (1,)), recency_penalty_cap=1.0)
    target.set_weight(2, 3.0, 0)
    accept(target, [request(1, 1), request(2, 2)])
    assert dispatch(target).model_id == 2
    assert [model.weight for model in target.snapshot(0).models] == [1.0, 3.0]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_rule_29_a_bad_weight_changes_nothing(weight: float) -> None:
    target = scheduler(spec(1, "resnet"))
    with pytest.raises(InvalidInput, match=r"weight of model 'resnet' is .*finite number above 0"):
        target.set_weight(1, weight, 0)
    assert target.snapshot(0).models[0].weight == 1.0


def test_rule_29_an_unknown_model_is_not_found() -> None:
    target = scheduler(spec(1))
    for call in (
        lambda: target.set_weight(7, 1.0, 0),
        lambda: target.remove_model(7, 0),
        lambda: target.seed_cost(7, 0, 1, 5),
        lambda: target.estimate_ns(7, 0, 1),
    ):
        with pytest.raises(NotFound, match="model 7 is not loaded"):
            call()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sizes": ()}, "batch_sizes"),
        ({"sizes": (0, 1)}, "batch_sizes"),
        ({"sizes": (8, 1)}, "ascending"),
        ({"sizes": (1, 1)}, "ascending"),
        ({"sizes": (0,), "coalesces": True}, "batch axis"),
        ({"variants": 0}, "variants"),
        ({"max_batch_size": -1}, "max_batch_size"),
        ({"max_queue_delay_ns": -1}, "max_queue_delay_ns"),
        ({"weight": 0.0}, "weight"),
    ],
)
def test_an_impossible_spec_is_refused_whole(fields, message) -> None:
    target = scheduler()
    with pytest.raises(InvalidInput, match=message):
        target.add_model(spec(1, "odd", **fields))
    assert target.snapshot(0).models == ()


def test_a_model_id_in_use_is_refused() -> None:
    target = scheduler(spec(1, "first"))
    with pytest.raises(AlreadyExists, match="model id 1 is in use by 'first'"):
        target.add_model(spec(1, "second"))


def test_rule_33_options_out_of_range_are_reported_together() -> None:
    with pytest.raises(InvalidInput) as caught:
        scheduler(
            ema_halflife_ns=0, recency_penalty_cap=1.5, coalescing_discount=1.0, cost_ema_alpha=0.0, max_queue_depth=0,
            default_cost_ns=0,
        )  # fmt: skip
    for name in ("ema_halflife_ns", "recency_penalty_cap", "coalescing_discount", "cost_ema_alpha", "max_queue_depth"):
        assert f"{name} is " in str(caught.value)


@pytest.mark.parametrize(("sizes", "cap"), [((1,), 0), ((1, 8), 1), ((1,), 1)])
def test_bs_03_batches_of_one(sizes, cap) -> None:
    target = scheduler(spec(1, sizes=sizes, max_batch_size=cap, max_queue_delay_ns=3600 * SECOND))
    accept(target, [request(key) for key in range(3)])
    assert [keys(run(target)) for _ in range(3)] == [[0], [1], [2]]


def test_rule_30_counters_are_cumulative_and_gauges_return_to_zero() -> None:
    target = scheduler(spec(1, sizes=(1, 4), max_batch_size=3, weight=2.0), max_queue_depth=6)
    accept(target, [request(key, at_ns=0, deadline_ns=SECOND) for key in range(6)])
    assert target.offer(request(9), 0) is not None
    target.cancel(5, 0)
    accept(target, [request(6, rows=4)])
    depths = []
    for now_ms in (10, 20, 30, 40, 50, 60):
        depths.append(target.snapshot(0).models[0].queue_depth)
        run(target, now_ms * MS, 5 * MS)
    snapshot = target.snapshot(60 * MS)
    [model] = snapshot.models
    assert depths == [6, 5, 4, 3, 2, 1]
    assert (snapshot.queued, model.queue_depth, snapshot.dispatches) == (0, 0, 6)
    assert (model.dispatches, model.requests, model.rows, model.padding_rows) == (6, 6, 9, 0)
    assert model.compute_ns == 30 * MS
    assert model.dispatched_sizes == {1: 5, 4: 1}
    assert model.sheds == {"queue_full": 1, "cancelled": 1}
    assert (model.max_batch_rows, model.weight) == (3, 2.0)
    assert model.wait_sum_ns == 210 * MS
    assert model.wait_p50_ns == pytest.approx(30 * MS, rel=0.2)
    assert model.wait_p99_ns == pytest.approx(60 * MS, rel=0.2)
    assert sum(model.wait_counts) == 6
    assert sum(model.row_counts) == 6


def test_rule_30_padding_is_counted() -> None:
    target = scheduler(spec(1, sizes=(8,)), spec(2, sizes=(0,)))
    accept(target, [request(1, rows=3), request(2, 2)])
    run(target)
    run(target)
    assert [(model.padding_rows, model.rows) for model in target.snapshot(0).models] == [(5, 3), (0, 1)]


def test_what_waits_and_when_it_may_expire_are_told_at_no_cost() -> None:
    target = scheduler(spec(1), spec(2))
    assert (target.queued, target.no_expiry_before_ns) == (0, NO_DEADLINE)
    accept(target, [request(1, deadline_ns=7 * MS), request(2, model_id=2, deadline_ns=3 * MS)])
    assert (target.queued, target.no_expiry_before_ns) == (2, 3 * MS)
    assert target.cancel(2, 0) is not None
    assert target.queued == 1
    assert target.no_expiry_before_ns <= 7 * MS, "a bound may be early, never late"
    assert target.expire(3 * MS) == []
    assert target.no_expiry_before_ns == 7 * MS
