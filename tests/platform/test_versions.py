"""Versions of settings (ETag, If-Match), the audit log's before and after, and routes that are not configured."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from platform_world import ROUTE_PATH, Answer, Key, PlatformWorld

from frontend.batches.store.route_rows import EdgeRow, IncidentRow, MinuteRow
from frontend.batches.store.rows import SchedulingRow
from frontend.openai.errors import ApiError
from frontend.openai.principal import Role
from frontend.platform.audit_details import difference
from frontend.platform.versions import etag, read_if_match, version_of

PATH = ROUTE_PATH.format("R")
WINDOW = {"timezone": "America/New_York", "days": ["mon"], "start": "19:00", "end": "07:00"}
METRICS = {"url": "http://10.0.0.5:8000/metrics", "max_waiting": 0}


def put(platform: PlatformWorld, key: Key, document: Any, if_match: str | None = None, route: str = "R") -> Answer:
    headers = {} if if_match is None else {"If-Match": if_match}
    return platform.call("PUT", ROUTE_PATH.format(route), key, document, headers=headers)


# Pure


@given(
    st.lists(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters='",'), max_size=20)),
    st.booleans(),
)
def test_if_match_names_strong_versions_only(versions: list[str], weak: bool) -> None:
    if not versions:
        assert read_if_match(None) is None is read_if_match(b" * ")
        return
    header = ", ".join(("W/" if weak else "") + etag(version) for version in versions[:32])
    assert read_if_match(header.encode()) == (frozenset() if weak else frozenset(versions[:32]))


@pytest.mark.parametrize(
    "header", [b"", b"abc", b'"a', b'"a" "b"', b"*, *", b'w/"a"', b'"a",,', b",".join([b'"a"'] * 33)]
)
def test_an_if_match_that_says_nothing_is_refused(header: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_if_match(header)
    assert (refused.value.status, refused.value.param) == (400, "If-Match")


def test_the_difference_is_in_words_and_names_no_address() -> None:
    off = SchedulingRow("R", 2)
    url = "http://10.0.0.5:8000/metrics"
    metered = SchedulingRow("R", 4, metrics_url=url, metrics_max_waiting=0)
    other = SchedulingRow("R", 4, metrics_url="http://10.0.0.6:8000/metrics", metrics_max_waiting=0)
    assert difference(off, off) == {}
    assert difference(off, metered) == {
        "concurrency": {"before": "2 at once", "after": "4 at once"},
        "server_load": {"before": "Off", "after": "Pause if waiting > 0"},
        "metrics_url": {"before": "Off", "after": "Set"},
    }
    assert difference(metered, other) == {"metrics_url": {"before": "Set", "after": "Another address"}}
    assert difference(metered, off)["metrics_url"] == {"before": "Set", "after": "Off"}
    assert version_of(None) != version_of(replace(off, updated_at=1)) != version_of(replace(off, updated_at=2))


# Over HTTP


def test_an_etag_stands_for_the_settings_and_a_put_may_demand_it(platform: PlatformWorld) -> None:
    admin = platform.key()
    first = put(platform, admin, {"max_concurrency": 3})
    assert first.headers["etag"] == f'"{first.json["version"]}"'
    again = platform.get(admin)
    assert again.headers["etag"] == first.headers["etag"]
    second = put(platform, admin, {"max_concurrency": 4}, first.headers["etag"])
    assert second.status == 200 and second.headers["etag"] != first.headers["etag"]
    rows = len(platform.audit("R"))
    for stale in (first.headers["etag"], '"0"', f"W/{second.headers['etag']}", f'{first.headers["etag"]}, "x"'):
        refused = put(platform, admin, {"max_concurrency": 5}, stale)
        assert (refused.status, refused.param, refused.json["error"]["code"]) == (412, "If-Match", "412")
    assert platform.get(admin).json == second.json and len(platform.audit("R")) == rows
    assert put(platform, admin, {"max_concurrency": 5}, "nonsense").status == 400
    either = f'"x", {second.headers["etag"]}'
    assert put(platform, admin, {"max_concurrency": 5}, either).json["settings"]["max_concurrency"] == 5
    assert put(platform, admin, {"max_concurrency": 6}, "*").status == 200


def test_settings_that_nobody_has_saved_have_a_version_too(platform: PlatformWorld) -> None:
    admin = platform.key()
    never = platform.get(admin, "queue-1")
    assert never.json["updated_at"] is None
    assert put(platform, admin, {"max_concurrency": 9}, never.headers["etag"], "queue-1").status == 200
    assert put(platform, admin, {"max_concurrency": 8}, never.headers["etag"], "queue-1").status == 412


def test_of_many_who_saw_the_same_settings_one_replaces_them(platform: PlatformWorld) -> None:
    admin = platform.key()
    seen = put(platform, admin, {"max_concurrency": 1}).headers["etag"]
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda at=at: answers.append(put(platform, admin, {"max_concurrency": at}, seen)))
        for at in range(10, 16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status for answer in answers) == [200] + [412] * 5
    (winner,) = (answer for answer in answers if answer.status == 200)
    assert platform.get(admin).json["settings"] == winner.json["settings"]


def test_the_audit_log_says_what_was_before_and_after(platform: PlatformWorld) -> None:
    admin, auditor = platform.key(), platform.key(Role.AUDITOR)
    put(platform, admin, {"max_concurrency": 2})
    put(platform, admin, {"max_concurrency": 2, "window": WINDOW, "metrics": METRICS})
    put(platform, admin, {"max_concurrency": 2, "window": WINDOW, "metrics": METRICS})
    log = platform.call("GET", "/api/v1/platform/audit-log?subject=R&action=batch_scheduling.updated&limit=2", auditor)
    same, changed = log.json["data"]
    assert same["details"]["changes"] == {}
    assert changed["details"]["changes"] == {
        "window": {"before": "Any time", "after": "Mon 19:00–07:00 (America/New_York)"},
        "server_load": {"before": "Off", "after": "Pause if waiting > 0"},
        "metrics_url": {"before": "Off", "after": "Set"},
    }
    assert (changed["actor"], changed["subject"]) == (f"key {admin.id}", "R")
    assert "10.0.0.5" not in str(log.json)
    assert platform.call("GET", "/api/v1/platform/audit-log?subject=none", auditor).json["data"] == []
    for query in ("subject=", "action=", "subject=%00", "subject=" + "x" * 257):
        assert platform.call("GET", f"/api/v1/platform/audit-log?{query}", auditor).status == 400
    workspace = platform.workspace()
    path = f"/api/v1/platform/workspaces/{workspace}/batch-weight"
    for weight in (3, 3):
        assert platform.call("PUT", path, admin, {"weight": weight}).status == 200
    assert [details for _, _, details in platform.audit(workspace)] == [
        {"weight": 3, "changes": {"weight": {"before": "1", "after": "3"}}},
        {"weight": 3, "changes": {}},
    ]


def test_a_route_that_is_not_configured_any_more_can_be_read_and_not_changed(platform: PlatformWorld) -> None:
    admin, auditor = platform.key(), platform.key(Role.AUDITOR)
    store = platform.store
    row = SchedulingRow("gone", 5, window_timezone="UTC", window_days=1, window_start_minute=0, window_end_minute=60)
    store.run(store.store.scheduling.put_settings(row, None))
    now = store.run(store.store.now_us())
    edge = EdgeRow("faded", now - 60_000_000, "p", "live_traffic")
    store.run(store.store.explain.add_edges([edge]))
    store.run(store.store.explain.add_minutes([MinuteRow("faded", now // 60_000_000 - 1, observed_us=60_000_000)]))
    gone = platform.get(auditor, "gone")
    assert (gone.status, gone.json["configured"]) == (200, False)
    assert gone.json["deployment"] == {"id": "gone", "model": "gone", "kind": None}
    assert gone.json["settings"]["max_concurrency"] == 5 and gone.json["in_words"]["window"] == "Mon 00:00–01:00 (UTC)"
    faded = platform.get(auditor, "faded")
    assert (faded.status, faded.json["configured"], faded.json["updated_at"]) == (200, False, None)
    history = platform.call("GET", ROUTE_PATH.format("faded") + "/history", auditor)
    assert history.status == 200 and [edge["reason"] for edge in history.json["edges"]] == ["live_traffic"]
    for answer in (
        put(platform, admin, {"max_concurrency": 2}, route="gone"),
        platform.call("POST", ROUTE_PATH.format("gone") + "/preview", admin, {"max_concurrency": 2}),
    ):
        assert (answer.status, answer.param) == (409, "deployment")
        assert "not configured any more" in answer.message
    assert platform.get(auditor, "gone").json["settings"] == gone.json["settings"]
    assert platform.audit("gone") == []
    listed = platform.call("GET", "/api/v1/platform/deployments", auditor).json["data"]
    assert [one["deployment"]["id"] for one in listed if not one["configured"]] == ["gone"]
    assert not listed[-1]["configured"] and platform.get(auditor, "R").json["configured"] is True
    assert platform.get(admin, "never").status == 404


def test_past_incidents_are_listed_by_their_end(platform: PlatformWorld) -> None:
    store, workspace = platform.store, platform.workspace("personal")
    alerts = store.store.alerts
    for name in ("x", "y", "z"):
        store.run(alerts.open_incident(IncidentRow(f"inc_{name}", "late", f"batch_{name}", workspace, "s", "{}")))
    store.run(alerts.resolve("late", "batch_y", '{"ended_by": "progress"}'))
    store.run(alerts.resolve("late", "batch_x"))
    auditor = platform.key(Role.AUDITOR)

    def of(query: str) -> list[str]:
        found = platform.call("GET", f"/api/v1/platform/incidents?{query}", auditor).json["data"]
        return [one["subject"] for one in found if one["rule"] == "late"]

    assert of("status=past") == ["batch_x", "batch_y"]
    assert of("status=past&limit=1&offset=1") == ["batch_y"]
    assert of("status=open") == ["batch_z"]
    past = platform.call("GET", "/api/v1/platform/incidents?status=past", auditor).json["data"]
    assert [one["details"] for one in past if one["subject"] == "batch_y"] == [{"ended_by": "progress"}]
