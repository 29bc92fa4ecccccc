"""The gateway section: every mistake with its path, every value with its source, no secret in either."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from frontend import config
from frontend.commands.settings import effective
from frontend.config import ConfigError, Flag, Loaded
from frontend.gateway_config import VARIABLES
from frontend.gateway_settings import AlertRule, GatewaySettings

GOOD = """
gateway:
  state_dir: state
  max_body_bytes: 1000000
  models:
    - name: chat
      routing: weighted
      routes:
        - {id: a, kind: vllm, endpoint: "http://gpu.example:8000/v1", addresses: [10.0.0.5], weight: 2}
        - {id: b, kind: openai, api_key_env: OPENAI_KEY, upstream_model: big}
    - {name: embed, routes: [{id: c, kind: local, upstream_model: minilm}]}
"""


def load(
    tmp_path: Path, text: str, environ: dict[str, str] | None = None, flags: dict[str, Flag] | None = None
) -> Loaded:
    (tmp_path / "models").mkdir(exist_ok=True)
    node_file = tmp_path / "node.yaml"
    node_file.write_text(text)
    return config.load(node_file, {"HOME": "/h", **(environ or {})}, flags or {}, lambda: 1, need_models=False)


def mistakes(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, environ)
    return caught.value.mistakes


def test_without_the_section_there_is_no_gateway(tmp_path: Path) -> None:
    loaded = load(tmp_path, "")
    assert not loaded.settings.gateway.enabled
    assert loaded.settings.frontend("f", "/r", (), {}).gateway == loaded.settings.gateway


def test_a_good_section(tmp_path: Path) -> None:
    gateway = load(tmp_path, GOOD, {"OPENAI_KEY": "sk-secret"}).settings.gateway
    assert gateway.enabled
    assert gateway.state_dir == str(tmp_path / "state")
    assert [route.id for model in gateway.models for route in model.routes] == ["a", "b", "c"]
    assert gateway.models[0].routes[0].weight == 2.0
    assert "sk-secret" not in repr(gateway)


def test_it_can_be_written_and_switched_off(tmp_path: Path) -> None:
    text = GOOD.replace("gateway:", "gateway:\n  enabled: false")
    assert not load(tmp_path, text, {"OPENAI_KEY": "x"}).settings.gateway.enabled


def test_the_state_lies_in_the_run_directory_unless_told_otherwise(tmp_path: Path) -> None:
    loaded = load(tmp_path, "run_dir: run")
    assert loaded.settings.gateway.state_dir == str(tmp_path / "run" / "gateway")


def test_environment_and_command_line_win(tmp_path: Path) -> None:
    environ = {
        "INFERENCE_SERVER_GATEWAY_MAX_BODY_BYTES": "5000", "INFERENCE_SERVER_GATEWAY_BATCHES_WORKERS": "0",
        "INFERENCE_SERVER_GATEWAY_FILES_URL": "s3://bucket/x",
    }  # fmt: skip
    flags = {"gateway.development": Flag("--development", "true")}
    loaded = load(tmp_path, "gateway: {max_body_bytes: 7, batches: {workers: 3}}", environ, flags)
    gateway = loaded.settings.gateway
    assert (gateway.max_body_bytes, gateway.batches.workers, gateway.files.url) == (5000, 0, "s3://bucket/x")
    assert gateway.development
    assert gateway.enabled
    assert any("development" in notice for notice in loaded.settings.notices)
    assert loaded.sources["gateway.batches.workers"] == "environment INFERENCE_SERVER_GATEWAY_BATCHES_WORKERS"
    assert effective(loaded)["gateway.max_body_bytes"][0] == 5000


def test_every_scalar_has_a_variable() -> None:
    assert VARIABLES["INFERENCE_SERVER_GATEWAY_STORE"] == "gateway.store"
    assert VARIABLES["INFERENCE_SERVER_GATEWAY_FILES_MAX_FILE_BYTES"] == "gateway.files.max_file_bytes"
    assert "INFERENCE_SERVER_GATEWAY_MODELS" not in VARIABLES
    assert len(set(VARIABLES.values())) == len(VARIABLES) > 15


def route(text: str) -> str:
    return "gateway: {models: [{name: m, routes: [{" + text + "}]}]}"


def webhook(text: str) -> str:
    return "gateway: {alerts: {webhook: {" + text + "}}}"


WEBHOOK = "gateway.alerts.webhook"
WHERE = "gateway.models[0].routes[0]"
BAD = [
    ("gateway: 5", "gateway: expected a mapping, got 5"),
    ("gateway: {enabld: true}", "gateway.enabld: unknown key; did you mean enabled?"),
    ("gateway: {development: 1}", "gateway.development: expected true or false, got 1"),
    ("gateway: {models: 3}", "gateway.models: expected a list, got 3"),
    ("gateway: {models: [x]}", "gateway.models[0]: expected a mapping, got 'x'"),
    ("gateway: {models: [{name: m}]}", "gateway.models[0].routes: is missing"),
    ("gateway: {models: [{name: m, routes: []}]}", "gateway.models[0].routes: expected 1 to 64 entries, got 0"),
    ("gateway: {models: [{name: m, routing: x, routes: []}]}",
     "gateway.models[0].routing: expected ordered|weighted|least_in_flight, got 'x'"),
    (route("kind: local"), f"{WHERE}.id: is missing"),
    (route("id: 'a b', kind: local"),
     f"{WHERE}.id: expected letters, digits, '.', '_' and '-', at most 128, got 'a b'"),
    (route("id: local.x, kind: local"),
     f"{WHERE}.id: local.... is for bundles that are served without being configured"),
    (route("id: a, kind: azure"), f"{WHERE}.kind: expected vllm|openai_compatible|openai|local, got 'azure'"),
    (route("id: a, kind: local, weight: 0"), f"{WHERE}.weight: expected a number above 0, got 0"),
    (route("id: a, kind: local, endpoint: 'http://h/v1'"), f"{WHERE}.endpoint: a local route has none"),
    (route("id: a, kind: local, supports_priority: true"),
     f"{WHERE}.supports_priority: upstreams of kind local have no priority"),
    (route("id: a, kind: openai, supports_priority: true"),
     f"{WHERE}.supports_priority: upstreams of kind openai have no priority"),
    (route("id: a, kind: vllm, endpoint: 'http://h:8000/v1'"), f"{WHERE}.endpoint: addresses are missing"),
    (route("id: a, kind: vllm, endpoint: 'http://h:8000/v1', addresses: [127.0.0.1]"),
     f"{WHERE}.endpoint: 127.0.0.1 is not allowed: loopback is for development mode"),
    (route("id: a, kind: vllm, endpoint: 'http://h:8000/v1', addresses: [169.254.169.254]"),
     f"{WHERE}.endpoint: 169.254.169.254 is not allowed: link-local"),
    (route("id: a, kind: vllm, endpoint: 'http://h:8000/v1', addresses: [5]"),
     f"{WHERE}.addresses[0]: expected text, got 5"),
    (route("id: a, kind: vllm"), f"{WHERE}.endpoint: expected http(s)://"),
    (route("id: a, kind: openai, api_key_env: NO_SUCH"),
     f"{WHERE}.api_key_env: the environment variable NO_SUCH is not set"),
    (route("id: a, kind: openai, api_key_env: sk-proj-abc"),
     f"{WHERE}.api_key_env: expected the name of an environment variable"),
    ("gateway: {max_body_bytes: 100000000}",
     "gateway.max_body_bytes: 100000000 is above global.endpoints.max_request_bytes (67108864)"),
    ("gateway: {store: 'mysql://u:pw@h/d'}", "gateway.store: expected nothing for SQLite, or postgresql://..."),
    ("gateway: {store_password_env: NO_SUCH}",
     "gateway.store_password_env: the environment variable NO_SUCH is not set"),
    ("gateway: {files: {url: 'ftp://x'}}",
     "gateway.files.url: expected nothing, file:///DIR or s3://BUCKET/PREFIX, got 'ftp://x'"),
    ("gateway: {files: {batch_retention_days: 0}}",
     "gateway.files.batch_retention_days: expected a whole number from 1 to 365, got 0"),
    ("gateway: {batches: {lease_seconds: 5}}",
     "gateway.batches.lease_renew_seconds: expected less than lease_seconds (5), got 15"),
    ("gateway: {batches: {default_max_concurrency: 0}}",
     "gateway.batches.default_max_concurrency: expected a whole number from 1 to 256, got 0"),
    ("gateway: {alerts: {rules: [{name: a, kind: batch_late}]}}",
     "gateway.alerts.rules[0].kind: expected batch_stalled|batch_failed|batch_at_risk, got 'batch_late'"),
    ("gateway: {alerts: {rules: [{name: a, kind: batch_stalled, window_minutes: 4}]}}",
     "gateway.alerts.rules[0].window_minutes: expected a whole number from 5 to 1440, got 4"),
    ("gateway: {alerts: {rules: [{kind: batch_failed}]}}", "gateway.alerts.rules[0].name: is missing"),
    ("gateway: {alerts: {rules: [{name: a, kind: batch_failed}, {name: a, kind: batch_failed}]}}",
     "gateway.alerts.rules[1].name: 'a' is also gateway.alerts.rules[0].name"),
    ("gateway: {alerts: {webhook: {secret_env: HOOK}}}",
     "gateway.alerts.webhook.secret_env: there is no url that it could belong to"),
    (webhook("url: 'https://hooks.example/x'"), f"{WEBHOOK}.secret_env: is missing"),
    (webhook("url: 'https://hooks.example/x', secret_env: NO_SUCH"),
     f"{WEBHOOK}.secret_env: the environment variable NO_SUCH is not set"),
    (webhook("url: 'http://10.0.0.5/x', secret_env: HOOK"), f"{WEBHOOK}.addresses: addresses are missing"),
    (webhook("url: 'http://h.example/x', addresses: [203.0.113.7], secret_env: HOOK"),
     f"{WEBHOOK}.addresses[0]: plain http may go to private addresses only; use https"),
    (webhook("url: 'https://h.example/x', addresses: [169.254.169.254], secret_env: HOOK"),
     f"{WEBHOOK}.addresses[0]: 169.254.169.254 is not allowed"),
    (webhook("url: 'https://169.254.169.254/x', secret_env: HOOK"), f"{WEBHOOK}.url: 169.254.169.254 is not allowed"),
    (webhook("url: 'https://[fd00:ec2::254]/x', secret_env: HOOK"), f"{WEBHOOK}.url: fd00:ec2::254 is not allowed"),
    (webhook("url: 'https://2130706433/x', secret_env: HOOK"), f"{WEBHOOK}.url: expected an IP address"),
    (webhook("url: 'https://u:pw@h.example/x', secret_env: HOOK"), f"{WEBHOOK}.url: expected http(s)://HOST"),
    (webhook("url: 'ftp://h.example/x', secret_env: HOOK"), f"{WEBHOOK}.url: expected http(s)://HOST"),
    ("gateway: {pages: {public_url: 'https://h.example/admin'}}",
     "gateway.pages.public_url: expected http(s)://HOST or http(s)://HOST:PORT, got 'https://h.example/admin'"),
    ("gateway: {pages: {secret_env: NO_SUCH}}",
     "gateway.pages.secret_env: the environment variable NO_SUCH is not set"),
    ("gateway: {pages: {session_hours: 0}}",
     "gateway.pages.session_hours: expected a whole number from 1 to 168, got 0"),
    ("gateway: {batches: {validation: later}}", "gateway.batches.validation: expected sync|async, got 'later'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), BAD, ids=[expected[:60] for _, expected in BAD])
def test_a_mistake_is_named_with_its_path(tmp_path: Path, text: str, expected: str) -> None:
    found = mistakes(tmp_path, text)
    assert any(line.startswith(expected) for line in found), found
    assert not any("pw@" in line or "sk-proj" in line for line in found)


def test_mistakes_are_told_together_and_keep_their_places(tmp_path: Path) -> None:
    text = """
