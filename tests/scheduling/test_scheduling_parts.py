"""Queues, orders, decayed sums and histograms against plain Python."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_cases import request

from worker.scheduling.ema import DecayedSum
from worker.scheduling.order import SWEEP_SLACK, LazyOrder
from worker.scheduling.queues import RequestQueue
from worker.scheduling.types import NO_DEADLINE, Request
from worker.scheduling.waits import ROW_BOUNDS, WAIT_BOUNDS_NS, WaitHistogram

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(1, 60) | st.just(NO_DEADLINE), st.booleans()),
        st.tuples(st.just("take"), st.integers(0, 5)),
        st.tuples(st.just("withdraw"), st.integers(0, 50)),
        st.tuples(st.just("expire"), st.integers(0, 60)),
    ),
    max_size=120,
)


@given(CALLS)
def test_queue_behaves_like_two_lists(calls) -> None:
    queue = RequestQueue()
    model: list[Request] = []
    for key, (name, *arguments) in enumerate(calls):
        if name == "push":
            deadline_ns, committed = arguments
            added = request(key, deadline_ns=deadline_ns, committed=committed)
            queue.push(added)
            model.insert(sum(one.committed for one in model) if committed else len(model), added)
        elif name == "take":
            count = min(arguments[0], len(model))
            assert queue.take(count) == model[:count]
            del model[:count]
        elif name == "withdraw" and model:
            queue.withdraw(model.pop(arguments[0] % len(model)))
        elif name == "expire":
            expired = [one for one in model if one.deadline_ns <= arguments[0]]
            assert queue.take_expired(arguments[0]) == sorted(expired, key=lambda one: (one.deadline_ns, one.key))
            model = [one for one in model if one not in expired]
        assert list(queue.waiting()) == model
        assert queue.depth == len(model)
        assert queue.front() is (model[0] if model else None)
        assert queue.soonest_ns() == min((one.deadline_ns for one in model), default=NO_DEADLINE)


def test_queue_holds_at_most_twice_what_waits() -> None:
    queue = RequestQueue()
    stays = request(0, deadline_ns=5)
    queue.push(stays)
    for key in range(1, 5000):
        leaves = request(key, deadline_ns=10 + key, committed=key % 3 == 0)
        queue.push(leaves)
        queue.withdraw(leaves)
        assert queue.held() <= 2 * (queue.depth + 1) + SWEEP_SLACK
    assert list(queue.waiting()) == [stays]


def test_a_request_cannot_leave_a_queue_twice() -> None:
    queue = RequestQueue()
    one = request(1)
    queue.push(one)
    queue.withdraw(one)
    with pytest.raises(AssertionError, match="left the queue before"):
        queue.withdraw(one)
    with pytest.raises(AssertionError, match="2 requests asked of a queue of 0"):
        queue.take(2)


@given(st.lists(st.tuples(st.integers(0, 8), st.none() | st.integers(0, 30), st.sets(st.integers(0, 8))), max_size=200))
def test_order_finds_the_least_key(changes) -> None:
    now: dict[int, int] = {}
    order = LazyOrder(lambda model_id: (now[model_id], 0, "", model_id) if model_id in now else None)
    for model_id, value, passed_over in changes:
        before = now.pop(model_id, None)
        if value is not None:
            now[model_id] = value
            if before is None or value < before:
                order.update((value, 0, "", model_id))
        elif before is not None and before % 2:
            order.forget(model_id)
        least = min(((value, 0, "", key) for key, value in now.items()), default=None)
        assert order.first() == least
        outside = [(value, 0, "", key) for key, value in now.items() if key not in passed_over]
        assert order.first_outside(passed_over) == min(outside, default=None)
        assert order.first() == least


def test_order_sweeps_entries_that_count_no_more() -> None:
    order = LazyOrder(lambda model_id: None)
    for value in range(10_000, 0, -1):
        order.update((value, 0, "", value % 3))
        assert order.held() <= 2 * 3 + SWEEP_SLACK + 1


def test_decayed_sum_halves_and_never_grows_backwards() -> None:
    total = DecayedSum(half_life_ns=1000)
    assert total.read(5) == 0.0
    total.add(8.0, 1000)
    assert total.read(2000) == pytest.approx(4.0)
    assert total.read(500) == 8.0
    total.add(1.0, 4000)
    assert total.read(4000) == pytest.approx(2.0)
    assert total.read(10**12) == 0.0


@given(st.lists(st.integers(10_000, 10**11), min_size=1, max_size=200), st.sampled_from([0.5, 0.99]))
def test_quantiles_are_close(waits, fraction) -> None:
    histogram = WaitHistogram()
    for start in range(0, len(waits), 7):
        histogram.observe(waits[start : start + 7])
    exact = sorted(waits)[max(0, -(-int(fraction * 100) * len(waits) // 100) - 1)]
    assert histogram.quantile_ns(fraction) == pytest.approx(exact, rel=0.2)
    assert sum(histogram.counts()) == len(waits)
    assert histogram.sum_ns == sum(waits)


def test_histogram_edges() -> None:
    histogram = WaitHistogram()
    assert histogram.quantile_ns(0.5) == 0
    waits = [0, WAIT_BOUNDS_NS[0], WAIT_BOUNDS_NS[0] + 1, WAIT_BOUNDS_NS[1], WAIT_BOUNDS_NS[-1], 10**15]
    histogram.observe(waits)
    counts = histogram.counts()
    assert len(counts) == len(WAIT_BOUNDS_NS) + 1
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (2, 2, 1, 1)
    assert histogram.quantile_ns(1.0) <= WAIT_BOUNDS_NS[-1]
    # Arrivals are stamped by frontends, who may write anything.
    histogram.observe([-5, -(2**64)])
    assert (histogram.counts()[0], histogram.sum_ns) == (4, sum(waits))
    assert ROW_BOUNDS[0] == 1


@pytest.mark.parametrize("together", [False, True])
def test_requests_that_leave_before_any_deadline_is_asked_for_are_not_held(together: bool) -> None:
    queue = RequestQueue()
    queue.push(request(0, deadline_ns=5))
    for key in range(1, 10 * SWEEP_SLACK):
        passing = request(key)
        if together:
            queue.extend([passing])
        else:
            queue.push(passing)
        queue.withdraw(passing)
        assert queue.held() <= 2 * (queue.depth + 1) + SWEEP_SLACK + 1
    assert queue.soonest_ns() == 5
