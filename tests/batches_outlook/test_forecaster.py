"""Outlooks from what a store holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from frontend.batches.scheduling.alerts import AlertDuty
from frontend.batches.scheduling.forecast import FRESH_S, MIN_LINES, STALE_S, Forecaster
from frontend.batches.scheduling.outlook import Outlook, outlook_document
from frontend.batches.store.route_rows import MinuteRow, RouteCap
from frontend.batches.store.rows import SECOND_US, BatchRow, Demand, SchedulingRow
from frontend.gateway_settings import AlertSettings, BatchSettings
from store_world import World

MINUTE_US = 60 * SECOND_US


class Clock:
    """Monotonic nanoseconds that a test moves."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def forecaster(world: World, clock: Clock | None = None, route: str = "", **settings: int) -> Forecaster:
    made = BatchSettings(**{"default_max_concurrency": 2} | settings)
    return Forecaster(world.store, made, lambda endpoint, model: route, clock or Clock())


def measured(world: World, route: str = "R", *, line_s: float = 10.0, minutes: int = 20, share: float = 1.0) -> None:
    """Write what was seen on a route in the last minutes: 12 lines in each."""
    now = world.run(world.store.now_us()) // MINUTE_US
    rows = [
        MinuteRow(
            route, now - ago, cap=2, open_us=int(share * MINUTE_US), observed_us=MINUTE_US, lines_done=12,
            line_s_sum=12 * line_s, line_s_sq_sum=12 * line_s**2,
        )
        for ago in range(minutes)
    ]  # fmt: skip
    world.run(world.store.explain.add_minutes(rows))


def waiting(world: World, batch: BatchRow, *demands: Demand, runner: str = "r1") -> None:
    world.run(world.store.scheduling.publish_waits(runner, batch.id, demands, legitimate=False))


def of(world: World, made: Forecaster, batch: BatchRow) -> Outlook:
    found = world.run(made.of(batch.id))
    assert found is not None
    return found


def in_s(world: World, at: int | None) -> float:
    assert at is not None
    return at - world.run(world.store.now_us()) / SECOND_US


def test_a_waiting_batch_gets_an_eta_from_measured_lines(world: World) -> None:
    measured(world)
    batch = world.running_batch(world.workspace().id, 100)
    waiting(world, batch, Demand("R", 100, None, True))
    outlook = of(world, forecaster(world), batch)
    assert in_s(world, outlook.eta_p50) == pytest.approx(500, rel=0.1)
    assert outlook.eta_p90 is not None and outlook.eta_p50 is not None and outlook.eta_p90 >= outlook.eta_p50
    assert outlook.expires_at == batch.expires_at // SECOND_US
    assert (outlook.at_risk, outlook.window_hours) == (False, 24)
    assert outlook.measured_lines >= 200
    assert outlook_document(outlook)["suggested_completion_window"] == "24h"


def test_without_measured_lines_nothing_is_claimed(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 50_000)
    waiting(world, batch, Demand("R", 50_000, None, True))
    outlook = of(world, forecaster(world), batch)
    assert (outlook.eta_p50, outlook.eta_p90, outlook.at_risk, outlook.window_hours) == (None, None, False, None)
    assert outlook.measured_lines == 0
    world.run(world.store.explain.add_minutes([MinuteRow("R", 1, lines_done=MIN_LINES - 1, line_s_sum=4.0)]))
    assert of(world, forecaster(world), batch).measured_lines == 0


