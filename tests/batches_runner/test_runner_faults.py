"""What goes wrong around a runner, and what must come of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from frontend.batches.objects import ObjectWriter, StorageUnavailable, object_path
from frontend.batches.store.rows import ClaimBatch, ClaimGroup, ClaimLine, FinishLine
from frontend.openai.calls import GatewayCall, Sent, UpstreamAnswer
from runner_world import QUICK, WORKSPACE, RunnerWorld, StubExecutor, check, failed, line, ok, unsteady

UNREACHABLE = failed(502, Sent.NOT_SENT)


async def poll(what: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds."""
    for _ in range(3000):
        if await what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not come to hold")


async def told(holds: bool) -> bool:
    return holds


def test_bg_14_a_refused_connection_fails_no_line(runners: RunnerWorld) -> None:
    """Nothing was sent, so nothing ran: lines wait again, the route is tried by one at a time, all complete."""
    attempts: list[float] = []
    up = False

    def answer(text: str, nth: int) -> UpstreamAnswer:
        if not up:
            attempts.append(asyncio.get_running_loop().time())
            return UNREACHABLE
        return ok(text)

    async def scenario() -> None:
        nonlocal up
        executor = StubExecutor(answer)
        await runners.cap("R", 4)
        batch = await runners.batch(12)
        async with runners.running(executor, times=replace(QUICK, longest_pause_s=0.2)):
            await poll(lambda: told(len(attempts) >= 8))
            await runners.until_waiting(batch, "R", (12, "route_cooling", False))
            up = True
            done = await runners.ended(batch)
        assert done.batch.request_completed == 12 and not done.errors
        assert sorted(executor.texts) == sorted(f"t{i}" for i in range(12)), "each reached the upstream once"
        # Four met the outage together; after that one tries at a time, after ever longer pauses.
        later = attempts[4:]
        assert all(b - a >= QUICK.first_pause_s for a, b in pairwise(later))
        check(done, executor, 12)

    runners.world.run(scenario())


def test_bg_14_retry_after_is_honoured(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor(
            lambda text, nth: failed(429, retry_after_s=0.6) if text == "t0" else ok(text)
        )  # fmt: skip
        await runners.cap("R", 1)
        batch = await runners.batch(2)
        async with runners.running(executor):
            await runners.until_waiting(batch, "R", (1, "rate_limited", False))
            done = await runners.ended(batch)
        assert executor.calls[1].at_s - executor.calls[0].at_s >= 0.6
        check(done, executor, 2)

    runners.world.run(scenario())


def test_rule_50_a_pause_is_of_one_batch_and_route(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor(
            lambda text, nth: failed(429, retry_after_s=300) if text == "t0" else ok(text), routes={"m": "R", "n": "S"}
        )
        await runners.cap("R", 1)
        paused = await runners.batch(
            [line(0), line(1), *(line(i, "n", text=f"n{i}") for i in range(2, 6))], models=["m", "m", *"nnnn"]
        )
        async with runners.running(executor):
            await executor.until(5)
            other = await runners.batch([line(0, text="o0"), line(1, text="o1")])
            done = await runners.ended(other)
            assert done.batch.request_completed == 2, "another batch goes on where one pauses"
            await runners.until_waiting(paused, "R", (1, "rate_limited", False))
            assert {"n2", "n3", "n4", "n5"} <= set(executor.texts), "and the same batch elsewhere"
            await runners.store.batches.cancel(None, paused.id)
            check(await runners.ended(paused), executor, 6)

    runners.world.run(scenario())


def test_bg_18_declined_lines_all_end_in_the_output_if_retries_are_asked_for(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: failed(503) if nth == 1 and int(text[1:]) % 3 == 0 else ok(text))
        batch = await runners.batch(30, retry_limit=2)
        async with runners.running(executor) as runner:
            done = await runners.ended(batch)
        assert len(done.output) == 30 and runner.figures.retries == 10
        check(done, executor, 30)

    runners.world.run(scenario())


@pytest.mark.parametrize(("limit", "calls"), [(2, 3), (0, 1)])
def test_bg_20_exactly_as_many_calls_as_attempts(runners: RunnerWorld, limit: int, calls: int) -> None:
    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: failed(503))
        batch = await runners.batch(1, retry_limit=limit)
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert len(executor.calls) == calls and done.codes == {"c0": "503"}

    runners.world.run(scenario())


def test_bf_07_one_bad_line_never_stops_the_batch(runners: RunnerWorld) -> None:
    async def answer(text: str) -> UpstreamAnswer:
        if text == "t2":
            raise RuntimeError("a bug behind one line")
        return ok(text)

    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: answer(text))
        lines = [line(i) for i in range(8)]
        lines[5] = b"{damaged"
        batch = await runners.batch(lines)
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert done.batch.state == "completed"
        assert sorted(done.succeeded) == ["c0", "c1", "c3", "c4", "c6", "c7"]
        assert {one["custom_id"] for one in done.errors} == {"c2", None}
        assert done.codes["c2"] == "500"

    runners.world.run(scenario())


