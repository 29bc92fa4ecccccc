"""The figures of the gates' benchmark, and the server whose latency it measures."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from bench import latency_model
from bench.gates_report import BUSY, Pass, covered_s, figures, percentile, table
from bench.latency_model import LatencyModel, step_s
from bench.other_work import PROC, TICKS, OtherWork, Process, others_s, processes, stolen_s


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


def pass_(spans: list[tuple[float, float]], lines: int, others: float = 0.0, took_s: float = 40.0) -> Pass:
    return Pass(took_s, spans, lines, [(0.0, 0), (took_s, lines)], others)


def round_(live_ms: float = 100.0, gated_ms: float = 100.0, others: float = 0.0) -> dict[str, Pass]:
    """Return a round with 20 s of idle time and 20 s of calls; the first gated one takes 150 ms."""
    return {
        "alone": Pass(10.0, [], 100, []),
        "live only": pass_(calls(200, live_ms, 20.0), 0, others),
        "gated": pass_([*calls(1, 150.0, 20.0), *calls(198, gated_ms, 20.15)], 180),
    }


FIRST = {**round_(), "ungated": pass_(calls(100, 200.0, 20.0), 400)}


def test_figures_of_one_round() -> None:
    found = figures([FIRST])
    assert found["alone_lines_per_s"] == {"median": 10.0, "least": 10.0, "most": 10.0}
    ways = found["ways"]
    assert ways["ungated"]["p99_over_live_only"] == pytest.approx(2.0)
    assert ways["gated"]["p99_over_live_only"] == pytest.approx(1.0)
    assert ways["gated"]["first_of_burst_ms"] == pytest.approx(150.0)
    # 180 lines, where batches alone reach 10 a second in 40 - 19.95 s.
    assert ways["gated"]["share_of_idle_capacity"]["median"] == pytest.approx(180 / 200.5)
    row = "| gated | 199 | 100 | 100 | 100 | 150 | 1.00 | 1.00 (1.00 to 1.00) | 4.5 | 90% (90% to 90%) |"
    assert row in table(found)
    assert "1 rounds, busy: none." in table(found)


def test_busy_rounds_are_marked_and_left_out() -> None:
    found = figures([FIRST, round_(gated_ms=300.0, others=BUSY + 0.01), round_(gated_ms=104.0), round_(gated_ms=102.0)])
    assert found["busy_rounds"] == [2]
    ratios = found["ways"]["gated"]["p99_over_live_only_per_round"]
    assert ratios == {"median": pytest.approx(1.02), "least": pytest.approx(1.0), "most": pytest.approx(1.04)}
    assert found["ways"]["gated"]["calls"] == 3 * 199
    assert "4 rounds, busy: 2. Most that others used of the machine in each: 0%, 11%, 0%, 0%." in table(found)
    assert "No round was quiet" not in table(found)


def test_a_way_of_one_round_is_told_even_if_that_was_busy() -> None:
    first = {**FIRST, "live only": pass_(calls(200, 100.0, 20.0), 0, 0.5)}
    found = figures([first, round_(live_ms=110.0)])
    assert (found["busy_rounds"], found["ways"]["gated"]["p99_over_live_only"]) == ([1], pytest.approx(100 / 110))
    assert found["ways"]["ungated"]["p99_over_live_only"] == pytest.approx(2.0)


def test_without_a_quiet_round_all_are_told_with_a_warning() -> None:
    found = figures([{**FIRST, "live only": pass_(calls(200, 100.0, 20.0), 0, 0.5)}])
    assert found["ways"]["gated"]["calls"] == 199
    assert "No round was quiet" in table(found)


def test_the_work_of_others_is_what_neither_descends_from_us_nor_gives_way(tmp_path: Path) -> None:
    def process(pid: int, name: str, parent: int, nice: int, *used: int) -> None:
        times = " ".join(str(seconds * TICKS) for seconds in used)
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "stat").write_text(
            f"{pid} ({name}) S {parent} 1 1 0 -1 4194304 9 9 9 9 {times} 20 {nice} 1 0\n"
        )

    process(10, "bench) S 99", 1, -5, 2, 1, 0, 0)
    process(30, "worker", 20, 0, 5, 0, 0, 0)
    process(20, "node (a b)", 10, 0, 1, 0, 0, 0)
    process(40, "other", 1, -5, 1, 2, 3, 4)
    process(50, "idle job", 1, 0, 100, 0, 0, 0)
    before = processes(tmp_path)
    assert before[40] == Process(1, -5, 10.0)
    process(40, "other", 1, -5, 2, 2, 4, 4)
    process(50, "idle job", 1, 0, 900, 0, 0, 0)
    process(30, "worker", 20, 0, 500, 0, 0, 0)
    process(60, "come in between", 1, -10, 1, 0, 0, 0)
    assert others_s(before, processes(tmp_path), 10) == 3.0
    (tmp_path / "stat").write_text(f"cpu  1 2 3 4 5 6 7 {8 * TICKS} 0 0\n")
    assert stolen_s(tmp_path) == 8.0


def test_this_machine_tells_its_work() -> None:
    assert processes(PROC)[os.getpid()].used_s > 0.0
    assert OtherWork().share() >= 0.0


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
