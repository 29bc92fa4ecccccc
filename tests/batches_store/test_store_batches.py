"""Creating, listing, cancelling, leasing and ending batches, on both databases."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest

from engines.errors import NotFound
from frontend.batches.job_state import IllegalTransition
from frontend.batches.store.errors import ActiveBatchLimit, BatchNotCancellable, IdempotencyConflict
from frontend.batches.store.rows import (
    SECOND_US,
    BatchRow,
    ClaimResult,
    DirectFailure,
    Idempotency,
    NewFile,
    TerminalState,
    WrittenFile,
)
from store_world import LEASE_US, SHA, World

KEY = Idempotency("retry-me", "a" * 64)


def end(world: World, batch: BatchRow, state: TerminalState = "completed", runner: str = "r1") -> BatchRow | None:
    return world.run(world.store.runner.finalize(runner, batch.id, state))


def test_create_commits_the_private_copy_and_starts_the_window(world: World) -> None:
    workspace = world.workspace()
    batch = world.batch(workspace.id, 6, completion_window_hours=72, metadata='{"a": "b"}', retry_limit=2)
    assert (batch.state, batch.status_detail, batch.mode) == ("queued", "validating", "gateway")
    assert batch.expires_at == batch.created_at + 72 * 3600 * SECOND_US
    assert batch.metadata == '{"a": "b"}'
    assert batch.work_file_id is not None
    assert world.run(world.store.files.get_internal(batch.work_file_id)) is not None
    assert world.run(world.store.batches.get(workspace.id, batch.id)) == batch
    assert world.run(world.store.batches.get(world.workspace().id, batch.id)) is None


def test_create_refuses_another_workspaces_input(world: World) -> None:
    mine, theirs = world.workspace(), world.workspace()
    new = world.new_batch(mine.id, 1, input_file_id=world.file(theirs.id).id)
    with pytest.raises(NotFound):
        world.run(world.store.batches.create(new, active_limit=10))
    assert world.run(world.store.batches.get(None, new.id)) is None


def test_idempotency_key_returns_the_first_batch_for_a_day(world: World) -> None:
    workspace, other = world.workspace(), world.workspace()
    batches = world.store.batches
    first = world.new_batch(workspace.id, 1)
    made, created = world.run(batches.create(first, active_limit=10, idempotency=KEY))
    assert created
    again = world.run(batches.create(world.new_batch(workspace.id, 1), active_limit=10, idempotency=KEY))
    assert again == (made, False)
    assert world.run(batches.find_idempotent(workspace.id, KEY)) == made
    assert world.run(batches.find_idempotent(other.id, KEY)) is None
    with pytest.raises(IdempotencyConflict):
        world.run(batches.find_idempotent(workspace.id, Idempotency(KEY.key, "b" * 64)))
    assert world.run(batches.create(world.new_batch(other.id, 1), active_limit=10, idempotency=KEY))[1]
    world.advance(24 * 3600 + 1)
    assert world.run(batches.create(world.new_batch(workspace.id, 1), active_limit=10, idempotency=KEY))[1]


def test_two_creates_at_once_with_one_key_make_one_batch(world: World) -> None:
    workspace = world.workspace()
    news = [world.new_batch(workspace.id, 1) for _ in range(6)]

    async def all_at_once() -> list[tuple[BatchRow, bool]]:
        return await asyncio.gather(
            *(world.store.batches.create(new, active_limit=10, idempotency=KEY) for new in news)
        )

    answers = world.run(all_at_once())
    assert sum(created for _, created in answers) == 1
    assert len({batch.id for batch, _ in answers}) == 1


def test_limit_of_active_batches_holds_at_once_and_a_cancel_frees_its_slot(world: World) -> None:
    """Rule 53: the job slot is free as soon as cancel is asked."""
    workspace = world.workspace()
    news = [world.new_batch(workspace.id, 1) for _ in range(5)]

    async def all_at_once() -> list[object]:
        creates = (world.store.batches.create(new, active_limit=3) for new in news)
        return await asyncio.gather(*creates, return_exceptions=True)

    answers = world.run(all_at_once())
    assert sum(isinstance(answer, ActiveBatchLimit) for answer in answers) == 2
    assert world.run(world.store.batches.active_count(workspace.id)) == 3
    active = world.run(world.store.batches.list_batches(workspace.id, 10)).rows
    world.run(world.store.batches.cancel(workspace.id, active[0].id))
    world.run(world.store.batches.create(world.new_batch(workspace.id, 1), active_limit=3))


def test_listing_pages_newest_first_and_filters(world: World) -> None:
    workspace, other = world.workspace(), world.workspace()
    made = [world.batch(workspace.id, 1, api_key_id="a" if i % 2 else "b").id for i in range(5)]
    foreign = world.batch(other.id, 1).id
    batches = world.store.batches
    page = world.run(batches.list_batches(workspace.id, 2))
    assert ([row.id for row in page.rows], page.has_more) == ([made[4], made[3]], True)
    page = world.run(batches.list_batches(workspace.id, 9, after=made[3]))
    assert ([row.id for row in page.rows], page.has_more) == ([made[2], made[1], made[0]], False)
    assert [row.id for row in world.run(batches.list_batches(workspace.id, 9, api_key_id="a")).rows] == made[3::-2]
    assert [row.id for row in world.run(batches.list_batches(workspace.id, 2, offset=3)).rows] == [made[1], made[0]]
    assert {row.id for row in world.run(batches.list_batches(None, 9)).rows} == {*made, foreign}
    with pytest.raises(NotFound):
        world.run(batches.list_batches(other.id, 9, after=made[0]))
    world.run(world.store.runner.take("r1", LEASE_US, 1))
    end(world, world.run(batches.list_batches(workspace.id, 9)).rows[-1])
    assert [row.id for row in world.run(batches.list_batches(workspace.id, 9, active=False)).rows] == [made[0]]
    assert made[0] not in {row.id for row in world.run(batches.list_batches(workspace.id, 9, active=True)).rows}


def test_cancel_is_repeatable_until_the_end_and_refused_after(world: World) -> None:
    """BF-03, acceptance test 22."""
    workspace = world.workspace()
    batch = world.batch(workspace.id, 2)
    cancelled = world.run(world.store.batches.cancel(workspace.id, batch.id))
    assert cancelled.status_detail == "cancelling"
    world.advance(5)
    assert world.run(world.store.batches.cancel(workspace.id, batch.id)) == cancelled
    with pytest.raises(NotFound):
        world.run(world.store.batches.cancel(world.workspace().id, batch.id))
    # The runner dies before it acts; whoever takes the batch next still sees the request.
    world.run(world.store.runner.take("r1", LEASE_US, 5))
    world.advance(61)
    (taken,) = world.run(world.store.runner.take("r2", LEASE_US, 5))
    assert taken.batch.cancel_requested_at == cancelled.cancel_requested_at
    assert not world.run(world.store.runner.begin("r2", batch.id))
    ended = end(world, batch, "cancelled", "r2")
    assert ended is not None
    with pytest.raises(BatchNotCancellable):
        world.run(world.store.batches.cancel(workspace.id, batch.id))
    assert world.get(batch) == ended
    assert (ended.request_completed, ended.request_failed) == (0, 0)


@pytest.mark.parametrize("state", get_args(TerminalState))
def test_each_end_refuses_a_cancel_and_a_second_end(world: World, state: TerminalState) -> None:
    """BF-03, rule 6: terminal states are final; repeating the same end is harmless."""
    batch = world.running_batch(world.workspace().id, 1)
    ended = end(world, batch, state)
    assert ended is not None
    assert (ended.state, ended.status_detail) == (state, state)
    assert ended.completed_at is not None
    assert end(world, batch, "failed") == ended
    with pytest.raises(BatchNotCancellable):
        world.run(world.store.batches.cancel(None, batch.id))


def test_cancel_while_finalizing_keeps_the_status(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 1)
    world.run(world.store.runner.mark_finalizing("r1", batch.id, "file-out", "file-err"))
    assert world.run(world.store.batches.cancel(None, batch.id)).status_detail == "finalizing"


def test_lease_is_taken_oldest_first_renewed_and_lost(world: World) -> None:
    """Rule 35."""
    workspace = world.workspace()
    made = [world.batch(workspace.id, 1).id for _ in range(3)]
    runner = world.store.runner
    assert [one.batch.id for one in world.run(runner.take("r1", LEASE_US, 2))] == made[:2]
    assert [one.batch.id for one in world.run(runner.take("r2", LEASE_US, 5))] == made[2:]
    assert world.run(runner.take("r3", LEASE_US, 5)) == ()
    world.advance(45)
    states = world.run(runner.renew("r1", made[:1], LEASE_US))
    assert states[made[0]].owned
    assert not states[made[0]].cancel_requested
    world.advance(20)
    taken = world.run(runner.take("r3", LEASE_US, 5))
    assert [(one.batch.id, one.taken_over) for one in taken] == [(made[1], True), (made[2], True)]
    world.run(world.store.batches.cancel(None, made[0]))
    states = world.run(runner.renew("r1", [*made, "batch_none"], LEASE_US))
    assert states[made[0]].cancel_requested
    assert [states[one].owned for one in (*made, "batch_none")] == [True, False, False, False]
    world.advance(24 * 3600)
    assert world.run(runner.renew("r3", [made[1]], LEASE_US))[made[1]].expired


def test_released_batch_is_free_at_once(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 1)
    world.run(world.store.runner.release_batches("other", [batch.id]))
    assert world.run(world.store.runner.take("r2", LEASE_US, 5)) == ()
    world.run(world.store.runner.release_batches("r1", [batch.id]))
    (taken,) = world.run(world.store.runner.take("r2", LEASE_US, 5))
    assert not taken.taken_over


def test_two_takers_at_once_share_without_overlap(world: World) -> None:
    workspace = world.workspace()
    made = {world.batch(workspace.id, 1).id for _ in range(20)}
    second = world.open()

    async def both() -> list[set[str]]:
        takes = [store.runner.take(f"r{i}", LEASE_US, 3) for i, store in enumerate([world.store, second] * 4)]
        return [{one.batch.id for one in taken} for taken in await asyncio.gather(*takes)]

    taken = world.run(both())
    assert sum(map(len, taken)) == len(set().union(*taken))
    assert set().union(*taken) <= made


def test_sweeper_takes_only_what_has_ended_its_time(world: World) -> None:
    """Acceptance test 23: without a runner a batch still expires."""
    workspace = world.workspace()
    old = world.batch(workspace.id, 1)
    world.advance(24 * 3600 + 1)
    cancelled = world.batch(workspace.id, 1)
    world.batch(workspace.id, 1)
    world.run(world.store.batches.cancel(None, cancelled.id))
    taken = world.run(world.store.runner.take("sweeper", LEASE_US, 10, expired_only=True))
    assert [one.batch.id for one in taken] == [old.id, cancelled.id]


def test_finalize_counts_lines_reveals_files_and_refuses_running_lines(world: World) -> None:
    """Rules 58 and 59."""
    workspace = world.workspace()
    batch = world.running_batch(workspace.id, 4)
    assert world.claim(batch, [0, 1]) == [ClaimResult.CLAIMED] * 2
    world.finish(batch, 0)
    with pytest.raises(IllegalTransition):
        end(world, batch)
    world.finish(batch, 1, ok=False)
    runner = world.store.runner
    marked = world.run(runner.mark_finalizing("r1", batch.id, "file-out", "file-err"))
    assert marked is not None
    assert (marked.status_detail, marked.output_file_id) == ("finalizing", None)
    again = world.run(runner.mark_finalizing("r1", batch.id, "file-other", "file-other"))
    assert again is not None
    assert (again.reserved_output_id, again.reserved_error_id) == ("file-out", "file-err")
    for name in ("file-out", "file-err"):
        world.run(world.store.files.insert(NewFile(name, workspace.id, "batch_output", "batch_output", name, "t", "p")))
    assert world.run(world.store.files.get(workspace.id, "file-out")) is None
    ended = world.run(runner.finalize("r1", batch.id, "completed", output=WrittenFile("file-out", 7, SHA), error=None))
    assert ended is not None
    assert (ended.output_file_id, ended.error_file_id) == ("file-out", None)
    assert (ended.request_completed, ended.request_failed) == (1, 1)
    assert world.run(world.store.files.get(workspace.id, "file-out")) is not None
    assert world.run(world.store.files.get(workspace.id, "file-err")) is None


def test_settle_lets_go_of_everything_and_only_once(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 1)
    world.claim(batch, [0])
    world.finish(batch, 0)
    assert not world.run(world.store.runner.settle("r1", batch.id))
    end(world, batch)
    assert not world.run(world.store.runner.settle("r2", batch.id))
    assert world.run(world.store.runner.settle("r1", batch.id))
    assert not world.run(world.store.runner.settle("r1", batch.id))
    assert world.run(world.store.runner.records(batch.id, -1, 10)) == ()
    assert batch.work_file_id is not None
    assert world.run(world.store.files.get_internal(batch.work_file_id)) is None
    world.advance(1000)
    assert world.run(world.store.runner.take("r2", LEASE_US, 5)) == ()


def test_ended_but_unsettled_batch_is_taken_again_to_settle_it(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 1)
    end(world, batch)
    world.advance(61)
    (taken,) = world.run(world.store.runner.take("r2", LEASE_US, 5))
    assert taken.batch.finished
    assert world.run(world.store.runner.settle("r2", batch.id))


def test_deferred_validation_that_failed_ends_with_its_report(world: World) -> None:
    batch = world.batch(world.workspace().id, 0, work_file=None)
    world.run(world.store.runner.take("r1", LEASE_US, 5))
    ended = world.run(
        world.store.runner.finalize("r1", batch.id, "failed", errors='[{"line": 2}]', error_code="invalid")
    )
    assert ended is not None
    assert (ended.state, ended.errors) == ("failed", '[{"line": 2}]')


def test_line_without_a_route_fails_without_a_slot(world: World) -> None:
    """Rule 16."""
    batch = world.running_batch(world.workspace().id, 3)
    world.claim(batch, [0], cap=1)
    lines = [DirectFailure(n, f"direct-{n}", 404, "model_not_found", b"{}") for n in (0, 1)]
    runner = world.store.runner
    assert world.run(runner.fail_lines("r1", batch.id, lines)) == (False, True)
    assert world.run(runner.fail_lines("r1", batch.id, lines)) == (False, True)
    assert world.run(runner.fail_lines("r2", batch.id, [DirectFailure(2, "x", 404, "e", None)])) == (False,)
    line = world.run(runner.lines(batch.id, 0, 10))[0]
    assert (line.line_no, line.route_id, line.state) == (1, None, "failed")
    assert world.get(batch).request_failed == 1
    (outcome, *_) = [one for one in world.run(world.store.batches.outcomes(batch.id)) if one.state == "failed"]
    assert (outcome.code, outcome.lines) == ("model_not_found", 1)


def test_segment_replaces_records_and_is_added_once(world: World) -> None:
    workspace = world.workspace()
    batch = world.running_batch(workspace.id, 3)
    world.claim(batch, [0, 1, 2])
    for line in range(3):
        world.finish(batch, line, ok=line != 1, record=b"line %d" % line)
    runner = world.store.runner
    records = world.run(runner.records(batch.id, -1, 10))
    assert [(one.line_no, one.is_error, one.record) for one in records] == [
        (0, False, b"line 0"), (1, True, b"line 1"), (2, False, b"line 2"),
    ]  # fmt: skip
    for name in ("file-s0", "file-s1"):
        world.run(world.store.files.insert(NewFile(name, workspace.id, "batch_output", None, name, "t", "p")))
    written = WrittenFile("file-s0", 3, SHA)
    assert world.run(runner.add_segment("r1", batch.id, 0, written, [0, 1]))
    assert world.run(runner.add_segment("r1", batch.id, 0, written, [0, 1]))
    assert not world.run(runner.add_segment("r2", batch.id, 1, WrittenFile("file-s1", 3, SHA), [2]))
    assert [one.line_no for one in world.run(runner.records(batch.id, -1, 10))] == [2]
    assert [line.segment for line in world.run(runner.lines(batch.id, -1, 10))] == [0, 0, None]
    assert [(one.seq, one.file_id, one.lines) for one in world.run(runner.segments(batch.id))] == [(0, "file-s0", 2)]
    assert world.claim(batch, [1], attempt=2) == [ClaimResult.TAKEN]