gateway:
  models:
    - name: m
      routes:
        - {kind: local}
        - {id: a, kind: local}
        - {id: a, kind: local}
        - {id: h1, kind: vllm, endpoint: "http://h/v1", addresses: [10.0.0.1]}
        - {id: h2, kind: vllm, endpoint: "http://h/v1", addresses: [10.0.0.2]}
    - {name: m, routes: [{id: z, kind: local}]}
"""
    environ = {"INFERENCE_SERVER_GATEWAY_STORRE": "x", "INFERENCE_SERVER_GATEWAY_DEVELOPMENT": "maybe"}
    paths = [line.split(":")[0] for line in mistakes(tmp_path, text, environ)]
    assert sorted(paths) == sorted([
        "gateway.models[0].routes[0].id", "gateway.models[0].routes[2].id", "gateway.models[0].routes[4].addresses",
        "gateway.models[1].name", "INFERENCE_SERVER_GATEWAY_STORRE", "gateway.development",
    ])  # fmt: skip


def test_alerts_and_pages(tmp_path: Path) -> None:
    text = """
gateway:
  alerts:
    rules:
      - {name: nights, kind: batch_stalled, workspace: ws_a, window_minutes: 5}
    webhook: {url: "https://hooks.example:8443/in?team=x", secret_env: HOOK}
  pages: {public_url: "https://serve.example", session_hours: 1}
