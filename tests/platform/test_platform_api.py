"""Weights, incidents, the audit log, history and preview over HTTP."""

from __future__ import annotations

import http.client
import re
from datetime import UTC, datetime
from urllib.parse import urlencode

import pytest
from platform_world import ROUTE_PATH, WAIT_S, PlatformWorld

from frontend.batches.store.route_rows import EdgeRow, IncidentRow, MinuteRow
from frontend.batches.store.watch_protocol import MINUTE_US
from frontend.openai.principal import Role

HISTORY = ROUTE_PATH + "/history"
PREVIEW = ROUTE_PATH + "/preview"


def test_weights_are_set_by_platform_admins_and_audited(platform: PlatformWorld) -> None:
    admin, workspace = platform.key(), platform.workspace()
    path = f"/api/v1/platform/workspaces/{workspace}/batch-weight"
    for role in (Role.AUDITOR, Role.WORKSPACE_ADMIN, Role.MEMBER):
        assert platform.call("PUT", path, platform.key(role), {"weight": 3}).status == 403
    answer = platform.call("PUT", path, admin, {"weight": 3})
    assert answer.status == 200 and answer.json["weight"] == 3
    listed = platform.call("GET", "/api/v1/platform/workspaces", platform.key(Role.AUDITOR)).json["data"]
    assert {one["id"]: one["weight"] for one in listed}[workspace] == 3
    for body, param in (
        ({"weight": 0}, "weight"),
        ({"weight": 101}, "weight"),
        ({"weight": True}, "weight"),
        ({"weight": 1.0}, "weight"),
        ({"weight": 1 << 80}, "weight"),
        ({}, "weight"),
        ({"weight": 2, "more": 1}, "more"),
    ):
        answer = platform.call("PUT", path, admin, body)
        assert (answer.status, answer.param) == (400, param)
    changes = {"weight": {"before": "1", "after": "3"}}
    assert platform.audit(workspace) == [("batch_weight.updated", admin.id, {"weight": 3, "changes": changes})]
    assert platform.call("PUT", path.replace(workspace, "ws_none"), admin, {"weight": 3}).status == 404


def test_incidents_are_listed_newest_first(platform: PlatformWorld) -> None:
    store, auditor = platform.store, platform.key(Role.AUDITOR)
    for number in range(3):
        row = IncidentRow(f"inc_{number}", "batch_stalled", f"batch_{number}", None, "stalled", '{"minutes": 60}')
        assert store.run(store.store.alerts.open_incident(row))
        store.advance(1)
    store.advance(-3)
    store.run(store.store.alerts.resolve("batch_stalled", "batch_1"))

    def ids(query: str) -> list[str]:
        found = platform.call("GET", f"/api/v1/platform/incidents{query}", auditor)
        return [one["id"] for one in found.json["data"]]

    assert ids("") == ["inc_2", "inc_1", "inc_0"] and ids("?limit=1") == ["inc_2"]
    assert ids("?status=open") == ["inc_2", "inc_0"]
    first = platform.call("GET", "/api/v1/platform/incidents?limit=1", auditor).json["data"][0]
    assert first["details"] == {"minutes": 60} and first["resolved_at"] is None
    assert platform.call("GET", "/api/v1/platform/incidents", platform.key(Role.MEMBER)).status == 403


def test_the_audit_log_has_pages_and_no_address(platform: PlatformWorld) -> None:
    admin = platform.key()
    url = "http://10.0.0.5:8000/metrics"
    for cap in (3, 4, 5):
        assert platform.put(admin, {"max_concurrency": cap, "metrics": {"url": url, "max_waiting": 0}}).status == 200
    found = platform.call("GET", "/api/v1/platform/audit-log?limit=2", admin)
    assert [one["details"]["max_concurrency"] for one in found.json["data"]] == [5, 4] and found.json["has_more"]
    assert found.json["data"][0]["actor"] == f"key {admin.id}" and found.json["data"][0]["subject"] == "R"
    last = found.json["data"][-1]["seq"]
    rest = platform.call("GET", f"/api/v1/platform/audit-log?limit=1&before={last}", admin)
    assert rest.json["data"][0]["details"]["max_concurrency"] == 3
    assert b"10.0.0.5" not in platform.call("GET", "/api/v1/platform/audit-log?limit=200", admin).raw
    assert platform.call("GET", "/api/v1/platform/audit-log", platform.key(Role.WORKSPACE_ADMIN)).status == 403


