"""Lines that were claimed and not sent: their claims are given back, so that nothing is lost and everything is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from frontend.batches.objects import StorageUnavailable
from frontend.batches.runner.gates import Ask, Reason
from frontend.batches.store.rows import BatchRow
from frontend.batches.work_file import WorkFile
from frontend.openai.calls import Sent, UpstreamAnswer
from gated_world import until
from runner_world import QUICK, RunnerWorld, StubExecutor, check, failed, ok, unsteady

UNREACHABLE = failed(502, Sent.NOT_SENT)
LONG = replace(QUICK, first_pause_s=3600.0, longest_pause_s=3600.0)
"""One failure to send closes the route for the rest of the test."""


class Server:
    """Answers lines while it is ``up``, and counts those that could not be sent."""

    def __init__(self) -> None:
        self.up = False
        self.attempts = 0

    def __call__(self, text: str, nth: int) -> UpstreamAnswer:
        self.attempts += 1
        return ok(text) if self.up else UNREACHABLE


class Switch:
    """Provides ``Gate``: closed for a reason that the test sets."""

    def __init__(self, reason: Reason | None = None) -> None:
        self.reason = reason
        self.asked = 0

    def closed(self, ask: Ask) -> Reason | None:
        self.asked += 1
        return self.reason


async def running(runners: RunnerWorld, batch: BatchRow) -> int:
    return (await runners.store.runner.line_counts(batch.id)).running


async def until_none_runs(runners: RunnerWorld, batch: BatchRow) -> None:
    async def none() -> bool:
        return await running(runners, batch) == 0

    await until("no line runs", none)


@pytest.mark.parametrize("reason", [Reason.OUTSIDE_WINDOW, Reason.LIVE_TRAFFIC, Reason.METRICS_UNAVAILABLE])
def test_a_batch_whose_last_lines_could_not_be_sent_tells_the_gate_that_holds_it(
    runners: RunnerWorld, reason: Reason
) -> None:
    """Rules 38 and 71: all lines that are left were claimed before the gate closed; they are demand all the same."""

    async def scenario() -> None:
        server, gate = Server(), Switch()
        executor = StubExecutor(server)
        batch = await runners.batch(3)
        async with runners.running(executor, times=LONG, gates=[gate]):
            await runners.until_waiting(batch, "R", (3, "route_cooling", False))
            before = await runners.store.batches.get(None, batch.id)
            assert before is not None and before.last_waited_at is None, "a server that is away is a fault"
            gate.reason = reason
            await runners.until_waiting(batch, "R", (3, reason.value, False))
            assert (await runners.store.runner.line_counts(batch.id)).claimed == 0
            runners.world.advance(600)

            async def is_told() -> bool:
                found = await runners.store.batches.get(None, batch.id)
                now_us = await runners.store.now_us()
                return (found is not None and (found.last_waited_at or 0) > now_us - 300_000_000) != (
                    reason is Reason.METRICS_UNAVAILABLE
                )

            await until("the stall clock stands exactly behind a gate that is no fault", is_told)
            stalled = [row.id for row in await runners.store.scheduling.stalled(300_000_000)]
            assert stalled == ([batch.id] if reason is Reason.METRICS_UNAVAILABLE else [])

    runners.world.run(scenario())


def test_a_runner_that_dies_while_its_server_is_away_loses_no_line(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        server = Server()
        executor = StubExecutor(server)
        batch = await runners.batch(20)
        dead = runners.runner(executor, times=LONG, runner_id="dead")
        await dead.start()
        await runners.until_waiting(batch, "R", (20, "route_cooling", False))
        await until_none_runs(runners, batch)
        await dead.close()
        server.up = True
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert len(done.output) == 20 and not done.errors
        assert sorted(executor.texts) == sorted(f"t{i}" for i in range(20))
        check(done, executor, 20)

    runners.world.run(scenario())


def test_a_drain_gives_back_what_was_not_sent(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        server = Server()
        executor = StubExecutor(server)
        batch = await runners.batch(8)
        runner = runners.runner(executor)
        await runner.start()

        async def was_tried() -> bool:
            return server.attempts >= 9

        await until("the route is tried", was_tried)
        assert await runner.drain(30)
        assert (await runners.store.runner.line_counts(batch.id)).claimed == 0
        await runner.close()
        server.up = True
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert len(done.output) == 8 and not done.errors
        check(done, executor, 8)

    runners.world.run(scenario())


def test_rule_56_lines_that_were_never_sent_are_cancelled_not_failed(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor(Server())
        batch = await runners.batch(5)
        async with runners.running(executor, times=LONG):
            await runners.until_waiting(batch, "R", (5, "route_cooling", False))
            await runners.store.batches.cancel(None, batch.id)
            done = await runners.ended(batch)
        assert set(done.codes.values()) == {"batch_cancelled"} and len(done.errors) == 5
        assert (done.batch.request_completed, done.batch.request_failed) == (0, 0)
        check(done, executor, 5)

    runners.world.run(scenario())


@pytest.mark.parametrize("end", ["answered", "cancelled", "another runner"])
def test_rule_46_a_retry_that_could_not_be_sent_keeps_its_attempts(runners: RunnerWorld, end: str) -> None:
    """It is the failure that it was, with what it met last: sent again later, or standing if the batch stops."""

    async def scenario() -> None:
        up = False

        def answer(text: str, nth: int) -> UpstreamAnswer:
            if nth == 1:
                return failed(503)
            return ok(text) if up else UNREACHABLE

        executor = StubExecutor(answer)
        times = replace(QUICK, longest_pause_s=0.1)
        batch = await runners.batch(1, retry_limit=1)
        runner = runners.runner(executor, times=times)
        await runner.start()

        async def was_returned() -> bool:
            return runner.figures.returned >= 2 and await running(runners, batch) == 0

        await until("the retry was given back", was_returned)
        (line,) = await runners.store.runner.lines(batch.id, -1, 9)
        while line.state == "running":
            (line,) = await runners.store.runner.lines(batch.id, -1, 9)
        assert (line.state, line.attempts, line.status_code) == ("failed", 1, 502)
        if end == "another runner":
            await runner.drain(30)
            await runner.close()
            runner = runners.runner(executor, times=times)
            await runner.start()
        up = end != "cancelled"
        if end == "cancelled":
            await runners.store.batches.cancel(None, batch.id)
        done = await runners.ended(batch)
        await runner.close()
        if end == "cancelled":
            assert done.codes == {"c0": "502"} and done.batch.request_failed == 1
        else:
            assert len(done.output) == 1 and [call.text for call in executor.calls] == ["t0", "t0"]
        check(done, executor, 1)

    runners.world.run(scenario())


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_lines_whose_text_cannot_be_had_in_time_are_given_back(
    runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    there = asyncio.Event()
    real = WorkFile.read_lines

    async def away(work: WorkFile, numbers: Sequence[int]) -> Any:
        if not there.is_set():
            if how == "hangs":
                await there.wait()
            raise StorageUnavailable("the file storage is away")
        return await real(work, numbers)

    async def scenario() -> None:
        executor = StubExecutor()
        batch = await runners.batch(6)
        monkeypatch.setattr(WorkFile, "read_lines", away)
        async with runners.running(executor, times=replace(QUICK, unsent_s=0.1)) as runner:

            async def were_returned() -> bool:
                return runner.figures.returned >= 7

            await until("lines were given back, and one was tried again", were_returned)
            await runners.until_waiting(batch, "R", (6, "route_cooling", False))
            there.set()
            done = await runners.ended(batch)
        assert len(done.output) == 6 and max(executor.counts.values()) == 1
        check(done, executor, 6)

    runners.world.run(scenario())


def test_a_gate_that_closes_while_the_text_is_read_keeps_the_line_back(
    runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, there = asyncio.Event(), asyncio.Event()
    real = WorkFile.read_lines

    async def slowly(work: WorkFile, numbers: Sequence[int]) -> Any:
        reached.set()
        await there.wait()
        return await real(work, numbers)

    async def scenario() -> None:
        gate = Switch()
        executor = StubExecutor()
        batch = await runners.batch(4)
        monkeypatch.setattr(WorkFile, "read_lines", slowly)
        # A pass of a nanosecond: whatever the reading takes is long.
        async with runners.running(executor, times=replace(QUICK, pass_s=1e-9, unsent_s=60.0), gates=[gate]):
            await reached.wait()
            gate.reason = Reason.LIVE_TRAFFIC
            there.set()
            await runners.until_waiting(batch, "R", (4, "live_traffic", False))
            assert not executor.calls and await running(runners, batch) == 0
            gate.reason = None
            done = await runners.ended(batch)
        assert len(done.output) == 4
        check(done, executor, 4)

    runners.world.run(scenario())


def test_a_server_that_is_away_costs_one_claim_and_one_return_per_pause(
    runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes per try and none per line that waits; with the server there, nothing is given back."""
    real, returns = runners.store.runner.give_back, 0

    async def counted(runner_id: str, lines: Any) -> Any:
        nonlocal returns
        returns += 1
        return await real(runner_id, lines)

    async def scenario() -> None:
        server = Server()
        executor = StubExecutor(server)
        await runners.cap("R", 4)
        batch = await runners.batch(100)
        monkeypatch.setattr(runners.store.runner, "give_back", counted)
        async with runners.running(executor, times=replace(QUICK, longest_pause_s=0.1)) as runner:

            async def was_tried() -> bool:
                return server.attempts >= 12

            await until("the route was tried", was_tried)
            await until_none_runs(runners, batch)
            assert returns <= server.attempts and runner.figures.returned <= server.attempts
            server.up = True
            await runners.ended(batch)
            before = returns, runner.figures.returned
            other = await runners.batch(100)
            done = await runners.ended(other)
            assert (returns, runner.figures.returned) == before
        check(done, executor, 100)

    runners.world.run(scenario())


