"""Settings that are replaced only if they are those one has seen, the audit log's filters, and how incidents end."""

from __future__ import annotations

import asyncio

import pytest

from frontend.batches.store.errors import SettingsChanged
from frontend.batches.store.route_rows import AuditRow, IncidentRow
from frontend.batches.store.rows import SchedulingRow
from store_world import World


def audit(subject: str, action: str = "u") -> AuditRow:
    return AuditRow(action, None, None, subject, "{}")


def test_settings_are_replaced_only_if_they_are_the_expected_ones(world: World) -> None:
    scheduling = world.store.scheduling
    first = world.run(scheduling.put_settings(SchedulingRow("R", 4), audit("R"), expected=0))
    for stale in (0, first.updated_at - 1, first.updated_at + 1):
        with pytest.raises(SettingsChanged):
            world.run(scheduling.put_settings(SchedulingRow("R", 5), audit("R"), expected=stale))
    assert world.run(scheduling.settings("R")) == first
    assert len(world.run(scheduling.audit_log(10))) == 1, "what is refused leaves no row"
    second = world.run(scheduling.put_settings(SchedulingRow("R", 6), audit("R"), expected=first.updated_at))
    assert world.run(scheduling.settings("R")) == second
    assert second.updated_at > first.updated_at
    assert world.run(scheduling.put_settings(SchedulingRow("R", 7), None)).max_concurrency == 7


def test_of_many_who_replace_the_same_settings_one_does(world: World) -> None:
    stores = [world.store, world.open(), world.open()]
    before = world.run(world.store.scheduling.put_settings(SchedulingRow("R", 1), None))

    async def all_put() -> list[SchedulingRow | BaseException]:
        puts = (
            store.scheduling.put_settings(SchedulingRow("R", 10 + at), audit("R"), expected=before.updated_at)
            for at, store in enumerate(stores)
        )
        return await asyncio.gather(*puts, return_exceptions=True)

    done = world.run(all_put())
    (winner,) = [one for one in done if isinstance(one, SchedulingRow)]
    assert sum(isinstance(one, SettingsChanged) for one in done) == len(stores) - 1
    assert world.run(world.store.scheduling.settings("R")) == winner
    assert len(world.run(world.store.scheduling.audit_log(10))) == 1


def test_the_audit_log_is_narrowed_by_action_and_subject(world: World) -> None:
    scheduling = world.store.scheduling
    for subject, action in (("R", "u"), ("S", "u"), ("R", "c"), ("R", "u")):
        world.run(scheduling.audit(audit(subject, action)))
    of_r = world.run(scheduling.audit_log(10, subject="R"))
    assert [row.action for row in of_r] == ["u", "c", "u"]
    assert len(world.run(scheduling.audit_log(10, action="u"))) == 3
    (older, _) = world.run(scheduling.audit_log(2, of_r[0].seq, action="u"))
    assert older.subject == "S"
    assert world.run(scheduling.audit_log(10, action="c", subject="S")) == ()


def test_an_incident_keeps_what_ended_it_and_the_past_is_listed_by_its_end(world: World) -> None:
    alerts = world.store.alerts
    for number, subject in enumerate("abc"):
        world.run(alerts.open_incident(IncidentRow(f"i{number}", "failed", subject, "ws_a", "s", '{"a": 1}')))
        world.advance(1)
    for subject, details in (("b", '{"a": 1, "ended_by": "day_passed"}'), ("a", None)):
        assert world.run(alerts.resolve("failed", subject, details))
        world.advance(1)
    past = world.run(alerts.incidents(10, resolved=True))
    assert [(row.subject, row.details) for row in past] == [
        ("a", '{"a": 1}'), ("b", '{"a": 1, "ended_by": "day_passed"}'),
    ]  # fmt: skip
    assert [row.subject for row in world.run(alerts.incidents(1, offset=1, resolved=True))] == ["b"]
    assert [row.subject for row in world.run(alerts.incidents(10))] == ["c", "b", "a"]