@pytest.mark.parametrize(("lines", "window"), [(10_000, 24), (20_000, 48), (60_000, 168), (200_000, None)])
def test_a_batch_that_will_not_end_in_time_is_at_risk_and_told_which_window_would_hold(
    world: World, lines: int, window: int | None
) -> None:
    measured(world)
    batch = world.running_batch(world.workspace().id, min(lines, 50_000))
    waiting(world, batch, *(Demand("R", min(lines, 50_000), None, True),))
    others = [world.running_batch(world.workspace().id, 50_000) for _ in range(lines // 50_000 - 1)]
    for other in others:
        waiting(world, other, Demand("R", 50_000, None, True))
    if lines == 60_000:
        other = world.running_batch(world.workspace().id, 10_000)
        waiting(world, other, Demand("R", 10_000, None, True))
    outlook = of(world, forecaster(world), batch)
    assert outlook.window_hours == window
    assert outlook.at_risk == (window != 24)


def test_the_time_window_of_the_route_is_waited_for(world: World) -> None:
    measured(world)
    now_us = world.run(world.store.now_us())
    minute = now_us // MINUTE_US % 1440
    row = SchedulingRow(
        "R", 2, window_timezone="UTC", window_days=127, window_start_minute=(minute + 120) % 1440,
        window_end_minute=(minute + 240) % 1440,
    )  # fmt: skip
    world.run(world.store.scheduling.put_settings(row, None))
    batch = world.running_batch(world.workspace().id, 100)
    waiting(world, batch, Demand("R", 100, "outside_window", False))
    outlook = of(world, forecaster(world), batch)
    assert in_s(world, outlook.eta_p50) == pytest.approx(2 * 3600 + 500, abs=150)


def test_other_workspaces_and_their_weights_count(world: World) -> None:
    measured(world)
    first, second = world.workspace(), world.workspace()
    mine, other = world.running_batch(first.id, 100), world.running_batch(second.id, 1000)
    for batch in (mine, other):
        waiting(world, batch, Demand("R", batch.request_total, None, True))
    alike = in_s(world, of(world, forecaster(world), mine).eta_p50)
    assert alike == pytest.approx(1000, rel=0.1)
    world.run(world.store.scheduling.set_weight(first.id, 3, None))
    assert in_s(world, of(world, forecaster(world), mine).eta_p50) == pytest.approx(alike * 2 / 3, rel=0.1)


def test_a_batch_nobody_has_taken_up_waits_where_its_model_goes(world: World) -> None:
    measured(world)
    batch = world.batch(world.workspace().id, 100)
    assert world.run(forecaster(world).of(batch.id)) is None
    assert in_s(world, of(world, forecaster(world, route="R"), batch).eta_p50) == pytest.approx(500, rel=0.1)


def test_lines_that_run_and_none_that_wait_end_after_a_line(world: World) -> None:
    measured(world)
    batch = world.running_batch(world.workspace().id, 2)
    world.claim(batch, [0, 1])
    waiting(world, batch)
    assert 5 < in_s(world, of(world, forecaster(world), batch).eta_p50) < 20


def test_a_batch_of_two_models_ends_with_the_later_one(world: World) -> None:
    measured(world, "R")
    measured(world, "S", line_s=100.0)
    batch = world.running_batch(world.workspace().id, 40)
    world.claim(batch, [0], route="S")
    waiting(world, batch, Demand("R", 20, None, True), Demand("S", 20, None, True))
    assert in_s(world, of(world, forecaster(world), batch).eta_p50) == pytest.approx(1050, rel=0.15)


def test_the_adaptive_cap_and_the_limits_of_the_runner_count(world: World) -> None:
    measured(world)
    world.run(world.store.scheduling.put_settings(SchedulingRow("R", 16, min_concurrency=2), None))
    batch = world.running_batch(world.workspace().id, 800)
    waiting(world, batch, Demand("R", 800, None, True))

    def eta(**settings: int) -> float:
        return in_s(world, of(world, forecaster(world, **settings), batch).eta_p50)

    assert eta() == pytest.approx(4000, rel=0.1)
    world.run(world.store.scheduling.put_cap(RouteCap("R", 8, "clean_windows")))
    assert eta() == pytest.approx(1000, rel=0.1)
    assert eta(batch_concurrency=4) == pytest.approx(2000, rel=0.1)
    expected = 2000 if world.kind == "sqlite" else 1000
    assert eta(workers=4) == pytest.approx(expected, rel=0.1)


def test_batches_that_end_or_are_being_cancelled_have_no_outlook(world: World) -> None:
    measured(world)
    batch = world.running_batch(world.workspace().id, 100)
    waiting(world, batch, Demand("R", 100, None, True))
    world.run(world.store.batches.cancel(None, batch.id))
    assert world.run(forecaster(world).all()) == {}


def test_what_would_come_is_forecast_behind_what_is_there(world: World) -> None:
    measured(world)
    made = forecaster(world)
    batch = world.running_batch(world.workspace().id, 100)
    waiting(world, batch, Demand("R", 100, None, True))
    new = world.batch(world.workspace().id, 100)
    outlook = world.run(made.would(new, {"R": 100}))
    assert in_s(world, outlook.eta_p50) == pytest.approx(1000, rel=0.1)
    long = world.run(made.would(new, {"R": 30_000}))
    assert (long.at_risk, long.window_hours) == (True, 48)
    unknown = world.run(made.would(new, {"S": 30_000}))
    assert (unknown.eta_p90, unknown.at_risk) == (None, False)
    nothing = world.run(made.would(new, {}))
    assert nothing.eta_p90 is None


def test_askers_share_one_look_and_are_given_the_last_one_meanwhile(world: World) -> None:
    measured(world)
    clock = Clock()
    made = forecaster(world, clock)
    batch = world.running_batch(world.workspace().id, 100)
    waiting(world, batch, Demand("R", 100, None, True))
    looks = 0
    unfinished = made._unfinished

    async def counted() -> dict[str, BatchRow]:
        nonlocal looks
        looks += 1
        return await unfinished()

    made._unfinished = counted

    async def ask() -> Sequence[object]:
        return await asyncio.gather(*(made.all() for _ in range(8)))

    assert len({id(found) for found in world.run(ask())}) == 1
    clock.ns += int(FRESH_S * 0.9e9)
    world.run(ask())
    assert looks == 1
    clock.ns += int(FRESH_S * 0.2e9)

    async def ask_twice() -> None:
        before = await made.all()
        assert await made.all() is before, "the next look is under way"
        assert looks == 1
        assert made._looking is not None
        await made._looking
        assert await made.all() is not before

    world.run(ask_twice())
    assert looks == 2
    clock.ns += int(STALE_S * 1.1e9)
    world.run(ask())
    assert looks == 3


def test_an_asker_that_goes_away_leaves_the_answer_to_others_and_closing_ends_all(world: World) -> None:
    made = forecaster(world)

    async def scenario() -> None:
        impatient = asyncio.create_task(made.all())
        other = asyncio.create_task(made.all())
        await asyncio.sleep(0)
        impatient.cancel()
        assert await other == {}
        await made.close()
        await made.close()

    world.run(scenario())


def test_a_batch_at_risk_becomes_an_incident_that_names_the_window_it_needs(world: World) -> None:
    measured(world)
    batch = world.running_batch(world.workspace().id, 20_000)
    waiting(world, batch, Demand("R", 20_000, None, True))
    duty = AlertDuty(world.store, AlertSettings(), forecaster(world, route="R"))
    world.run(duty.judge())
    assert world.run(world.store.alerts.open_incidents()) == ()
    world.run(duty.judge())
    (incident,) = world.run(world.store.alerts.open_incidents())
    details = json.loads(incident.details)
    assert (incident.rule, incident.subject) == ("at_risk", batch.id)
    assert details["suggested_completion_window"] == "48h"
    assert details["eta_p90"] > details["expires_at"]
    assert batch.created_at // SECOND_US + 48 * 3600 >= details["eta_p90"]
