"""``global.control`` and what else is told about settings that are each right alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend import config
from frontend.config import ConfigError, Loaded
from frontend.settings import ControlSettings


def load(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None) -> Loaded:
    (tmp_path / "models").mkdir(exist_ok=True)
    node_file = tmp_path / "node.yaml"
    node_file.write_text(f"model_repo: models\n{text}")
    return config.load(node_file, {"HOME": "/h", **(environ or {})}, {}, lambda: 1, need_models=True)


def test_the_default_is_a_socket_in_the_run_directory(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert loaded.settings.control == ControlSettings(endpoint="unix:control.sock", allow_remote=False)
    assert loaded.sources["global.control.endpoint"] == "default"


def test_file_and_environment(tmp_path: Path) -> None:
    text = "global: {control: {endpoint: '0.0.0.0:8003', allow_remote: true}}"
    assert load(tmp_path, text).settings.control == ControlSettings(endpoint="0.0.0.0:8003", allow_remote=True)
    environ = {
        "INFERENCE_SERVER_CONTROL_ENDPOINT": "10.0.0.1:9", "INFERENCE_SERVER_CONTROL_ALLOW_REMOTE": "true",
    }  # fmt: skip
    loaded = load(tmp_path, "", environ)
    assert loaded.settings.control == ControlSettings(endpoint="10.0.0.1:9", allow_remote=True)
    assert loaded.sources["global.control.allow_remote"] == "environment INFERENCE_SERVER_CONTROL_ALLOW_REMOTE"


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("{endpoint: 8003}", "global.control.endpoint: expected text, got 8003"),
        ("{endpoint: '8003'}", "global.control.endpoint: expected unix:NAME.sock"),
        ("{endpoint: 'unix:worker0.sock'}", "global.control.endpoint: worker0.sock is a socket that the node itself"),
        ("{endpoint: '10.0.0.1:9'}", "global.control.endpoint: '10.0.0.1:9' may be reached from other machines"),
        ("{endpoint: '127.0.0.1:8001'}", "global.control.endpoint: 8001 is also global.endpoints.grpc_port"),
        ("{allow_remote: maybe}", "global.control.allow_remote: expected true or false, got 'maybe'"),
        ("{endpiont: none}", "global.control.endpiont: unknown key; did you mean endpoint?"),
    ],
)
def test_a_mistake_is_named_with_its_path_beside_all_others(tmp_path: Path, text: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"global: {{control: {text}, scheduler: {{sizing: big}}}}")
    assert len(caught.value.mistakes) == 2
    assert any(line.startswith(mistake) for line in caught.value.mistakes), caught.value.mistakes
    assert "global.scheduler.sizing: expected fill|learned, got 'big'" in caught.value.mistakes


def test_none_needs_no_quotes_in_yaml(tmp_path: Path) -> None:
    assert load(tmp_path, "global: {control: {endpoint: none}}").settings.control.endpoint == "none"


def test_a_setting_without_effect_yet_is_said_at_the_start(tmp_path: Path) -> None:
    notices = load(tmp_path, "global: {scheduler: {compaction_interval: 5}}").settings.notices
    assert any(notice.startswith("scheduler.compaction_interval: no effect") for notice in notices)
    assert not any("compaction" in notice for notice in load(tmp_path).settings.notices)
