"""The duty: incidents in a store, told to a webhook, by one process of several."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping

import pytest

from frontend.batches.scheduling.alerts import LEASE_S, AlertDuty
from frontend.batches.scheduling.delivery_state import MAX_AGE_US, MAX_ATTEMPTS
from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.scheduling.webhook import NotTold, Webhook
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.route_rows import IncidentEvent, IncidentRow
from frontend.batches.store.rows import SECOND_US
from frontend.gateway_settings import AlertRule, AlertSettings
from store_world import World

STALLED_5 = AlertRule(name="stalled", kind="batch_stalled", window_minutes=5)
FAILED = AlertRule(name="failed", kind="batch_failed")
AT_RISK = AlertRule(name="at_risk", kind="batch_at_risk")


class StubOutlooks:
    """Provides ``Outlooks``."""

    def __init__(self) -> None:
        self.found: dict[str, Outlook] = {}

    async def all(self) -> Mapping[str, Outlook]:
        return self.found

    async def of(self, batch_id: str) -> Outlook | None:
        return self.found.get(batch_id)


class StubWebhook(Webhook):
    """Takes messages, or fails them in the way it is told to."""

    def __init__(self) -> None:
        self.told: list[tuple[str, IncidentEvent]] = []
        self.attempts = 0
        self.fails: NotTold | None = None

    async def start(self) -> None:
        """It is there."""

    async def close(self) -> None:
        """It stays."""

    async def tell(self, incident: IncidentRow, event: IncidentEvent, now_s: int) -> None:
        self.attempts += 1
        if self.fails is not None:
            raise self.fails
        self.told.append((incident.subject, event))


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


class Watch:
    """A duty in a world whose clocks move together."""

    def __init__(self, world: World, *rules: AlertRule, name: str = "p1", clock: Clock | None = None) -> None:
        self.world = world
        self.clock = clock or Clock()
        self.outlooks = StubOutlooks()
        self.webhook = StubWebhook()
        self.duty = AlertDuty(
            world.open(), AlertSettings(rules=rules), self.outlooks, self.webhook, process_id=name, clock_ns=self.clock
        )

    def look(self) -> list[tuple[str, str]]:
        """Look and deliver; return what is open."""
        self.world.run(self.duty.look())
        self.world.run(self.duty.deliver())
        return [(one.rule, one.subject) for one in self.world.run(self.world.store.alerts.open_incidents())]

    def later(self, seconds: float) -> None:
        self.world.advance(seconds)
        self.clock.ns += int(seconds * 1e9)

    def figures(self) -> dict[tuple[str, str], float]:
        return {(one.name, next(iter(one.labels.values()), "")): one.value for one in self.duty.series()}


async def until(met: Callable[[], bool]) -> None:
    for _ in range(3000):
        if met():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that in time")


def test_rule_70_a_batch_without_progress_is_one_incident_until_it_progresses(world: World) -> None:
    watch = Watch(world, STALLED_5)
    batch = world.running_batch(world.workspace().id, 3)
    assert watch.look() == []
    for _ in range(4):
        watch.later(120)
        found = watch.look()
    assert found == [("stalled", batch.id)]
    assert watch.figures()["gateway_batch_alerts_open", "stalled"] == 1
    (incident,) = world.run(world.store.alerts.incidents(10))
    assert incident.workspace_id == batch.workspace_id
    assert "no progress for 6 minutes" in incident.summary
    assert json.loads(incident.details)["total"] == 3
    world.sql("UPDATE batches SET last_progress_at = :now", now=world.run(world.store.now_us()))
    watch.later(61)
    assert watch.look() == []
    (incident,) = world.run(world.store.alerts.incidents(10))
    assert json.loads(incident.details)["ended_by"] == "progress"
    assert watch.figures()["gateway_batch_alerts_open", "stalled"] == 0
    assert watch.figures()["gateway_batch_alerts_total", "stalled"] == 1
    assert watch.webhook.told == [(batch.id, "opened"), (batch.id, "resolved")]


def test_rule_72_a_failed_batch_is_told_and_over_after_a_day(world: World) -> None:
    watch = Watch(world, FAILED)
    batch = world.running_batch(world.workspace().id, 3)
    world.run(world.store.runner.finalize("r1", batch.id, "failed", error_code="batch_failed"))
    for _ in range(2):
        assert watch.look() == [("failed", batch.id)]
        watch.later(3600)
    assert watch.webhook.told == [(batch.id, "opened")]
    watch.later(23 * 3600)
    assert watch.look() == []
    watch.later(3600)
    assert watch.look() == []
    assert len(world.run(world.store.alerts.incidents(10))) == 1


def test_a_batch_at_risk_is_told_at_the_second_look(world: World) -> None:
    watch = Watch(world, AT_RISK)
    batch = world.running_batch(world.workspace().id, 3)
    now_s = world.run(world.store.now_us()) // SECOND_US
    watch.outlooks.found[batch.id] = Outlook(now_s + 90_000, now_s + 99_000, now_s + 86_400, True, 48, 100)
    assert watch.look() == []
    assert watch.figures()["gateway_batches_at_risk", ""] == 1
    watch.later(61)
    assert watch.look() == [("at_risk", batch.id)]
    watch.outlooks.found[batch.id] = Outlook(now_s + 900, now_s + 1000, now_s + 86_400, False, 24, 100)
    watch.later(61)
    assert watch.look() == []


def test_it_is_judged_every_minute_and_not_at_every_look(world: World) -> None:
    watch = Watch(world, FAILED)
    assert watch.look() == []
    batch = world.running_batch(world.workspace().id, 3)
    world.run(world.store.runner.finalize("r1", batch.id, "failed"))
    watch.later(30)
    assert watch.look() == []
    watch.later(31)
    assert watch.look() == [("failed", batch.id)]


def test_one_process_does_it_and_another_goes_on_when_it_is_gone(world: World) -> None:
    clock = Clock()
    first, second = (Watch(world, FAILED, name=name, clock=clock) for name in ("p1", "p2"))
    batch = world.running_batch(world.workspace().id, 3)
    world.run(world.store.runner.finalize("r1", batch.id, "failed"))
    first.look()
    second.look()
    assert (first.webhook.told, second.webhook.told) == ([(batch.id, "opened")], [])
    assert ("gateway_batch_alerts_open", "failed") not in second.figures()
    # Killed: nobody releases anything.
    other = world.running_batch(world.workspace().id, 3)
    world.run(world.store.runner.finalize("r1", other.id, "failed"))
    first.later(LEASE_S + 1)
    found = second.look()
    assert sorted(found) == sorted([("failed", batch.id), ("failed", other.id)])
    assert second.webhook.told == [(other.id, "opened")]
    first.look()
    assert len(world.run(world.store.alerts.incidents(10))) == 2
    assert ("gateway_batch_alerts_open", "failed") not in first.figures()


def test_closing_leaves_the_duty_to_others_at_once(world: World) -> None:
    clock = Clock()
    first, second = (Watch(world, FAILED, name=name, clock=clock) for name in ("p1", "p2"))

    async def scenario() -> None:
        await first.duty.start()
        await until(lambda: ("gateway_batch_alerts_open", "failed") in first.figures())
        await second.duty.look()
        assert ("gateway_batch_alerts_open", "failed") not in second.figures()
        await first.duty.close()
        await first.duty.close()
        await second.duty.look()
        assert ("gateway_batch_alerts_open", "failed") in second.figures()

    world.run(scenario())


def _failed_batches(world: World, count: int) -> list[str]:
    found = []
    for _ in range(count):
        batch = world.running_batch(world.workspace().id, 1)
        world.run(world.store.runner.finalize("r1", batch.id, "failed"))
        found.append(batch.id)
    return found


def test_a_receiver_that_is_away_is_told_later_and_everything_in_order(world: World) -> None:
    watch = Watch(world, FAILED)
    batches = _failed_batches(world, 5)
    watch.webhook.fails = NotTold("cannot be reached", reached=False)
    watch.look()
    assert watch.webhook.attempts == 1, "one event only while it cannot be reached"
    watch.look()
    assert watch.webhook.attempts == 1, "not before its pause is over"
    watch.later(11)
    watch.look()
    assert watch.webhook.attempts == 2
    watch.webhook.fails = None
    watch.later(31)
    watch.look()
    watch.look()
    watch.later(100)
    watch.look()
    assert sorted(subject for subject, _ in watch.webhook.told) == sorted(batches)
    assert watch.figures()["gateway_batch_alert_messages_total", "delivered"] == 5
    assert watch.figures()["gateway_batch_alert_messages_total", "failed"] == 2


def test_a_message_nobody_takes_is_given_up(world: World, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(world, FAILED)
    _failed_batches(world, 1)
    watch.webhook.fails = NotTold("answered 400", reached=True)
    with caplog.at_level(logging.ERROR, "batches"):
        for _ in range(15):
            watch.look()
            watch.later(3601)
    assert watch.webhook.attempts == MAX_ATTEMPTS
    assert "alert.given_up" in caplog.text
    assert world.run(world.store.alerts.undelivered(10)) == ()


def test_what_is_a_day_old_is_not_told_any_more(world: World) -> None:
    watch = Watch(world, FAILED)
    _failed_batches(world, 1)
    watch.webhook.fails = NotTold("cannot be reached", reached=False)
    watch.look()
    watch.webhook.fails = None
    watch.later(MAX_AGE_US / SECOND_US + 60)
    watch.look()
    assert [event for _, event in watch.webhook.told] == ["resolved"]
    assert watch.figures()["gateway_batch_alert_messages_total", "given_up"] == 1


def test_a_store_that_is_away_is_waited_for(world: World, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(world, FAILED)
    calls = 0

    async def failing() -> None:
        nonlocal calls
        calls += 1
        raise StoreUnavailable("gone")

    watch.duty.look = failing
    watch.duty._look_s = 0.001

    async def scenario() -> None:
        await watch.duty.start()
        await until(lambda: calls >= 3)
        await watch.duty.close()

    with caplog.at_level(logging.WARNING, "batches"):
        world.run(scenario())
    assert caplog.text.count("alerts_outage") == 1, "told once"


def test_without_rules_nothing_is_done(world: World) -> None:
    watch = Watch(world)

    async def scenario() -> None:
        await watch.duty.start()
        await asyncio.sleep(0)
        await watch.duty.close()

    world.run(scenario())
    assert world.sql("SELECT count(*) FROM gateway_duties") == [(0,)]
