"""The claim on both databases: exactly once, within the cap, in the fair order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from frontend.batches.store.rows import (
    BatchRow,
    ClaimBatch,
    ClaimGroup,
    ClaimLine,
    ClaimResult,
    Demand,
    FinishLine,
)
from frontend.batches.store.sql_store import SqlStore
from store_world import World, execution

CLAIMED, FULL, WAIT = ClaimResult.CLAIMED, ClaimResult.FULL, ClaimResult.WAIT
TAKEN, STOPPED = ClaimResult.TAKEN, ClaimResult.STOPPED


def one_line(batch: BatchRow, line: int, cap: int, execution_id: str, waiting: int = 1) -> ClaimGroup:
    lines = (ClaimLine(line, execution_id),)
    return ClaimGroup("R", cap, (ClaimBatch(batch.id, batch.workspace_id, waiting, lines),))


def test_acceptance_3_one_line_asked_eight_times_is_claimed_once(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 1)
    stores = [world.store, world.open()]

    async def race() -> list[ClaimResult]:
        turns = (stores[i % 2].runner.turn("r1", [], [one_line(batch, 0, 4, f"e{i}")]) for i in range(8))
        return [result.claimed[0][0][0] for result in await asyncio.gather(*turns)]

    answers = Counter(world.run(race()))
    assert answers[CLAIMED] == 1
    assert sum(answers[one] for one in (TAKEN, FULL, WAIT)) == 7
    assert world.states(batch) == {0: "running"}


def test_acceptance_3_eight_workers_share_three_workspaces_within_the_cap(world: World) -> None:
    cap, per_workspace, workers = 3, 24, 8
    batches = [world.running_batch(world.workspace().id, per_workspace) for _ in range(3)]
    left = {batch.id: list(range(per_workspace)) for batch in batches}
    by_id = {batch.id: batch for batch in batches}
    # Rule W1: fair shares on SQLite need the one writer line of one process.
    stores = [world.store, world.open() if world.kind == "postgresql" else world.store]
    starts: list[str] = []
    running: set[tuple[str, int]] = set()
    most = 0

    async def worker(number: int) -> None:
        nonlocal most
        store: SqlStore = stores[number % 2]
        draw = random.Random(number)
        while any(left.values()):
            batch_id = draw.choice([one for one, lines in left.items() if lines])
            line, batch = left[batch_id][0], by_id[batch_id]
            group = one_line(batch, line, cap, f"{number}/{batch_id}/{line}", len(left[batch_id]))
            answer = (await store.runner.turn("r1", [], [group])).claimed[0][0][0]
            if answer is TAKEN and line in left[batch_id]:
                left[batch_id].remove(line)
            if answer is not CLAIMED:
                continue
            assert (batch_id, line) not in running
            running.add((batch_id, line))
            most = max(most, len(running))
            starts.append(batch_id)
            if line in left[batch_id]:
                left[batch_id].remove(line)
            await asyncio.sleep(0)
            running.discard((batch_id, line))
            end = FinishLine(batch_id, line, f"{number}/{batch_id}/{line}", "succeeded", 200, None, None)
            assert (await store.runner.turn("r1", [end], [])).finished == (True,)

    async def race() -> None:
        await asyncio.gather(*(worker(number) for number in range(workers)))

    world.run(race())
    assert len(starts) == 3 * per_workspace
    assert most <= cap
    for batch in batches:
        assert set(world.states(batch).values()) == {"succeeded"}
        assert world.get(batch).request_completed == per_workspace
    shares = Counter(starts[:60])
    assert all(abs(shares[batch.id] - 20) <= 2 for batch in batches), shares


def test_acceptance_4_fair_order_of_the_worked_example(world: World) -> None:
    """Rule 44, one line at a time."""
    a, b = world.workspace("a"), world.workspace("b")
    batches = {
        "A1": world.running_batch(a.id, 6, batch_id="batch_a1"),
        "A2": world.running_batch(a.id, 3, batch_id="batch_a2"),
        "B1": world.running_batch(b.id, 3, batch_id="batch_b1"),
    }
    total = {"A1": 6, "A2": 3, "B1": 3}
    given = dict.fromkeys(batches, 0)
    starts: list[str] = []

    def publish() -> None:
        for name, batch in batches.items():
            waiting = total[name] - given[name]
            demands = [Demand("R", waiting, "concurrency", True)] if waiting else []
            world.run(world.store.scheduling.publish_waits("r1", batch.id, demands, legitimate=True))

    def start_all() -> None:
        """The runner asks for all its batches at once, one line each, until nothing more starts."""
        while True:
            asking = [name for name in batches if given[name] < total[name]]
            group = ClaimGroup(
                "R", 3,
                tuple(
                    ClaimBatch(
                        batches[name].id, batches[name].workspace_id, total[name] - given[name],
                        (ClaimLine(given[name], execution(batches[name], given[name])),),
                    )
                    for name in asking
                ),
                limit=1,
            )  # fmt: skip
            answers = world.run(world.store.runner.turn("r1", [], [group])).claimed[0]
            claimed = [name for name, answer in zip(asking, answers, strict=True) if answer[0] is CLAIMED]
            if not claimed:
                return
            starts.append(f"{claimed[0]}.{given[claimed[0]]}")
            given[claimed[0]] += 1
            publish()

    publish()
    start_all()
    ended = 0
    while ended < len(starts):
        name, line = starts[ended].split(".")
        assert world.finish(batches[name], int(line))
        ended += 1
        start_all()
    assert " ".join(starts) == "A1.0 B1.0 A2.0 B1.1 A1.1 B1.2 A2.1 A1.2 A2.2 A1.3 A1.4 A1.5"


def test_acceptance_5_a_late_small_batch_does_not_starve(world: World) -> None:
    first = world.running_batch(world.workspace().id, 8)
    assert world.claim(first, [0], cap=1, waiting=8) == [CLAIMED]
    second = world.running_batch(world.workspace().id, 2)
    starts = ["first"]
    given = {"first": 1, "second": 0}
    ended = world.finish(first, 0)
    while len(starts) < 5:
        lines = {"first": first, "second": second}
        group = ClaimGroup(
            "R", 1,
            tuple(
                ClaimBatch(batch.id, batch.workspace_id, size - given[name],
                           (ClaimLine(given[name], execution(batch, given[name])),))
                for (name, batch), size in zip(lines.items(), (8, 2), strict=True) if given[name] < size
            ),
        )  # fmt: skip
        answers = world.run(world.store.runner.turn("r1", [], [group])).claimed[0]
        winner = [lines_of.batch_id for lines_of, got in zip(group.batches, answers, strict=True) if got == (CLAIMED,)]
        (name,) = [one for one, batch in lines.items() if batch.id in winner]
        starts.append(name)
        ended = world.finish(lines[name], given[name])
        given[name] += 1
    assert ended
    assert starts.count("second") == 2


def test_acceptance_6_tiny_batches_win_no_extra_turns(world: World) -> None:
    big_owner, tiny_owner = world.workspace(), world.workspace()
    big = world.running_batch(big_owner.id, 20)
    starts: list[str] = []
    given = 0
    for _ in range(10):
        tiny = world.running_batch(tiny_owner.id, 1)
        left = {tiny.id: (tiny, 0)}
        for _ in range(2):
            asks = [*left.values(), (big, given)]
            group = ClaimGroup(
                "R", 1,
                tuple(
                    ClaimBatch(batch.id, batch.workspace_id, 1, (ClaimLine(line, execution(batch, line)),))
                    for batch, line in asks
                ),
            )  # fmt: skip
            answers = world.run(world.store.runner.turn("r1", [], [group])).claimed[0]
            ((batch, line),) = [ask for ask, got in zip(asks, answers, strict=True) if got == (CLAIMED,)]
            starts.append(batch.workspace_id)
            world.finish(batch, line)
            if batch is big:
                given += 1
            else:
                del left[tiny.id]
    for i in range(len(starts) - 9):
        assert abs(starts[i : i + 10].count(tiny_owner.id) - 5) <= 1


def test_group_keeps_the_cap_and_the_order_of_lines(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 6)
    assert world.claim(batch, [0, 1, 2, 3], cap=2) == [CLAIMED, CLAIMED, FULL, FULL]
    assert world.claim(batch, [2], cap=2) == [FULL]
    world.finish(batch, 0)
    assert world.claim(batch, [2, 3], cap=2) == [CLAIMED, FULL]
    assert world.claim(batch, [5], cap=1, route="S") == [CLAIMED]


def test_one_turn_finishes_before_it_claims(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 2)
    world.claim(batch, [0], cap=1)
    end = FinishLine(batch.id, 0, execution(batch, 0), "succeeded", 200, None, b"{}")
    result = world.run(world.store.runner.turn("r1", [end], [one_line(batch, 1, 1, execution(batch, 1))]))
    assert result.finished == (True,)
    assert result.claimed == (((CLAIMED,),),)


def test_another_processs_first_batch_is_waited_for_until_it_is_stale(world: World) -> None:
    """Rule 40: first != me -> WAIT; a row older than 10 s is ignored."""
    first = world.running_batch(world.workspace().id, 5, runner="r1")
    second = world.running_batch(world.workspace().id, 5, runner="r2")
    world.run(world.store.scheduling.publish_waits("r1", first.id, [Demand("R", 5, None, True)], legitimate=True))
    world.advance(1)
    assert world.claim(second, [0], runner="r2", cap=1) == [WAIT]
    # Rule 38: gates that are closed for the first one must not hold the second.
    closed = [Demand("R", 5, "outside_window", False)]
    world.run(world.store.scheduling.publish_waits("r1", first.id, closed, legitimate=True))
    assert world.claim(second, [0], runner="r2", cap=1) == [CLAIMED]
    world.run(world.store.scheduling.publish_waits("r1", first.id, [Demand("R", 5, None, True)], legitimate=True))
    assert world.claim(second, [1], runner="r2", cap=2) == [WAIT]
    world.advance(11)
    assert world.claim(second, [1], runner="r2", cap=2) == [CLAIMED]


def test_slots_beyond_those_of_another_processs_turns_are_not_held_up(world: World) -> None:
    """Rule 41 over all free slots: three of four are the first batch's, in its absence; the fourth is not."""
    first = world.running_batch(world.workspace("a").id, 9, runner="r1")
    second = world.running_batch(first.workspace_id, 9, runner="r2")
    third = world.running_batch(world.workspace("b").id, 9, runner="r2")
    for batch, runner in ((first, "r1"), (second, "r2")):
        world.run(world.store.scheduling.publish_waits(runner, batch.id, [Demand("R", 9, None, True)], legitimate=True))
    world.advance(1)
    assert world.claim(third, [0, 1, 2], runner="r2", cap=3, waiting=3) == [CLAIMED, WAIT, WAIT]
    assert world.claim(third, [1, 2], runner="r2", cap=4, waiting=2) == [CLAIMED, WAIT]
    assert world.claim(first, [0, 1], runner="r1", cap=4, waiting=9) == [CLAIMED, WAIT]
    assert world.claim(second, [0, 1], runner="r2", cap=4, waiting=9) == [CLAIMED, FULL]


