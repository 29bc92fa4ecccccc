"""Batches over the management API: who sees which, what they wait for, cancelling. Rules 68, 69 and 82."""

from __future__ import annotations

from typing import Any

import pytest
from platform_world import Answer, Key, PlatformWorld

from frontend.batches.store.rows import BatchRow, ClaimResult, Demand
from frontend.openai.principal import Role
from store_world import LEASE_US

SECRET = "nobody may read this"


def batches_of(platform: PlatformWorld, key: Key, workspace: str | None = None, query: str = "") -> Answer:
    return platform.call("GET", f"/api/v1/workspaces/{workspace or key.workspace}/batches{query}", key)


def one_batch(platform: PlatformWorld, key: Key, batch: BatchRow) -> Answer:
    return platform.call("GET", f"/api/v1/workspaces/{batch.workspace_id}/batches/{batch.id}", key)


def cancel(platform: PlatformWorld, key: Key, batch: BatchRow) -> Answer:
    return platform.call("POST", f"/api/v1/workspaces/{batch.workspace_id}/batches/{batch.id}/cancel", key)


def new_batch(platform: PlatformWorld, key: Key, lines: int = 4, **changes: Any) -> BatchRow:
    changes.setdefault("metadata", f'{{"note":"{SECRET}"}}')
    return platform.store.batch(key.workspace, lines, api_key_id=key.id, **changes)


def running_batch(platform: PlatformWorld, key: Key, lines: int = 4, runner: str = "r1") -> BatchRow:
    batch = new_batch(platform, key, lines)
    store = platform.store
    store.run(store.store.runner.take(runner, LEASE_US, 1000))
    assert store.run(store.store.runner.begin(runner, batch.id))
    return batch


def publish(platform: PlatformWorld, batch: BatchRow, *demands: Demand) -> None:
    store = platform.store
    store.run(store.store.scheduling.publish_waits("r1", batch.id, demands, legitimate=True))


def finish_batch(platform: PlatformWorld, batch: BatchRow) -> None:
    """End a batch whose lines have all ended."""
    store = platform.store
    store.run(store.store.runner.mark_finalizing("r1", batch.id, f"file-o-{batch.id}", f"file-e-{batch.id}"))
    assert store.run(store.store.runner.finalize("r1", batch.id, "completed")) is not None


def test_rule_82_members_see_their_own_and_admins_all(platform: PlatformWorld) -> None:
    workspace = platform.workspace()
    first, second = (platform.key(Role.MEMBER, workspace) for _ in range(2))
    admin, auditor = platform.key(Role.WORKSPACE_ADMIN, workspace), platform.key(Role.AUDITOR)
    mine, other = new_batch(platform, first), new_batch(platform, second)
    seen = batches_of(platform, first)
    assert seen.json["scope"] == "own" and [one["id"] for one in seen.json["data"]] == [mine.id]
    assert seen.json["data"][0]["mine"] is True
    assert one_batch(platform, first, other).status == 404
    for key in (admin, auditor, platform.key()):
        seen = batches_of(platform, key, workspace)
        assert seen.json["scope"] == "workspace" and {one["id"] for one in seen.json["data"]} == {mine.id, other.id}
        assert not any(one["mine"] for one in seen.json["data"])
        assert one_batch(platform, key, other).json["batch"]["key_name"] == f"key {second.id}"


def test_rule_82_a_workspace_is_nobody_elses_business(platform: PlatformWorld) -> None:
    member = platform.key(Role.MEMBER)
    batch = new_batch(platform, member)
    stranger = platform.key(Role.WORKSPACE_ADMIN)
    absent = batches_of(platform, stranger, "ws_none")
    assert absent.status == 404
    for answer in (batches_of(platform, stranger, member.workspace), one_batch(platform, stranger, batch)):
        assert (answer.status, answer.json) == (404, absent.json)
    assert cancel(platform, stranger, batch).status == 404
    # The right batch under the wrong workspace is none.
    path = f"/api/v1/workspaces/{stranger.workspace}/batches/{batch.id}"
    assert platform.call("GET", path, stranger).status == 404
    assert platform.call("GET", f"/api/v1/workspaces/{member.workspace}/batches/batch_zz", member).status == 404


def test_a_workspace_may_be_named(platform: PlatformWorld) -> None:
    member = platform.key(Role.MEMBER)
    batch = new_batch(platform, member)
    name = platform.call("GET", "/api/v1/me", member).json["workspace"]
    seen = batches_of(platform, member, name.replace(" ", "%20"))
    assert [one["id"] for one in seen.json["data"]] == [batch.id] and seen.json["data"][0]["workspace"] == name


