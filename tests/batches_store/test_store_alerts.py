"""Duties, incidents, caps and the rows behind lists, on both databases."""

from __future__ import annotations

import asyncio

import pytest

from frontend.batches.store.errors import RuleBroken
from frontend.batches.store.route_rows import BatchTotals, IncidentRow, PositionRow, RouteCap
from frontend.batches.store.rows import SECOND_US, ClaimResult, Demand, SchedulingRow
from store_world import World

LEASE_US = 10 * SECOND_US


def incident(number: int, subject: str = "batch_1", rule: str = "batch_stalled") -> IncidentRow:
    return IncidentRow(f"inc_{number}", rule, subject, "ws_a", "no progress for 60 minutes", '{"minutes": 60}')


def writes(world: World) -> list[object]:
    return world.sql("SELECT lease_until FROM gateway_duties")


def test_duty_is_held_by_one_process_until_its_lease_ends(world: World) -> None:
    stores = [world.store, world.open(), world.open()]

    async def all_ask() -> list[bool]:
        return await asyncio.gather(
            *(store.alerts.hold_duty("alerts", f"p{i}", LEASE_US) for i, store in enumerate(stores))
        )

    first = world.run(all_ask())
    assert sorted(first) == [False, False, True]
    holder = first.index(True)
    for _ in range(5):
        world.advance(4)
        assert world.run(all_ask()) == first
    world.advance(11)
    others = [i for i in range(3) if i != holder]
    assert world.run(stores[others[0]].alerts.hold_duty("alerts", f"p{others[0]}", LEASE_US))
    assert not world.run(stores[holder].alerts.hold_duty("alerts", f"p{holder}", LEASE_US))
    assert world.run(stores[holder].alerts.hold_duty("metrics", f"p{holder}", LEASE_US)), "duties are independent"


def test_holding_a_duty_writes_only_when_half_the_lease_is_over(world: World) -> None:
    assert world.run(world.store.alerts.hold_duty("alerts", "p1", LEASE_US))
    first = writes(world)
    world.advance(3)
    assert world.run(world.store.alerts.hold_duty("alerts", "p1", LEASE_US))
    assert not world.run(world.store.alerts.hold_duty("alerts", "p2", LEASE_US))
    assert writes(world) == first
    world.advance(3)
    assert world.run(world.store.alerts.hold_duty("alerts", "p1", LEASE_US))
    assert writes(world) > first


def test_duty_is_free_at_once_when_its_process_leaves_or_the_clock_stepped_back(world: World) -> None:
    alerts = world.store.alerts
    for name in ("alerts", "metrics"):
        assert world.run(alerts.hold_duty(name, "p1", LEASE_US))
    world.run(alerts.release_duties("p1"))
    for name in ("alerts", "metrics"):
        assert world.run(alerts.hold_duty(name, "p2", LEASE_US))
    world.advance(-3600)
    assert world.run(alerts.hold_duty("alerts", "p3", LEASE_US))
    assert not world.run(alerts.hold_duty("alerts", "p2", LEASE_US))


def test_rule_72_at_most_one_open_incident_per_rule_and_subject(world: World) -> None:
    alerts = world.store.alerts
    other = world.open().alerts

    async def race() -> list[bool]:
        return await asyncio.gather(*((alerts if i % 2 else other).open_incident(incident(i)) for i in range(6)))

    assert world.run(race()).count(True) == 1
    assert world.run(alerts.open_incident(incident(10, "batch_2")))
    assert world.run(alerts.open_incident(incident(11, rule="batch_failed")))
    assert len(world.run(alerts.open_incidents())) == 3
    assert world.run(alerts.resolve("batch_stalled", "batch_1"))
    assert not world.run(alerts.resolve("batch_stalled", "batch_1"))
    assert world.run(alerts.open_incident(incident(12)))
    rows = world.run(alerts.incidents(10))
    assert [row.id for row in rows][:2] == ["inc_12", "inc_11"]
    ended = [row for row in rows if row.resolved_at is not None]
    assert [row.subject for row in ended] == ["batch_1"]
    assert ended[0].opened_at <= (ended[0].resolved_at or 0)
    assert len(world.run(alerts.incidents(2))) == 2
    with pytest.raises(RuleBroken):
        world.run(alerts.open_incident(IncidentRow("x", "r", "s", None, "", "not json")))


