"""Random scenarios: every invariant of the simulator holds in each; CI runs fixed seeds and fresh ones it prints."""

from __future__ import annotations

import random

import pytest
from scheduler_sim import random_scenario, simulate


@pytest.mark.parametrize("seed", range(40))
def test_fixed_seed(seed: int) -> None:
    result = simulate(random_scenario(seed))
    assert result.requests == sum(result.outcomes.values())


def test_fresh_seeds() -> None:
    # A failure is shown again by ``scripts/replay SEED``.
    for _ in range(5):
        seed = random.SystemRandom().randrange(10_000, 2**31)
        print(f"seed {seed}")
        result = simulate(random_scenario(seed))
        assert result.requests == sum(result.outcomes.values()), f"seed {seed}"


@pytest.mark.slow
def test_a_thousand_seeds() -> None:
    requests = 0
    for seed in range(1000, 2000):
        requests += simulate(random_scenario(seed)).requests
    assert requests > 1_000_000
