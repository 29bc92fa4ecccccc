"""Batches that end without a runner, inputs validated late, and runners that cannot serve what they took."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontend.batches.objects import object_path
from frontend.batches.runner.expiry import ExpirySweeper
from frontend.batches.store.rows import (
    BatchRow,
    ClaimBatch,
    ClaimGroup,
    ClaimLine,
    FinishLine,
    NewBatch,
    NewFile,
    WrittenFile,
)
from frontend.openai.calls import UpstreamAnswer
from runner_world import KEY, QUICK, WORKSPACE, RunnerWorld, StubExecutor, check, failed, line, ok


def test_acceptance_23_expires_without_any_runner(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        store = runners.store
        batch, lively = await runners.batch(3), await runners.batch(2)
        await store.runner.take("dead", 60_000_000, 1)
        assert await store.runner.begin("dead", batch.id)
        asked = tuple(ClaimLine(i, f"e{i}") for i in range(2))
        await store.runner.turn(
            "dead", (), (ClaimGroup("R", 2, (ClaimBatch(batch.id, WORKSPACE, 3, asked),)),)
        )  # fmt: skip
        record = b'{"custom_id":"c1","response":{},"error":null}'
        await store.runner.turn("dead", (FinishLine(batch.id, 1, "e1", "succeeded", 200, None, record),), ())
        sweeper = ExpirySweeper(store, runners.objects, 7, interval_s=0.02)
        assert await sweeper.sweep() == 0, "nothing is due"
        runners.world.advance(24 * 3600 + 1)
        await sweeper.start()
        done = await runners.ended(batch)
        other = await runners.ended(lively)
        await sweeper.close()
        assert (done.batch.state, other.batch.state) == ("expired", "expired")
        assert sweeper.ended == {"expired": 2}
        assert done.succeeded == ["c1"]
        assert done.codes == {"c0": "result_unavailable", "c2": "batch_expired"}
        assert other.codes == {"c0": "batch_expired", "c1": "batch_expired"}
        check(done, StubExecutor(), 3)

    runners.world.run(scenario())


def test_a_live_runner_is_left_alone_by_the_sweeper(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        held = asyncio.Event()

        async def hold(text: str) -> UpstreamAnswer:
            await held.wait()
            return ok(text)

        executor = StubExecutor(lambda text, nth: hold(text))
        batch = await runners.batch(1)
        async with runners.running(executor):
            await executor.until(1)
            await runners.store.batches.cancel(None, batch.id)
            assert await ExpirySweeper(runners.store, runners.objects, 7).sweep() == 0
            held.set()
            done = await runners.ended(batch)
        assert done.batch.state == "cancelled" and done.succeeded == ["c0"]

    runners.world.run(scenario())


async def deferred(runners: RunnerWorld, text: bytes) -> BatchRow:
    """Create a batch whose input is still to be validated."""
    file_id = "file-" + "a" * 32
    writer = await runners.objects.open_writer(object_path(file_id))
    await writer.write(text)
    written = await writer.commit()
    await runners.store.files.insert(
        NewFile(file_id, WORKSPACE, "batch_input", "batch", "in.jsonl", "x", object_path(file_id), KEY)
    )  # fmt: skip
    await runners.store.files.commit(WrittenFile(file_id, written.bytes, written.sha256))
    new = NewBatch(
        "batch_" + "a" * 32, WORKSPACE, KEY, "/v1/chat/completions", "mixed", file_id, None, 24, 0, 0
    )  # fmt: skip
    return (await runners.store.batches.create(new, active_limit=10))[0]


def test_a_late_validated_input_runs_like_any_other(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor()
        batch = await deferred(runners, b"\n\n".join(line(i) for i in range(5)))
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert (done.batch.state, done.batch.request_total, done.batch.public_model) == ("completed", 5, "m")
        check(done, executor, 5)

    runners.world.run(scenario())


def test_a_late_validated_input_that_is_bad_fails_the_batch_with_the_report(runners: RunnerWorld) -> None:
    async def scenario() -> None:
        executor = StubExecutor()
        batch = await deferred(runners, line(0) + b"\n{not json\n" + line(0))
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert done.batch.state == "failed" and not executor.calls
        assert done.batch.errors is not None
        report = json.loads(done.batch.errors)
        assert [(one["code"], one["line"]) for one in report["data"]] == [
            ("invalid_json", 2), ("duplicate_custom_id", 3),
        ]  # fmt: skip
        assert (done.batch.output_file_id, done.batch.error_file_id) == (None, None)

    runners.world.run(scenario())


def test_a_runner_without_a_worker_hands_back_what_only_a_worker_serves(runners: RunnerWorld) -> None:
    other = runners.world.open()

    async def scenario() -> None:
        remote, local = StubExecutor(routes={"m": "R"}), StubExecutor(routes={"m": "R", "own": "local.own"})
        batch = await runners.batch([line(0), line(1, "own"), line(2)], models=["m", "own", "m"])
        times = replace(QUICK, unserved_s=0.05, replan_s=0.05)
        async with runners.running(remote, times=times, has_worker=False):
            await remote.until(2)
            for _ in range(1000):
                found = await runners.store.batches.get(None, batch.id)
                if found is not None and found.runner_id is None:
                    break
                await asyncio.sleep(0.01)
            if runners.store.kind == "postgresql":
                async with runners.running(local, store=other):
                    done = await runners.ended(batch)
        if runners.store.kind == "sqlite":
            async with runners.running(local, store=other):
                done = await runners.ended(batch)
        assert sorted(remote.texts) == ["t0", "t2"] and local.texts == ["t1"]
        assert sorted(done.succeeded) == ["c0", "c1", "c2"]

    runners.world.run(scenario())


def test_results_expire_as_the_batch_says_and_cost_nothing_to_list(runners: RunnerWorld, tmp_path: Path) -> None:
    async def scenario() -> None:
        executor = StubExecutor()
        batch = await runners.batch(2, output_expires_after_seconds=3600)
        async with runners.running(executor):
            done = await runners.ended(batch)
        assert done.batch.output_file_id is not None
        file = await runners.store.files.get(WORKSPACE, done.batch.output_file_id)
        assert file is not None and file.expires_at is not None
        assert abs(file.expires_at - file.created_at - 3600 * 1_000_000) < 1_000_000
        assert file.filename == f"{batch.id}_output.jsonl" and file.purpose == "batch_output"

    runners.world.run(scenario())


def test_a_failure_that_the_runner_has_not_heard_of_is_in_no_segment(
    runners: RunnerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the store already while results are gathered, and is sent again afterwards: its success must count."""
    runner = runners.store.runner
    turn, records, add_segment = runner.turn, runner.records, runner.add_segment
    stored, gathered = asyncio.Event(), asyncio.Event()

    async def late(runner_id: str, finish: Any, claim: Any) -> Any:
        result = await turn(runner_id, finish, claim)
        if any(end.line_no == 2 and end.state == "failed" for end in finish):
            stored.set()
            await gathered.wait()
        return result

    async def after(*args: Any) -> Any:
        await stored.wait()
        return await records(*args)

    async def noted(*args: Any) -> bool:
        done = await add_segment(*args)
        gathered.set()
        return done

    async def scenario() -> None:
        executor = StubExecutor(lambda text, nth: failed(503) if text == "t2" and nth == 1 else ok(text))
        for name, call in (("turn", late), ("records", after), ("add_segment", noted)):
            monkeypatch.setattr(runner, name, call)
        await runners.cap("R", 1)
        batch = await runners.batch(3, retry_limit=1)
        async with runners.running(executor, times=replace(QUICK, segment_lines=2)):
            done = await runners.ended(batch)
        assert done.succeeded == ["c0", "c1", "c2"] and executor.counts["t2"] == 2
        check(done, executor, 3)

    runners.world.run(scenario())
