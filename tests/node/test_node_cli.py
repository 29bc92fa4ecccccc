"""The command line: what it prints, how it fails, and that it stays quick to start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_node_process import LIMIT_S, environment

from frontend.options import OPTIONS

pytestmark = pytest.mark.process


def run(*arguments: str, **variables: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "frontend.cli", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**environment(), **variables}, timeout=LIMIT_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_config_shows_every_value_and_its_source(tmp_path: Path) -> None:
    node_file = tmp_path / "node.yaml"
    node_file.write_text("global: {scheduler: {models: {a.b: {weight: 2}}}}\nmodels: {a.b: [worker0]}\ngpus: 0")
    code, out, err = run(
        "config", "--json", "--node", str(node_file), "--http-port", "0", INFERENCE_SERVER_SCHEDULER_DISCIPLINE="edf"
    )
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert {option.path for option in OPTIONS} <= set(rows)
    file = f"file {node_file}"
    assert {path: rows[path] for path in rows if rows[path]["source"] != "default"} == {
        "global.scheduler.discipline": {
            "value": "edf", "source": "environment INFERENCE_SERVER_SCHEDULER_DISCIPLINE",
        },
        "global.scheduler.models.a.b.weight": {"value": 2.0, "source": file},
        "global.endpoints.http_port": {"value": 0, "source": "command line --http-port"},
        "models.a.b": {"value": ["worker0"], "source": file},
        "gpus": {"value": [], "source": file},
    }  # fmt: skip
    code, out, _ = run("config")
    assert code == 0
    assert any(line.split() == ["global.endpoints.http_port", "8000", "(default)"] for line in out.splitlines())


def test_mistakes_are_lines_and_exit_status_2(tmp_path: Path) -> None:
    code, out, err = run("serve", "--models", str(tmp_path / "none"), "--http-port", "http", "--discipline", "x")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "ringserve: global.scheduler.discipline: expected fair|fifo|edf, got 'x' (from command line --discipline)",
        "ringserve: global.endpoints.http_port: expected a whole number from 0 to 65535, got 'http'"
        " (from command line --http-port)",
        f"ringserve: model_repo: {tmp_path}/none does not exist; give --models DIR (from command line --models)",
    ]


@pytest.mark.parametrize("arguments", [(), ("sreve",), ("serve", "--prot", "1"), ("check",), ("frontend",)])
def test_wrong_usage_is_exit_status_2(arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: ringserve")


def test_version_and_help() -> None:
    assert run("version")[1].startswith("ringserve ")
    for command in ("serve", "status", "policy", "metrics"):
        assert "exit status:" in run(command, "--help")[1]


@pytest.mark.parametrize("command", ["version", "status", "config", "policy", "metrics"])
def test_commands_load_no_engine_and_no_numpy(command: str) -> None:
    heavy = "{'numpy', 'onnx', 'onnxruntime', 'cupy', 'tensorrt', 'grpc', 'uvloop', 'prometheus_client'}"
    program = (
        "import sys; from frontend import cli; "
        f"cli.main(['{command}'] + ([] if '{command}' in ('version', 'config') else ['--run-dir', '/nonexistent'])); "
        f"print('LOADED', sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=LIMIT_S, check=True
    )
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_the_node_loads_no_device_library() -> None:
    program = (
        "import sys, frontend.node.supervisor; "
        "print(sorted({'onnx', 'onnxruntime', 'cupy', 'tensorrt', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=LIMIT_S, check=True
    )
    assert done.stdout == "[]\n"
