"""The bound that ``pick_fair`` states: no front of a fixed set of busy models waits longer than it says."""

from __future__ import annotations

import math
import random

import pytest
from scheduler_sim import SECOND, Scenario, SimModel, Simulation


def check_bound(seed: int) -> None:
    """Let one model use the device alone, then let others join at once, and measure how long any front waits."""
    rng = random.Random(seed)
    halflife_s = rng.choice([0.5, 1.0, 2.0])
    count = rng.randint(2, 6)
    weights = [rng.choice([1.0, 1.0, 2.0, 3.0, 5.0]) for _ in range(count)]
    least = min(weights) / sum(weights)
    # Together below a third of (least share x half-life), up to thirtyfold apart.
    room_ms = halflife_s * 1000 * least / 3 * 0.95
    shares = [10 ** rng.uniform(-1.5, 0) for _ in range(count)]
    costs_ms = [room_ms * share / sum(shares) for share in shares]
    alone_s = rng.choice([0.0, halflife_s, 2 * halflife_s])
    models = tuple(
        SimModel(f"m{index}", sizes=(1,), run_ms=cost, weight=weight, backlog=2, from_s=0.0 if index == 0 else alone_s)
        for index, (cost, weight) in enumerate(zip(costs_ms, weights, strict=True))
    )
    bound_ns = (halflife_s * (1 + math.log2(1 / least)) + max(costs_ms) / 1000) * SECOND
    duration_s = alone_s + 1.3 * bound_ns / SECOND
    scenario = Scenario(
        "starvation",
        models,
        duration_s=duration_s,
        halflife_s=halflife_s,
        seed=seed,
        warm=rng.random() < 0.5,
        expect={"stop_at_end": True},
    )
    simulation = Simulation(scenario)
    result = simulation.run()
    for model in models:
        assert 0 < result.worst_front_wait_ns[model.name] <= bound_ns, f"seed {seed}, {model}"
        assert simulation.waiting_since_ns(model.name) <= bound_ns, f"seed {seed}: {model.name} was starved at the end"


@pytest.mark.parametrize("seed", range(8))
def test_rule_5_no_front_starves(seed: int) -> None:
    check_bound(seed)


@pytest.mark.slow
def test_rule_5_no_front_starves_in_a_thousand_seeds() -> None:
    for seed in range(1000):
        check_bound(seed)
