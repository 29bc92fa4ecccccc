"""``edf`` under 1.5 times the load a device can carry, against a bound that knows the whole trace in advance."""

from __future__ import annotations

import pytest
from offline_bound import most_meetable
from scheduler_sim import MS, Scenario, SimModel, Simulation

from worker.scheduling.types import Discipline, Request, Shed

SINGLE = {"sizes": (1,), "run_ms": 2.0}
BATCHED = {"sizes": (1, 8, 32), "run_ms": 2.0, "row_ms": 0.25}
# Fluid capacity is 500 rows/s for SINGLE, 3,200 rows/s for BATCHED (32 rows in 10 ms).
TRACES = {
    "one model, mixed budgets": ([SimModel("a", **SINGLE, rate=750, budget_ms=(4, 40))], 2 * MS),
    "three budgets": (
        [SimModel(f"b{ms}", **SINGLE, rate=250, budget_ms=(ms, ms)) for ms in (10, 50, 200)],
        2 * MS,
    ),
    "three models, mixed budgets": (
        [SimModel(f"b{low}", **SINGLE, rate=250, budget_ms=(low, 10 * low)) for low in (4, 10, 40)],
        2 * MS,
    ),
    "bursts": (
        [SimModel(f"b{ms}", **SINGLE, burst=75, burst_every_s=0.3, budget_ms=(ms, ms)) for ms in (50, 100, 300)],
        2 * MS,
    ),
    "heavy tail": (
        [SimModel(f"b{ms}", **SINGLE, rate=250, heavy_tail=True, budget_ms=(ms, ms)) for ms in (10, 50, 200)],
        2 * MS,
    ),
    "batches": (
        [SimModel(f"b{ms}", **BATCHED, rate=1600, budget_ms=(ms, ms)) for ms in (50, 100, 200)],
        10 * MS // 32,
    ),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", TRACES)
def test_rule_19_edf_meets_what_an_offline_optimum_could(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    models, slot_ns = TRACES[name]
    scenario = Scenario(name, tuple(models), discipline=Discipline.EDF, warm=True, duration_s=3.0, seed=seed)
    simulation = Simulation(scenario)
    jobs: list[tuple[int, int]] = []
    offer = simulation.scheduler.offer

    def watched(request: Request, now_ns: int) -> Shed | None:
        jobs.append((request.arrival_ns, request.deadline_ns))
        return offer(request, now_ns)

    monkeypatch.setattr(simulation.scheduler, "offer", watched)
    result = simulation.run()
    bound = most_meetable(jobs, slot_ns)
    assert bound < 0.85 * len(jobs), "the trace must be an overload"
    assert result.met >= 0.95 * bound
    assert result.outcomes["ran"] == result.met, "with exact costs, what runs must meet its deadline"


def test_the_bound_counts_by_hand() -> None:
    # Four unit jobs, three of which must run in [0, 2): two of them and the late one can.
    assert most_meetable([(0, 20), (0, 20), (0, 20), (0, 40)], 10) == 3
    assert most_meetable([(100, 105)], 10) == 0
    assert most_meetable([], 10) == 0