def test_rule_82_personal_workspaces_are_totals_to_others(platform: PlatformWorld) -> None:
    admin, auditor = platform.key(), platform.key(Role.AUDITOR)
    before = platform.call("GET", "/api/v1/platform/batches", auditor).json
    person = platform.key(Role.MEMBER, platform.workspace("personal"))
    batch = new_batch(platform, person, lines=7)
    after = platform.call("GET", "/api/v1/platform/batches", auditor).json
    assert batch.id not in {one["id"] for one in after["data"]}
    difference = {name: after["personal"][name] - before["personal"][name] for name in after["personal"]}
    assert difference == {"workspaces": 1, "unfinished": 1, "finished": 0, "total": 7, "completed": 0, "failed": 0}
    for key in (admin, auditor):
        assert batches_of(platform, key, person.workspace).status == 403
        assert one_batch(platform, key, batch).status == 403 and cancel(platform, key, batch).status == 403
    assert one_batch(platform, person, batch).status == 200


def test_rule_82_the_platform_lists_team_batches(platform: PlatformWorld) -> None:
    member = platform.key(Role.MEMBER)
    batch = new_batch(platform, member)
    for role in (Role.PLATFORM_ADMIN, Role.AUDITOR):
        found = platform.call("GET", "/api/v1/platform/batches?limit=1", platform.key(role))
        assert [one["id"] for one in found.json["data"]] == [batch.id]
    for role in (Role.MEMBER, Role.WORKSPACE_ADMIN):
        assert platform.call("GET", "/api/v1/platform/batches", platform.key(role)).status == 403


def test_rule_82_pages_and_filters(platform: PlatformWorld) -> None:
    key = platform.key(Role.WORKSPACE_ADMIN)
    made = [new_batch(platform, key, 1).id for _ in range(3)]
    ended = running_batch(platform, key, 1)
    platform.store.claim(ended, [0], route="R")
    platform.store.finish(ended, 0)
    finish_batch(platform, ended)
    newest = [ended.id, *made[::-1]]

    def ids(query: str) -> tuple[list[str], bool]:
        found = batches_of(platform, key, query=query)
        assert found.status == 200, found.json
        return [one["id"] for one in found.json["data"]], found.json["has_more"]

    assert ids("") == (newest, False) and ids("?status=all") == (newest, False)
    assert ids("?status=finished") == ([ended.id], False)
    assert ids("?status=active") == (newest[1:], False)
    assert ids("?limit=2") == (newest[:2], True) and ids("?limit=2&offset=2") == (newest[2:], False)
    for query in ("?status=running", "?limit=0", "?limit=201", "?offset=-1", "?after=x"):
        answer = batches_of(platform, key, query=query)
        assert answer.status == 400 and answer.param == query[1:].partition("=")[0]


def test_rule_82_a_row_names_no_line_body_or_metadata(platform: PlatformWorld) -> None:
    key = platform.key(Role.MEMBER)
    batch = new_batch(platform, key)
    for answer in (
        batches_of(platform, key),
        one_batch(platform, key, batch),
        platform.call("GET", "/api/v1/platform/batches", platform.key()),
    ):
        assert batch.id.encode() in answer.raw and SECRET.encode() not in answer.raw


def test_rule_82_one_batch_counts_its_outcomes(platform: PlatformWorld) -> None:
    key = platform.key(Role.MEMBER)
    batch = running_batch(platform, key, 6)
    store = platform.store
    assert store.claim(batch, [0, 1, 2, 3], route="R") == [ClaimResult.CLAIMED] * 4
    store.finish(batch, 0)
    store.finish(batch, 1)
    store.finish(batch, 2, ok=False)
    found = one_batch(platform, key, batch).json
    assert found["outcomes"] == [
        {"state": "succeeded", "code": None, "lines": 2},
        {"state": "failed", "code": "upstream_unavailable", "lines": 1},
        {"state": "running", "code": None, "lines": 1},
    ]
    assert (found["batch"]["completed"], found["batch"]["failed"], found["batch"]["total"]) == (2, 1, 6)
    assert found["batch"]["running_lines"] == 1 and found["batch"]["completion_window"] == "24h"
    assert found["batch"]["created_at"].endswith("Z") and found["batch"]["ended_at"] is None


def test_rule_68_a_batch_waits_with_the_reason_of_its_largest_route(platform: PlatformWorld) -> None:
    key = platform.key(Role.MEMBER)
    batch = running_batch(platform, key, 9)
    assert one_batch(platform, key, batch).json["batch"]["waiting_reason"] is None, "nothing was said yet"
    closed = Demand("cloud", 5, "outside_window", ready=False)
    publish(platform, batch, Demand("own", 4, "live_traffic", ready=False), closed)
    for answer in (one_batch(platform, key, batch).json["batch"], batches_of(platform, key).json["data"][0]):
        assert answer["waiting_reason"] == "outside_window"
        assert answer["status"] == "in_progress", "waiting is no status"
    platform.store.claim(batch, [0], route="own", waiting=3)
    running = one_batch(platform, key, batch).json
    assert running["batch"]["waiting_reason"] is None and running["batch"]["running_lines"] == 1


