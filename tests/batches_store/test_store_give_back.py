"""Claims whose line was never sent are given back: the line is as it was, and nobody else's is touched."""

from __future__ import annotations

import asyncio

import pytest

from frontend.batches.store.errors import RuleBroken
from frontend.batches.store.rows import BatchRow, ClaimBatch, ClaimGroup, ClaimLine, ClaimResult, Demand, FinishLine
from store_world import LEASE_US, World, execution

CLAIMED, FULL, WAIT, TAKEN = ClaimResult.CLAIMED, ClaimResult.FULL, ClaimResult.WAIT, ClaimResult.TAKEN
RECORD = b'{"failed": "502"}'


def unsent(batch: BatchRow, line: int, attempt: int = 1) -> FinishLine:
    """Return what a runner says of a line that it could not send."""
    if attempt == 1:
        return FinishLine(batch.id, line, execution(batch, line), "failed", None, None, None)
    return FinishLine(batch.id, line, execution(batch, line, attempt), "failed", 502, "upstream_unreachable", RECORD)


def give_back(world: World, *lines: FinishLine, runner: str = "r1") -> tuple[bool, ...]:
    return world.run(world.store.runner.give_back(runner, lines))


def claim_as(world: World, batch: BatchRow, line: int, execution_id: str, runner: str) -> ClaimResult:
    asked = ClaimBatch(batch.id, batch.workspace_id, 1, (ClaimLine(line, execution_id),))
    return world.run(world.store.runner.turn(runner, [], [ClaimGroup("R", 100, (asked,))])).claimed[0][0][0]


def test_a_claim_that_is_given_back_leaves_nothing(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 3)
    before = world.get(batch)
    assert world.claim(batch, [0, 1, 2], cap=3) == [CLAIMED] * 3
    other = world.running_batch(world.workspace().id, 1)
    assert world.claim(other, [0], cap=3) == [FULL]
    assert give_back(world, unsent(batch, 0), unsent(batch, 2)) == (True, True)
    assert world.states(batch) == {1: "running"}
    assert world.run(world.store.runner.claimed_lines(batch.id)) == (1,)
    assert world.run(world.store.scheduling.running_by_batch([batch.id])) == {batch.id: 1}
    # The counters stand, and it was no progress.
    assert world.get(batch) == before
    # Its slots are free, and the line can be claimed by a new execution, once.
    assert world.claim(other, [0], cap=3) == [CLAIMED]
    assert claim_as(world, batch, 0, "again", "r1") is CLAIMED
    assert claim_as(world, batch, 0, "twice", "r1") is TAKEN
    assert not world.finish(batch, 0), "the first execution is over"


def test_giving_back_again_changes_nothing(world: World) -> None:
    """The answer of a call may be lost: it is made again."""
    batch = world.running_batch(world.workspace().id, 3, retry_limit=1)
    world.claim(batch, [0, 1])
    world.finish(batch, 1, ok=False)
    world.claim(batch, [1], attempt=2)
    lines = (unsent(batch, 0), unsent(batch, 1, 2))
    assert give_back(world, *lines) == (True, True)
    found = world.run(world.store.runner.lines(batch.id, -1, 9)), world.get(batch)
    assert give_back(world, *lines) == (True, True)
    assert (world.run(world.store.runner.lines(batch.id, -1, 9)), world.get(batch)) == found
    assert give_back(world) == ()


def test_a_retry_that_is_given_back_is_the_failure_that_it_was(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 2, retry_limit=2)
    world.claim(batch, [0])
    world.finish(batch, 0, ok=False)
    assert world.claim(batch, [0], attempt=2) == [CLAIMED]
    assert world.get(batch).request_failed == 0
    progress = world.get(batch).last_progress_at
    world.advance(5)
    assert give_back(world, unsent(batch, 0, 2)) == (True,)
    (line,) = world.run(world.store.runner.lines(batch.id, -1, 9))
    assert (line.state, line.attempts, line.status_code, line.error_code) == (
        "failed", 1, 502, "upstream_unreachable",
    )  # fmt: skip
    assert [one.record for one in world.run(world.store.runner.records(batch.id, -1, 9))] == [RECORD]
    assert (world.get(batch).request_failed, world.get(batch).last_progress_at) == (1, progress)
    # It still has both of its retries.
    for attempt in (2, 3):
        assert world.claim(batch, [0], attempt=attempt) == [CLAIMED]
        assert world.finish(batch, 0, attempt=attempt, ok=attempt == 3)
    assert (world.get(batch).request_completed, world.get(batch).request_failed) == (1, 0)