"""
    loaded = load(tmp_path, text, {"HOOK": "s3cret"})
    gateway = loaded.settings.gateway
    assert effective(loaded)["gateway.alerts.webhook.url"][0] == "https://hooks.example:8443/***"
    assert gateway.alerts.rules == (AlertRule(name="nights", kind="batch_stalled", workspace="ws_a", window_minutes=5),)
    assert gateway.alerts.webhook.url == "https://hooks.example:8443/in?team=x"
    assert gateway.pages.session_hours == 1
    assert "s3cret" not in repr(gateway)


def test_the_gateway_sections_of_the_readme_are_accepted(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"^```yaml\n(gateway:\n.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        load(tmp_path, block, {"HOOK_KEY": "x"})


def test_alerts_are_there_unless_they_are_switched_off(tmp_path: Path) -> None:
    assert [rule.kind for rule in load(tmp_path, "").settings.gateway.alerts.rules] == [
        "batch_stalled", "batch_failed", "batch_at_risk",
    ]  # fmt: skip
    assert load(tmp_path, "gateway: {alerts: {rules: []}}").settings.gateway.alerts.rules == ()
    assert load(tmp_path, "").settings.gateway.batches.default_max_concurrency == 2


def test_a_password_in_the_store_is_not_shown(tmp_path: Path) -> None:
    loaded = load(tmp_path, "gateway: {store: 'postgresql://user:s3cret@db.example/gateway'}")
    assert isinstance(loaded.settings.gateway, GatewaySettings)
    assert effective(loaded)["gateway.store"][0] == "postgresql://user:***@db.example/gateway"
