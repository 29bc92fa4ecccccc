"""Acceptance tests 6 to 9 and 15 to 18 of the batch specification at the runner, on both stores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from frontend.batches.runner.gates import Reason
from frontend.batches.scheduling.load_limits import ReadError
from frontend.batches.scheduling.route_watch import RouteWatch
from frontend.batches.store.rows import SchedulingRow
from frontend.openai.calls import Sent, UpstreamAnswer
from gated_world import URL, GatedWorld, until
from runner_world import QUICK, RunnerWorld, StubExecutor, failed, line, ok

HOUR_US = 3600 * 1_000_000


@pytest.fixture
def gated(runners: RunnerWorld, tmp_path: Path) -> Iterator[GatedWorld]:
    directory = tmp_path / "run"
    directory.mkdir()
    with GatedWorld(runners, directory) as world:
        yield world


async def put(gated: GatedWorld, **settings: int | str | None) -> None:
    await gated.store.scheduling.put_settings(SchedulingRow("R", **settings), None)  # type: ignore[arg-type]


def later_window(gated: GatedWorld, hours: int) -> dict[str, int | str]:
    """Return a daily window of one hour, UTC, that opens in so many hours."""
    at = datetime.fromtimestamp(gated.now_us() / 1e6, UTC).replace(minute=0) + timedelta(hours=hours)
    start = at.hour * 60
    return {
        "window_timezone": "UTC", "window_days": 127, "window_start_minute": start,
        "window_end_minute": (start + 60) % 1440,
    }  # fmt: skip


class Held:
    """Answers that wait until the test lets them go."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def __call__(self, text: str) -> UpstreamAnswer:
        await self.gate.wait()
        return ok(text)


