"""Batch scheduling of routes over HTTP: rules 80 and 81, acceptance tests 14 and 25."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from platform_world import ROUTE_PATH, PlatformWorld

from frontend.batches.store.route_rows import SignalRow
from frontend.openai.principal import Role

DEFAULTS = {
    "max_concurrency": 2, "yield_live_threshold": None, "metrics": None, "priority": None, "window": None,
    "latency_share_percent": None, "reopen_after_s": None,
}  # fmt: skip
FULL: dict[str, Any] = {
    "max_concurrency": 4,
    "yield_live_threshold": 2,
    "metrics": {
        "url": "http://10.0.0.5:8000/metrics", "max_waiting": 0, "max_running": None, "max_kv_cache_percent": 90,
    },
    "priority": 10,
    "window": {
        "timezone": "America/New_York", "days": ["mon", "tue", "wed", "thu", "fri"], "start": "19:00", "end": "07:00",
    },
    "latency_share_percent": None, "reopen_after_s": None,
}  # fmt: skip


def changed(**values: Any) -> dict[str, Any]:
    """Return the full document with other values; ``a__b`` is ``b`` within ``a``."""
    document = copy.deepcopy(FULL)
    for path, value in values.items():
        outer, _, inner = path.partition("__")
        if inner:
            document[outer][inner] = value
        else:
            document[outer] = value
    return document


def test_acceptance_25_an_auditor_reads_the_defaults_and_changes_nothing(platform: PlatformWorld) -> None:
    auditor = platform.key(Role.AUDITOR)
    found = platform.get(auditor, "R2")
    assert found.status == 200
    assert found.json["settings"] == found.json["defaults"] == DEFAULTS
    assert found.json["status"] == {
        "queued_lines": 0, "waiting_batches": 0, "running_lines": 0, "paused_reason": None, "checked_at": None,
        "live_in_flight": None, "metrics": None, "cap": 2, "cap_why": None, "reopens_at": None,
    }  # fmt: skip
    assert found.json["updated_at"] is None and found.json["updated_by"] is None
    refused = platform.put(auditor, FULL, "R2")
    assert refused.status == 403 and refused.json["error"]["code"] == "403"
    assert platform.get(auditor, "R2").json == found.json
    assert platform.audit("R2") == []


def test_acceptance_25_an_admin_puts_and_gets_the_same_and_leaves_one_audit_row(platform: PlatformWorld) -> None:
    admin = platform.key()
    before = len(platform.audit("R"))
    put = platform.put(admin, FULL)
    assert put.status == 200 and put.json["settings"] == FULL
    got = platform.get(admin)
    assert got.json == put.json
    assert got.json["priority_supported"] is True
    assert got.json["updated_by"] == f"key {admin.id}" and got.json["updated_at"].endswith("Z")
    assert got.json["in_words"]["window"] == "Mon–Fri 19:00–07:00 (America/New_York)"
    assert got.json["in_words"]["server_load"] == "Pause if waiting > 0 or KV cache > 90%"
    ((action, actor, details),) = platform.audit("R")[before:]
    assert (action, actor) == ("batch_scheduling.updated", admin.id)
    assert "10.0.0.5" not in json.dumps(details) and details.pop("changes") is not None
    assert details == {
        "max_concurrency": 4, "yield_live_threshold": 2, "server_metrics": True, "priority": 10, "window": True,
    }  # fmt: skip


def test_acceptance_25_put_of_the_required_alone_is_the_defaults_again(platform: PlatformWorld) -> None:
    admin = platform.key()
    assert platform.put(admin, FULL).status == 200
    assert platform.put(admin, {"max_concurrency": 2}).json["settings"] == DEFAULTS
    assert platform.get(admin).json["settings"] == DEFAULTS


@pytest.mark.parametrize("role", [Role.MEMBER, Role.WORKSPACE_ADMIN])
def test_acceptance_25_others_get_403_and_an_unknown_route_404(platform: PlatformWorld, role: Role) -> None:
    key = platform.key(role)
    assert platform.get(key).status == 403
    assert platform.put(key, FULL).status == 403
    # Which routes there are is not theirs to find out either.
    assert platform.get(key, "none").status == 403
    admin = platform.key()
    for answer in (platform.get(admin, "none"), platform.put(admin, FULL, "none"), platform.get(admin, "local.none")):
        assert (answer.status, answer.param) == (404, "deployment")


def test_nobody_reads_without_a_key(platform: PlatformWorld) -> None:
    for headers in ({}, {"Authorization": "Bearer sk-none"}, {"Cookie": "ringserve_session=x"}):
        answer = platform.call("GET", ROUTE_PATH.format("R"), headers=headers)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"


REFUSED: list[tuple[dict[str, Any], str]] = [
    (changed(max_concurrency=0), "max_concurrency"),
    (changed(max_concurrency=257), "max_concurrency"),
    (changed(max_concurrency="4"), "max_concurrency"),
    (changed(max_concurrency=True), "max_concurrency"),
    (changed(max_concurrency=2.0), "max_concurrency"),
    (changed(max_concurrency=None), "max_concurrency"),
    (changed(max_concurrency={"min": 5, "max": 4}), "max_concurrency.min"),
    (changed(max_concurrency={"min": 1}), "max_concurrency.max"),
    (changed(max_concurrency={"min": 1, "max": 2, "step": 1}), "max_concurrency.step"),
    (changed(latency_share_percent=20), "latency_share_percent"),
    (changed(yield_live_threshold=0), "yield_live_threshold"),
    (changed(yield_live_threshold=100_001), "yield_live_threshold"),
    (changed(metrics={"url": "http://10.0.0.5:8000/metrics"}), "metrics"),
    (changed(metrics__max_waiting=-1), "metrics.max_waiting"),
    (changed(metrics__max_running=100_001), "metrics.max_running"),
    (changed(metrics__max_kv_cache_percent=0), "metrics.max_kv_cache_percent"),
    (changed(metrics__max_kv_cache_percent=101), "metrics.max_kv_cache_percent"),
    (changed(metrics__url="http://169.254.169.254/metrics"), "metrics.url"),
    (changed(metrics__url="http://10.0.0.5:9000/metrics"), "metrics.url"),
    (changed(metrics__url="https://api.openai.com/metrics"), "metrics.url"),
    (changed(metrics__url=None), "metrics.url"),
    (changed(metrics__token="x"), "metrics.token"),
    (changed(metrics=[]), "metrics"),
    (changed(priority=0), "priority"),
    (changed(priority=-1), "priority"),
    (changed(priority=1_000_001), "priority"),
    (changed(surprise=1), "surprise"),
    (changed(window="always"), "window"),
    (changed(window__days=[]), "window.days"),
    (changed(window__days=["mon", "mon"]), "window.days"),
    (changed(window__days=["monday"]), "window.days"),
    (changed(window__days="mon"), "window.days"),
    (changed(window__timezone="Mars/Olympus"), "window.timezone"),
    (changed(window__timezone=""), "window.timezone"),
    (changed(window__timezone="E" * 65), "window.timezone"),
    (changed(window__timezone=None), "window.timezone"),
    (changed(window__start="24:00"), "window.start"),
    (changed(window__start="6:00"), "window.start"),
    (changed(window__end=""), "window.end"),
    (changed(window__end=7), "window.end"),
]


def test_acceptance_14_25_what_is_refused_changes_nothing(platform: PlatformWorld) -> None:
    admin = platform.key()
    assert platform.put(admin, FULL).status == 200
    before, rows = platform.get(admin).json, platform.audit("R")
    for document, param in REFUSED:
        answer = platform.put(admin, document)
        assert (answer.status, answer.json["error"]["code"], answer.param) == (400, "400", param), document
        assert platform.call("POST", ROUTE_PATH.format("R") + "/preview", admin, document).json == answer.json
    assert platform.get(admin).json == before
    assert platform.audit("R") == rows


def test_acceptance_14_a_window_across_midnight_is_accepted(platform: PlatformWorld) -> None:
    window = {"timezone": "Europe/Berlin", "days": ["sat", "sun"], "start": "22:00", "end": "06:00"}
    answer = platform.put(platform.key(), changed(window=window))
    assert answer.status == 200 and answer.json["settings"]["window"] == window


def test_rule_81_the_first_failure_wins(platform: PlatformWorld) -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("max_concurrency", 0, "max_concurrency"),
        ("yield_live_threshold", 0, "yield_live_threshold"),
        ("metrics", {"url": "http://elsewhere.example/metrics", "max_waiting": -1}, "metrics.max_waiting"),
        ("metrics", {"url": "http://elsewhere.example/metrics", "max_waiting": 0}, "metrics.url"),
        ("priority", 0, "priority"),
        ("window", {"timezone": "Mars/Olympus", "days": ["mon"], "start": "00:00", "end": "01:00"}, "window.timezone"),
    ]
    admin = platform.key()
    for first in range(len(wrong)):
        # All of those from here on are wrong; an earlier metrics mistake must not hide a later one.
        document = {"max_concurrency": 2} | {name: value for name, value, _ in reversed(wrong[first:])}
        assert platform.put(admin, document).param == wrong[first][2], document


@pytest.mark.parametrize("route", ["cloud", "own", "local.double"])
def test_rule_77_a_priority_hint_needs_a_server_that_knows_it(platform: PlatformWorld, route: str) -> None:
    admin = platform.key()
    assert platform.get(admin, route).json["priority_supported"] is False
    answer = platform.put(admin, {"max_concurrency": 2, "priority": 5}, route)
    assert (answer.status, answer.param) == (400, "priority")
    assert platform.put(admin, {"max_concurrency": 3}, route).status == 200
    assert platform.get(admin, route).json["settings"] == {**DEFAULTS, "max_concurrency": 3}


def test_an_adaptive_cap_is_a_range(platform: PlatformWorld) -> None:
    document = {"max_concurrency": {"min": 1, "max": 8}, "latency_share_percent": 30}
    answer = platform.put(platform.key(), document)
    assert answer.json["settings"] == {**DEFAULTS, **document}
    assert 1 <= answer.json["status"]["cap"] <= 8


def test_rule_80_bodies_that_are_no_object_of_settings(platform: PlatformWorld) -> None:
    admin, path = platform.key(), ROUTE_PATH.format("R")
    for data in (b"", b"{", b"[1]", b'"x"', b"null", b"\xff", b"a=1", b"[" * 60_000, b'{"a":1e999}', b'{"\\ud800":1}'):
        answer = platform.call("PUT", path, admin, data=data)
        assert answer.status == 400 and answer.json["error"]["code"] == "400", data[:20]
        assert data[:20].decode("latin-1") not in answer.message or len(data) < 2
    large = json.dumps({"max_concurrency": 2, "x": "y" * 70_000}).encode()
    assert platform.call("PUT", path, admin, data=large).status == 413
    chunked = {"Transfer-Encoding": "chunked"}
    encoded = b"%x\r\n%s\r\n0\r\n\r\n" % (len(large), large)
    assert platform.call("PUT", path, admin, data=encoded, headers=chunked).status == 413
    assert platform.call("PUT", path, admin, FULL, headers={"Content-Encoding": "gzip"}).status == 415
    assert platform.call("GET", path, admin, data=b"{}").status == 400


def test_paths_methods_and_queries_that_are_none(platform: PlatformWorld) -> None:
    admin = platform.key()
    for path in ("/api", "/api/", "/api/v1", "/api/v2/me", "/api/v1/me/", "/api/v1/platform/nothing"):
        answer = platform.call("GET", path, admin)
        assert (answer.status, answer.json["error"]["code"]) == (404, "404"), path
    answer = platform.call("DELETE", ROUTE_PATH.format("R"), admin)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, PUT")
    for query in (
        "?x=1",
        "?hours=0",
        "?hours=337",
        "?hours=1.5",
        "?hours=",
        "?hours=1&hours=2",
        "?hours=%D9%A3",
        "?%ff=1",
    ):
        answer = platform.call("GET", ROUTE_PATH.format("R") + f"/history?{query}", admin)
        assert answer.status == 400, query
    for odd in ("%00", "%ff", "a" * 300, "%0A"):
        assert platform.get(admin, odd).status == 404


def test_head_answers_like_get_without_a_body(platform: PlatformWorld) -> None:
    admin = platform.key()
    head = platform.call("HEAD", ROUTE_PATH.format("R"), admin)
    assert head.status == 200 and head.raw == b"" and int(head.headers["content-length"]) > 100
    assert head.headers["cache-control"] == "no-store" and head.headers["x-content-type-options"] == "nosniff"


def test_rule_80_status_shows_demand_signal_and_reading(platform: PlatformWorld) -> None:
    admin = platform.key()
    assert platform.put(admin, FULL).status == 200
    store = platform.store
    read_at = store.run(store.store.now_us())
    signal = SignalRow(
        "R", "server_busy", live_in_flight=1, metrics_checked_at=read_at, metrics_ok=True, metrics_waiting=3,
        metrics_running=1, metrics_kv_cache_permille=913,
    )  # fmt: skip
    store.run(store.store.scheduling.put_signal(signal))
    status = platform.get(admin).json["status"]
    assert status["paused_reason"] == "server_busy" and status["live_in_flight"] == 1 and status["cap"] == 4
    assert status["metrics"] == {
        "checked_at": status["metrics"]["checked_at"], "ok": True, "waiting": 3, "running": 1,
        "kv_cache_permille": 913, "error": None,
    }  # fmt: skip
    unread = SignalRow(
        "R", "metrics_unavailable", metrics_checked_at=read_at, metrics_ok=False, metrics_error="timeout"
    )
    store.run(store.store.scheduling.put_signal(unread))
    status = platform.get(admin).json["status"]
    assert status["metrics"]["ok"] is False and status["metrics"]["error"] == "timeout"
    assert status["metrics"]["waiting"] is None


def test_when_a_live_gate_reopens_is_told_while_it_is_to_come(platform: PlatformWorld) -> None:
    admin, store = platform.key(), platform.store
    answer = platform.put(admin, {"max_concurrency": 2, "yield_live_threshold": 1, "reopen_after_s": 10})
    assert (answer.status, answer.json["settings"]["reopen_after_s"]) == (200, 10)
    assert platform.audit("R")[-1][2]["reopen_after_s"] == 10
    now = store.run(store.store.now_us())
    for reopens_at in (now + 3_600_000_000, now - 1):
        signal = SignalRow("R", "live_traffic", live_in_flight=0, reopens_at=reopens_at)
        store.run(store.store.scheduling.put_signal(signal))
        status = platform.get(admin).json["status"]
        assert status["paused_reason"] == "live_traffic"
        assert (status["reopens_at"] is not None) == (reopens_at > now)


def test_rule_23_a_reason_that_nobody_looked_at_for_long_is_not_shown(platform: PlatformWorld) -> None:
    admin, store = platform.key(), platform.store
    for seconds, shown in ((-31, None), (-25, "outside_window")):
        store.advance(seconds)
        store.run(store.store.scheduling.put_signal(SignalRow("cloud", "outside_window")))
        store.advance(-seconds)
        status = platform.get(admin, "cloud").json["status"]
        assert status["paused_reason"] == shown and status["checked_at"] is not None


def test_deployments_lists_every_route_with_its_settings(platform: PlatformWorld) -> None:
    admin = platform.key()
    found = platform.call("GET", "/api/v1/platform/deployments", admin)
    by_id = {one["deployment"]["id"]: one for one in found.json["data"]}
    assert list(by_id) == ["R", "R2", "cloud", "own", "queue-1", "queue-2", "local.double"]
    for route_id, one in by_id.items():
        assert one == platform.get(admin, route_id).json
    assert by_id["R"]["deployment"] == {"id": "R", "model": "m", "kind": "vllm"}


def test_me_says_whom_a_key_belongs_to(platform: PlatformWorld) -> None:
    member = platform.key(Role.MEMBER)
    found = platform.call("GET", "/api/v1/me", member).json
    assert (found["workspace_id"], found["key_id"], found["role"]) == (member.workspace, member.id, "member")
    assert found["key_name"] == f"key {member.id}"


def test_the_readmes_example_is_accepted(platform: PlatformWorld) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (text,) = re.findall(r"batch-scheduling \\\n.*-d '(\{.*?\})'\n```", readme, re.DOTALL)
    answer = platform.put(platform.key(), json.loads(text))
    assert answer.status == 200
    for name, value in json.loads(text).items():
        found = answer.json["settings"][name]
        assert found == value or value.items() <= found.items()
