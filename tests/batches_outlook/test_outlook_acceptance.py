"""Alerts, forecasts and adaptive caps of a real runner with its gates, on both stores: acceptance tests 15 and 16."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from frontend.batches.scheduling.adaptive import AdaptiveCaps
from frontend.batches.scheduling.alerts import AlertDuty
from frontend.batches.scheduling.forecast import Forecaster
from frontend.batches.scheduling.load_limits import ReadError
from frontend.batches.store.route_rows import RouteCount
from frontend.batches.store.rows import SECOND_US, BatchRow, SchedulingRow
from frontend.gateway_settings import AlertRule, AlertSettings, BatchSettings
from frontend.openai.calls import UpstreamAnswer
from gated_world import URL, GatedWorld, until
from runner_world import RunnerWorld, StubExecutor, failed, line, ok

HOUR_US = 3600 * SECOND_US
RULES = AlertSettings(rules=(AlertRule(name="stalled", kind="batch_stalled", window_minutes=5),))


@pytest.fixture
def gated(runners: RunnerWorld, tmp_path: Path) -> Iterator[GatedWorld]:
    directory = tmp_path / "run"
    directory.mkdir()
    with GatedWorld(runners, directory) as world:
        yield world


def later_window(gated: GatedWorld, hours: int) -> dict[str, Any]:
    """Return a daily window of one hour, UTC, that opens in so many hours."""
    at = datetime.fromtimestamp(gated.now_us() / 1e6, UTC).replace(minute=0) + timedelta(hours=hours)
    start = at.hour * 60
    return {
        "window_timezone": "UTC", "window_days": 127, "window_start_minute": start,
        "window_end_minute": (start + 60) % 1440,
    }  # fmt: skip


class Watchman:
    """A frontend's alert duty, which lives on when runners die."""

    def __init__(self, gated: GatedWorld) -> None:
        self._store = gated.store
        self._duty = AlertDuty(gated.store, RULES, Forecaster(gated.store, BatchSettings()))

    async def incidents(self) -> list[str]:
        """Judge now; return the batches with an open incident."""
        await self._duty.judge()
        return [one.subject for one in await self._store.alerts.open_incidents()]


async def until_waited(gated: GatedWorld, batch: BatchRow) -> None:
    """Wait until it is written that a batch waits now, for a legitimate reason."""

    async def waited() -> bool:
        stored = await gated.store.batches.get(None, batch.id)
        return stored is not None and (stored.last_waited_at or 0) > await gated.store.now_us() - 60 * SECOND_US

    await until("the wait is written", waited)


def test_acceptance_15_a_window_holds_is_no_stall_and_an_incident_ends_with_progress(gated: GatedWorld) -> None:
    world, runners, watch = gated.runners.world, gated.runners, Watchman(gated)
    executor = StubExecutor()
    row = SchedulingRow("R", **later_window(gated, 2))
    world.run(gated.store.scheduling.put_settings(row, None))
    batch = world.run(runners.batch(2))

    async def held() -> None:
        async with gated.running(executor):
            await runners.until_waiting(batch, "R", (2, "outside_window", False))

    world.run(held())
    world.advance(3600)

    async def waits() -> None:
        async with gated.running(executor):
            await until_waited(gated, batch)
            assert (await runners.waits(batch))["R"] == (2, "outside_window", False)
            assert await watch.incidents() == []
        assert not executor.calls

    world.run(waits())
    # No runner: nobody writes that it waits.
    world.advance(6 * 60)
    assert world.run(watch.incidents()) == [batch.id]

    async def comes_back() -> None:
        gated.moved_us += 2 * HOUR_US
        async with gated.running(executor):
            done = await runners.ended(batch)
        assert done.batch.state == "completed"
        assert await watch.incidents() == []

    world.run(comes_back())
    (incident,) = world.run(gated.store.alerts.incidents(10))
    assert incident.resolved_at is not None