def test_acceptance_6_tiny_batches_are_no_trick(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor(lambda text, nth: ok(text))
        big_workspace, big_key = await runners.workspace("big")
        tiny_workspace, tiny_key = await runners.workspace("tiny")

        await put(gated, max_concurrency=1, yield_live_threshold=1)
        gated.set_live("R", 1)
        async with gated.running(executor):
            big = await runners.batch(
                [line(i, text=f"big{i}") for i in range(20)], workspace=big_workspace, key=big_key
            )
            for number in range(20):
                tiny = await runners.batch([line(0, text=f"tiny{number}")], workspace=tiny_workspace, key=tiny_key)
                await runners.until_waiting(tiny, "R", (1, "live_traffic", False))
            gated.set_live("R", 0)
            await runners.ended(big)
        order = ["big" if text.startswith("big") else "tiny" for text in executor.texts]
        for start in range(len(order) - 9):
            assert 4 <= order[start : start + 10].count("tiny") <= 6, order

    gated.runners.world.run(scenario())


def test_acceptance_7_yield(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor()
        await put(gated, yield_live_threshold=1)
        gated.set_live("R", 1)
        async with gated.running(executor):
            batch = await runners.batch(2)
            await runners.until_waiting(batch, "R", (2, "live_traffic", False))
            await gated.until_signal("R", paused_reason="live_traffic", live_in_flight=1)
            (place,) = await runners.store.views.positions(batch.id)
            assert (place.position, place.queue, place.waiting_lines) == (1, 1, 2)
            assert not executor.calls
            gated.set_live("R", 0)
            done = await runners.ended(batch)
        assert (done.batch.request_completed, len(executor.calls)) == (2, 2)

    gated.runners.world.run(scenario())


def test_a_gate_waits_for_more_calls_where_that_is_set(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor()
        await put(gated, yield_live_threshold=1, reopen_after_s=600)
        gated.set_live("R", 1)
        async with gated.running(executor):
            batch = await runners.batch(2)
            await gated.until_signal("R", paused_reason="live_traffic", live_in_flight=1, reopens_at=None)
            gated.set_live("R", 0)
            found = await gated.until_signal("R", paused_reason="live_traffic", live_in_flight=0)
            left_us = (found.reopens_at or 0) - await runners.store.now_us()
            assert 0 < left_us <= 600_000_000
            await runners.until_waiting(batch, "R", (2, "live_traffic", False))
            assert not executor.calls
            # What is saved acts within 5 s; these callers are too far apart for a second.
            await put(gated, yield_live_threshold=1, reopen_after_s=1)
            done = await runners.ended(batch)
            assert (await gated.until_signal("R", paused_reason=None)).reopens_at is None
        assert (done.batch.request_completed, len(executor.calls)) == (2, 2)

    gated.runners.world.run(scenario())


@pytest.mark.parametrize(("live", "starts"), [(1, True), (2, False)])
def test_acceptance_8_boundary(gated: GatedWorld, live: int, starts: bool) -> None:
    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor()
        await put(gated, yield_live_threshold=2)
        gated.set_live("R", live)
        async with gated.running(executor):
            batch = await runners.batch(1)
            if starts:
                assert (await runners.ended(batch)).succeeded == ["c0"]
            else:
                await runners.until_waiting(batch, "R", (1, "live_traffic", False))
                assert not executor.calls

    gated.runners.world.run(scenario())


def test_acceptance_9_metrics_busy_fail_recover(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners, load = gated.runners, gated.load
        executor = StubExecutor()
        await put(gated, metrics_url=URL, metrics_max_waiting=0, metrics_max_kv_cache_percent=90)
        load.say(waiting=3, running=0, kv_cache_permille=200)
        async with gated.running(executor):
            batch = await runners.batch(2)
            await runners.until_waiting(batch, "R", (2, "server_busy", False))
            found = await gated.until_signal("R", paused_reason="server_busy", metrics_ok=True)
            assert (found.metrics_waiting, found.metrics_kv_cache_permille) == (3, 200)
            load.fail(ReadError.HTTP_STATUS)
            await runners.until_waiting(batch, "R", (2, "metrics_unavailable", False))
            found = await gated.until_signal("R", paused_reason="metrics_unavailable", metrics_ok=False)
            assert (found.metrics_error, found.metrics_waiting) == ("http_status", None)
            load.say(waiting=0, running=0)
            await gated.until_signal("R", metrics_error="missing_metric", metrics_waiting=0)
            load.say(waiting=0, kv_cache_permille=950)
            await gated.until_signal("R", paused_reason="server_busy", metrics_kv_cache_permille=950)
            assert not executor.calls
            load.say(waiting=0, running=1, kv_cache_permille=500)
            done = await runners.ended(batch)
        assert done.batch.request_completed == 2

    gated.runners.world.run(scenario())


def test_a_first_reading_that_is_on_its_way_is_no_news(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor()
        await put(gated, metrics_url=URL, metrics_max_waiting=0)
        async with gated.running(executor) as (runner, watch):
            batch = await runners.batch(1)
            await runners.until_waiting(batch, "R", (1, "metrics_unavailable", False))
            assert await gated.signal("R") is None and pauses(watch) == {}
            gated.load.say(waiting=0)
            runner.wake()
            await runners.ended(batch)

    gated.runners.world.run(scenario())


def pauses(watch: RouteWatch) -> dict[str, float]:
    """Return the pauses that are not 0, by reason."""
    return {
        one.labels["reason"]: one.value
        for one in watch.series()
        if one.name == "gateway_batch_route_pauses_total" and one.value
    }


def test_acceptance_15_a_window_holds_and_is_no_stall(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor()
        await put(gated, **later_window(gated, 2))
        async with gated.running(executor) as (_, watch):
            batch = await runners.batch(2)
            await runners.until_waiting(batch, "R", (2, "outside_window", False))
            stored = await runners.store.batches.get(None, batch.id)
            assert stored is not None and stored.last_waited_at is not None
            assert not executor.calls
            assert pauses(watch) == {"outside_window": 1}, "an edge counts, a pass does not"
            gated.moved_us += 2 * HOUR_US
            done = await runners.ended(batch)
            assert pauses(watch) == {"outside_window": 1}
        assert done.batch.request_completed == 2
        edges = await runners.store.explain.edges("R", 0, gated.now_us() + HOUR_US)
        assert [edge.reason for edge in edges] == ["outside_window", None]
        assert {edge.cap for edge in edges} == {2}

    gated.runners.world.run(scenario())


def test_acceptance_16_unreadable_metrics_are_a_stall(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners, scheduling = gated.runners, gated.store.scheduling
        await put(gated, metrics_url=URL, metrics_max_waiting=0)
        window = later_window(gated, 2)
        await scheduling.put_settings(SchedulingRow("S", **window), None)  # type: ignore[arg-type]
        gated.load.fail(ReadError.UNREACHABLE)
        executor = StubExecutor(routes={"m": "R", "n": "S"})
        async with gated.running(executor):
            both = await runners.batch([line(0), line(1, "n")], models=["m", "n"])
            windowed = await runners.batch([line(0, "n")], model="n")
            await runners.until_waiting(both, "R", (1, "metrics_unavailable", False))
            await runners.until_waiting(both, "S", (1, "outside_window", False))
            await runners.until_waiting(windowed, "S", (1, "outside_window", False))
            stored = await runners.store.batches.get(None, both.id)
            assert stored is not None and stored.last_waited_at is None, "one lane's fault is the batch's"
            stored = await runners.store.batches.get(None, windowed.id)
            assert stored is not None and stored.last_waited_at is not None
        assert not executor.calls

    gated.runners.world.run(scenario())


def test_acceptance_17_priority_hint(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor()
        await put(gated, priority=7)
        async with gated.running(executor):
            await runners.ended(await runners.batch(2))
            await put(gated)
            await until_cap_is_read(gated)
            await runners.ended(await runners.batch(1))
        assert [received.call.priority for received in executor.calls] == [7, 7, None]

    gated.runners.world.run(scenario())


async def until_cap_is_read(gated: GatedWorld) -> None:
    """Wait for longer than a runner believes what it has read of the settings."""
    await asyncio.sleep(4 * QUICK.access_s)


def test_acceptance_18_reasons(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        held = Held()
        executor = StubExecutor(lambda text, nth: held(text))
        async with gated.running(executor, per_batch=2):
            batch = await runners.batch(5)
            await runners.until_waiting(batch, "R", (3, "concurrency", True))
            held.gate.set()
            await runners.ended(batch)
        held.gate.clear()
        await put(gated, max_concurrency=1, yield_live_threshold=1)
        gated.set_live("R", 1)
        async with gated.running(executor):
            first, second = await runners.batch(3), await runners.batch(3)
            for batch in (first, second):
                await runners.until_waiting(batch, "R", (3, "live_traffic", False))
            gated.set_live("R", 0)

            async def other_waits_for_its_turn() -> bool:
                reasons = [(await runners.waits(one)).get("R", (0, None))[1] for one in (first, second)]
                return sorted(map(str, reasons)) == ["concurrency", "fair_share"]

            await until("one is full and the other waits for its turn", other_waits_for_its_turn)
            held.gate.set()
            await runners.ended(first)
            await runners.ended(second)

    gated.runners.world.run(scenario())


def test_acceptance_18_full_is_full_also_without_a_permit(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        held = Held()
        executor = StubExecutor(lambda text, nth: held(text))
        async with gated.running(executor, workers=2) as (_, watch):
            batch = await runners.batch(5)
            await runners.until_waiting(batch, "R", (3, "concurrency", True))

            async def counted() -> bool:
                return watch.running("R") == 2

            await until("the lines are counted", counted)
            await runners.until_waiting(batch, "R", (3, "concurrency", True))
            held.gate.set()
            await runners.ended(batch)

    gated.runners.world.run(scenario())


def test_acceptance_18_precedence(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor(lambda text, nth: failed(429, retry_after_s=20.0))
        gated.set_live("R", 5)
        times = replace(QUICK, first_pause_s=20.0)
        async with gated.running(executor, times=times):
            limited = await runners.batch(3)
            await runners.until_waiting(limited, "R", (1, "rate_limited", False))
            await put(gated, yield_live_threshold=1, **later_window(gated, 2))
            await until_cap_is_read(gated)
            other = await runners.batch(2)
            await runners.until_waiting(other, "R", (2, "outside_window", False))
            assert (await runners.waits(limited))["R"] == (1, "rate_limited", False)
            # Nothing behind a closed gate is asked.
            signal = await gated.until_signal("R", paused_reason=Reason.OUTSIDE_WINDOW)
            assert signal.live_in_flight in (None, 5)

    gated.runners.world.run(scenario())


@pytest.mark.parametrize("moment", ["during its pause", "after its pause"])
def test_acceptance_18_a_closed_gate_is_told_also_of_an_unreachable_route(gated: GatedWorld, moment: str) -> None:
    """A route that is away is not tried behind a closed gate: without this, cooling would be told for ever."""
    up = False

    async def scenario() -> None:
        nonlocal up
        runners = gated.runners
        executor = StubExecutor(lambda text, nth: ok(text) if up else failed(502, Sent.NOT_SENT))
        gated.load.say(waiting=0)
        await put(gated, metrics_url=URL, metrics_max_waiting=0)
        first_pause_s = 3600.0 if moment == "during its pause" else QUICK.first_pause_s
        async with gated.running(executor, times=replace(QUICK, first_pause_s=first_pause_s, longest_pause_s=3600.0)):
            batch = await runners.batch(5)
            await runners.until_waiting(batch, "R", (5, "route_cooling", False))
            gated.load.fail(ReadError.UNREACHABLE)
            await runners.until_waiting(batch, "R", (5, "metrics_unavailable", False))
            await put(gated, **later_window(gated, 2))
            await runners.until_waiting(batch, "R", (5, "outside_window", False))
            assert (await runners.store.runner.line_counts(batch.id)).claimed == 0, "what was not sent is not claimed"
            stored = await runners.store.batches.get(None, batch.id)
            assert stored is not None and stored.last_waited_at is not None, "a closed window is no stall"
            await gated.until_signal("R", paused_reason="outside_window")
            await put(gated)
            if moment == "during its pause":
                await runners.until_waiting(batch, "R", (5, "route_cooling", False))
                await runners.store.batches.cancel(None, batch.id)
            up = True
            done = await runners.ended(batch)
        expected = {"batch_cancelled"} if moment == "during its pause" else set()
        assert set(done.codes.values()) == expected and len(done.output) + len(done.errors) == 5

    gated.runners.world.run(scenario())
