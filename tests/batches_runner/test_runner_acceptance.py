"""Acceptance tests 1 to 5 and 19 to 23 of the batch specification, on both stores."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from frontend.batches.runner.gates import Reason
from frontend.batches.store.rows import ClaimBatch, ClaimGroup, ClaimLine, ClaimResult, FinishLine
from frontend.openai.calls import UpstreamAnswer
from runner_world import QUICK, WORKSPACE, RunnerWorld, StubExecutor, check, failed, line, ok


async def after(delay_s: float, answer: UpstreamAnswer) -> UpstreamAnswer:
    await asyncio.sleep(delay_s)
    return answer


def test_acceptance_1_cap(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: after(0.05, ok(text)))
        await runners.cap("R", 2)
        batch = await runners.batch(6)
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert done.batch.state == "completed"
        assert (done.batch.request_total, done.batch.request_completed, done.batch.request_failed) == (6, 6, 0)
        assert executor.most == 2
        rows = await runners.store.runner.lines(batch.id, -1, 100)
        assert [row.route_id for row in rows] == ["R"] * 6
        check(done, executor, 6)

    runners.world.run(scenario())


def test_acceptance_2_cap_across_processes(runners: RunnerWorld) -> None:
    if runners.world.kind == "sqlite":
        # One process runs batches there; see test_bf_11_second_runner_stays_passive.
        return
    other = runners.world.open()

    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: after(0.06, ok(text)))
        await runners.cap("R", 2)
        a, b = await runners.batch(5), await runners.batch(others(5))
        async with runners.running(executor), runners.running(executor, store=other):
            done = [await runners.ended(a), await runners.ended(b)]
        assert executor.most <= 2
        assert sorted(executor.texts) == sorted([f"t{i}" for i in range(5)] + [f"b{i}" for i in range(5)])
        assert [one.batch.state for one in done] == ["completed"] * 2

    runners.world.run(scenario())


class Closable:
    """A gate that a test opens and shuts."""

    def __init__(self, *, closed: bool = False) -> None:
        self.closed_now = closed

    def closed(self, ask: object) -> Reason | None:
        return Reason.OUTSIDE_WINDOW if self.closed_now else None


def others(count: int) -> list[bytes]:
    """Return lines that another batch's cannot be taken for."""
    return [line(i, text=f"b{i}") for i in range(count)]


def test_acceptance_3_claim_race(runners: RunnerWorld) -> None:
    store = runners.store

    async def turn(group: ClaimGroup, runner: str = "r") -> tuple[ClaimResult, ...]:
        return (await store.runner.turn(runner, (), (group,))).claimed[0][0]

    async def scenario() -> None:
        batch = await runners.batch(3)
        await store.runner.take("r", 60_000_000, 10)
        assert await store.runner.begin("r", batch.id)

        def ask(line_no: int, execution: str, cap: int = 8) -> ClaimGroup:
            return ClaimGroup("R", cap, (ClaimBatch(batch.id, WORKSPACE, 3, (ClaimLine(line_no, execution),)),))

        answers = await asyncio.gather(*(turn(ask(0, f"e{i}")) for i in range(8)))
        flat = [answer for (answer,) in answers]
        assert flat.count(ClaimResult.CLAIMED) == 1
        assert set(flat) <= {ClaimResult.CLAIMED, ClaimResult.TAKEN, ClaimResult.FULL, ClaimResult.WAIT}

    runners.world.run(scenario())