def test_a_server_that_accepts_no_connection_is_tried_without_a_claim(
    runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a runner may be killed at any instant of the outage, and an outage costs the store nothing."""
    real, claims = runners.store.runner.turn, 0

    async def counted(runner_id: str, finish: Any, claim: Any) -> Any:
        nonlocal claims
        claims += len(claim)
        return await real(runner_id, finish, claim)

    async def scenario() -> None:
        server = Server()
        executor = StubExecutor(server, reachable=lambda: server.up)
        await runners.cap("R", 4)
        batch = await runners.batch(12)
        monkeypatch.setattr(runners.store.runner, "turn", counted)
        gate = Switch()
        async with runners.running(executor, times=replace(QUICK, longest_pause_s=0.1), gates=[gate]):

            async def was_reached_for() -> bool:
                return executor.reaches >= 5

            await until("a connection is tried again and again", was_reached_for)
            assert (server.attempts, claims) == (4, 1)
            assert (await runners.store.runner.line_counts(batch.id)).claimed == 0
            gate.reason = Reason.OUTSIDE_WINDOW
            await runners.until_waiting(batch, "R", (12, "outside_window", False))
            tried, asked = executor.reaches, gate.asked

            async def was_asked_again() -> bool:
                return gate.asked >= asked + 10

            await until("the gate was asked again and again", was_asked_again)
            assert executor.reaches <= tried + 1, "nobody connects behind a closed gate"
            gate.reason, server.up = None, True
            done = await runners.ended(batch)
        assert sorted(executor.texts) == sorted(f"t{i}" for i in range(12)) and not done.errors
        check(done, executor, 12)

    runners.world.run(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_an_unsteady_server_and_store_lose_and_double_nothing(
    runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A third of the lines meets no server, a third of the store's calls fails, half of these after taking effect."""
    rng = random.Random(seed)

    def answer(text: str, nth: int) -> UpstreamAnswer:
        if rng.random() < 1 / 3:
            return UNREACHABLE
        return failed(503) if rng.random() < 0.1 else ok(text)

    async def scenario() -> None:
        executor = StubExecutor(answer)
        times = replace(QUICK, segment_lines=16, first_pause_s=0.01, longest_pause_s=0.02, retry_base_s=0.01)
        batch = await runners.batch(60, retry_limit=1)
        for name in ("turn", "give_back", "begin", "add_segment", "mark_finalizing", "finalize", "settle", "renew"):
            monkeypatch.setattr(runners.store.runner, name, unsteady(getattr(runners.store.runner, name), rng))
        async with runners.running(executor, times=times, workers=8):
            done = await runners.ended(batch)
        assert set(done.codes.values()) <= {"503", "502"}
        sent = [text for text in executor.texts if executor.texts.count(text) > 2]
        assert not sent, "a line is sent once, and once more if it failed"
        check(done, executor, 60)

    runners.world.run(scenario())


def test_a_return_that_the_store_refuses_ends_the_line(runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake, not an outage: better one line with an error than one that runs for ever."""

    async def refuses(runner_id: str, lines: Any) -> Any:
        raise AssertionError("this store does not take claims back")

    async def scenario() -> None:
        up = False

        def answer(text: str, nth: int) -> UpstreamAnswer:
            nonlocal up
            up, was_up = True, up
            return ok(text) if was_up else UNREACHABLE

        executor = StubExecutor(answer)
        batch = await runners.batch(4)
        monkeypatch.setattr(runners.store.runner, "give_back", refuses)
        await runners.cap("R", 1)
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert len(done.output) == 3 and done.codes == {"c0": "result_unavailable"}
        check(done, executor, 4)

    runners.world.run(scenario())
