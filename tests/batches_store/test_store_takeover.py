"""Runners that die, pause and come back: nobody's line runs twice, nobody's counts lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frontend.batches.store import scheduling_ops, view_ops
from frontend.batches.store.claim_state import RouteView
from frontend.batches.store.rows import ClaimResult, Demand, NewFile, WrittenFile
from frontend.batches.store.transaction import Op
from store_world import LEASE_US, SHA, World, world_of

CLAIMED, FULL, TAKEN, STOPPED = ClaimResult.CLAIMED, ClaimResult.FULL, ClaimResult.TAKEN, ClaimResult.STOPPED


def test_acceptance_21_crash_interrupts_what_ran_and_what_was_not_kept(world: World) -> None:
    workspace = world.workspace()
    batch = world.running_batch(workspace.id, 3, runner="old")
    assert world.claim(batch, [0, 1], runner="old") == [CLAIMED] * 2
    assert world.finish(batch, 1, record=None, runner="old")
    assert world.get(batch).request_completed == 1
    other = world.running_batch(workspace.id, 1, runner="new")
    # Before the takeover the dead runner's line still holds its slot.
    assert world.claim(other, [0], cap=1, runner="new") == [FULL]
    world.advance(61)
    (taken,) = world.run(world.store.runner.take("new", LEASE_US, 5))
    assert (taken.batch.id, taken.taken_over, taken.interrupted) == (batch.id, True, 2)
    assert world.states(batch) == {0: "interrupted", 1: "interrupted"}
    assert world.claim(other, [0], cap=1, runner="new") == [CLAIMED]
    world.finish(other, 0, runner="new")
    assert world.claim(batch, [0, 1, 2], runner="new") == [TAKEN, TAKEN, CLAIMED]
    assert world.finish(batch, 2, runner="new")
    before = world.get(batch)
    assert (before.request_completed, before.request_failed) == (1, 2)
    # The old process answers at last.
    assert not world.finish(batch, 0, runner="old")
    assert world.claim(batch, [2], runner="old") == [STOPPED]
    assert world.get(batch) == before
    assert [one.line_no for one in world.run(world.store.runner.records(batch.id, -1, 10))] == [2]
    ended = world.run(world.store.runner.finalize("new", batch.id, "completed"))
    assert ended is not None
    assert (ended.request_completed, ended.request_failed) == (1, 2)


def test_takeover_keeps_finished_lines_whose_result_was_kept(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 4, runner="old")
    world.claim(batch, [0, 1, 2, 3], runner="old")
    for line in range(3):
        world.finish(batch, line, ok=line != 1, runner="old")
    world.run(world.store.files.insert(NewFile("file-s", batch.workspace_id, "batch_output", None, "s", "t", "p")))
    assert world.run(world.store.runner.add_segment("old", batch.id, 0, WrittenFile("file-s", 1, SHA), [0]))
    world.advance(61)
    (taken,) = world.run(world.store.runner.take("new", LEASE_US, 5))
    assert taken.interrupted == 1
    assert world.states(batch) == {0: "succeeded", 1: "failed", 2: "succeeded", 3: "interrupted"}
    assert (taken.batch.request_completed, taken.batch.request_failed) == (2, 2)
    assert [one.line_no for one in world.run(world.store.runner.records(batch.id, -1, 9))] == [1, 2]


def test_bf_18_a_stale_runner_can_write_nothing(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 2, runner="old")
    world.claim(batch, [0], runner="old")
    world.advance(61)
    world.run(world.store.runner.take("new", LEASE_US, 5))
    runner = world.store.runner
    before = world.get(batch)
    world.run(world.store.files.insert(NewFile("file-s", batch.workspace_id, "batch_output", None, "s", "t", "p")))
    written = WrittenFile("file-s", 1, SHA)
    assert not world.run(runner.renew("old", [batch.id], LEASE_US))[batch.id].owned
    assert not world.run(runner.begin("old", batch.id))
    assert not world.run(runner.add_segment("old", batch.id, 0, written, [0]))
    assert world.run(runner.mark_finalizing("old", batch.id, "o", "e")) is None
    assert world.run(runner.finalize("old", batch.id, "completed", output=written)) is None
    assert not world.run(runner.settle("old", batch.id))
    world.run(runner.release_batches("old", [batch.id]))
    world.run(world.store.scheduling.publish_waits("old", batch.id, [Demand("R", 1, None, True)], legitimate=True))
    assert world.run(world.store.scheduling.fresh_waits("R")) == ()
    assert world.get(batch) == before
    assert world.run(world.store.files.get_internal("file-s")) is None


def test_late_renewal_keeps_a_lease_that_nobody_took(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 1)
    world.claim(batch, [0])
    world.advance(3600)
    # Its own expired lease is not offered to the holder: its lines still run.
    assert world.run(world.store.runner.take("r1", LEASE_US, 5)) == ()
    assert world.run(world.store.runner.renew("r1", [batch.id], LEASE_US))[batch.id].owned
    assert world.run(world.store.runner.take("r2", LEASE_US, 5)) == ()
    assert world.states(batch) == {0: "running"}


def test_bf_11_second_runner_on_one_sqlite_file_stays_passive(tmp_path: Path) -> None:
    with world_of("sqlite", str(tmp_path / "store.sqlite3")) as world:
        second = world.open()
        assert world.run(world.store.runner.acquire("first", LEASE_US))
        assert not world.run(second.runner.acquire("second", LEASE_US))
        assert world.run(world.store.runner.acquire("first", LEASE_US))
        world.run(world.store.runner.release("first"))
        assert world.run(second.runner.acquire("second", LEASE_US))
        assert not world.run(world.store.runner.acquire("first", LEASE_US))


def test_bf_11_dead_runner_on_one_host_is_replaced_at_once(tmp_path: Path) -> None:
    """The kernel frees the dead one's lock: its leases need not be waited for."""
    with world_of("sqlite", str(tmp_path / "store.sqlite3")) as world:
        dying = world.open()
        assert world.run(dying.runner.acquire("first", LEASE_US))
        batch = world.running_batch(world.workspace().id, 2, runner="first")
        world.claim(batch, [0], runner="first")
        assert not world.run(world.store.runner.acquire("second", LEASE_US))
        world.run(dying.close())
        assert world.run(world.store.runner.acquire("second", LEASE_US))
        (taken,) = world.run(world.store.runner.take("second", LEASE_US, 5))
        assert (taken.batch.id, taken.interrupted) == (batch.id, 1)


