"""Weights on both databases: the claim itself follows them, whatever processes ask."""

from __future__ import annotations

from collections import Counter

import pytest

from engines.errors import NotFound
from frontend.batches.store.errors import RuleBroken
from frontend.batches.store.route_rows import AuditRow
from frontend.batches.store.rows import BatchRow, ClaimBatch, ClaimGroup, ClaimLine, ClaimResult, Demand
from store_world import World, execution


def three(world: World, lines: int) -> dict[str, BatchRow]:
    return {name: world.running_batch(world.workspace(name).id, lines) for name in "abc"}


def starts(world: World, batches: dict[str, BatchRow], cap: int, count: int, lines: int) -> str:
    """Claim and finish in turn, two processes asking alternately; return whose lines started."""
    stores = [world.store, world.open()]
    given = dict.fromkeys(batches, 0)
    running: list[tuple[str, int]] = []
    order = ""
    for batch in batches.values():
        world.run(
            world.store.scheduling.publish_waits(
                "r1", batch.id, [Demand("R", lines, "concurrency", True)], legitimate=True
            )
        )
    while len(order) < count:
        if len(running) == cap:
            name, line = running.pop(0)
            assert world.finish(batches[name], line)
        group = ClaimGroup(
            "R", cap,
            tuple(
                ClaimBatch(one.id, one.workspace_id, lines, (ClaimLine(given[name], execution(one, given[name])),))
                for name, one in batches.items()
            ),
            limit=1,
        )  # fmt: skip
        answers = world.run(stores[len(order) % 2].runner.turn("r1", [], [group])).claimed[0]
        (name,) = [name for name, answer in zip(batches, answers, strict=True) if answer[0] is ClaimResult.CLAIMED]
        running.append((name, given[name]))
        given[name] += 1
        order += name
    return order


@pytest.mark.parametrize("cap", [1, 4])
def test_claims_follow_the_weights(world: World, cap: int) -> None:
    batches = three(world, 60)
    world.run(world.store.scheduling.set_weight("ws_a", 30, None))
    world.run(world.store.scheduling.set_weight("ws_b", 20, None))
    world.run(world.store.scheduling.set_weight("ws_c", 10, None))
    order = starts(world, batches, cap, 36, 60)
    got = Counter(order[6:])
    assert (got["a"], got["b"], got["c"]) == (15, 10, 5), order
    assert "aaa" not in order[6:] and "bb" not in order[6:]
    queue = [row.workspace_id for row in world.run(world.store.scheduling.fresh_waits("R"))]
    assert sorted(queue) == ["ws_a", "ws_b", "ws_c"]
    positions = {
        name: next(one for one in world.run(world.store.views.positions(batch.id)) if one.route_id == "R").position
        for name, batch in batches.items()
    }
    assert sorted(positions, key=lambda name: positions[name] or 0) == [name.removeprefix("ws_") for name in queue]


def test_rule_41_holds_again_once_weights_are_alike(world: World) -> None:
    batches = three(world, 60)
    world.run(world.store.scheduling.set_weight("ws_a", 5, None))
    starts(world, batches, 1, 12, 60)
    for row in world.sql("SELECT batch_id, line_no FROM batch_lines WHERE state = 'running'"):
        world.finish(next(batch for batch in batches.values() if batch.id == row[0]), row[1])
    for name in "abc":
        world.run(world.store.scheduling.set_weight(f"ws_{name}", 9, None))
    turns = dict(world.sql("SELECT workspace_id, last_claim_at FROM batch_route_turns"))
    oldest_first = sorted(turns, key=turns.__getitem__)
    queue = [row.workspace_id for row in world.run(world.store.scheduling.fresh_waits("R"))]
    assert queue == oldest_first


def test_weight_is_set_with_its_audit_row_or_not_at_all(world: World) -> None:
    scheduling = world.store.scheduling
    world.workspace("a")
    audit = AuditRow("workspace.weight_updated", "ws_a", "key", "ws_a", '{"weight": 3}')
    assert world.run(scheduling.weights()) == {}
    world.run(scheduling.set_weight("ws_a", 3, audit))
    assert world.run(scheduling.weights()) == {"ws_a": 3}
    for weight in (0, 101, -1):
        with pytest.raises(RuleBroken):
            world.run(scheduling.set_weight("ws_a", weight, audit))
    with pytest.raises(NotFound, match="ws_none"):
        world.run(scheduling.set_weight("ws_none", 2, audit))
    assert world.run(scheduling.weights()) == {"ws_a": 3}
    (row,) = world.run(scheduling.audit_log(10))
    assert (row.action, row.actor_key_id, row.details) == ("workspace.weight_updated", "key", '{"weight": 3}')
    world.run(scheduling.set_weight("ws_a", 1, None))
    assert world.run(scheduling.weights()) == {}
