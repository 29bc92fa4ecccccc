"""Which alerts fire, and when their incidents open and end."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.scheduling.incident_state import (
    FAILED_US,
    Changes,
    Key,
    Picture,
    ending,
    judge,
    stall_clock_us,
    watches,
)
from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.store.route_rows import IncidentRow
from frontend.batches.store.rows import SECOND_US, BatchRow, WorkspaceRow
from frontend.gateway_settings import DEFAULT_RULES, AlertRule

NOW_US = 1_780_300_800 * SECOND_US
MINUTE_US = 60 * SECOND_US
TEAM = WorkspaceRow("ws_team", "team", "team", 0)
PERSONAL = WorkspaceRow("ws_own", "own", "personal", 0)
WORKSPACES = {one.id: one for one in (TEAM, PERSONAL)}
STALLED, FAILED, AT_RISK = DEFAULT_RULES


def batch(name: str = "b", workspace: str = "ws_team", **changes: Any) -> BatchRow:
    values: dict[str, Any] = dict.fromkeys(BatchRow.__dataclass_fields__)
    values |= {
        "id": name, "workspace_id": workspace, "mode": "gateway", "state": "in_progress", "request_total": 10,
        "request_completed": 3, "request_failed": 1, "created_at": NOW_US - 3600 * SECOND_US,
        "expires_at": NOW_US + 3600 * SECOND_US,
    } | changes  # fmt: skip
    return BatchRow(**values)


def outlook(p90_s: int | None, at_risk: bool) -> Outlook:
    now = NOW_US // SECOND_US
    eta = None if p90_s is None else now + p90_s
    return Outlook(eta, eta, now + 3600, at_risk, 48, 100)


def picture(**changes: Any) -> Picture:
    return replace(Picture(NOW_US, WORKSPACES, {}, (), {}, {}), **changes)


class Incidents:
    """Open incidents, changed as ``judge`` says."""

    def __init__(self) -> None:
        self.open: dict[Key, IncidentRow] = {}
        self.pending: frozenset[Key] = frozenset()
        self.opened: list[Key] = []

    def judge(self, seen: Picture, rules: tuple[AlertRule, ...] = DEFAULT_RULES) -> Changes:
        changes = judge(rules, seen, tuple(self.open.values()), self.pending)
        for fired in changes.opens:
            assert fired.key not in self.open, "at most one per rule and subject"
            self.open[fired.key] = IncidentRow(
                secrets.token_hex(4), fired.rule, fired.subject, fired.workspace_id, fired.summary, "{}"
            )
            self.opened.append(fired.key)
        for key in changes.resolves:
            del self.open[key]
        self.pending = changes.pending
        return changes


def test_rule_70_a_stalled_batch_opens_one_incident_and_progress_ends_it() -> None:
    incidents = Incidents()
    stalled = batch(last_progress_at=NOW_US - 61 * MINUTE_US)
    for _ in range(3):
        incidents.judge(picture(stalled={60: [stalled]}))
    assert incidents.opened == [("stalled", "b")]
    incidents.judge(picture(stalled={60: []}))
    assert not incidents.open
    incidents.judge(picture(stalled={60: [stalled]}))
    assert incidents.opened == [("stalled", "b")] * 2


def test_rule_70_the_summary_names_the_minutes_and_the_details_what_is_known() -> None:
    stalled = batch(last_progress_at=NOW_US - 90 * MINUTE_US, last_waited_at=NOW_US - 61 * MINUTE_US)
    (fired,) = judge(DEFAULT_RULES, picture(stalled={60: [stalled]}), (), ()).opens
    assert fired.summary == "Batch b has made no progress for 61 minutes"
    assert fired.details == {
        "kind": "batch_stalled", "batch": "b", "mode": "gateway", "total": 10, "done": 4,
        "minutes_without_progress": 61, "window_minutes": 60,
    }  # fmt: skip


@settings(deadline=None)
@given(
    progress=st.none() | st.integers(1, NOW_US),
    begun=st.none() | st.integers(1, NOW_US),
    waited=st.none() | st.integers(1, NOW_US),
)
def test_rule_70_the_clock_is_the_later_of_progress_and_wait(
    progress: int | None, begun: int | None, waited: int | None
) -> None:
    row = batch(last_progress_at=progress, in_progress_at=begun, last_waited_at=waited, created_at=5)
    expected = progress if progress is not None else begun if begun is not None else 5
    assert stall_clock_us(row) == max(expected, waited or 0)


@pytest.mark.parametrize(
    ("row", "summary"),
    [
        (batch(state="expired"), "Batch b expired before all its lines had run"),
        (batch(state="failed", error_code="budget_exceeded"), "Batch b was stopped by its budget"),
        (batch(state="failed"), "Batch b failed"),
    ],
)
def test_rule_72_a_failed_batch_is_one_incident_for_a_day(row: BatchRow, summary: str) -> None:
    incidents = Incidents()
    changes = incidents.judge(picture(ended=[row]))
    assert [fired.summary for fired in changes.opens] == [summary]
    assert not incidents.judge(picture(ended=[row])).opens
    # The store lists it for FAILED_US; after that it is over.
    assert FAILED_US == 24 * 3600 * SECOND_US
    assert incidents.judge(picture(ended=[])).resolves == (("failed", "b"),)


def test_rule_72_an_installation_rule_watches_no_personal_workspace_and_a_workspace_rule_only_its_own() -> None:
    anywhere = AlertRule(name="any", kind="batch_failed")
    by_id = AlertRule(name="id", kind="batch_failed", workspace="ws_own")
    by_name = AlertRule(name="name", kind="batch_failed", workspace="own")
    seen = picture(ended=[batch("t"), batch("p", "ws_own"), batch("gone", "ws_unknown")])
    found = judge((anywhere, by_id, by_name), seen, (), ()).opens
    assert {fired.key for fired in found} == {("any", "t"), ("id", "p"), ("name", "p")}
    assert not watches(anywhere, None)


def test_rules_of_one_kind_have_their_own_windows() -> None:
    short, long = (AlertRule(name=n, kind="batch_stalled", window_minutes=m) for n, m in (("s", 5), ("l", 120)))
    found = judge((short, long), picture(stalled={5: [batch()], 120: []}), (), ()).opens
    assert [fired.rule for fired in found] == ["s"]


def _risk(p90_s: int | None, at_risk: bool) -> Picture:
    return picture(unfinished={"b": batch()}, outlooks={"b": outlook(p90_s, at_risk)})


def test_at_risk_opens_at_the_second_look_and_ends_with_room_to_spare() -> None:
    incidents = Incidents()
    assert not incidents.judge(_risk(4000, True)).opens
    (fired,) = incidents.judge(_risk(4000, True)).opens
    assert fired.summary == "Batch b may expire before it is done"
    assert fired.details["suggested_completion_window"] == "48h"
    # Just inside again: no room to spare, so nothing changes, whichever way it tips.
    for p90_s, at_risk in ((3590, False), (3700, True), (3500, False), (None, True)):
        changes = incidents.judge(_risk(p90_s, at_risk))
        assert (changes.opens, changes.resolves) == ((), ())
    assert incidents.judge(_risk(3000, False)).resolves == (("at_risk", "b"),)


def test_at_risk_once_only_opens_nothing() -> None:
    incidents = Incidents()
    for p90_s, at_risk in ((4000, True), (1000, False)) * 5:
        incidents.judge(_risk(p90_s, at_risk))
    assert not incidents.opened


def test_at_risk_stays_while_nothing_is_known_and_ends_with_the_batch() -> None:
    incidents = Incidents()
    for _ in range(2):
        incidents.judge(_risk(4000, True))
    incidents.judge(picture(unfinished={"b": batch()}))
    assert incidents.open
    incidents.judge(picture())
    assert not incidents.open


def test_incidents_of_a_rule_that_is_gone_end() -> None:
    incidents = Incidents()
    incidents.judge(picture(ended=[batch()]))
    assert incidents.judge(picture(ended=[batch()]), ()).resolves == (("failed", "b"),)


@pytest.mark.parametrize(
    ("rule", "row", "code"),
    [
        (None, batch(), "rule_removed"),
        (FAILED, batch(state="failed", completed_at=NOW_US), "day_passed"),
        (FAILED, None, "day_passed"),
        (STALLED, None, "batch_ended"),
        (STALLED, batch(completed_at=NOW_US), "batch_ended"),
        (AT_RISK, batch(completed_at=NOW_US), "batch_ended"),
        (AT_RISK, batch(), "on_time"),
        (STALLED, batch(last_progress_at=NOW_US, last_waited_at=NOW_US - 1), "progress"),
        (STALLED, batch(last_progress_at=NOW_US - 1, last_waited_at=NOW_US), "waits"),
        (STALLED, batch(last_waited_at=NOW_US), "waits"),
    ],
)
def test_what_ended_an_incident_has_a_code(rule: AlertRule | None, row: BatchRow | None, code: str) -> None:
    assert ending(rule, row) == code


SUBJECTS = st.sets(st.sampled_from("abc"))


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(SUBJECTS, SUBJECTS, st.dictionaries(st.sampled_from("abc"), st.integers(0, 7200))), max_size=30
    )
)
def test_there_is_at_most_one_open_incident_per_rule_and_batch(
    steps: list[tuple[set[str], set[str], dict[str, int]]],
) -> None:
    incidents = Incidents()
    for stalled, ended, risks in steps:
        incidents.judge(
            picture(
                stalled={60: [batch(name) for name in stalled]},
                ended=[batch(name, state="failed") for name in ended],
                unfinished={name: batch(name) for name in risks},
                outlooks={name: outlook(p90_s, p90_s > 3600) for name, p90_s in risks.items()},
            )
        )
        assert {subject for rule, subject in incidents.open if rule == "stalled"} == stalled
        assert {subject for rule, subject in incidents.open if rule == "failed"} == ended
        assert {subject for rule, subject in incidents.open if rule == "at_risk"} <= set(risks)
    incidents.judge(picture())
    assert not incidents.open
