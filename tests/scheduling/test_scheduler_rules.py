"""The facade, rule by rule, with times and costs chosen by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from scheduling_cases import MS, SECOND, accept, dispatch, keys, request, run, scheduler, spec

from engines.errors import Kind
from worker.channel.records import Reason
from worker.scheduling.types import NO_DEADLINE, Discipline, Dispatch, Idle, Sizing, WaitUntil


@pytest.mark.interpreted
def test_rule_1_scheduling_imports_no_clock_no_io_no_asyncio() -> None:
    code = """
import sys
before = set(sys.modules)
import worker.scheduling.scheduler
new = set(sys.modules) - before
bad = {"time", "asyncio", "socket", "selectors", "threading", "logging", "os", "random", "subprocess"} & new
print(sorted(bad), sorted(n for n in new if n.split(".")[0] in ("worker", "engines", "frontend")))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.startswith("[] ")
    ours = set(eval(output[3:]))
    assert {name for name in ours if not name.startswith("worker.scheduling")} <= {
        "worker", "worker.channel", "worker.channel.records", "engines", "engines.errors",
    }  # fmt: skip


def test_rule_3_one_committed_request_before_the_discipline() -> None:
    target = scheduler(spec(1), spec(2), discipline=Discipline.FIFO)
    accept(target, [request(key, 1, at_ns=key) for key in range(4)])
    accept(
        target,
        [request(10, 2, at_ns=10), request(11, 2, at_ns=11, committed=True), request(12, 1, at_ns=12, committed=True)],
    )
    assert keys(run(target, 20)) == [11]
    assert keys(run(target, 20)) == [12]
    assert keys(run(target, 20)) == [0]


def test_rule_27_committed_requests_stand_before_the_others_of_their_model() -> None:
    target = scheduler(spec(1, sizes=(8,)))
    accept(target, [request(1), request(2), request(3, committed=True), request(4, committed=True)])
    assert keys(run(target)) == [3, 4, 1, 2]


@pytest.mark.interpreted
@pytest.mark.parametrize("discipline", list(Discipline))
def test_rule_4_idle_models_are_not_looked_at(discipline: Discipline, monkeypatch: pytest.MonkeyPatch) -> None:
    target = scheduler(*(spec(model_id) for model_id in range(1, 1001)), discipline=discipline)
    touched: set[int] = set()

    class Watched(dict):
        def __getitem__(self, model_id):
            touched.add(model_id)
            return super().__getitem__(model_id)

        def get(self, model_id, default=None):
            touched.add(model_id)
            return super().get(model_id, default)

        def __iter__(self):
            raise AssertionError("all models were scanned")

        values = items = keys = __iter__

    monkeypatch.setattr(target, "_models", Watched(target._models))
    accept(target, [request(key, 1 + key % 10, deadline_ns=SECOND) for key in range(40)])
    while isinstance(target.next(1), Dispatch):
        pass
    assert touched == set(range(1, 11))


def test_rule_5_fair_serves_the_model_furthest_below_its_share() -> None:
    target = scheduler(spec(1, sizes=(1,)), spec(2, sizes=(1,)))
    accept(target, [request(key, 1 + key % 2, at_ns=key) for key in range(10)])
    assert run(target, 100, 5 * MS).model_id == 1, "nothing used yet: equal shares, the older front"
    assert run(target, 100, 50 * MS).model_id == 2
    assert [run(target, 100, 5 * MS).model_id for _ in range(3)] == [1, 1, 1], "model 2 used ten times as much"


def test_rule_5_use_is_forgotten_by_half_lives() -> None:
    target = scheduler(spec(1, sizes=(1,)), ema_halflife_ns=SECOND)
    accept(target, [request(1)])
    run(target, 0, 8 * MS)
    [model] = target.snapshot(3 * SECOND).models
    assert model.recent_compute_s == pytest.approx(0.001)
    assert target.snapshot(0).models[0].recent_compute_s == pytest.approx(0.008)


def test_rule_5_the_clamp_lets_cost_decide_between_two_large_deficits() -> None:
    specs = [spec(1, sizes=(1,), weight=10.0), spec(2, sizes=(1,), weight=5.0), spec(3, sizes=(1,), weight=0.1)]
    for cap, first in ((0.25, 2), (1.0, 1)):
        target = scheduler(*specs, recency_penalty_cap=cap)
        target.seed_cost(1, 0, 1, 12 * MS)
        target.seed_cost(2, 0, 1, 10 * MS)
        accept(target, [request(key, key) for key in (1, 2, 3)])
        assert dispatch(target).model_id == first


