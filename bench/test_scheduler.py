"""What the scheduler itself costs. Run ``pytest bench/test_scheduler.py``; ``--benchmark-disable`` only checks results.

Budget (shared machine, CPython 3.11): at most 10 us per request taken in batches of 32, offer, next and record
together; a decision with 1,000 loaded models at most 1.3 times one with 10, 10 of them busy either way.
"""

from __future__ import annotations

import itertools

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import Discipline, Dispatch, ModelSpec, Request, SchedulerOptions, Sizing

MS = 1_000_000
BUDGET_NS = 30_000 * MS
BATCH = 32
BUSY = 10


def loaded(models: int, discipline: Discipline, sizing: Sizing = Sizing.FILL) -> Scheduler:
    """Return a scheduler whose first ``BUSY`` models have two batches waiting each."""
    scheduler = Scheduler(SchedulerOptions(discipline, sizing))
    for model_id in range(models):
        scheduler.add_model(ModelSpec(model_id, f"m{model_id}", (1, 8, 32), 1, True))
        for size in (1, 8, 32):
            scheduler.seed_cost(model_id, 0, size, MS + size * MS // 50)
    for key in range(2 * BATCH * BUSY):
        request = Request(-1 - key, key % BUSY, 0, 1, key, BUDGET_NS + key)
        assert scheduler.offer(request, key) is None
    return scheduler


@pytest.mark.parametrize("sizing", list(Sizing), ids=lambda sizing: sizing.value)
@pytest.mark.parametrize("discipline", list(Discipline), ids=lambda discipline: discipline.value)
def test_one_batch_of_32(benchmark: BenchmarkFixture, discipline: Discipline, sizing: Sizing) -> None:
    """Dispatch 32 requests, record them, and offer 32 new ones to that model: divide by 32 for the cost per request."""
    scheduler = loaded(BUSY, discipline, sizing)
    keys = itertools.count()
    now_ns = MS

    def batch() -> Dispatch:
        nonlocal now_ns
        now_ns += MS
        decision = scheduler.next(now_ns)
        assert isinstance(decision, Dispatch)
        scheduler.record(decision, MS, now_ns)
        for _ in range(BATCH):
            scheduler.offer(Request(next(keys), decision.model_id, 0, 1, now_ns, now_ns + BUDGET_NS), now_ns)
        return decision

    decision = benchmark(batch)
    assert len(decision.requests) == BATCH
    assert scheduler.snapshot(now_ns).queued == 2 * BATCH * BUSY


@pytest.mark.parametrize("models", [10, 1000])
@pytest.mark.parametrize("discipline", list(Discipline), ids=lambda discipline: discipline.value)
def test_one_decision(benchmark: BenchmarkFixture, discipline: Discipline, models: int) -> None:
    """Dispatch one request of one of ten busy models and put one back; compare 1,000 loaded models with 10."""
    scheduler = Scheduler(SchedulerOptions(discipline))
    for model_id in range(models):
        scheduler.add_model(ModelSpec(model_id, f"m{model_id}", (1,), 1, True))
        scheduler.seed_cost(model_id, 0, 1, MS)
    keys = itertools.count()
    for _ in range(10 * BUSY):
        key = next(keys)
        assert scheduler.offer(Request(key, key % BUSY * (models // BUSY), 0, 1, key, BUDGET_NS), key) is None
    now_ns = MS

    def decide() -> Dispatch:
        nonlocal now_ns
        now_ns += MS // 10
        decision = scheduler.next(now_ns)
        assert isinstance(decision, Dispatch)
        scheduler.record(decision, MS, now_ns)
        scheduler.offer(Request(next(keys), decision.model_id, 0, 1, now_ns, now_ns + BUDGET_NS), now_ns)
        return decision

    decision = benchmark(decide)
    assert len(decision.requests) == 1
    assert scheduler.snapshot(now_ns).queued == 10 * BUSY