def test_every_event_is_undelivered_until_marked(world: World) -> None:
    alerts = world.store.alerts
    world.run(alerts.open_incident(incident(1)))
    world.run(alerts.open_incident(incident(2, "batch_2")))
    world.run(alerts.resolve("batch_stalled", "batch_1"))

    def listed(limit: int = 10) -> list[tuple[str, str]]:
        return [(row.id, event) for row, event in world.run(alerts.undelivered(limit))]

    assert listed() == [("inc_1", "opened"), ("inc_1", "resolved"), ("inc_2", "opened")]
    assert listed(1) == [("inc_1", "opened")]
    world.run(alerts.mark_delivered("inc_1", "opened"))
    world.run(alerts.mark_delivered("inc_2", "opened"))
    assert listed() == [("inc_1", "resolved")]
    world.run(alerts.mark_delivered("inc_1", "resolved"))
    (first,) = [row for row in world.run(alerts.incidents(9)) if row.id == "inc_1"]
    world.run(alerts.mark_delivered("inc_1", "resolved"))
    assert first in world.run(alerts.incidents(9)), "the first time stays"
    assert listed() == []
    world.run(alerts.resolve("batch_stalled", "batch_2"))
    assert listed() == [("inc_2", "resolved")]
    world.run(alerts.open_incident(incident(3)))
    with pytest.raises(RuleBroken):
        world.run(alerts.mark_delivered("inc_3", "resolved"))


def test_old_resolved_incidents_go_and_open_ones_stay(world: World) -> None:
    alerts = world.store.alerts
    for number, subject in enumerate("abc"):
        world.run(alerts.open_incident(incident(number, subject)))
    world.run(alerts.resolve("batch_stalled", "a"))
    world.advance(100)
    world.run(alerts.resolve("batch_stalled", "b"))
    assert world.run(alerts.prune_incidents(50 * SECOND_US)) == 1
    assert sorted(row.subject for row in world.run(alerts.incidents(9))) == ["b", "c"]


def test_cap_moves_only_from_where_its_writer_saw_it(world: World) -> None:
    scheduling = world.store.scheduling
    first = world.run(scheduling.put_cap(RouteCap("R", 4, "start")))
    assert (first.cap, first.why) == (4, "start") and first.changed_at > 0
    # Two processes saw the same overload of a cap of 4: it is halved once.
    halved = world.run(scheduling.put_cap(RouteCap("R", 2, "overload"), expected=4))
    again = world.run(scheduling.put_cap(RouteCap("R", 2, "overload"), expected=4))
    late = world.run(scheduling.put_cap(RouteCap("R", 1, "overload"), expected=4))
    assert halved == again == late and halved.cap == 2
    world.run(scheduling.put_cap(RouteCap("S", 256, "clean_window"), expected=3))
    assert [(row.route_id, row.cap) for row in world.run(scheduling.caps())] == [("R", 2), ("S", 256)]
    for cap, why in ((0, "x"), (257, "x"), (3, "Not a code")):
        with pytest.raises(RuleBroken):
            world.run(scheduling.put_cap(RouteCap("R", cap, why)))


def test_adaptive_settings_keep_their_bounds(world: World) -> None:
    scheduling = world.store.scheduling
    row = SchedulingRow("R", 16, min_concurrency=2, latency_share_percent=20)
    stored = world.run(scheduling.put_settings(row, None))
    assert world.run(scheduling.settings("R")) == stored
    assert world.run(scheduling.put_settings(SchedulingRow("S", 1, min_concurrency=1), None)).min_concurrency == 1
    for broken in (
        SchedulingRow("R", 16, min_concurrency=17),
        SchedulingRow("R", 16, min_concurrency=0),
        SchedulingRow("R", 16, latency_share_percent=20),
        SchedulingRow("R", 16, min_concurrency=2, latency_share_percent=0),
        SchedulingRow("R", 16, min_concurrency=2, latency_share_percent=1001),
    ):
        with pytest.raises(RuleBroken):
            world.run(scheduling.put_settings(broken, None))
    assert world.run(scheduling.settings("R")) == stored


