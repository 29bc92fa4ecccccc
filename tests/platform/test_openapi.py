"""The OpenAPI document against what the API really answers, to sensible requests and to senseless ones."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_schema import faults
from platform_world import ROUTE_PATH, Answer, Key, PlatformWorld

from frontend.batches.store.route_rows import EdgeRow, IncidentRow, MinuteRow, SignalRow
from frontend.batches.store.rows import Demand
from frontend.openai.principal import Role
from store_world import LEASE_US

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
NAMES = (
    "max_concurrency",
    "yield_live_threshold",
    "metrics",
    "priority",
    "window",
    "latency_share_percent",
    "reopen_after_s",
    "surprise",
)
INNER = ("min", "max", "url", "max_waiting", "max_running", "max_kv_cache_percent", "timezone", "days", "start", "end")
NUMBERS = st.sampled_from([-1, 0, 1, 2, 4, 90, 100, 101, 256, 257, 1000, 100_000, 1_000_001, 1 << 70])
VALUES = (
    NUMBERS
    | st.sampled_from(["Europe/London", "mon", "19:00", "07:00", "24:00", "http://10.0.0.5:8000/metrics", ""])
    | st.lists(st.sampled_from(["mon", "tue", "sun", "x"]), max_size=3)
    | ANYTHING
)
DOCUMENTS = st.dictionaries(
    st.sampled_from(NAMES), VALUES | st.dictionaries(st.sampled_from(INNER), VALUES, max_size=5), max_size=6
)


@pytest.fixture(scope="module")
def document(platform: PlatformWorld) -> dict[str, Any]:
    answer = platform.call("GET", "/api/v1/openapi.json")
    assert answer.status == 200, "it needs no key"
    found = answer.json
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def filled(platform: PlatformWorld) -> dict[str, str]:
    """Fill every table with something, so that no list is empty and no optional part absent; return names of it."""
    world, store = platform.store, platform.store.store
    workspace = platform.workspace()
    platform.workspace("personal")
    batch = world.batch(workspace, 4, api_key_id=platform.key(Role.MEMBER, workspace).id)
    world.run(store.runner.take("r1", LEASE_US, 1000))
    assert world.run(store.runner.begin("r1", batch.id))
    world.claim(batch, [0, 1], route="R2")
    world.finish(batch, 0, ok=False)
    world.run(
        store.scheduling.publish_waits("r1", batch.id, [Demand("R", 3, "server_busy", ready=False)], legitimate=True)
    )
    now = world.run(store.now_us())
    signal = SignalRow("R", "server_busy", 0, 1, now, True, 3, 1, 913)
    world.run(store.scheduling.put_signal(signal))
    world.run(store.explain.add_edges([EdgeRow("R", now - 1000, "p", "server_busy", 1, 3, 1, 913, None, 2)]))
    world.run(store.explain.add_minutes([MinuteRow("R", now // 60_000_000 - 1, observed_us=1)]))
    world.run(store.alerts.open_incident(IncidentRow("inc", "batch_failed", batch.id, workspace, "s", '{"a": 1}')))
    window = {"timezone": "Europe/London", "days": ["sat"], "start": "22:00", "end": "06:00"}
    metrics = {"url": "http://10.0.0.5:8000/metrics", "max_waiting": 0}
    full = {"max_concurrency": {"min": 1, "max": 4}, "window": window, "metrics": metrics, "priority": 3}
    assert platform.put(platform.key(), full).status == 200
    return {"deployment": "R", "workspace": workspace, "batch": batch.id}


def check(document: dict[str, Any], path: str, method: str, answer: Answer) -> None:
    """Fail unless the document foresees an answer and its body."""
    responses = document["paths"][path][method.lower()]["responses"]
    assert str(answer.status) in responses, (method, path, answer.status, answer.raw[:200])
    content = responses[str(answer.status)]["content"]
    assert answer.headers["content-type"] == "application/json"
    assert list(faults(answer.json, content["application/json"]["schema"], document)) == []


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method.upper(), operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method != "parameters"
    ]


def body_of(path: str) -> Any:
    if path.endswith("/batch-weight"):
        return {"weight": 2}
    window = {"timezone": "Europe/London", "days": ["sun"], "start": "22:00", "end": "06:00"}
    return {"max_concurrency": 4, "yield_live_threshold": 2, "window": window}


def test_every_answer_is_in_the_document(
    platform: PlatformWorld, document: dict[str, Any], filled: dict[str, str]
) -> None:  # fmt: skip
    keys = {role: platform.key(role, filled["workspace"]) for role in Role}
    seen = set()
    # Reads first: one of the changes ends the batch that they show.
    for path, method, operation in sorted(operations(document), key=lambda one: one[1] != "GET"):
        url = re.sub(r"\{(\w+)\}", lambda match: filled[match[1]], path)
        body = body_of(path) if "requestBody" in operation else None
        for key in (*keys.values(), None):
            answer = platform.call(method, url, key, body)
            check(document, path, method, answer)
            seen.add((path, method, answer.status))
        unknown = re.sub(r"\{\w+\}", "none", path)
        for wrong_url, wrong in ((unknown, body), (url + "?surprise=1", body), (url, [1] if body else None)):
            check(document, path, method, platform.call(method, wrong_url, keys[Role.PLATFORM_ADMIN], wrong))
    assert {(path, method) for path, method, status in seen if status == 200} == {
        (path, method) for path, method, _ in operations(document)
    }, "every operation succeeded for somebody"


def test_what_is_told_is_really_told(platform: PlatformWorld, filled: dict[str, str]) -> None:
    """Guards the test above: an empty list agrees with every document."""
    admin = platform.key()
    for path in ("deployments", "batches", "workspaces", "incidents", "audit-log"):
        assert platform.call("GET", f"/api/v1/platform/{path}", admin).json["data"], path
    shown = platform.call("GET", f"/api/v1/workspaces/{filled['workspace']}/batches/{filled['batch']}", admin).json
    assert shown["outcomes"] and shown["scheduling"]
    history = platform.call("GET", ROUTE_PATH.format("R") + "/history", admin).json
    assert history["spans"] and history["points"] and history["edges"][0]["metrics"]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(settings_document=DOCUMENTS | ANYTHING)
def test_whatever_is_put_is_saved_whole_or_refused_whole(
    platform: PlatformWorld, document: dict[str, Any], settings_document: Any
) -> None:  # fmt: skip
    admin = _admin(platform)
    before = platform.get(admin, "own").json
    answer = platform.call("PUT", ROUTE_PATH.format("own"), admin, data=json.dumps(settings_document).encode())
    check(document, ROUTE_PATH.format("{deployment}"), "PUT", answer)
    after = platform.get(admin, "own").json
    assert answer.status in (200, 400)
    assert after == (before if answer.status == 400 else answer.json)
    if answer.status == 200:
        assert platform.put(admin, after["settings"], "own").json["settings"] == after["settings"]
        schema = {"$ref": "#/components/schemas/SettingsDocument"}
        assert list(faults(after["settings"], schema, document)) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=64))
def test_whatever_bytes_come_are_answered(platform: PlatformWorld, document: dict[str, Any], data: bytes) -> None:
    answer = platform.call("PUT", ROUTE_PATH.format("own"), _admin(platform), data=data)
    check(document, ROUTE_PATH.format("{deployment}"), "PUT", answer)
    assert answer.status == 400


_ADMINS: dict[int, Key] = {}


def _admin(platform: PlatformWorld) -> Key:
    return _ADMINS.setdefault(platform.port, platform.key())
