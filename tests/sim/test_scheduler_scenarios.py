"""Scenario files: fixed traffic, checked after every step by the simulator and at the end against ``expect``."""

from __future__ import annotations

import pytest
from scheduler_sim import MS, SCENARIOS, Scenario, load_scenario, simulate

ALL = sorted(SCENARIOS.glob("*.yaml"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_scenario_ends_as_expected(path) -> None:
    scenario = load_scenario(path)
    result = simulate(scenario)
    expect = dict(scenario.expect)
    expect.pop("stop_at_end", None)
    assert expect, "a scenario must expect something"
    tolerance = expect.pop("tolerance", None)
    for name, share in expect.pop("shares", {}).items():
        assert result.share(name) == pytest.approx(share, abs=tolerance)
    if "even" in expect:
        first, second = (result.compute_ns[name] for name in expect.pop("even"))
        assert first / (first + second) == pytest.approx(0.5, abs=tolerance)
    for name, limit_ms in expect.pop("worst_front_wait_ms", {}).items():
        assert 0 < result.worst_front_wait_ns[name] <= limit_ms * MS
    if "most_missed" in expect:
        assert result.missed <= expect.pop("most_missed") * result.requests
    for outcome in expect.pop("outcomes", []):
        assert result.outcomes.get(outcome, 0) > 0
    assert not expect, f"unknown expectations {sorted(expect)}"


@pytest.mark.parametrize("halflife_s", [2, 30])
@pytest.mark.slow
def test_rule_5_shares_hold_for_other_half_lives(halflife_s: float) -> None:
    for name in ("fair_one_to_one", "fair_five_three_two"):
        scenario = load_scenario(SCENARIOS / f"{name}.yaml")
        result = simulate(scenario, halflife_s=halflife_s, duration_s=halflife_s * 10)
        for model, share in scenario.expect["shares"].items():
            assert result.share(model) == pytest.approx(share, abs=0.03)


def test_same_scenario_and_seed_give_the_same_trace() -> None:
    scenario = load_scenario(SCENARIOS / "bursts_and_cancels.yaml")
    hashes = [simulate(scenario, seed=seed).trace_hash for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_rule_15_learned_needs_less_device_time_than_fill() -> None:
    scenario = load_scenario(SCENARIOS / "learned_sizes.yaml")
    assert isinstance(scenario, Scenario)
    learned = simulate(scenario)
    filled = simulate(scenario, sizing=type(scenario.sizing).FILL)
    assert learned.rows == filled.rows
    assert learned.compute_ns["flat"] < filled.compute_ns["flat"]
    assert learned.padding["flat"] > filled.padding["flat"]