def test_retry_is_counted_and_only_as_expected(world: World) -> None:
    """Rules 11 and 46."""
    batch = world.running_batch(world.workspace().id, 2, retry_limit=2)
    world.claim(batch, [0, 1])
    assert world.claim(batch, [0], attempt=2) == [TAKEN]
    world.finish(batch, 0, ok=False)
    assert world.get(batch).request_failed == 1
    assert world.claim(batch, [0], attempt=3) == [TAKEN]
    assert world.claim(batch, [0], attempt=2, cap=1) == [FULL]
    assert world.claim(batch, [0], attempt=2) == [CLAIMED]
    assert world.run(world.store.runner.records(batch.id, -1, 10)) == ()
    assert world.get(batch).request_failed == 0
    assert not world.finish(batch, 0, ok=True, attempt=1)
    assert world.finish(batch, 0, ok=True, attempt=2)
    after = world.get(batch)
    assert (after.request_completed, after.request_failed) == (1, 0)
    assert world.run(world.store.runner.lines(batch.id, -1, 1))[0].attempts == 2


def test_repeating_a_claim_or_a_finish_whose_answer_was_lost_changes_nothing(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 1)
    assert world.claim(batch, [0]) == [CLAIMED]
    assert world.claim(batch, [0]) == [CLAIMED]
    assert world.claim(batch, [0], cap=1) == [CLAIMED]
    assert world.finish(batch, 0)
    assert world.finish(batch, 0)
    assert not world.finish(batch, 0, ok=False)
    assert world.get(batch).request_completed == 1
    assert world.claim(batch, [0]) == [TAKEN]