def test_only_the_runner_that_has_a_claim_gives_it_back(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 4)
    world.claim(batch, [0, 1])
    world.finish(batch, 1)
    assert give_back(world, unsent(batch, 0), runner="r2") == (False,)
    stranger = FinishLine(batch.id, 0, "another", "failed", None, None, None)
    assert give_back(world, stranger, unsent(batch, 1)) == (False, False)
    assert world.states(batch) == {0: "running", 1: "succeeded"}
    assert world.get(batch).request_completed == 1


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_claim_that_was_taken_over_is_not_touched(world: World, attempt: int) -> None:
    batch = world.running_batch(world.workspace().id, 2, retry_limit=1)
    world.claim(batch, [0])
    if attempt == 2:
        world.finish(batch, 0, ok=False)
        world.claim(batch, [0], attempt=2)
    world.advance(61)
    (taken,) = world.run(world.store.runner.take("r2", LEASE_US, 5))
    assert taken.interrupted == 1
    before = world.get(batch)
    assert give_back(world, unsent(batch, 0, attempt)) == (False,)
    assert world.states(batch) == {0: "interrupted"} and world.get(batch) == before
    assert world.run(world.store.runner.records(batch.id, -1, 9)) == ()


def test_a_line_that_another_runner_claimed_meanwhile_is_not_touched(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 1)
    world.claim(batch, [0])
    assert give_back(world, unsent(batch, 0)) == (True,)
    world.advance(61)
    (taken,) = world.run(world.store.runner.take("r2", LEASE_US, 5))
    assert (taken.taken_over, taken.interrupted) == (True, 0)
    assert claim_as(world, batch, 0, "theirs", "r2") is CLAIMED
    assert give_back(world, unsent(batch, 0)) == (False,)
    assert world.states(batch) == {0: "running"}


def test_takeover_and_return_at_once_agree(world: World) -> None:
    """A line is interrupted by the one or waits by the other, and counted accordingly."""
    lines = 20
    batch = world.running_batch(world.workspace().id, lines)
    world.claim(batch, list(range(lines)))
    world.advance(61)
    second = world.open()

    async def race() -> tuple[list[bool], int]:
        async def one_by_one() -> list[bool]:
            return [(await world.store.runner.give_back("r1", [unsent(batch, n)]))[0] for n in range(lines)]

        given, taken = await asyncio.gather(one_by_one(), second.runner.take("r2", LEASE_US, 5))
        return given, taken[0].interrupted

    given, interrupted = world.run(race())
    assert sum(given) + interrupted == lines
    assert world.states(batch) == {n: "interrupted" for n, back in enumerate(given) if not back}
    assert world.get(batch).request_failed == interrupted


def test_rule_71_lines_that_were_given_back_are_demand(world: World) -> None:
    """A gate holds them: a good reason, so the batch is not stalled, and is again once nobody says so."""
    batch = world.running_batch(world.workspace().id, 2)
    world.claim(batch, [0, 1])
    give_back(world, unsent(batch, 0), unsent(batch, 1))
    scheduling = world.store.scheduling
    world.advance(299)
    closed = [Demand("R", 2, "outside_window", False)]
    world.run(scheduling.publish_waits("r1", batch.id, closed, legitimate=True))
    world.advance(299)
    assert world.run(scheduling.stalled(300_000_000)) == ()
    world.advance(2)
    assert [row.id for row in world.run(scheduling.stalled(300_000_000))] == [batch.id]


def test_the_schema_lets_only_unsent_claims_go(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 9, retry_limit=2)
    world.claim(batch, [0, 1, 2])
    world.finish(batch, 0)
    world.finish(batch, 1, ok=False)
    world.finish(batch, 2, ok=False)
    world.claim(batch, [2], attempt=2)
    for line in range(3):
        with pytest.raises(RuleBroken):
            world.sql(f"DELETE FROM batch_lines WHERE line_no = {line}")
    for line, change in (
        (0, "attempts = attempts - 1"), (1, "attempts = 0"), (2, "attempts = 1"),
        (2, "attempts = 1, state = 'succeeded', finished_at = 1"),
    ):  # fmt: skip
        with pytest.raises(RuleBroken):
            world.sql(f"UPDATE batch_lines SET {change} WHERE line_no = {line}")