def test_runner_that_stopped_renewing_loses_the_file(tmp_path: Path) -> None:
    with world_of("sqlite", str(tmp_path / "store.sqlite3")) as world:
        second = world.open()
        assert world.run(world.store.runner.acquire("stopped", LEASE_US))
        world.advance(61)
        assert world.run(second.runner.acquire("second", LEASE_US))
        # Back again, it still has the host's lock, and must not take that for the second one's death.
        assert not world.run(world.store.runner.acquire("stopped", LEASE_US))
        assert world.run(second.runner.acquire("second", LEASE_US))


def test_any_number_of_runners_on_postgresql(postgres_url: str) -> None:
    with world_of("postgresql", postgres_url) as world:
        second = world.open()
        assert world.run(world.store.runner.acquire("first", LEASE_US))
        assert world.run(second.runner.acquire("second", LEASE_US))


def test_stall_clock_follows_progress_and_legitimate_waits(world: World) -> None:
    """Rules 70 and 71."""
    batch = world.running_batch(world.workspace().id, 2)
    scheduling = world.store.scheduling
    window_us = 300_000_000
    world.advance(200)
    world.claim(batch, [0])
    world.finish(batch, 0)
    world.advance(200)
    assert world.run(scheduling.stalled(window_us)) == ()
    closed = [Demand("R", 1, "outside_window", False)]
    world.run(scheduling.publish_waits("r1", batch.id, closed, legitimate=True))
    world.advance(299)
    assert world.run(scheduling.stalled(window_us)) == ()
    unreadable = [Demand("R", 1, "metrics_unavailable", False)]
    world.run(scheduling.publish_waits("r1", batch.id, unreadable, legitimate=False))
    world.advance(2)
    assert [row.id for row in world.run(scheduling.stalled(window_us))] == [batch.id]


@pytest.mark.parametrize("waited", [False, True])
def test_demand_rows_keep_since_and_vanish_with_the_batch(world: World, waited: bool) -> None:
    batch = world.running_batch(world.workspace().id, 9)
    scheduling = world.store.scheduling
    both = [Demand("R", 3, None, True), Demand("S", 6, "server_busy", False)]
    world.run(scheduling.publish_waits("r1", batch.id, both, legitimate=waited))
    since = {wait.route_id: wait.since for wait in world.run(scheduling.fresh_waits())}
    world.advance(2)
    world.run(scheduling.publish_waits("r1", batch.id, both[:1], legitimate=waited))
    (wait,) = world.run(scheduling.fresh_waits())
    assert (wait.route_id, wait.since, wait.waiting_lines, wait.ready) == ("R", since["R"], 3, True)
    assert (world.get(batch).last_waited_at is not None) == waited
    (count,) = world.run(scheduling.route_counts())
    assert (count.waiting_lines, count.waiting_batches, count.running_lines) == (3, 1, 0)
    world.run(world.store.runner.mark_finalizing("r1", batch.id, "o", "e"))
    assert world.run(scheduling.fresh_waits()) == ()


def test_a_batch_that_ends_while_the_queue_is_read_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two statements, on PostgreSQL of two moments: the first still has a batch that the second has not."""
    batches = [world.running_batch(world.workspace().id, 3) for _ in range(2)]
    for batch in batches:
        demand = [Demand("R", 3, "live_traffic", False)]
        world.run(world.store.scheduling.publish_waits("r1", batch.id, demand, legitimate=True))
    real = scheduling_ops.route_view

    def later(*arguments: Any, **named: Any) -> Op[RouteView]:
        view = yield from real(*arguments, **named)
        del view.contenders[batches[0].id]
        return view

    for module in (scheduling_ops, view_ops):
        monkeypatch.setattr(module, "route_view", later)
    assert world.run(world.store.views.positions(batches[0].id)) == ()
    assert [one.position for one in world.run(world.store.views.positions(batches[1].id))] == [1]
    assert [wait.batch_id for wait in world.run(world.store.scheduling.fresh_waits("R"))] == [batches[1].id]