@pytest.mark.parametrize("stop", ["cancel", "expiry", "lease", "finalizing", "ended", "unknown", "not begun"])
def test_stopped_batch_starts_nothing(world: World, stop: str) -> None:
    """Rules 9 and 53: seen in the claim's own transaction."""
    workspace = world.workspace()
    batch = world.batch(workspace.id, 2) if stop == "not begun" else world.running_batch(workspace.id, 2)
    runner = "r1"
    match stop:
        case "cancel":
            world.run(world.store.batches.cancel(None, batch.id))
        case "expiry":
            world.advance(24 * 3600)
        case "lease":
            runner = "r2"
        case "finalizing":
            world.run(world.store.runner.mark_finalizing("r1", batch.id, "o", "e"))
        case "ended":
            world.run(world.store.runner.finalize("r1", batch.id, "failed"))
        case "unknown":
            batch = world.batch(workspace.id, 1)
    assert world.claim(batch, [0], runner=runner) == [STOPPED]
    assert world.states(batch) == {}


def test_bg_13_turns_go_on_when_the_clock_steps_back(world: World) -> None:
    """BG-13: the last claim lies in the future, and still every workspace gets its turn."""
    batches = [world.running_batch(world.workspace().id, 20) for _ in range(2)]
    world.claim(batches[0], [0], cap=1, waiting=20)
    world.finish(batches[0], 0)
    world.advance(-24 * 3600)
    starts = []
    given = [1, 0]
    for _ in range(6):
        group = ClaimGroup(
            "R", 1,
            tuple(
                ClaimBatch(batch.id, batch.workspace_id, 5, (ClaimLine(given[i], execution(batch, given[i])),))
                for i, batch in enumerate(batches)
            ),
        )  # fmt: skip
        answers = world.run(world.store.runner.turn("r1", [], [group])).claimed[0]
        ((i, batch),) = [one for one, got in zip(enumerate(batches), answers, strict=True) if got == (CLAIMED,)]
        starts.append(i)
        world.finish(batch, given[i])
        given[i] += 1
    assert starts == [1, 0, 1, 0, 1, 0]


def test_bg_13_rows_from_the_future_are_not_fresh(world: World) -> None:
    first = world.running_batch(world.workspace().id, 5, runner="r1")
    second = world.running_batch(world.workspace().id, 5, runner="r2")
    world.run(world.store.scheduling.publish_waits("r1", first.id, [Demand("R", 5, None, True)], legitimate=True))
    world.advance(-90)
    assert world.claim(second, [0], runner="r2") == [CLAIMED]
    assert [wait.batch_id for wait in world.run(world.store.scheduling.fresh_waits("R"))] == [second.id]