def test_rule_5_ties_go_to_the_older_front_then_to_the_name() -> None:
    target = scheduler(spec(1, "b", (1,)), spec(2, "a", (1,)), spec(3, "c", (1,)))
    accept(target, [request(1, 1, at_ns=5), request(2, 2, at_ns=5), request(3, 3, at_ns=4)])
    assert [dispatch(target, 9).model_id for _ in range(3)] == [3, 2, 1]


def test_rule_6_shares_are_among_models_with_queued_work() -> None:
    # Over all three models each busy one would be above its share, where dividing by cost favours the dearer.
    target = scheduler(spec(1, sizes=(1,), weight=8.0), spec(2, sizes=(1,)), spec(3, sizes=(1,)))
    target.seed_cost(2, 0, 1, MS)
    target.seed_cost(3, 0, 1, 100 * MS)
    accept(target, [request(key, 2 + key % 2) for key in range(20)])
    first = run(target, 1, 100 * MS)
    second = run(target, 1, 90 * MS)
    assert {first.model_id, second.model_id} == {2, 3}
    assert run(target, 1, MS).model_id == second.model_id


def test_rule_7_cost_divides_and_coalescing_is_discounted() -> None:
    target = scheduler(spec(1, "a", (2,)), spec(2, "b", (1,)), coalescing_discount=0.5)
    target.seed_cost(1, 0, 2, 30 * MS)
    target.seed_cost(2, 0, 1, 20 * MS)
    accept(target, [request(1, 1), request(2, 2)])
    assert dispatch(target).model_id == 2, "one request in the larger batch: no discount"
    target = scheduler(spec(1, "a", (2,)), spec(2, "b", (1,)), coalescing_discount=0.5)
    target.seed_cost(1, 0, 2, 30 * MS)
    target.seed_cost(2, 0, 1, 20 * MS)
    accept(target, [request(1, 1), request(3, 1), request(2, 2)])
    assert dispatch(target).model_id == 1, "two requests: 15 ms against 20"


def test_rule_7_a_pair_without_estimate_costs_ten_milliseconds() -> None:
    for known_ms, first in ((9, 2), (11, 1)):
        target = scheduler(spec(1, "a", (1,)), spec(2, "b", (1,)))
        target.seed_cost(2, 0, 1, known_ms * MS)
        accept(target, [request(1, 1), request(2, 2)])
        assert dispatch(target).model_id == first


def test_rule_8_fifo_takes_the_oldest_front_whatever_the_weights() -> None:
    target = scheduler(spec(1, "b", (1,), weight=100.0), spec(2, "a", (1,)), discipline=Discipline.FIFO)
    accept(target, [request(1, 1, at_ns=2), request(2, 2, at_ns=1), request(3, 1, at_ns=3), request(4, 2, at_ns=3)])
    assert [keys(run(target, 9)) for _ in range(4)] == [[2], [1], [4], [3]]
    assert isinstance(target.next(9), Idle)


