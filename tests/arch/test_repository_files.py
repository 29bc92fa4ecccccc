"""What lies in the repository: its top level, the lock files, the scripts, and a README that names what exists."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from source_tree import ROOT

from engines.bundle.validate import parse_manifest
from engines.errors import Kind
from frontend.kserve.status import STATUS
from frontend.options import OPTIONS, Option

FOLDERS = {"worker", "frontend", "engines", "tests", "bench", "scripts"}
FILES = {"pyproject.toml", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE"}
LOCKS = ("requirements.lock", "requirements-test.lock", "scripts/demo/wheels.lock")


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


def locked(name: str) -> dict[str, set[str]]:
    """Return the pinned versions of each package in a lock file."""
    pins: dict[str, set[str]] = {}
    for match in re.finditer(r"^([a-z0-9.-]+)==([^ ]+)", (ROOT / name).read_text(), re.MULTILINE):
        pins.setdefault(match[1], set()).add(match[2])
    return pins


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def required(lines: list[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0]) for line in lines}


def test_top_level_is_fixed() -> None:
    names = {name.partition("/")[0] for name in tracked() if not name.startswith(".")}
    assert {name for name in names if name not in FOLDERS | FILES and not name.endswith(".lock")} == set()


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_pins_with_hashes_and_names_no_index(lock: str) -> None:
    text = (ROOT / lock).read_text()
    entries = re.split(r"\n(?=[a-z])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries if entry.strip())
    assert "://" not in text
    assert "index" not in text.replace("--no-emit-index-url", "")


def test_what_is_tested_is_what_is_served() -> None:
    tested = locked("requirements-test.lock")
    assert {name for name, versions in locked("requirements.lock").items() if versions != tested.get(name)} == set()


def test_locks_hold_what_the_project_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needs = project["project"]["dependencies"] + project["build-system"]["requires"]
    assert required(needs) <= {normal(name) for name in locked("requirements.lock")}
    needs += project["project"]["optional-dependencies"]["test"]
    assert required(needs) <= {normal(name) for name in locked("requirements-test.lock")}


def scripts() -> list[Path]:
    files = [*sorted((ROOT / "scripts").iterdir()), ROOT / ".ci" / "run"]
    return [file for file in files if file.is_file() and not file.suffix]


def test_scripts_can_be_run_and_parsed() -> None:
    assert scripts()
    for file in scripts():
        assert os.access(file, os.X_OK), file
        if "bash" in file.read_text().splitlines()[0]:
            subprocess.run(["bash", "-n", file], check=True)


@pytest.mark.parametrize("script", ["serve", "test"])
def test_script_says_how_it_is_used(script: str) -> None:
    done = subprocess.run([ROOT / "scripts" / script, "--help"], capture_output=True, text=True, check=True)
    assert f"scripts/{script}" in done.stdout


@pytest.mark.parametrize("arguments", [["setup", "--nonsense"], ["demo_bundles", "nonsense"]])
def test_script_refuses_what_it_does_not_know(arguments: list[str]) -> None:
    script, argument = arguments
    done = subprocess.run([ROOT / "scripts" / script, argument], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert argument.lstrip("-") in done.stderr


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.path)
def test_readme_names_every_setting(option: Option) -> None:
    path = option.path.removeprefix("global.")
    assert f"`{path}`" in (ROOT / "README.md").read_text()


def test_readme_names_scripts_that_exist() -> None:
    named = set(re.findall(r"scripts/([a-z_]+(?:\.py)?)", (ROOT / "README.md").read_text()))
    assert named
    assert {name for name in named if not (ROOT / "scripts" / name).exists()} == set()


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.OK], ids=lambda kind: kind.name)
def test_readme_tells_the_status_of_every_kind(kind: Kind) -> None:
    status = STATUS[kind]
    assert f"| `{kind.name}` | {status.http} | {status.grpc_name} |" in (ROOT / "README.md").read_text()


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_readme_manifest_is_accepted() -> None:
    manifests = [block for block in readme_blocks("yaml") if "executable_inputs" in block]
    assert manifests
    for block in manifests:
        assert parse_manifest(block.encode(), "README.md", has_model_py=False).inputs


def test_readme_node_file_is_accepted(tmp_path: Path) -> None:
    (block,) = [block for block in readme_blocks("yaml") if "model_repo" in block]
    (tmp_path / "models").mkdir()
    (tmp_path / "node.yaml").write_text(block)
    done = subprocess.run(
        [sys.executable, "-m", "frontend.cli", "config", "--node", tmp_path / "node.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_readme_shows_the_request_that_serve_sends() -> None:
    source = (ROOT / "scripts" / "demo" / "first_request.py").read_text()
    body = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_CONTENT"
    )
    shown_bodies = [json.loads(match) for match in re.findall(r"-d '(\{.*\})'", "".join(readme_blocks("sh")))]
    assert [request["inputs"][0]["data"] for request in shown_bodies] == [[body]]


def test_readme_python_can_be_parsed() -> None:
    assert readme_blocks("python")
    for block in readme_blocks("python"):
        ast.parse(block)