def test_rule_69_position_counts_every_fresh_wait(world: World) -> None:
    a, b = world.workspace("a"), world.workspace("b")
    first, second, third = (world.running_batch(one.id, 9) for one in (a, b, a))
    publish = world.store.scheduling.publish_waits
    for batch, reason, ready in ((first, "concurrency", True), (second, "rate_limited", False), (third, None, True)):
        world.run(
            publish("r1", batch.id, [Demand("R", 7, reason, ready), Demand("S", 2, "workers", False)], legitimate=True)
        )
    for batch in (first, third):
        assert world.claim(batch, [0], route="R", cap=2, waiting=7) == [ClaimResult.CLAIMED]
    views = world.store.views
    places = {one.id: world.run(views.positions(one.id)) for one in (first, second, third)}
    on_r = {one: next(place for place in rows if place.route_id == "R") for one, rows in places.items()}
    ranked = [row.batch_id for row in world.run(world.store.scheduling.fresh_waits("R"))]
    assert [on_r[one].position for one in ranked] == [1, 2, 3]
    assert {place.queue for place in on_r.values()} == {3}
    assert (on_r[second.id].reason, on_r[second.id].waiting_lines, on_r[second.id].running_lines) == (
        "rate_limited",
        7,
        0,
    )
    assert sum(place.running_lines for place in on_r.values()) == 2
    assert [place.route_id for place in places[second.id]] == ["R", "S"]
    world.advance(11)
    stale = world.run(views.positions(first.id))
    assert stale == (PositionRow("R", None, 0, 1, None, 0, None),)
    assert world.run(views.positions(second.id)) == ()


def test_rule_68_list_reason_is_that_of_most_waiting_lines_and_none_while_a_line_runs(world: World) -> None:
    owner = world.workspace().id
    waits, ties, runs, quiet = (world.running_batch(owner, 9) for _ in range(4))
    publish = world.store.scheduling.publish_waits
    for batch, demands in (
        (waits, [Demand("R", 2, "live_traffic", False), Demand("S", 5, "server_busy", False)]),
        (
            ties,
            [Demand("S", 3, "server_busy", False), Demand("R", 3, "outside_window", False), Demand("T", 8, None, True)],
        ),
        (runs, [Demand("R", 2, "concurrency", True)]),
    ):
        world.run(publish("r1", batch.id, demands, legitimate=True))
    assert world.claim(runs, [0], route="Q") == [ClaimResult.CLAIMED]
    ids = [batch.id for batch in (waits, ties, runs, quiet)]
    expected = {waits.id: "server_busy", ties.id: "outside_window"}
    assert world.run(world.store.views.waiting_reasons(ids)) == expected
    assert world.run(world.store.views.waiting_reasons(ids[:1])) == {waits.id: "server_busy"}
    world.advance(11)
    assert world.run(world.store.views.waiting_reasons(ids)) == {}


def test_ended_batches_and_names_of_keys(world: World) -> None:
    owner = world.workspace("a").id
    since = world.run(world.store.now_us())
    ended = {}
    for state in ("completed", "failed", "expired", "cancelled"):
        batch = world.running_batch(owner, 1)
        world.run(world.store.runner.mark_finalizing("r1", batch.id, "o", "e"))
        world.run(world.store.runner.finalize("r1", batch.id, state))
        ended[state] = batch.id
    world.running_batch(owner, 1)
    rows = world.run(world.store.views.ended_since(since))
    assert [row.id for row in rows] == [ended["failed"], ended["expired"]]
    assert world.run(world.store.views.ended_since(world.run(world.store.now_us()) + 1)) == ()
    for number in (1, 2):
        world.run(world.store.keys.create_key(f"k{number}", owner, "member", f"name {number}", "rs-", f"{number:064}"))
    assert world.run(world.store.views.key_names(["k2", "k1", "gone"])) == {"k1": "name 1", "k2": "name 2"}
    assert world.run(world.store.views.key_names([])) == {}


def test_rule_82_personal_workspaces_are_totals_only(world: World) -> None:
    views = world.store.views
    assert world.run(views.personal_totals()) == BatchTotals(0, 0, 0, 0, 0)
    team = world.workspace("team").id
    world.run(world.store.keys.create_workspace("ws_me", "me", "personal"))
    first, second = world.batch(team, 3), world.batch(team, 4)
    running = world.running_batch("ws_me", 5)
    world.claim(running, [0, 1])
    world.finish(running, 0)
    world.finish(running, 1, ok=False)
    page = world.run(views.platform_batches(1))
    assert ([row.id for row in page.rows], page.has_more) == ([second.id], True)
    page = world.run(views.platform_batches(5, offset=1))
    assert ([row.id for row in page.rows], page.has_more) == ([first.id], False)
    assert world.run(views.platform_batches(5, active=False)).rows == ()
    assert len(world.run(views.platform_batches(5, active=True)).rows) == 2
    assert world.run(views.personal_totals()) == BatchTotals(1, 1, 5, 1, 1)