def test_acceptance_16_unreadable_metrics_are_a_stall_also_beside_a_closed_window(gated: GatedWorld) -> None:
    world, runners, watch = gated.runners.world, gated.runners, Watchman(gated)
    executor = StubExecutor(routes={"m": "R", "n": "S"})
    gated.load.fail(ReadError.UNREACHABLE)

    async def scenario() -> None:
        await gated.store.scheduling.put_settings(SchedulingRow("R", metrics_url=URL, metrics_max_waiting=0), None)
        await gated.store.scheduling.put_settings(SchedulingRow("S", **later_window(gated, 2)), None)
        async with gated.running(executor):
            both = await runners.batch([line(0), line(1, "n")], models=["m", "n"])
            metrics = await runners.batch(1)
            windowed = await runners.batch([line(0, "n")], model="n")
            for batch, route, reason in (
                (both, "R", "metrics_unavailable"), (both, "S", "outside_window"),
                (metrics, "R", "metrics_unavailable"), (windowed, "S", "outside_window"),
            ):  # fmt: skip
                await runners.until_waiting(batch, route, (1, reason, False))
            assert await watch.incidents() == []
            world.advance(6 * 60)
            await until_waited(gated, windowed)
            assert sorted(await watch.incidents()) == sorted([both.id, metrics.id])
        assert not executor.calls

    world.run(scenario())


def test_a_runner_measures_its_lines_and_the_next_batch_is_forecast_from_them(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners

        async def slow(text: str) -> UpstreamAnswer:
            await asyncio.sleep(0.05)
            return ok(text)

        executor = StubExecutor(lambda text, nth: slow(text))
        async with gated.running(executor, default_cap=2):
            await runners.ended(await runners.batch(20))
        # Its samples are written at the latest when it ends.
        forecaster = Forecaster(gated.store, BatchSettings(), lambda endpoint, model: "R")
        batch = await runners.batch(2000)
        outlook = await forecaster.of(batch.id)
        assert outlook is not None and outlook.eta_p50 is not None
        assert outlook.measured_lines == 20
        now_s = await gated.store.now_us() / SECOND_US
        # 2000 lines, 2 at once; a busy machine makes them slower, never faster.
        assert 2000 * 0.05 / 2 * 0.9 <= outlook.eta_p50 - now_s <= 3600
        assert not outlook.at_risk

    gated.runners.world.run(scenario())


class Server:
    """An upstream that takes so many lines at once and answers 429 to more."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.now = 0
        self.refused = 0

    async def __call__(self, text: str) -> UpstreamAnswer:
        self.now += 1
        try:
            if self.now > self.capacity:
                self.refused += 1
                return failed(429)
            await asyncio.sleep(0.02)
            return ok(text)
        finally:
            self.now -= 1


def test_an_adaptive_cap_settles_below_what_the_server_refuses(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        server = Server(6)
        executor = StubExecutor(lambda text, nth: server(text))
        row = SchedulingRow("R", 12, min_concurrency=1)
        await gated.store.scheduling.put_settings(row, None)
        async with _adapting(gated, executor, row):
            batch = await runners.batch(3000, retry_limit=2)

            async def lowered() -> bool:
                edges = await gated.store.explain.edges("R", 0, gated.now_us() + HOUR_US)
                return any(edge.why == "overload" for edge in edges)

            await until("it is lowered after a refusal", lowered)
            assert server.refused > 0
            assert executor.most <= 12
            await gated.store.batches.cancel(None, batch.id)
            await runners.ended(batch)
        changes = [
            (edge.cap, edge.why)
            for edge in await gated.store.explain.edges("R", 0, gated.now_us() + HOUR_US)
            if edge.why is not None
        ]
        assert all(cap is not None and 1 <= cap <= 12 for cap, _ in changes)
        for (before, _), (cap, why) in pairwise(changes):
            assert before is not None and cap is not None
            assert cap == (before + 1 if why == "clean_windows" else max(1, before // 2))

    gated.runners.world.run(scenario())


@asynccontextmanager
async def _adapting(gated: GatedWorld, executor: StubExecutor, row: SchedulingRow) -> Any:
    """Run with a cap that adapts every 50 ms instead of every 10 s."""

    class Quiet:
        def latency_counts(self, route_id: str) -> tuple[int, ...]:
            return (0, 0)

        latency_bounds_s = (1.0,)

    caps = AdaptiveCaps("runner-1", gated.store, Quiet(), window_s=0.05, look_s=0.01)
    caps.rows = lambda: [row]
    caps.counts = lambda: [RouteCount("R", 1000, 1, caps.cap(row))]
    async with gated.running(executor, caps=caps):
        caps.start()
        yield
        await caps.close()
