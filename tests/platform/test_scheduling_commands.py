"""``ringserve batch show`` and ``ringserve batch-scheduling`` against a running gateway."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from platform_world import Key, PlatformWorld

from frontend.batches.store.rows import BatchRow, Demand
from frontend.cli import main
from frontend.commands.batch_outlook import page_lines
from frontend.commands.scheduling import print_preview
from frontend.openai.principal import Role
from store_world import LEASE_US

Run = Callable[..., tuple[int, str, str]]
SETTINGS = {
    "max_concurrency": 4,
    "window": {"timezone": "Europe/London", "days": ["sat"], "start": "22:00", "end": "06:00"},
}


@pytest.fixture
def run(platform: PlatformWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(key: Key, *words: str) -> tuple[int, str, str]:
        monkeypatch.setenv("RINGSERVE_API_KEY", key.secret)
        monkeypatch.setenv("RINGSERVE_BASE_URL", f"http://127.0.0.1:{platform.port}/v1")
        status = main(list(words))
        told = capsys.readouterr()
        return status, told.out, told.err

    return call


@pytest.fixture
def waiting(platform: PlatformWorld) -> tuple[Key, BatchRow]:
    key = platform.key(Role.MEMBER)
    store = platform.store
    batch = store.batch(key.workspace, 9, api_key_id=key.id)
    store.run(store.store.runner.take("r1", LEASE_US, 1000))
    assert store.run(store.store.runner.begin("r1", batch.id))
    demand = Demand("cloud", 9, "outside_window", ready=False)
    store.run(store.store.scheduling.publish_waits("r1", batch.id, [demand], legitimate=True))
    return key, batch


def test_show_says_why_a_batch_waits(run: Run, waiting: tuple[Key, BatchRow]) -> None:
    key, batch = waiting
    status, out, _ = run(key, "batch", "show", batch.id)
    assert status == 0
    assert "waiting  Queued — waiting for capacity: Outside its time window" in out.splitlines()
    assert "on       n: Outside its time window, " in out and "9 waiting, 0 running, since 20" in out
    status, out, _ = run(key, "batch", "show", batch.id, "--json")
    found = json.loads(out)
    assert found["object"] == "batch" and found["scheduling"]["scheduling"][0]["reason"] == "outside_window"


def test_show_without_a_management_api_is_the_batch_alone(
    platform: PlatformWorld, run: Run, waiting: tuple[Key, BatchRow]
) -> None:  # fmt: skip
    # A member sees a colleague's batch as such; why it waits is told to its creator and to admins.
    _, batch = waiting
    colleague = platform.key(Role.MEMBER, batch.workspace_id)
    status, out, err = run(colleague, "batch", "show", batch.id)
    assert (status, err) == (0, "") and out.startswith(batch.id) and "waiting " not in out


def test_outlooks_are_told_in_words() -> None:
    page = {
        "batch": {
            "ended_at": None, "waiting_reason": None,
            "outlook": {
                "eta_p50": "2026-06-01T10:00:00Z", "eta_p90": None, "at_risk": True,
                "suggested_completion_window": "72h", "measured_lines": 9,
            },
        },
        "scheduling": [
            {
                "model": "m", "reason": "metrics_unavailable", "position": 2, "queue": 3, "waiting_lines": 1,
                "running_lines": 0, "since": "2026-06-01T09:00:00Z",
            },
            {
                "model": "n", "reason": None, "position": None, "queue": 0, "waiting_lines": 0, "running_lines": 2,
                "since": None,
            },
        ],
    }  # fmt: skip
    assert list(page_lines(page)) == [
        "on       m: Server metrics unavailable (a fault: somebody should look at it), #2 of 3 in queue, 1 waiting, "
        "0 running, since 2026-06-01 09:00:00Z",
        "on       n: Starting lines, 0 waiting, 2 running",
        "outlook  ends about 2026-06-01 10:00:00Z, AT RISK: its window may end before, a window of 72h would do",
    ]


def test_settings_are_shown_changed_and_listed(platform: PlatformWorld, run: Run, tmp_path: Path) -> None:
    admin, auditor = platform.key(), platform.key(Role.AUDITOR)
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(SETTINGS))
    status, out, _ = run(admin, "batch-scheduling", "set", "R2", str(file))
    assert status == 0 and "lines    4 at once" in out and "window   Sat 22:00–06:00 (Europe/London)" in out
    status, shown, _ = run(auditor, "batch-scheduling", "get", "R2")
    assert status == 0 and shown == out and shown.startswith("R2: Idle, model m\n")
    status, out, _ = run(auditor, "batch-scheduling", "list")
    row = next(line for line in out.splitlines() if line.startswith("R2 "))
    assert row.split(None, 5) == ["R2", "m", "0", "0/4", "Idle", "Sat 22:00–06:00 (Europe/London)"]
    status, out, _ = run(auditor, "batch-scheduling", "list", "--json")
    assert "R2" in {one["deployment"]["id"] for one in json.loads(out)}


def test_what_get_prints_can_be_set_again(
    platform: PlatformWorld, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    admin = platform.key()
    assert platform.put(admin, SETTINGS, "own").status == 200
    _, out, _ = run(admin, "batch-scheduling", "get", "own", "--json")
    document = json.loads(out)
    document["settings"]["max_concurrency"] = 7
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(document).encode())))
    status, out, _ = run(admin, "batch-scheduling", "set", "own", "-", "--json")
    assert status == 0 and json.loads(out)["settings"] == document["settings"]


def test_a_preview_changes_nothing(platform: PlatformWorld, run: Run, tmp_path: Path) -> None:
    admin = platform.key()
    before = platform.get(admin, "cloud").json["settings"]
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(SETTINGS))
    status, out, _ = run(admin, "batch-scheduling", "set", "cloud", str(file), "--preview")
    assert status == 0 and out.count("opens    ") == 14 and platform.get(admin, "cloud").json["settings"] == before
    file.write_text('{"max_concurrency": 2}')
    _, out, _ = run(admin, "batch-scheduling", "set", "cloud", str(file), "--preview")
    assert "opens    at any time" in out


def test_a_preview_says_when_batches_would_end(capsys: pytest.CaptureFixture[str]) -> None:
    eta = {"eta_p50": "2026-10-09T12:00:00Z", "eta_p90": None, "at_risk": True}
    row = {"batch_id": "batch_1", "now": eta, "then": eta | {"eta_p90": "2026-10-09T14:00:00Z", "at_risk": False}}
    words = dict.fromkeys(("concurrency", "live_traffic", "server_load", "metrics_url", "window", "priority"), "Off")
    found = {
        "in_words": words,
        "always": True,
        "intervals": [],
        "effects": {"data": [row], "left_out": 2, "personal": 1},
    }
    assert print_preview(found, as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "batch    batch_1: ends 2026-10-09T12:00:00Z (9 of 10: unknown, may expire) now,"
        " 2026-10-09T12:00:00Z (9 of 10: 2026-10-09T14:00:00Z) then",
        "batches  2 more, 1 of personal workspaces",
    ]
    print_preview(found | {"effects": None}, as_json=False)
    assert "cannot be foreseen now" in capsys.readouterr().out


def test_refusals_name_the_field_and_say_how_it_ended(platform: PlatformWorld, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"max_concurrency": 0}')
    status, out, err = run(platform.key(), "batch-scheduling", "set", "R2", str(file))
    assert (status, out) == (1, "") and "HTTP 400: max_concurrency must be from 1 to 256 (max_concurrency)" in err
    status, _, err = run(platform.key(Role.AUDITOR), "batch-scheduling", "set", "R2", str(file))
    assert status == 1 and "HTTP 403" in err
    file.write_text("{")
    assert run(platform.key(), "batch-scheduling", "set", "R2", str(file))[0] == 2
    assert run(platform.key(), "batch-scheduling", "set", "R2", str(tmp_path / "none"))[0] == 2
    file.write_text("[" * 70_000)
    assert run(platform.key(), "batch-scheduling", "set", "R2", str(file))[0] == 2
    assert run(platform.key(), "batch-scheduling", "get", "a/b")[0] == 1
