"""``plan_batch``: rules 10 to 15 by hand, and against a slow, literal reading of the rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_cases import request, spec

from worker.channel.records import Reason
from worker.scheduling.batching import max_batch_rows, plan_batch
from worker.scheduling.types import BatchPlan, ModelSpec, Request


def plan(
    model: ModelSpec, rows: list[int], variants: list[int] | None = None, costs: dict[int, float] | None = None
) -> BatchPlan:
    shapes = variants or [0] * len(rows)
    waiting = [
        request(key, rows=count, variant=shape) for key, (count, shape) in enumerate(zip(rows, shapes, strict=True))
    ]
    cost_of = None if costs is None else lambda variant, size: costs.get(size)
    return plan_batch(model, waiting, cost_of)


@pytest.mark.parametrize(
    ("sizes", "cap", "rows", "size", "taken", "reason"),
    [
        # The largest compiled size that the rows fill; the rest waits.
        ((1, 8, 32), 0, [1] * 31, 8, 8, Reason.FILLED),
        ((1, 8, 32), 0, [1] * 32, 32, 32, Reason.FILLED),
        ((1, 8, 32), 0, [1] * 100, 32, 32, Reason.FILLED),
        ((1, 8, 32), 0, [1] * 7, 1, 1, Reason.FILLED),
        # Fewer rows than the smallest size: padded.
        ((8, 32), 0, [1] * 3, 8, 3, Reason.QUEUE_DRAINED),
        # BS-17: twelve one-row requests run as 8, then 4.
        ((1, 2, 4, 8), 0, [1] * 12, 8, 8, Reason.FILLED),
        ((1, 2, 4, 8), 0, [1] * 4, 4, 4, Reason.FILLED),
        # Whole requests only: the second 5 does not fit into 8.
        ((1, 8), 0, [5, 5], 8, 1, Reason.FILLED),
        ((1, 8, 32), 0, [3, 4, 5], 8, 2, Reason.FILLED),
        # BS-02: rows count, not requests.
        ((1, 4, 8), 0, [3] * 10, 8, 2, Reason.FILLED),
        ((1, 4, 8), 0, [8] * 5, 8, 1, Reason.FILLED),
        # A front larger than the size for the queue gets the smallest that holds it, and company that fits.
        ((1, 8, 32), 0, [9], 32, 1, Reason.OVERSIZE),
        ((1, 8, 32), 0, [9, 2], 32, 2, Reason.QUEUE_DRAINED),
    ],
)  # fmt: skip
def test_rule_12_size_and_take(sizes, cap, rows, size, taken, reason) -> None:
    result = plan(spec(sizes=sizes, max_batch_size=cap), rows)
    assert (result.batch_size, result.taken, result.rows, result.reason) == (size, taken, sum(rows[:taken]), reason)


@pytest.mark.parametrize(
    ("sizes", "cap", "rows", "size", "taken", "reason"),
    [
        ((1, 8, 32), 6, [1] * 31, 1, 1, Reason.FILLED),
        ((8, 32), 6, [1] * 31, 8, 6, Reason.CAPPED),
        ((8, 32), 6, [4, 4], 8, 1, Reason.CAPPED),
        ((1, 8, 32), 6, [7, 1], 8, 1, Reason.OVERSIZE),
        ((8,), 4, [8, 1], 8, 1, Reason.FILLED),
        ((1, 8, 32), 1, [1, 1], 1, 1, Reason.FILLED),
        ((1, 8, 32), 100, [1] * 40, 32, 32, Reason.FILLED),
    ],
)  # fmt: skip
def test_rule_13_cap_changes_no_shape_and_splits_nothing(sizes, cap, rows, size, taken, reason) -> None:
    result = plan(spec(sizes=sizes, max_batch_size=cap), rows)
    assert (result.batch_size, result.taken, result.rows, result.reason) == (size, taken, sum(rows[:taken]), reason)


def test_rule_10_without_a_batch_axis_everywhere_one_request_runs() -> None:
    result = plan(spec(sizes=(1, 8), coalesces=False), [3, 3])
    assert (result.batch_size, result.taken, result.reason) == (8, 1, Reason.NOT_COALESCING)
    result = plan(spec(sizes=(0,)), [1, 1])
    assert (result.batch_size, result.taken, result.reason) == (0, 1, Reason.NOT_COALESCING)


def test_rule_11_window_ends_at_another_shape() -> None:
    result = plan(spec(sizes=(8,)), [1, 1, 1, 1], [0, 0, 1, 0])
    assert (result.variant, result.batch_size, result.taken, result.reason) == (0, 8, 2, Reason.OTHER_SHAPE)
    assert not result.growable


@pytest.mark.parametrize(
    ("rows", "variants", "reason"), [([1, 1], [-1, -1], Reason.NONE), ([33, 1], [0, 0], Reason.OVERSIZE)]
)
def test_rule_11_front_without_an_executable_runs_alone(rows, variants, reason) -> None:
    result = plan(spec(), rows, variants)
    assert (result.batch_size, result.taken, result.reason) == (-1, 1, reason)


def test_rule_14_lone_request_that_fills_the_size_has_no_padding() -> None:
    result = plan(spec(), [8])
    assert (result.batch_size, result.rows, result.taken, result.reason) == (8, 8, 1, Reason.FILLED)


@pytest.mark.parametrize(
    ("rows", "costs", "size", "taken"),
    [
        # One padded 32 is cheaper per row than a full 8.
        ([1] * 31, {1: 1.0, 8: 2.0, 32: 4.0}, 32, 31),
        ([1] * 31, {1: 1.0, 8: 2.0, 32: 16.0}, 8, 8),
        # Equal per row: the one that carries more, then the smaller size.
        ([1, 1], {1: 1.0, 8: 2.0, 32: 2.0}, 8, 2),
        # A size that was never measured: as ``fill``.
        ([1] * 31, {1: 1.0, 8: 2.0}, 8, 8),
        # A size that seems dearer than a larger one was disturbed when it was measured; it runs, and is measured again.
        ([1], {1: 7.0, 8: 2.0, 32: 4.0}, 1, 1),
        # The front is always carried, whatever it costs.
        ([9, 1], {1: 1.0, 8: 1.0, 32: 1000.0}, 32, 2),
    ],
)
def test_rule_15_learned_takes_the_least_cost_per_row(rows, costs, size, taken) -> None:
    result = plan(spec(), rows, costs=costs)
    assert (result.batch_size, result.taken) == (size, taken)


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"), [((1, 8), 0, 8), ((1, 8), 4, 4), ((1, 8), 64, 8), ((0,), 0, 1), ((0,), 4, 1)]
)
def test_rule_30_effective_max_batch(sizes, cap, expected) -> None:
    assert max_batch_rows(spec(sizes=sizes, max_batch_size=cap)) == expected


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(lambda sizes: tuple(sorted(sizes)))
SHAPES = st.sampled_from([0] * 12 + [1, -1])
WAITING = st.lists(
    st.tuples(st.integers(1, 45), SHAPES) | st.tuples(st.integers(1, 3), SHAPES), min_size=1, max_size=50
)


def literal_fill(model: ModelSpec, waiting: list[Request]) -> tuple[int, int]:
    """Return (size, taken) as rules 11 to 13 say it, one sentence after another; the front has an executable."""
    window = []
    for one in waiting:
        if one.variant != waiting[0].variant:
            break
        window.append(one.rows)
    cap = model.max_batch_size or 10**9
    filled = [size for size in model.batch_sizes if size <= min(sum(window), cap)]
    size = max(filled) if filled else min(model.batch_sizes)
    if window[0] > size:
        size = min(holding for holding in model.batch_sizes if holding >= window[0])
    taken, rows = 1, window[0]
    while taken < len(window) and rows + window[taken] <= min(size, cap):
        rows += window[taken]
        taken += 1
    return size, taken


def bounded(costs: dict[int, float], size: int) -> float:
    return min(cost for other, cost in costs.items() if other >= size)


def literal_learned(model: ModelSpec, waiting: list[Request], costs: dict[int, float]) -> float:
    """Return the least cost per row carried over all sizes that hold the front; none costs more than a larger one."""
    best = float("inf")
    cap = model.max_batch_size or 10**9
    for size in model.batch_sizes:
        if size < waiting[0].rows:
            continue
        rows = waiting[0].rows
        for one in waiting[1:]:
            if one.variant != waiting[0].variant or rows + one.rows > min(size, cap):
                break
            rows += one.rows
        best = min(best, bounded(costs, size) / rows)
    return best


@settings(max_examples=300)
@given(SIZES, WAITING, st.integers(0, 45), st.data())
def test_plans_follow_the_rules(sizes, shapes, cap, data) -> None:
    model = spec(sizes=sizes, max_batch_size=cap)
    waiting = [request(key, rows=rows, variant=variant) for key, (rows, variant) in enumerate(shapes)]
    costs = {size: data.draw(st.floats(1.0, 1e9)) for size in sizes}
    filled = plan_batch(model, waiting, None)
    learned = plan_batch(model, waiting, lambda variant, size: costs[size])
    for result in (filled, learned):
        taken = waiting[: result.taken]
        assert result.taken >= 1
        assert result.rows == sum(one.rows for one in taken)
        assert {one.variant for one in taken} == {result.variant}
        if result.batch_size < 0:
            assert result.taken == 1
            assert result.variant < 0 or result.rows > sizes[-1]
        else:
            assert result.batch_size in sizes
            assert result.rows <= result.batch_size
            assert result.taken == 1 or not cap or result.rows <= cap
    if filled.batch_size > 0:
        assert (filled.batch_size, filled.taken) == literal_fill(model, waiting)
        assert bounded(costs, learned.batch_size) / learned.rows == literal_learned(model, waiting, costs)


@settings(max_examples=300)
@given(SIZES, WAITING, st.integers(0, 45), st.integers(1, 45), st.booleans())
def test_a_plan_that_cannot_grow_ignores_later_requests(sizes, shapes, cap, rows, learned) -> None:
    model = spec(sizes=sizes, max_batch_size=cap)
    waiting = [request(key, rows=count, variant=variant) for key, (count, variant) in enumerate(shapes)]
    cost_of = (lambda variant, size: float(size) ** 0.5) if learned else None
    before = plan_batch(model, waiting, cost_of)
    after = plan_batch(model, [*waiting, request(999, rows=rows)], cost_of)
    if not before.growable:
        assert before == after
