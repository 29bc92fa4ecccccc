"""The figures of the gates' benchmark, and the server whose latency it measures."""

from __future__ import annotations

import asyncio

import pytest

from bench import latency_model
from bench.gates_report import Pass, covered_s, figures, percentile, table
from bench.latency_model import LatencyModel, step_s


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0.0),
        ([(0.0, 1.0), (2.0, 4.0)], 3.0),
        ([(0.0, 3.0), (1.0, 2.0), (2.5, 4.0)], 4.0),
        ([(2.0, 3.0), (0.0, 2.0)], 3.0),
    ],
)
def test_time_with_a_call_is_counted_once(spans: list[tuple[float, float]], expected: float) -> None:
    assert covered_s(spans) == expected


@pytest.mark.parametrize(("percent", "expected"), [(50, 50.0), (99, 99.0), (99.9, 100.0), (100, 100.0), (0, 1.0)])
def test_percentiles_are_values_that_were_measured(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in range(1, 101)], percent) == expected
    assert percentile([7.0], percent) == 7.0


def calls(count: int, ms: float, start_s: float = 0.0) -> list[tuple[float, float]]:
    return [(start_s + i * ms / 1e3, start_s + (i + 1) * ms / 1e3) for i in range(count)]


PASSES = {
    "alone": [Pass(10.0, [], 100, [])],
    "live only": [Pass(40.0, calls(200, 100.0, 20.0), 0, [])],
    "ungated": [Pass(40.0, calls(100, 200.0, 20.0), 400, [(0.0, 0), (40.0, 400)])],
    "gated": [Pass(40.0, [*calls(1, 150.0, 20.0), *calls(198, 100.0, 20.15)], 180, [(0.0, 0), (20.0, 180)])],
}


def test_figures_of_one_round() -> None:
    found = figures(PASSES)
    assert found["alone_lines_per_s"] == {"median": 10.0, "least": 10.0, "most": 10.0}
    assert found["ungated"]["p99_over_live_only"] == pytest.approx(2.0)
    assert found["gated"]["p99_over_live_only"] == pytest.approx(1.0)
    assert found["gated"]["first_of_burst_ms"] == pytest.approx(150.0)
    # 180 lines, where batches alone reach 10 a second in 40 - 19.95 s.
    assert found["gated"]["share_of_idle_capacity"]["median"] == pytest.approx(180 / 200.5)
    assert "| gated | 199 | 100 | 100 | 100 | 150 | 1.00 (1.00 to 1.00) | 4.5 | 90% (90% to 90%) |" in table(found)


def test_every_burst_has_first_calls() -> None:
    two = [*calls(1, 300.0, 0.0), (0.3, 0.9), *calls(1, 500.0, 20.0), (20.5, 21.4)]
    assert Pass(30.0, two, 0, []).first_ms() == pytest.approx(500.0)


def test_steps_last_as_long_as_the_larger_of_weights_and_requests() -> None:
    assert step_s(1) == step_s(8) == pytest.approx(0.020)
    assert step_s(16) == pytest.approx(0.040)


def test_the_model_runs_as_many_as_it_has_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_model, "LEAST_MS", 0.1)
    monkeypatch.setattr(latency_model, "EACH_MS", 0.0)

    async def run() -> list[int]:
        model = LatencyModel()
        ended: list[int] = []
        most = 0

        async def one(number: int) -> None:
            nonlocal most
            await model.run(3)
            most = max(most, len(model.running))
            ended.append(number)

        stepping = asyncio.create_task(model.step_for_ever())
        await asyncio.gather(*(one(number) for number in range(latency_model.SLOTS + 2)))
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        assert most <= latency_model.SLOTS
        return ended

    assert asyncio.run(run())[-2:] == [latency_model.SLOTS, latency_model.SLOTS + 1]
