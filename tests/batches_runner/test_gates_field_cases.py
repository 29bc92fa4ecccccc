"""Field cases of batch scheduling at the runner: what a server does to lines, and lines to live calls."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.batches.runner.gates import Reason
from frontend.batches.scheduling.route_watch import HINT_REFUSED
from frontend.batches.store.rows import SchedulingRow
from frontend.openai.calls import Sent, UpstreamAnswer
from gated_world import URL, GatedWorld, until
from runner_world import RunnerWorld, StubExecutor, ok


@pytest.fixture
def gated(runners: RunnerWorld, tmp_path: Path) -> Iterator[GatedWorld]:
    directory = tmp_path / "run"
    directory.mkdir()
    with GatedWorld(runners, directory) as world:
        yield world


class Slots:
    """A server that never takes a slot from a request that runs; lets requests go when told."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(0)

    async def answer(self, text: str) -> UpstreamAnswer:
        await self._free.acquire()
        return ok(text)

    def let_go(self, requests: int) -> None:
        for _ in range(requests):
            self._free.release()


def test_bg_05_a_priority_hint_is_not_relied_on_when_the_slots_are_taken(gated: GatedWorld) -> None:
    """Eight slots, six lines at once, a hint: what frees the server for live calls is that no further line starts."""

    async def scenario() -> None:
        runners, load, server = gated.runners, gated.load, Slots()
        executor = StubExecutor(lambda text, nth: server.answer(text))
        row = SchedulingRow("R", 6, metrics_url=URL, metrics_max_waiting=0, priority=10)
        await gated.store.scheduling.put_settings(row, None)
        load.say(waiting=0, running=0)
        async with gated.running(executor):
            batch = await runners.batch(24)
            await executor.until(6)
            # Eight live calls: two get the slots that the cap leaves free, the others wait behind lines that run.
            load.say(waiting=6, running=8)
            await gated.until_signal("R", paused_reason="server_busy", metrics_waiting=6)
            server.let_go(6)

            async def drained() -> bool:
                counts = await runners.store.runner.line_counts(batch.id)
                return counts.succeeded == 6

            await until("the lines that ran have ended", drained)
            await runners.until_waiting(batch, "R", (18, "server_busy", False))
            assert (len(executor.calls), executor.most) == (6, 6), "none has started since"
            load.say(waiting=0, running=2)
            server.let_go(18)
            done = await runners.ended(batch)
        assert done.batch.request_completed == 24
        assert executor.most == 6, "two slots stay free for live calls"

    gated.runners.world.run(scenario())


def test_bg_06_a_server_that_takes_no_hint_is_reported_with_the_first_line(
    gated: GatedWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        runners = gated.runners
        message = "Got priority 7 but Priority scheduling is not enabled."
        body = json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400}}).encode()
        refusal = UpstreamAnswer(400, body, "R", Sent.ANSWERED, "")
        executor = StubExecutor(lambda text, nth: refusal)
        await gated.store.scheduling.put_settings(SchedulingRow("R", 2, priority=7), None)

        async def notes() -> int:
            edges = await gated.store.explain.edges("R", 0, gated.now_us() + 60_000_000)
            return sum(edge.why == HINT_REFUSED for edge in edges)

        async with gated.running(executor):
            batch = await runners.batch(8)
            await until("the route says so", notes)
            done = await runners.ended(batch)
        assert await notes() == 1, "once, not for every line"
        assert (done.batch.request_failed, len(executor.calls)) == (8, 8), "rule 77: its lines fail"
        assert message in json.dumps(done.errors[0])

    with caplog.at_level(logging.ERROR, "batches"):
        gated.runners.world.run(scenario())
    assert caplog.text.count("batches.priority_refused route=R") == 1
    assert "--scheduling-policy priority" in caplog.text


def test_bg_06_other_refusals_say_nothing_of_hints(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners = gated.runners
        refusal = UpstreamAnswer(
            400, b'{"error":{"message":"the priority of this is unclear"}}', "R", Sent.ANSWERED, ""
        )
        executor = StubExecutor(lambda text, nth: refusal)
        async with gated.running(executor):
            # No hint was sent.
            await runners.ended(await runners.batch(2))
        edges = await gated.store.explain.edges("R", 0, gated.now_us() + 60_000_000)
        assert all(edge.why is None for edge in edges)

    gated.runners.world.run(scenario())


def test_bg_09_bursts_of_live_calls_stop_starts_and_cost_no_line(gated: GatedWorld) -> None:
    async def scenario() -> None:
        runners, bursts, cap = gated.runners, 5, 3
        executor = StubExecutor()
        row = SchedulingRow("R", cap, yield_live_threshold=1)
        await gated.store.scheduling.put_settings(row, None)
        gated.set_live("R", 1)
        seen: list[Reason | None] = []
        async with gated.running(executor) as (_, watch):
            note = watch.gates._note
            watch.gates._note = lambda route, found, now_ns: (seen.append(found.reason), note(route, found, now_ns))[1]
            batch = await runners.batch(300)
            for _ in range(bursts):
                seen.clear()

                async def yields() -> bool:
                    return Reason.LIVE_TRAFFIC in seen

                await until("the route yields", yields)
                begun = len(executor.calls)
                seen.clear()

                async def looked() -> bool:
                    return len(seen) >= 3

                await until("its gates were looked at again and again", looked)
                assert len(executor.calls) == begun, "nothing starts while somebody calls"
                gated.set_live("R", 0)
                await executor.until(begun + 20)
                gated.set_live("R", 1)
            gated.set_live("R", 0)
            done = await runners.ended(batch)
        assert (done.batch.request_completed, done.batch.request_failed) == (300, 0)
        assert len(executor.calls) == 300 and executor.most <= cap

    gated.runners.world.run(scenario())
