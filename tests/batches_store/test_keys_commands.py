"""Making keys, and the ``migrate`` and ``keys`` commands against real databases."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from frontend.batches.job_state import stop_state
from frontend.batches.keys import hash_key, make_key, matches, well_formed
from frontend.cli import main
from store_world import world_of


def test_keys_are_unlike_and_recognised_without_being_shown() -> None:
    keys = [make_key() for _ in range(50)]
    assert len({key.secret for key in keys}) == len({key.id for key in keys}) == 50
    for key in keys:
        assert well_formed(key.secret)
        assert matches(key.secret, key.key_hash)
        assert not matches(key.secret + "x", key.key_hash)
        assert key.secret.startswith(key.prefix)
        assert len(key.secret) - len(key.prefix) > 38
        assert key.secret not in repr(key)
    for junk in (
        "",
        "sk-ring-",
        "sk-ring-" + "a" * 42,
        "sk-ring-" + "a" * 44,
        "sk-other-" + "a" * 43,
        "sk-ring-" + "ü" * 43,
    ):
        assert not well_formed(junk)
    assert hash_key("x") == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"


@pytest.mark.parametrize(
    ("budget", "cancel", "expired", "state"),
    [
        (True, True, True, "failed"), (False, True, True, "cancelled"), (False, False, True, "expired"),
        (False, False, False, "completed"),
    ],
)  # fmt: skip
def test_rule_9_budget_before_cancel_before_expiry(budget: bool, cancel: bool, expired: bool, state: str) -> None:
    assert stop_state(budget_refused=budget, cancel_requested=cancel, expired=expired) == state


@pytest.fixture(params=["sqlite", "postgresql"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Arguments that name a node file whose gateway uses one of the databases."""
    store = "" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    file = tmp_path / "node.yaml"
    gateway = {"enabled": True, "state_dir": str(tmp_path / "state"), "store": store}
    file.write_text(json.dumps({"run_dir": str(tmp_path / "run"), "gateway": gateway}))
    return ["--node", str(file)]


def test_key_is_made_listed_and_revoked(node: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["migrate", *node]) == 0
    assert main(["migrate", *node]) == 0
    assert main(["migrate", "--after", *node]) == 0
    capsys.readouterr()
    create = ["keys", "create", *node, "--workspace", "acme", "--role", "workspace_admin", "--name", "ci"]
    assert main(create) == 0
    first = capsys.readouterr()
    secret = first.out.strip()
    assert well_formed(secret)
    assert "created workspace acme" in first.err
    assert secret not in first.err
    assert main([*create, "--json"]) == 0
    second = capsys.readouterr()
    assert "created workspace" not in second.err
    assert json.loads(second.out)["key"] != secret
    assert main(["keys", "list", *node, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["workspace"], one["role"], one["name"]) for one in listed] == [("acme", "workspace_admin", "ci")] * 2
    assert main(["keys", "revoke", listed[0]["id"], *node]) == 0
    assert main(["keys", "list", *node, "--workspace", "acme"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"{listed[0]['id']} .* revoked 20\d\d-", shown)
    assert secret not in shown
    assert hash_key(secret) not in shown
    database = tmp_path / "state" / "store.sqlite3"
    if database.exists():
        rows = sqlite3.connect(database).execute("SELECT * FROM api_keys").fetchall()
        assert secret not in repr(rows)


def test_mistakes_are_told(node: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["migrate", *node])
    capsys.readouterr()
    assert main(["keys", "revoke", "key_none", *node]) == 1
    assert "no key 'key_none'" in capsys.readouterr().err
    assert main(["keys", "list", "--workspace", "nobody", *node]) == 1
    assert "no workspace 'nobody'" in capsys.readouterr().err


def test_keys_ask_for_a_migration_first(postgres_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(json.dumps({"run_dir": str(tmp_path), "gateway": {"store": postgres_url}}))
    assert main(["keys", "list", "--node", str(file)]) == 1
    assert "run 'ringserve migrate'" in capsys.readouterr().err
    with world_of("postgresql", postgres_url):
        assert main(["keys", "list", "--node", str(file)]) == 0


def test_a_shell_without_the_upstreams_keys_can_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    route = {"id": "r", "kind": "openai_compatible", "endpoint": "https://example.com/v1", "addresses": ["1.1.1.1"]}
    models = [{"name": "m", "routes": [route | {"api_key_env": "NO_SUCH_UPSTREAM_KEY"}]}]
    file = tmp_path / "node.yaml"
    file.write_text(json.dumps({"run_dir": str(tmp_path), "gateway": {"enabled": True, "models": models}}))
    node = ["--node", str(file)]
    assert main(["migrate", *node]) == 0
    assert main(["keys", "create", "--workspace", "acme", *node, "--json"]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["keys", "revoke", made["id"], *node]) == 0
    # What runs lines needs them all the same.
    assert main(["batches", *node]) == 2
    assert "NO_SUCH_UPSTREAM_KEY is not set" in capsys.readouterr().err