def test_rule_9_edf_promotes_the_model_that_holds_the_soonest_deadline() -> None:
    target = scheduler(spec(1, sizes=(2,)), spec(2, sizes=(2,)), spec(3, sizes=(2,)), discipline=Discipline.EDF)
    accept(target, [request(1, 1, at_ns=1), request(2, 2, at_ns=2, deadline_ns=SECOND)])
    accept(target, [request(3, 3, at_ns=3), request(4, 3, at_ns=4), request(5, 3, at_ns=5, deadline_ns=SECOND // 2)])
    assert keys(run(target, 9)) == [3, 4], "the urgent one stands third: its model runs, in arrival order"
    assert keys(run(target, 9)) == [5]
    assert keys(run(target, 9)) == [2]
    assert keys(run(target, 9)) == [1]


def test_rule_9_edf_ties_go_to_the_older_front_then_to_the_name() -> None:
    specs = [spec(1, "b", (1,)), spec(2, "a", (1,)), spec(3, "c", (1,))]
    target = scheduler(*specs, discipline=Discipline.EDF)
    accept(target, [request(key, key, at_ns=at, deadline_ns=SECOND) for key, at in ((1, 5), (2, 5), (3, 4))])
    assert [dispatch(target, 9).model_id for _ in range(3)] == [3, 2, 1]


def test_rule_11_unknown_shape_dispatches_alone() -> None:
    target = scheduler(spec(1))
    accept(target, [request(1, variant=-1), request(2, variant=-1)])
    done = dispatch(target)
    assert (keys(done), done.batch_size, done.variant) == ([1], -1, -1)
    target.record(done, 0, 0)
    assert target.snapshot(0).models[0].dispatches == 0


def test_rule_16_a_partial_batch_lets_another_model_go_first() -> None:
    target = scheduler(spec(1, sizes=(8,), max_queue_delay_ns=10 * MS), spec(2, sizes=(1,)), discipline=Discipline.FIFO)
    accept(target, [request(1, 1, at_ns=0), request(2, 2, at_ns=1), request(3, 2, at_ns=2), request(4, 2, at_ns=3)])
    assert keys(run(target, 5 * MS)) == [2], "younger, but model 1 hopes for company"
    accept(target, [request(5, 1, at_ns=6 * MS)], 6 * MS)
    assert keys(run(target, 10 * MS)) == [1, 5], "its front is 10 ms old"
    assert keys(run(target, 10 * MS)) == [3]


def test_rule_16_a_full_batch_does_not_wait() -> None:
    target = scheduler(spec(1, sizes=(2,), max_queue_delay_ns=SECOND), spec(2, sizes=(1,)), discipline=Discipline.FIFO)
    accept(target, [request(1, 1, at_ns=0), request(2, 1, at_ns=0), request(3, 2, at_ns=1)])
    assert keys(run(target, 1)) == [1, 2]


def test_rule_16_a_free_device_never_waits_for_company() -> None:
    target = scheduler(*(spec(model_id, sizes=(8,), max_queue_delay_ns=SECOND) for model_id in (1, 2)))
    accept(target, [request(1, 1, at_ns=0), request(2, 2, at_ns=1)])
    assert keys(run(target, 2)) == [1]
    assert keys(run(target, 2)) == [2]


def test_rule_16_while_the_device_runs_company_may_be_waited_for() -> None:
    target = scheduler(spec(1, sizes=(8,), max_queue_delay_ns=10 * MS), discipline=Discipline.FIFO)
    accept(target, [request(1)])
    running = dispatch(target, 0)
    accept(target, [request(2, at_ns=MS)], MS)
    assert target.next(2 * MS) == WaitUntil(11 * MS)
    assert keys(dispatch(target, 11 * MS)) == [2]
    target.record(running, MS, 11 * MS)


def test_rule_16_waiting_stops_before_a_deadline_would_be_missed() -> None:
    target = scheduler(spec(1, sizes=(8,), max_queue_delay_ns=50 * MS), discipline=Discipline.FIFO)
    target.seed_cost(1, 0, 8, 4 * MS)
    accept(target, [request(1)])
    dispatch(target, 0)
    accept(target, [request(2, at_ns=0, deadline_ns=20 * MS), request(3, at_ns=0, deadline_ns=12 * MS)])
    assert target.next(0) == WaitUntil(8 * MS)
    accept(target, [request(4, at_ns=0, committed=True)])
    assert keys(dispatch(target, 0)) == [4, 2, 3], "a committed request does not wait"


def test_rule_19_an_expired_request_never_runs() -> None:
    for discipline in Discipline:
        target = scheduler(spec(1, sizes=(1,)), discipline=discipline)
        accept(target, [request(1, deadline_ns=5), request(2, deadline_ns=50)])
        assert keys(run(target, 5)) == [2]
        [shed] = target.take_sheds()
        assert (shed.request.key, shed.kind, shed.reason) == (1, Kind.DEADLINE_EXCEEDED, "deadline")
        assert "'m1'" in shed.text
        assert target.take_sheds() == []


def test_rule_19_edf_drops_what_cannot_finish_and_keeps_what_finishes_just_in_time() -> None:
    target = scheduler(spec(1, sizes=(8,)), discipline=Discipline.EDF)
    target.seed_cost(1, 0, 8, 10 * MS)
    late, just = request(1, deadline_ns=10 * MS - 1), request(2, deadline_ns=10 * MS)
    accept(target, [late, just, request(3, deadline_ns=5 * MS, committed=True)])
    assert keys(run(target, 0, 10 * MS)) == [3, 2]
    [shed] = target.take_sheds()
    assert (shed.request, shed.kind, shed.reason) == (late, Kind.DEADLINE_EXCEEDED, "laxity")
    assert "10.0 ms are left" in shed.text
    assert "takes about 10.0 ms" in shed.text


def test_rule_19_laxity_needs_a_measurement() -> None:
    target = scheduler(spec(1, sizes=(1,)), discipline=Discipline.EDF)
    accept(target, [request(1, deadline_ns=MS)])
    assert keys(run(target, 0)) == [1]


def test_rule_19_no_execution_when_nothing_is_left() -> None:
    target = scheduler(spec(1, sizes=(1,)), discipline=Discipline.EDF)
    target.seed_cost(1, 0, 1, 10 * MS)
    accept(target, [request(key, deadline_ns=MS) for key in range(3)])
    assert isinstance(target.next(0), Idle)
    assert [shed.reason for shed in target.take_sheds()] == ["laxity"] * 3
    accept(target, [request(key, deadline_ns=MS) for key in range(3)])
    assert isinstance(target.next(MS), Idle)
    assert [shed.reason for shed in target.take_sheds()] == ["deadline"] * 3


def test_rule_20_live_requests_fill_the_places_of_dropped_ones() -> None:
    target = scheduler(spec(1, sizes=(4,)), discipline=Discipline.EDF)
    target.seed_cost(1, 0, 4, 10 * MS)
    budgets = [SECOND, 5 * MS, 5 * MS, SECOND, SECOND, SECOND, SECOND]
    accept(target, [request(key, deadline_ns=budget) for key, budget in enumerate(budgets)])
    done = run(target, 0, 10 * MS)
    assert (keys(done), done.reason) == ([0, 3, 4, 5], Reason.FILLED)


def test_rule_21_expiry_does_not_wait_for_the_device() -> None:
    target = scheduler(spec(1, sizes=(1,)), spec(2, sizes=(1,)))
    assert target.next_expiry_ns() == NO_DEADLINE
    accept(
        target,
        [request(1, 1), request(2, 1, deadline_ns=70), request(3, 2, deadline_ns=40), request(4, 2, deadline_ns=50)],
    )
    dispatch(target)
    assert target.next_expiry_ns() == 40
    assert target.expire(39) == []
    assert [shed.request.key for shed in target.expire(60)] == [3, 4]
    assert target.next_expiry_ns() == 70
    assert [shed.request.key for shed in target.expire(70)] == [2]
    assert target.next_expiry_ns() == NO_DEADLINE
    assert target.snapshot(70).queued == 0


def test_rule_22_cancel_withdraws_what_waits_and_nothing_else() -> None:
    target = scheduler(spec(1, sizes=(2,)))
    accept(target, [request(key) for key in range(4)])
    shed = target.cancel(1, 0)
    assert shed is not None
    assert (shed.request.key, shed.kind, shed.reason) == (1, Kind.CANCELLED, "cancelled")
    assert target.cancel(1, 0) is None, "cancelled before"
    assert target.cancel(99, 0) is None, "unknown"
    done = dispatch(target)
    assert keys(done) == [0, 2]
    assert target.cancel(0, 0) is None, "dispatched"
    target.record(done, MS, 0)
    assert target.cancel(3, 0) is not None
    assert isinstance(target.next(0), Idle)
    assert target.snapshot(0).queued == 0


def test_rule_23_a_full_queue_refuses_at_once_and_only_its_model() -> None:
    target = scheduler(spec(1, "busy", (1,)), spec(2, "other", (1,)), max_queue_depth=2)
    accept(target, [request(1), request(2, committed=True)])
    shed = target.offer(request(3), 0)
    assert shed is not None
    assert (shed.kind, shed.reason) == (Kind.QUEUE_FULL, "queue_full")
    assert shed.text == "queue of model 'busy' is full: 2 requests wait, max_queue_depth is 2"
    accept(target, [request(4, 2)])
    run(target)
    accept(target, [request(5)])
    assert target.offer(request(6), 0) is not None


def test_do_09_the_cap_counts_what_waits_not_what_was_cancelled() -> None:
    target = scheduler(spec(1, sizes=(1,)), max_queue_depth=5)
    for round_number in range(100):
        accept(target, [request(10 * round_number + key) for key in range(5)])
        assert target.offer(request(9999), 0) is not None
        for key in range(5):
            assert target.cancel(10 * round_number + key, 0) is not None
    assert target.snapshot(0).queued == 0


def test_rule_25_costs_are_learned_from_the_first_measurement_on() -> None:
    target = scheduler(spec(1, sizes=(1,)))
    assert target.estimate_ns(1, 0, 1) is None
    accept(target, [request(key) for key in range(3)])
    run(target, 0, 100)
    assert target.estimate_ns(1, 0, 1) == 100
    run(target, 0, 200)
    assert target.estimate_ns(1, 0, 1) == 120
    done = dispatch(target)
    target.record(done, 0, 0)
    assert target.estimate_ns(1, 0, 1) == 120, "nothing ran, nothing learned"


def test_rule_26_costs_are_kept_per_variant() -> None:
    target = scheduler(spec(1))
    target.seed_cost(1, 0, 8, 100)
    target.seed_cost(1, 1, 8, 900)
    assert (target.estimate_ns(1, 0, 8), target.estimate_ns(1, 1, 8)) == (100, 900)
    assert target.estimate_ns(1, 0, 1) is None


def test_rule_15_learned_sizing_follows_what_executions_cost() -> None:
    target = scheduler(spec(1, sizes=(1, 8)), sizing=Sizing.LEARNED)
    target.seed_cost(1, 0, 1, 10 * MS)
    accept(target, [request(key) for key in range(5)])
    assert dispatch(target).batch_size == 1, "the 8 was never measured: as fill"
    target.seed_cost(1, 0, 8, 11 * MS)
    assert keys(dispatch(target)) == [1, 2, 3, 4]


def test_bs_11_the_bookkeeping_of_a_long_life_stays_small() -> None:
    """Rule 1: no drift. Half of the requests are cancelled, none of the far deadlines ever comes."""
    for discipline in Discipline:
        target = scheduler(spec(1, sizes=(4,)), spec(2, sizes=(4,)), discipline=discipline)
        for key in range(20_000):
            committed = key % 7 == 0
            accept(
                target, [request(key, 1 + key % 2, at_ns=key, deadline_ns=key + 30 * SECOND, committed=committed)], key
            )
            if key % 2:
                target.cancel(key - key % 3, key)
            if key % 4 == 3:
                run(target, key)
        while isinstance(target.next(20_000), Dispatch):
            pass
        assert target.snapshot(20_000).queued == 0
        assert target.next_expiry_ns() == NO_DEADLINE
        assert not target._requests
        assert not target._committed
        assert not target._busy
        assert target._expiries.held() <= 200
        assert target._turns is None or target._turns.held() <= 200
        assert all(model.queue.held() == 0 for model in target._models.values())


def test_rule_27_committed_requests_that_leave_are_not_kept_behind_one_that_stays() -> None:
    target = scheduler(spec(1, sizes=(1,)))
    accept(target, [request(0, committed=True)])
    for key in range(1, 1000):
        accept(target, [request(key, committed=True)])
        assert target.cancel(key, 0) is not None
        assert len(target._committed) <= 100
    assert keys(run(target)) == [0]
    assert not target._committed


def test_a_batch_is_settled_when_only_another_model_could_change_it() -> None:
    target = scheduler(spec(1, sizes=(1, 4)), spec(2, sizes=(1,)))
    assert target.next_settled(10) is None, "nothing waits"
    accept(target, [request(key, 1, deadline_ns=1000 + key) for key in range(3)])
    assert target.next_settled(10) is None, "a fourth would still fit in"
    accept(target, [request(3, 1), request(4, 1)])
    assert target.next_settled(1000) is None, "the first would have to be dropped"
    accept(target, [request(5, 2)])
    assert target.next_settled(10) is None, "two models"
    assert target.cancel(5, 10) is not None
    settled = target.next_settled(999)
    assert settled is not None and (keys(settled), settled.batch_size) == ([0, 1, 2, 3], 4)
    assert target.snapshot(999).queued == 1
    accept(target, [request(6, 1, committed=True)])
    assert target.next_settled(999) is None, "committed requests take their turn"


def test_rule_19_edf_settles_nothing_that_would_miss_its_deadline() -> None:
    target = scheduler(spec(1, sizes=(1,)), discipline=Discipline.EDF)
    target.seed_cost(1, 0, 1, 50)
    accept(target, [request(0, 1, deadline_ns=100)])
    assert target.next_settled(51) is None
    settled = target.next_settled(50)
    assert settled is not None and keys(settled) == [0]