def test_bf_21_odd_answers_touch_no_other_line(runners: RunnerWorld) -> None:
    bodies = {"t1": b"", "t2": b"[1]", "t3": b"\xff", "t4": b'{"usage":"x"}', "t5": '{"t":"\u2028"}'.encode()}

    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: replace(ok(text), body=bodies.get(text, ok(text).body)))
        batch = await runners.batch(7)
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert sorted(done.succeeded) == ["c0", "c2", "c4", "c5", "c6"]
        assert done.codes == {"c1": "502", "c3": "502"}
        check(done, executor, 7)

    runners.world.run(scenario())


def test_a_revoked_key_fails_what_has_not_started(runners: RunnerWorld) -> None:
    """Access is rechecked at execution: as the interactive call would, the rest gets 401, and is sent nowhere."""

    async def scenario() -> None:
        held = asyncio.Event()

        async def hold(text: str) -> UpstreamAnswer:
            await held.wait()
            return ok(text)

        workspace, key = await runners.workspace("a")
        executor = StubExecutor(lambda text, nth: hold(text))
        await runners.cap("R", 2)
        batch = await runners.batch(700, workspace=workspace, key=key)
        async with runners.running(executor):
            await executor.until(2)
            await runners.store.keys.revoke_key(key)
            await poll(lambda: _failures(runners, batch.id, 698))
            held.set()
            done = await runners.ended(batch)
        assert done.batch.state == "completed" and sorted(executor.texts) == ["t0", "t1"]
        assert sorted(done.succeeded) == ["c0", "c1"]
        assert set(done.codes.values()) == {"401"}
        assert done.errors[0]["response"]["body"]["error"]["code"] == "invalid_api_key"
        check(done, executor, 700)

    runners.world.run(scenario())


async def _failures(runners: RunnerWorld, batch_id: str, count: int) -> bool:
    return (await runners.store.runner.line_counts(batch_id)).failed == count