def test_no_metrics_url_gets_into_the_log(platform: PlatformWorld, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    admin = platform.key()
    document = {"max_concurrency": 2, "metrics": {"url": "http://10.0.0.5:8000/metrics", "max_waiting": 0}}
    assert platform.put(admin, document).status == 200
    assert platform.put(admin, {**document, "metrics": {"url": "http://secret.example/metrics"}}).status == 400
    texts = [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
    assert texts and not any("10.0.0.5" in text or "secret.example" in text for text in texts)


def test_history_says_why_nothing_ran(platform: PlatformWorld) -> None:
    store, auditor = platform.store, platform.key(Role.AUDITOR)
    now = store.run(store.store.now_us())
    begin = (now // MINUTE_US - 30) * MINUTE_US
    explain = store.store.explain
    edges = (
        EdgeRow("R2", begin, "p1", None, live_in_flight=0, cap=2),
        EdgeRow("R2", begin + 10 * MINUTE_US, "p1", "live_traffic", live_in_flight=3, cap=2),
        EdgeRow("R2", begin + 15 * MINUTE_US, "p1", "server_busy", metrics_waiting=4, metrics_kv_cache_permille=950),
    )
    store.run(explain.add_edges(edges))
    minute = begin // MINUTE_US
    rows = [MinuteRow("R2", minute + i, 3, 2, 9, 2, MINUTE_US, MINUTE_US, lines_done=1) for i in range(20)]
    store.run(explain.add_minutes(rows))
    found = platform.call("GET", HISTORY.format("R2") + "?hours=1", auditor).json
    shown = [(one["state"], one["reason"]) for one in found["spans"]]
    assert shown == [
        ("unwatched", None), ("open", None), ("closed", "live_traffic"), ("closed", "server_busy"), ("unwatched", None),
    ]  # fmt: skip
    assert found["spans"][0]["since"] == found["since"] and found["spans"][-1]["until"] == found["until"]
    assert len(found["points"]) == 20 and found["points"][0] == {
        "at": datetime.fromtimestamp(begin / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "live_max": 3, "running_max": 2, "queued_max": 9, "cap": 2, "lines_done": 1, "overloads": 0,
    }  # fmt: skip
    assert found["edges"][1]["live_in_flight"] == 3 and found["edges"][2]["metrics"]["kv_cache_permille"] == 950
    assert platform.call("GET", HISTORY.format("R2"), platform.key(Role.MEMBER)).status == 403


def test_a_long_history_is_told_in_larger_steps(platform: PlatformWorld) -> None:
    found = platform.call("GET", HISTORY.format("own") + "?hours=336", platform.key()).json
    assert found["step_minutes"] == 15
    assert found["spans"] == [{"since": found["since"], "until": found["until"], "state": "unwatched", "reason": None}]
    assert found["points"] == []


def test_preview_lists_the_next_openings_and_saves_nothing(platform: PlatformWorld) -> None:
    auditor = platform.key(Role.AUDITOR)
    before = platform.get(auditor, "R2").json
    window = {"timezone": "Europe/London", "days": ["sat"], "start": "22:00", "end": "06:00"}
    found = platform.call("POST", PREVIEW.format("R2"), auditor, {"max_concurrency": 4, "window": window}).json
    assert len(found["intervals"]) == 14 and found["always"] is False
    assert found["in_words"]["window"] == "Sat 22:00–06:00 (Europe/London)"
    for one in found["intervals"]:
        assert one["opens_local"].startswith(("Sat ", "Sun ")) and one["opens_at"] < one["closes_at"]
    assert platform.get(auditor, "R2").json["settings"] == before["settings"]
    always = platform.call("POST", PREVIEW.format("R2"), auditor, {"max_concurrency": 4}).json
    assert always["always"] is True and always["intervals"] == []
    assert platform.call("POST", PREVIEW.format("R2"), platform.key(Role.MEMBER), {"max_concurrency": 4}).status == 403


def test_preview_says_how_much_of_the_last_week_live_traffic_would_have_closed(platform: PlatformWorld) -> None:
    store = platform.store
    minute = store.run(store.store.now_us()) // MINUTE_US - 100
    rows = [MinuteRow("cloud", minute + i, live_max=i % 4, observed_us=MINUTE_US) for i in range(40)]
    store.run(store.store.explain.add_minutes(rows))
    document = {"max_concurrency": 2, "yield_live_threshold": 3}
    found = platform.call("POST", PREVIEW.format("cloud"), platform.key(), document).json
    assert (found["live_closed_percent"], found["observed_minutes"]) == (25.0, 40)
    found = platform.call("POST", PREVIEW.format("cloud"), platform.key(), {"max_concurrency": 2}).json
    assert found["live_closed_percent"] is None


def test_rule_80_a_browser_that_signed_in_on_the_pages(platform: PlatformWorld) -> None:
    admin = platform.key()
    host = {"Host": f"127.0.0.1:{platform.port}", "Origin": f"http://127.0.0.1:{platform.port}"}
    form = {**host, "Content-Type": "application/x-www-form-urlencoded"}
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=WAIT_S)
    try:
        connection.request("POST", "/ui/sign-in", urlencode({"key": admin.secret}), form)
        answer = connection.getresponse()
        answer.read()
        cookie = {"Cookie": str(answer.getheader("Set-Cookie")).partition(";")[0]}
        connection.request("GET", "/ui/routes", None, cookie)
        page = connection.getresponse().read().decode()
    finally:
        connection.close()
    token = re.search(r'name="form_token"\s+value="([^"]+)"', page)
    assert token is not None
    path, document = ROUTE_PATH.format("own"), {"max_concurrency": 9}
    read = platform.call("GET", path, headers=cookie)
    assert read.status == 200
    whole = {**cookie, **host, "X-CSRF-Token": token[1]}
    for missing in ("Origin", "X-CSRF-Token"):
        sent = {name: value for name, value in whole.items() if name != missing}
        assert platform.call("PUT", path, body=document, headers=sent).status == 403
    foreign = {**whole, "Origin": "https://elsewhere.example"}
    assert platform.call("PUT", path, body=document, headers=foreign).status == 403
    assert platform.call("GET", path, headers=cookie).json["settings"] == read.json["settings"]
    assert platform.call("PUT", path, body=document, headers=whole).json["settings"]["max_concurrency"] == 9
