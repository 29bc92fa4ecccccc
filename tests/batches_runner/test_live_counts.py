"""Live traffic across processes and machines, how far batches may overshoot it, and the figures of an installation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from frontend.batches.runner.gates import Reason
from frontend.batches.scheduling import live_counts
from frontend.batches.scheduling.live_counts import LiveCounts
from frontend.batches.scheduling.route_watch import RouteWatch
from frontend.batches.store.rows import SchedulingRow
from frontend.gateway_settings import GatewayModel, GatewaySettings, RouteSettings
from frontend.openai.calls import UpstreamAnswer
from frontend.openai.routes import Lease, Routes
from gated_world import GatedWorld, until
from runner_world import END_S, QUICK, RunnerWorld, StubExecutor, line, ok

ROUTE = RouteSettings(id="R", kind="vllm", endpoint="http://10.0.0.5:8000/v1", addresses=("10.0.0.5",))
SETTINGS = GatewaySettings(models=(GatewayModel(name="m", routes=(ROUTE,)),))


@pytest.fixture
def gated(runners: RunnerWorld, tmp_path: Path) -> Iterator[GatedWorld]:
    directory = tmp_path / "run"
    directory.mkdir()
    with GatedWorld(runners, directory) as world:
        yield world


class Process:
    """The live side of one gateway process."""

    def __init__(self, runners: RunnerWorld, directory: Path, *, reads: bool = True) -> None:
        directory.mkdir(exist_ok=True)
        self.routes = Routes(SETTINGS, {})
        opened = asyncio.Event()
        opened.set()
        self.counts = LiveCounts(directory, self.routes, runners.store, opened, reads=reads)

    def call(self) -> Lease:
        """Begin a live call."""
        model = self.routes.model("m")
        assert model is not None
        return self.routes.enter(model, model.routes[0], batch=False)

    async def until_count(self, expected: int) -> None:
        async def probe() -> bool:
            return self.counts.count("R") == expected

        await until(f"{expected} live calls are seen, not {self.counts.count('R')}", probe)


def test_rule_32_one_machine_is_exact_at_once(runners: RunnerWorld, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            one, two = (Process(runners, tmp_path / "run") for _ in range(2))
            for process in (one, two):
                process.counts.start()
                stack.push_async_callback(process.counts.close)
            leases = [one.call(), two.call(), two.call()]
            assert (one.counts.count("R"), two.counts.count("R")) == (3, 3)
            # Hearing of the own machine through the store too would count it twice.
            await asyncio.sleep(0.7)
            assert (one.counts.count("R"), two.counts.count("R")) == (3, 3)
            for lease in leases:
                lease.answered()
                lease.close()
            assert (one.counts.count("R"), two.counts.count("R")) == (0, 0)
            assert sum(one.counts.latency_counts("R")) == 3

    runners.world.run(scenario())


def test_rule_32_other_machines_are_heard_of_and_forgotten(runners: RunnerWorld, tmp_path: Path) -> None:
    if runners.world.kind == "sqlite":
        # One machine by nature; nothing is written for others.
        assert runners.world.sql("SELECT count(*) FROM route_inflight") == [(0,)]
        return

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            here, there, beside = (Process(runners, tmp_path / name) for name in ("a", "b", "b"))
            for process in (here, there, beside):
                process.counts.start()
                stack.push_async_callback(process.counts.close)
            leases = [there.call(), beside.call(), here.call()]
            await here.until_count(3)
            leases[0].close()
            await here.until_count(2)
            # Whatever the whole machine was doing when it died, nobody says that it still does.
            for process in (there, beside):
                await process.counts._exchange.close()
            runners.world.advance(6.1)
            await here.until_count(1)
            leases[2].close()
            assert here.counts.count("R") == 0

    runners.world.run(scenario())


@pytest.mark.parametrize("cap", [1, 4])
def test_rule_33_overshoot_is_what_had_passed_its_gates(gated: GatedWorld, cap: int) -> None:
    async def scenario() -> None:
        runners = gated.runners
        begun: list[int] = []

        async def answer(text: str) -> UpstreamAnswer:
            if len(executor.calls) == 25:
                gated.set_live("R", 1)
                begun.append(len(executor.calls))
            await asyncio.sleep(0)
            return ok(text)

        executor = StubExecutor(lambda text, nth: answer(text))
        await gated.store.scheduling.put_settings(SchedulingRow("R", max_concurrency=cap, yield_live_threshold=1), None)
        async with gated.running(executor):
            batch = await runners.batch(60)
            await gated.until_signal("R", paused_reason="live_traffic", live_in_flight=1)
            assert begun and len(executor.calls) - begun[0] <= cap
            assert executor.most <= cap
            gated.set_live("R", 0)
            assert (await runners.ended(batch)).batch.request_completed == 60

    runners = gated.runners
    runners.world.run(scenario())


@pytest.mark.parametrize("cap", [1, 4])
def test_rule_33_overshoot_across_machines_is_one_cap(gated: GatedWorld, tmp_path: Path, cap: int) -> None:
    """A live call on another machine, two run directories on one store, while lines start as fast as they can."""
    runners = gated.runners
    if runners.world.kind == "sqlite":
        # One machine by nature; see test_rule_33_overshoot_is_what_had_passed_its_gates.
        return

    async def scenario() -> None:
        released = asyncio.Event()
        leases: list[Lease] = []

        async def answer(text: str) -> UpstreamAnswer:
            if len(executor.calls) == 25:
                leases.append(there.call())
            if leases:
                await released.wait()
            return ok(text)

        executor = StubExecutor(lambda text, nth: answer(text))
        there = Process(runners, tmp_path / "there", reads=False)
        await gated.store.scheduling.put_settings(SchedulingRow("R", max_concurrency=cap, yield_live_threshold=1), None)
        async with AsyncExitStack() as stack:
            there.counts.start()
            stack.push_async_callback(there.counts.close)
            await stack.enter_async_context(gated.running(executor))
            batch = await runners.batch(60)
            await gated.until_signal("R", paused_reason="live_traffic", live_in_flight=1)
            begun = len(executor.calls)
            assert begun - 25 <= cap and executor.most <= cap
            # None of them has ended until now: what has room afterwards gives way.
            released.set()
            await runners.until_waiting(batch, "R", (60 - begun, "live_traffic", False))
            assert len(executor.calls) == begun
            leases[0].close()
            assert (await runners.ended(batch)).batch.request_completed == 60
        assert executor.most <= cap

    runners.world.run(scenario())


def test_rule_33_other_machines_are_heard_of_within_a_second() -> None:
    published_s = live_counts.CHANGED_NS / 1e9 + live_counts.LOOK_S
    assert published_s + live_counts.READ_S + live_counts.LOOK_S <= 1.0


def test_room_that_one_process_leaves_is_taken_by_another_at_once(gated: GatedWorld) -> None:
    if gated.runners.world.kind == "sqlite":
        # One process runs batches there.
        return
    other = gated.runners.world.open()

    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor()
        # Nobody looks again by himself in this test's time.
        times = replace(QUICK, pass_s=END_S)
        options = {"default_cap": 1, "times": times}
        first, first_key = await runners.workspace("a")
        second, second_key = await runners.workspace("b")
        async with gated.running(executor, **options), gated.running(executor, store=other, **options):
            batches = [
                await runners.batch([line(i, text=f"{key}{i}") for i in range(8)], workspace=workspace, key=key)
                for workspace, key in ((first, first_key), (second, second_key)) * 2
            ]
            for batch in batches:
                assert (await runners.ended(batch)).batch.request_completed == 8
        assert executor.most == 1

    gated.runners.world.run(scenario())


def value(watch: RouteWatch, name: str, **labels: str) -> float | None:
    found = [one.value for one in watch.series() if one.name == name and labels.items() <= one.labels.items()]
    assert len(found) <= 1
    return found[0] if found else None


def test_rule_83_one_process_tells_the_figures_of_all(gated: GatedWorld) -> None:
    stores = [gated.store]
    if gated.runners.world.kind == "postgresql":
        stores.append(gated.runners.world.open())

    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor(routes={"m": "R", "n": "S"})
        for route in "RS":
            await gated.store.scheduling.put_settings(SchedulingRow(route, yield_live_threshold=1), None)
        gated.set_live("R", 1)
        async with AsyncExitStack() as stack:
            watches = [(await stack.enter_async_context(gated.running(executor, store=store)))[1] for store in stores]
            await runners.batch([line(i) for i in range(3)])
            batch = await runners.batch([line(i) for i in range(2)])
            await runners.until_waiting(batch, "R", (2, "live_traffic", False))

            async def told() -> bool:
                values = [value(w, "gateway_batch_route_lines", provider="vllm", state="waiting") for w in watches]
                return sorted(values, key=str) == [5.0, None][: len(stores)]

            await until("one of them tells", told)
            (teller,) = [watch for watch in watches if watch.figures.exports]
            reasons = {name: value(teller, "gateway_batch_paused_routes", reason=name) for name in Reason}
            assert reasons == {name: float(name is Reason.LIVE_TRAFFIC) for name in Reason}
            for kind in ("vllm", "openai_compatible", "openai", "local"):
                assert value(teller, "gateway_batch_route_lines", provider=kind, state="running") == 0
            assert value(teller, "gateway_batch_queue_depth", mode="gateway") == 5
            assert not any(one.labels.keys() & {"route", "batch", "workspace"} for one in teller.series())
            gated.set_live("R", 0)
            await runners.ended(batch)

    gated.runners.world.run(scenario())


def test_minutes_say_what_happened_on_a_route(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        executor = StubExecutor()
        async with gated.running(executor, default_cap=3):
            await runners.ended(await runners.batch(20))
        minutes = await gated.store.explain.minutes("R", 0, gated.now_us() + 120_000_000)
        assert sum(minute.lines_done for minute in minutes) == 20
        assert 0 < sum(minute.open_us for minute in minutes) <= sum(minute.observed_us for minute in minutes)
        assert {minute.cap for minute in minutes} == {3}

    gated.runners.world.run(scenario())
