"""The simulation of gates that stay closed for a while; on a virtual clock, so its outcome is fixed."""

from __future__ import annotations

import pytest

from bench import reopening
from bench.reopening import Fixed, Learned, simulate


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reopening, "CYCLES", 2)


def test_a_gate_that_waits_protects_callers_who_pause() -> None:
    without = simulate(4, 1.0, None, 1)
    at_once, held = simulate(4, 1.0, Fixed(0), 1), simulate(4, 1.0, Learned(10), 1)
    assert without.share == 0.0
    assert at_once.p99_s > 1.15 * without.p99_s and at_once.share > 1.0
    assert held.p99_s < 1.1 * without.p99_s and 0.5 < held.share < 1.0


def test_a_learned_time_leaves_more_to_lines_than_its_limit_would_where_callers_are_dense() -> None:
    fixed, learned = simulate(4, 0.3, Fixed(30), 1), simulate(4, 0.3, Learned(30), 1)
    assert learned.share > fixed.share + 0.2
    assert learned.p99_s == pytest.approx(fixed.p99_s, rel=0.05)


def test_without_batches_a_call_takes_as_long_as_its_tokens() -> None:
    outcome = simulate(1, 10.0, None, 2)
    # Late by a step at most, in which it waits for nobody.
    assert outcome.share == 0.0
    assert outcome.p99_s == pytest.approx(reopening.TOKENS * 0.020, abs=0.021)