def test_acceptance_3_many_workers_share_fairly(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        gate: asyncio.Queue[None] = asyncio.Queue()
        order: list[str] = []

        async def one_by_one(text: str) -> UpstreamAnswer:
            await gate.get()
            return ok(text)

        executor = StubExecutor(lambda text, nth: one_by_one(text))
        await runners.cap("R", 3)
        batches = []
        for name in "abc":
            workspace, key = await runners.workspace(name)
            batches.append(await runners.batch(40, workspace=workspace, key=key))
        async with runners.running(executor, workers=8):
            for started in range(1, 61):
                await executor.until(started)
                order.append(executor.calls[started - 1].call.principal.workspace_id)
                if started >= 3:
                    gate.put_nowait(None)
            for _ in range(200):
                gate.put_nowait(None)
            done = [await runners.ended(batch) for batch in batches]
        assert executor.most == 3
        assert max(executor.counts.values()) == 3, "each text is in three batches"
        assert all(18 <= order.count(f"ws_{name}") <= 22 for name in "abc"), order
        assert [one.batch.request_completed for one in done] == [40] * 3

    runners.world.run(scenario())


def test_acceptance_4_fair_order(runners: RunnerWorld) -> None:
    """The worked order of the specification, with lines that end in the order of their starts."""

    async def scenario() -> None:
        worked = ["A1.0", "B1.0", "A2.0", "B1.1", "A1.1", "B1.2", "A2.1", "A1.2", "A2.2", "A1.3", "A1.4", "A1.5"]
        gates: dict[str, asyncio.Event] = {}

        async def hold(text: str) -> UpstreamAnswer:
            await gates.setdefault(text, asyncio.Event()).wait()
            return ok(text)

        executor = StubExecutor(lambda text, nth: hold(text))
        await runners.cap("R", 3)
        wa, ka = await runners.workspace("a")
        wb, kb = await runners.workspace("b")

        def lines(name: str, count: int) -> list[bytes]:
            return [line(i, text=f"{name}.{i}") for i in range(count)]

        gate = Closable(closed=True)
        async with runners.running(executor, gates=[gate]):
            for name, count, workspace, key in (("A1", 6, wa, ka), ("A2", 3, wa, ka), ("B1", 3, wb, kb)):
                batch = await runners.batch(lines(name, count), workspace=workspace, key=key)
                await runners.until_waiting(batch, "R", (count, "outside_window", False))
            gate.closed_now = False
            for started, ends in enumerate(worked[:10], start=3):
                await executor.until(started)
                gates[ends].set()
            for event in gates.values():
                event.set()
        # The first three start in one commit.
        assert sorted(executor.texts[:3]) == sorted(worked[:3]) and executor.texts[3:] == worked[3:]

    runners.world.run(scenario())


def test_acceptance_5_no_starvation(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        waits = asyncio.Event()

        async def answer(text: str) -> UpstreamAnswer:
            # The first line runs until the other workspace's batch waits for the same route.
            await waits.wait()
            return ok(text)

        executor = StubExecutor(lambda text, nth: answer(text))
        await runners.cap("R", 1)
        first_workspace, first_key = await runners.workspace("a")
        second_workspace, second_key = await runners.workspace("b")
        first = await runners.batch(8, workspace=first_workspace, key=first_key)
        async with runners.running(executor):
            await executor.until(1)
            second = await runners.batch(others(2), workspace=second_workspace, key=second_key)
            await runners.until_waiting(second, "R", (2, "concurrency", True))
            waits.set()
            await runners.ended(second)
            await runners.ended(first)
        assert {"b0", "b1"} <= set(executor.texts[:5])

    runners.world.run(scenario())


def test_acceptance_18_reasons_of_permits_and_caps(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        held = asyncio.Event()

        async def hold(text: str) -> UpstreamAnswer:
            await held.wait()
            return ok(text)

        executor = StubExecutor(lambda text, nth: hold(text), routes={"m": "R", "n": "S"})
        await runners.cap("R", 2)
        async with runners.running(executor, per_batch=2):
            batch = await runners.batch(5)
            await runners.until_waiting(batch, "R", (3, "concurrency", True))
            held.set()
            await runners.ended(batch)
        held.clear()
        async with runners.running(executor, workers=1):
            first = await runners.batch(5)
            await runners.until_waiting(first, "R", (4, "workers", False))
            second = await runners.batch([line(0, "n"), line(1, "n")], model="n")
            await runners.until_waiting(second, "S", (2, "workers", False))
            held.set()
            assert [(await runners.ended(batch)).batch.request_completed for batch in (first, second)] == [5, 2]

    runners.world.run(scenario())


def test_acceptance_19_rate_limit_pauses_and_sends_nothing_again(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: failed(429) if text in ("t0", "t1", "t2", "t4") else ok(text))
        await runners.cap("R", 1)
        batch = await runners.batch(6)
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert executor.texts == [f"t{i}" for i in range(6)], "each line is sent once"
        assert done.codes == {f"c{i}": "429" for i in (0, 1, 2, 4)}
        assert done.succeeded == ["c3", "c5"]
        at_s = [call.at_s for call in executor.calls]
        pauses = [later - earlier for earlier, later in pairwise(at_s)]
        first_s = QUICK.first_pause_s
        assert pauses[0] >= first_s and pauses[1] >= 2 * first_s and pauses[2] >= 4 * first_s
        assert pauses[4] >= first_s, "a success ended the row"
        check(done, executor, 6)

    runners.world.run(scenario())


def test_acceptance_19_with_retries_each_is_sent_again(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: failed(429) if nth == 1 and text != "t3" else ok(text))
        await runners.cap("R", 1)
        batch = await runners.batch(4, retry_limit=1)
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert sorted(done.succeeded) == ["c0", "c1", "c2", "c3"]
        rows = await runners.store.runner.lines(batch.id, -1, 10)
        assert [row.attempts for row in rows] == [2, 2, 2, 1]
        for text in ("t0", "t1", "t2"):
            first, second = (call.at_s for call in executor.calls if call.text == text)
            assert second - first >= QUICK.retry_base_s
        check(done, executor, 4)

    runners.world.run(scenario())


def test_acceptance_20_retries_are_opt_in_and_counted(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: failed(400 if text == "t1" else 502))
        none = await runners.batch(2)
        async with runners.running(executor):
            done = await runners.ended(none)
            assert (executor.counts["t0"], executor.counts["t1"]) == (1, 1)
            assert done.codes == {"c0": "502", "c1": "400"} and done.batch.state == "completed"
            two = await runners.batch(2, retry_limit=2)
            done = await runners.ended(two)
        assert (executor.counts["t0"], executor.counts["t1"]) == (1 + 3, 1 + 1), "a 400 is never sent again"
        assert (done.batch.request_failed, done.batch.output_file_id) == (2, None)
        at_s = [call.at_s for call in executor.calls if call.text == "t0"][1:]
        assert at_s[1] - at_s[0] >= QUICK.retry_base_s and at_s[2] - at_s[1] >= QUICK.retry_base_s**2
        check(done, executor, 2)

    runners.world.run(scenario())


def test_acceptance_20_a_retry_passes_the_gates_again(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        gate = Closable()

        def answer(text: str, nth: int) -> UpstreamAnswer:
            gate.closed_now = nth == 1
            return failed(502) if nth == 1 else ok(text)

        executor = StubExecutor(answer)
        batch = await runners.batch(1, retry_limit=1)
        async with runners.running(executor, gates=[gate]):
            await runners.until_waiting(batch, "R", (1, "outside_window", False))
            assert len(executor.calls) == 1
            gate.closed_now = False
            done = await runners.ended(batch)
        assert done.succeeded == ["c0"] and len(executor.calls) == 2

    runners.world.run(scenario())


def test_acceptance_21_crash(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        store = runners.store
        batch = await runners.batch(3)
        await store.runner.take("dead", 60_000_000, 10)
        assert await store.runner.begin("dead", batch.id)
        asked = tuple(ClaimLine(i, f"e{i}") for i in range(2))
        group = ClaimGroup("R", 2, (ClaimBatch(batch.id, WORKSPACE, 3, asked),))
        await store.runner.turn("dead", (), (group,))
        end = FinishLine(batch.id, 1, "e1", "succeeded", 200, None, None)
        await store.runner.turn("dead", (end,), ())
        # Before the takeover line 0 keeps its place: with a cap of 1 nobody gets one.
        other = await runners.batch(others(1))
        await store.runner.take("r2", 60_000_000, 10)
        await store.runner.begin("r2", other.id)
        one = ClaimGroup("R", 1, (ClaimBatch(other.id, WORKSPACE, 1, (ClaimLine(0, "x"),)),))
        assert (await store.runner.turn("r2", (), (one,))).claimed == (((ClaimResult.FULL,),),)
        await store.runner.release_batches("r2", [other.id])
        if store.kind == "sqlite":
            await store.runner.acquire("dead", 60_000_000)
        runners.world.advance(61)
        executor = StubExecutor()
        async with runners.running(executor):
            done = await runners.ended(batch)
            late = FinishLine(batch.id, 0, "e0", "succeeded", 200, None, b"{}")
            assert (await store.runner.turn("dead", (late,), ())).finished == (False,)
            await runners.ended(other)
        assert "t2" in executor.texts and not {"t0", "t1"} & set(executor.texts)
        assert done.succeeded == ["c2"]
        assert done.codes == {"c0": "result_unavailable", "c1": "result_unavailable"}
        assert (done.batch.request_completed, done.batch.request_failed) == (1, 2)
        again = await store.batches.get(None, batch.id)
        assert again == done.batch, "the late answer changed nothing"
        check(done, executor, 3)

    runners.world.run(scenario())


def test_acceptance_22_cancel_before_start(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        batch = await runners.batch(2)
        cancelled = await runners.store.batches.cancel(None, batch.id)
        assert cancelled.status_detail == "cancelling"
        assert await runners.store.batches.active_count(WORKSPACE) == 0
        executor = StubExecutor()
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert done.batch.state == "cancelled" and not executor.calls
        assert done.codes == {"c0": "batch_cancelled", "c1": "batch_cancelled"}
        assert done.batch.request_failed == 0
        check(done, executor, 2)

    runners.world.run(scenario())


def test_acceptance_22_cancel_in_the_middle(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        held = asyncio.Event()

        async def hold(text: str) -> UpstreamAnswer:
            await held.wait()
            return ok(text)

        executor = StubExecutor(lambda text, nth: hold(text))
        await runners.cap("R", 1)
        batch = await runners.batch(4)
        async with runners.running(executor):
            await executor.until(1)
            await runners.store.batches.cancel(None, batch.id)
            await runners.store.batches.cancel(None, batch.id)
            held.set()
            done = await runners.ended(batch)
        assert done.batch.state == "cancelled"
        assert done.succeeded == ["c0"] and executor.texts == ["t0"]
        assert done.codes == {f"c{i}": "batch_cancelled" for i in (1, 2, 3)}
        check(done, executor, 4)

    runners.world.run(scenario())


def test_acceptance_23_expiry_keeps_partial_results(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        held = asyncio.Event()

        async def hold(text: str) -> UpstreamAnswer:
            await held.wait()
            return ok(text)

        executor = StubExecutor(lambda text, nth: hold(text))
        await runners.cap("R", 1)
        batch = await runners.batch(4)
        assert batch.expires_at == batch.created_at + 24 * 3600 * 1_000_000
        longer = await runners.batch(others(1), completion_window_hours=72, models=["away"])
        assert longer.expires_at == longer.created_at + 72 * 3600 * 1_000_000
        async with runners.running(executor):
            await executor.until(1)
            runners.world.advance(24 * 3600)
            held.set()
            done = await runners.ended(batch)
        assert done.batch.state == "expired" and executor.texts == ["t0"]
        assert done.succeeded == ["c0"]
        assert done.codes == {f"c{i}": "batch_expired" for i in (1, 2, 3)}
        check(done, executor, 4)

    runners.world.run(scenario())