def test_rule_16_a_model_that_nobody_serves_fails_like_the_interactive_call(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor(routes={"m": "R"})
        batch = await runners.batch([line(0), line(1, "gone"), line(2)], models=["m", "gone", "m"])
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert sorted(done.succeeded) == ["c0", "c2"] and done.codes == {"c1": "404"}
        assert done.errors[0]["response"]["body"]["error"]["code"] == "model_not_found"
        rows = await runners.store.runner.lines(batch.id, -1, 10)
        assert [row.route_id for row in rows] == ["R", None, "R"]
        check(done, executor, 3)

    runners.world.run(scenario())


def test_rule_15_cooling_routes_are_waited_for(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor()
        batch = await runners.batch(2)
        async with runners.running(executor, times=replace(QUICK, replan_s=0.05)):
            await executor.until(2)
            await runners.ended(batch)
            executor.cooling.add("m")
            waiting = await runners.batch(2)
            await poll(lambda: _in_progress(runners, waiting.id))
            assert len(executor.calls) == 2
            executor.cooling.clear()
            done = await runners.ended(waiting)
        check(done, executor, 2)

    runners.world.run(scenario())


async def _in_progress(runners: RunnerWorld, batch_id: str) -> bool:
    found = await runners.store.batches.get(None, batch_id)
    return found is not None and found.state == "in_progress"


def test_retries_survive_a_new_owner(runners: RunnerWorld) -> None:
    """A failed line whose retry the old owner did not get to make is sent again by the new one, as attempt 2."""

    async def scenario() -> None:
        store = runners.store
        batch = await runners.batch(1, retry_limit=1)
        await store.runner.take("dead", 60_000_000, 10)
        await store.runner.begin("dead", batch.id)
        group = ClaimGroup("R", 2, (ClaimBatch(batch.id, WORKSPACE, 1, (ClaimLine(0, "e0"),)),))
        await store.runner.turn("dead", (), (group,))
        end = FinishLine(batch.id, 0, "e0", "failed", 503, "busy", b'{"custom_id":"c0","error":null,"response":null}')
        await store.runner.turn("dead", (end,), ())
        await store.runner.release_batches("dead", [batch.id])
        executor = StubExecutor()
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert done.succeeded == ["c0"] and not done.errors and executor.texts == ["t0"]
        assert (await store.runner.lines(batch.id, -1, 1))[0].attempts == 2

    runners.world.run(scenario())


def test_rule_57_many_lines_go_through_segments_in_the_order_of_their_ends(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: failed(400) if int(text[1:]) % 10 == 0 else ok(text))
        await runners.cap("R", 1)
        batch = await runners.batch(200)
        async with runners.running(executor, times=replace(QUICK, segment_lines=16)):
            done = await runners.ended(batch)
        segments = await runners.store.runner.segments(batch.id)
        assert len(segments) >= 2, "the store is kept small while the batch runs"
        assert [one["custom_id"] for one in done.output] == [f"c{i}" for i in range(200) if i % 10]
        assert (done.batch.request_completed, done.batch.request_failed) == (180, 20)
        for segment in segments:
            assert await runners.store.files.get_internal(segment.file_id) is None, "settled: gone"
        check(done, executor, 200)

    runners.world.run(scenario())


@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_a_damaged_segment_loses_its_lines_openly(runners: RunnerWorld, damage: str) -> None:
    """Lines whose results cannot be read back are listed as such; counts equal the files all the same."""

    async def scenario() -> None:
        held = asyncio.Event()

        async def hold(text: str) -> UpstreamAnswer:
            if text == "t39":
                await held.wait()
            return ok(text)

        executor = StubExecutor(lambda text, nth: hold(text))
        await runners.cap("R", 4)
        batch = await runners.batch(40)
        async with runners.running(executor, times=replace(QUICK, segment_lines=16)):
            await poll(lambda: _has_segments(runners, batch.id, 1))
            segment = (await runners.store.runner.segments(batch.id))[0]
            path = runners.directory / object_path(segment.file_id)
            data = path.read_bytes()
            if damage == "gone":
                path.unlink()
            else:
                path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"\0" * len(data))
            held.set()
            done = await runners.ended(batch)
        lost = [name for name, code in done.codes.items() if code == "result_unavailable"]
        assert 1 <= len(lost) <= segment.lines and len(done.output) == 40 - len(lost)
        check(done, executor, 40)

    runners.world.run(scenario())


async def _has_segments(runners: RunnerWorld, batch_id: str, count: int) -> bool:
    return len(await runners.store.runner.segments(batch_id)) >= count


def test_a_damaged_line_of_the_private_copy_is_not_sent(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor()
        batch = await runners.batch(40)
        assert batch.work_file_id is not None
        path = runners.directory / object_path(batch.work_file_id)
        path.write_bytes(path.read_bytes().replace(b'"t7"', b'"t8"', 1))
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert executor.counts["t8"] == 1 and "t7" not in executor.counts
        assert done.batch.state == "completed" and len(done.output) == 39
        assert [one["error"]["code"] for one in done.errors] == ["input_unavailable"]

    runners.world.run(scenario())


def test_a_lost_private_copy_ends_the_batch(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor()
        batch = await runners.batch(3)
        assert batch.work_file_id is not None
        (runners.directory / object_path(batch.work_file_id)).write_bytes(b"nothing of it")
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert (done.batch.state, done.batch.error_code) == ("failed", "input_unavailable")
        assert done.batch.errors is not None and not executor.calls
        assert [one["error"]["code"] for one in done.errors] == ["batch_failed"] * 3

    runners.world.run(scenario())


def test_a_full_disk_delays_the_end_and_loses_nothing(
    runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    refusals = 0
    real = runners.objects.open_writer

    async def full(path: str) -> ObjectWriter:
        nonlocal refusals
        if refusals < 5:
            refusals += 1
            raise StorageUnavailable("the file storage is full")
        return await real(path)

    async def scenario() -> None:
        executor = StubExecutor()
        batch = await runners.batch(20)
        monkeypatch.setattr(runners.objects, "open_writer", full)
        async with runners.running(executor, times=replace(QUICK, segment_lines=8)):
            done = await runners.ended(batch)
        assert refusals == 5 and len(done.output) == 20
        check(done, executor, 20)

    runners.world.run(scenario())


def test_a_store_that_loses_answers_costs_no_line(runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the calls fails, half of them after it has taken effect: each line still runs once and is kept."""
    # Drawn, not counted: with a fault every nth call, steps that make n calls fail at the same one for ever.
    faults = random.Random(3)

    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: failed(500) if text == "t7" else ok(text))
        batch = await runners.batch(60)
        for name in ("turn", "begin", "add_segment", "mark_finalizing", "finalize", "settle", "renew", "records"):
            monkeypatch.setattr(runners.store.runner, name, unsteady(getattr(runners.store.runner, name), faults))
        async with runners.running(executor, times=replace(QUICK, segment_lines=16), workers=8):
            done = await runners.ended(batch)
        assert max(executor.counts.values()) == 1 and len(executor.calls) == 60
        assert (done.batch.request_completed, done.batch.request_failed) == (59, 1)
        check(done, executor, 60)

    runners.world.run(scenario())


def test_one_end_that_the_store_refuses_holds_up_no_other(
    runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    real = runners.store.runner.turn

    async def picky(runner_id: str, finish: Any, claim: Any) -> Any:
        for end in finish:
            assert end.record is None or b'"c3"' not in end.record, "this store has something against line 3"
        return await real(runner_id, finish, claim)

    async def scenario() -> None:
        executor = StubExecutor()
        batch = await runners.batch(10)
        monkeypatch.setattr(runners.store.runner, "turn", picky)
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert len(done.output) == 9 and done.codes == {"c3": "result_unavailable"}
        check(done, executor, 10)

    runners.world.run(scenario())


@pytest.mark.parametrize("step_s", [-90, 3600, -86_400])
def test_bg_13_a_clock_step_moves_windows_only(runners: RunnerWorld, step_s: int) -> None:
    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: failed(503) if text == "t0" and nth == 1 else ok(text))
        await runners.cap("R", 1)
        batch = await runners.batch(6, retry_limit=1)
        async with runners.running(executor):
            await executor.until(1)
            runners.world.advance(step_s)
            done = await runners.ended(batch)
        first, second = (call.at_s for call in executor.calls if call.text == "t0")
        assert second - first >= QUICK.retry_base_s, "the pause is not the wall clock's"
        assert done.batch.state == "completed" and len(done.output) == 6
        check(done, executor, 6)

    runners.world.run(scenario())


def test_bf_11_a_second_runner_stays_passive_on_sqlite(runners: RunnerWorld) -> None:
    other = runners.world.open()

    async def scenario() -> None:
        executor = StubExecutor()
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(runners.running(executor))
            second = await stack.enter_async_context(runners.running(executor, store=other))
            batches = [await runners.batch([line(i, text=f"{n}-{i}") for i in range(20)]) for n in range(4)]
            done = [await runners.ended(batch) for batch in batches]
            passive = [first.passive, second.passive]
        assert sorted(passive) == ([False, True] if runners.store.kind == "sqlite" else [False, False])
        assert max(executor.counts.values()) == 1 and len(executor.calls) == 80
        assert [one.batch.request_completed for one in done] == [20] * 4

    runners.world.run(scenario())


def test_bf_18_a_runner_that_lost_its_lease_changes_nothing(runners: RunnerWorld) -> None:
    """Another took the batch over while lines ran here: their answers are dropped, nothing starts, no file is made."""

    async def scenario() -> None:
        held = asyncio.Event()

        async def hold(call_text: str) -> UpstreamAnswer:
            await held.wait()
            return ok("late " + call_text)

        slow = StubExecutor(lambda text, nth: hold(text))
        quick = StubExecutor()
        await runners.cap("R", 2)
        batch = await runners.batch(6)
        async with runners.running(slow, runner_id="first", times=replace(QUICK, renew_s=3600, tick_s=3600)) as first:
            await slow.until(2)
            if runners.store.kind == "sqlite":
                # As if the first process had been stopped for longer than its leases.
                await runners.store.runner.release("first")
                await runners.store.runner.acquire("second", 60_000_000)
                async with runners.running(quick, runner_id="second"):
                    done = await runners.ended(batch)
            else:
                runners.world.advance(61)
                async with runners.running(quick, runner_id="second"):
                    done = await runners.ended(batch)
            held.set()
            await poll(lambda: told(first.figures.fenced == 2))
        assert sorted(slow.texts) == ["t0", "t1"] and sorted(quick.texts) == ["t2", "t3", "t4", "t5"]
        assert await runners.store.batches.get(None, batch.id) == done.batch
        assert done.codes == {"c0": "result_unavailable", "c1": "result_unavailable"}
        again = await runners.results(done.batch)
        assert (again.output, again.errors) == (done.output, done.errors)
        check(done, quick, 6)

    runners.world.run(scenario())


def test_finalizing_may_be_repeated_by_another_after_any_crash(
    runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The first finalizer dies when its files are complete but not announced; the second one's are what people see."""
    died = asyncio.Event()

    async def scenario() -> None:
        executor = StubExecutor()
        batch = await runners.batch(5)
        real = runners.store.runner.finalize

        async def dies(*args: Any, **named: Any) -> Any:
            died.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(runners.store.runner, "finalize", dies)
        async with runners.running(executor):
            await died.wait()
            found = await runners.store.batches.get(None, batch.id)
            assert found is not None and found.status_detail == "finalizing"
            assert found.output_file_id is None, "no file is shown before the end"
        monkeypatch.setattr(runners.store.runner, "finalize", real)
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert len(executor.calls) == 5 and len(done.output) == 5
        assert done.batch.output_file_id != found.reserved_output_id, "nothing of the dead one is touched or shown"
        abandoned = await runners.store.files.to_sweep(10, -1)
        assert found.reserved_output_id in {file.id for file in abandoned}
        check(done, executor, 5)

    runners.world.run(scenario())


def test_drain_lets_running_lines_end_and_hands_the_rest_over(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        held = asyncio.Event()

        async def hold(text: str) -> UpstreamAnswer:
            await held.wait()
            return ok(text)

        executor = StubExecutor(lambda text, nth: hold(text))
        await runners.cap("R", 3)
        batch = await runners.batch(9)
        async with runners.running(executor) as runner:
            await executor.until(3)
            draining = asyncio.ensure_future(runner.drain(20))
            held.set()
            assert await draining
        rows = await runners.store.runner.lines(batch.id, -1, 10)
        assert [row.state for row in rows] == ["succeeded"] * 3
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert len(executor.calls) == 9 and len(done.output) == 9
        check(done, executor, 9)

    runners.world.run(scenario())


def test_a_batch_that_is_taken_up_while_draining_is_let_go(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor()
        async with runners.running(executor) as runner:
            await poll(lambda: told(not runner.passive))
            await runners.batch(3)
            await poll(lambda: told(runner.jobs == 1))
            assert await runner.drain(20)
            assert runner.jobs == 0

    runners.world.run(scenario())


def test_bf_02_cancel_at_any_moment_keeps_what_ran(runners: RunnerWorld) -> None:
    async def slow(text: str) -> UpstreamAnswer:
        await asyncio.sleep(0.002)
        return ok(text)

    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: slow(text))
        await runners.cap("R", 4)
        async with runners.running(executor):
            for round_no in range(10):
                before = len(executor.calls)
                batch = await runners.batch(30)
                await executor.until(before + 1 + 3 * round_no)
                answers = await asyncio.gather(
                    *(runners.store.batches.cancel(None, batch.id) for _ in range(2)), return_exceptions=True
                )
                done = await runners.ended(batch)
                if done.batch.state == "cancelled":
                    assert all(getattr(one, "id", None) == batch.id for one in answers)
                assert len(done.output) == len(executor.calls) - before
                assert set(done.codes.values()) <= {"batch_cancelled"}
                check(done, executor, 30)

    runners.world.run(scenario())


def test_rule_47_a_line_is_called_as_the_batch_says(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor()
        batch = await runners.batch(1, user_id="someone")
        async with runners.running(executor):
            done = await runners.ended(batch)
        call: GatewayCall = executor.calls[0].call
        assert (call.route, call.batch, call.endpoint, call.model) == ("R", True, "/v1/chat/completions", "m")
        assert (call.principal.workspace_id, call.principal.key_id, call.principal.user_id) == (
            WORKSPACE, "key_one", "someone",
        )  # fmt: skip
        assert done.batch.output_file_id is not None and done.batch.error_file_id is None

    runners.world.run(scenario())