def test_rule_68_a_batch_that_is_being_cancelled_does_not_wait(platform: PlatformWorld) -> None:
    key = platform.key(Role.MEMBER)
    batch = running_batch(platform, key, 2)
    publish(platform, batch, Demand("cloud", 2, "outside_window", ready=False))
    assert cancel(platform, key, batch).json["batch"]["waiting_reason"] is None


def test_rule_69_place_in_the_queue_of_each_route(platform: PlatformWorld) -> None:
    first, second = platform.key(Role.MEMBER), platform.key(Role.MEMBER)
    early, late = running_batch(platform, first, 9), running_batch(platform, second, 5)
    publish(platform, early, Demand("queue-1", 8, "server_busy", ready=False))
    publish(
        platform, late, Demand("queue-1", 3, "server_busy", ready=False), Demand("queue-2", 2, "fair_share", ready=True)
    )
    found = one_batch(platform, first, early).json["scheduling"]
    assert [(one["model"], one["reason"], one["position"], one["queue"]) for one in found] == [
        ("q", "server_busy", 1, 2)
    ]
    assert (found[0]["waiting_lines"], found[0]["running_lines"]) == (8, 0) and found[0]["since"].endswith("Z")
    lanes = one_batch(platform, second, late).json["scheduling"]
    assert [(one["reason"], one["position"], one["queue"]) for one in lanes] == [
        ("server_busy", 2, 2), ("fair_share", 1, 1),
    ]  # fmt: skip
    # A workspace with a line running on the route comes after one without.
    platform.store.claim(early, [0], route="queue-1", waiting=8)
    publish(platform, early, Demand("queue-1", 7, "server_busy", ready=False))
    lane = one_batch(platform, first, early).json["scheduling"][0]
    assert (lane["position"], lane["queue"], lane["running_lines"]) == (2, 2, 1)


def test_status_of_a_route_counts_what_waits_and_runs(platform: PlatformWorld) -> None:
    key, admin = platform.key(Role.MEMBER), platform.key()
    batch = running_batch(platform, key, 9)
    platform.store.claim(batch, [0, 1], route="cloud", waiting=9)
    publish(platform, batch, Demand("cloud", 7, "concurrency", ready=True))
    status = platform.call("GET", "/api/v1/platform/deployments/cloud/batch-scheduling", admin).json["status"]
    assert status["queued_lines"] >= 7 and status["waiting_batches"] >= 1 and status["running_lines"] >= 2


def test_rule_82_cancel_by_creator_or_admin_is_audited_once(platform: PlatformWorld) -> None:
    workspace = platform.workspace()
    creator, other = (platform.key(Role.MEMBER, workspace) for _ in range(2))
    admin = platform.key(Role.WORKSPACE_ADMIN, workspace)
    batch = new_batch(platform, creator)
    assert cancel(platform, other, batch).status == 404
    assert cancel(platform, platform.key(Role.AUDITOR), batch).status == 403
    assert platform.store.get(batch).cancel_requested_at is None and platform.audit(batch.id) == []
    for key in (creator, admin):
        answer = cancel(platform, key, batch)
        assert answer.status == 200 and answer.json["batch"]["status"] == "cancelling"
        assert answer.json["batch"]["cancelling_at"] is not None
    assert platform.audit(batch.id) == [("batch.cancelled", creator.id, {"state": "queued"})]


def test_rule_82_an_ended_batch_is_not_cancellable(platform: PlatformWorld) -> None:
    key = platform.key(Role.WORKSPACE_ADMIN)
    batch = running_batch(platform, key, 1)
    platform.store.claim(batch, [0], route="R")
    platform.store.finish(batch, 0)
    finish_batch(platform, batch)
    answer = cancel(platform, key, batch)
    assert (answer.status, answer.json["error"]["code"]) == (409, "409")
    assert platform.audit(batch.id) == []
    shown = one_batch(platform, key, batch).json
    assert shown["batch"]["state"] == "completed" and shown["scheduling"] == []


@pytest.mark.parametrize("body", [b"{}", b"x"])
def test_cancel_takes_no_body(platform: PlatformWorld, body: bytes) -> None:
    key = platform.key(Role.MEMBER)
    batch = new_batch(platform, key)
    path = f"/api/v1/workspaces/{batch.workspace_id}/batches/{batch.id}/cancel"
    assert platform.call("POST", path, key, data=body).status == 400
    assert platform.store.get(batch).cancel_requested_at is None
