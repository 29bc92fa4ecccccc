"""``ringserve build`` and ``ringserve check --backend tensorrt``: what is built, what is not and why, how it looks."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onnx_models
from engines.bundle.repository import scan
from engines.device.host import HostDevice
from engines.tensorrt.builder import BuildOptions
from engines.tensorrt.names import Api
from engines.tensorrt.plan_cache import PlanCache
from engines.tensorrt.planning import Planner
from tensorrt_fake.library import World, fake_api
from worker import build as command
from worker import check
from worker.config import PLAN_FOLDER_OF_REPOSITORY


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    onnx_models.mlp(root / "net", layers=2, width=32)
    onnx_models.affine(root / "small")
    onnx_models.unknown_operator(root / "strange")
    (root / "empty").mkdir()
    other = onnx_models.affine(root / "other").parent
    (other / "manifest.yaml").write_text(
        "format_version: 1\nengine: onnxruntime\n"
        "executable_inputs: [{name: INPUT, dtype: f32, shape: nc, dims: {c: 8}}]\n"
        "executable_outputs: [{name: OUTPUT, dtype: f32, shape: nc, dims: {c: 8}}]\n"
    )
    return root


def lines(repository: Path, world: World, *, anew: bool = False, bar: command.Bar | None = None) -> dict[str, str]:
    """Build everything and return what was told, by bundle; a figure of seconds becomes 0.0."""
    told = bar or command.Bar(io.StringIO())
    planner = Planner(
        fake_api("11.4", world), PlanCache(repository / PLAN_FOLDER_OF_REPOSITORY), BuildOptions(), told.tell
    )
    results = command.build(scan(repository), planner, "host", told, anew=anew)
    return {result.name: re.sub(r"^built in [\d.]+ s", "built", result.text) for result in results}


def test_each_bundle_is_told_with_its_figures_or_its_reason(repository: Path) -> None:
    world = World(HostDevice())
    told = lines(repository, world)
    assert told["net version 1"].startswith("built; 6 profiles, plan of ")
    assert told["small version 1"].startswith("built; 6 profiles, plan of ")
    assert told["other version 1"] == "left alone: its manifest says engine: onnxruntime"
    assert "cannot be parsed: Frobnicate node 'strange'" in told["strange version 1"]
    assert told["strange version 1"].startswith("cannot be built: ")
    assert told["empty version 1"].startswith("cannot be built: ")
    assert world.builds == 2


def test_second_build_has_nothing_to_do_unless_forced(repository: Path) -> None:
    lines(repository, World(HostDevice()))
    world = World(HostDevice())
    told = lines(repository, world)
    assert world.builds == 0
    assert told["net version 1"].startswith("up to date; 6 profiles, plan of ")
    assert told["net version 1"].endswith("2 weights of 0.01 MB outside it, shared by all batch sizes")
    assert told["small version 1"].endswith("weights inside it: it has no large weights")
    lines(repository, world, anew=True)
    assert world.builds == 2


def test_what_was_built_is_found_by_serving_and_never_a_bundle(repository: Path, tmp_path: Path) -> None:
    lines(repository, World(HostDevice()))
    assert PLAN_FOLDER_OF_REPOSITORY not in [bundle.name for bundle in scan(repository)]
    world = World(HostDevice())
    cache = PlanCache(tmp_path / "run", built=repository / PLAN_FOLDER_OF_REPOSITORY)
    planner = Planner(fake_api("11.4", world), cache, BuildOptions())
    for bundle in scan(repository):
        if bundle.name in ("net", "small"):
            planned, _ = planner.plan(bundle.name, check.load_manifest(bundle), bundle.model_file, "host")  # type: ignore[arg-type, union-attr]
            assert planned.cached
    assert world.builds == 0
    assert not (tmp_path / "run").exists()
    plans = list((repository / PLAN_FOLDER_OF_REPOSITORY).glob("*.plan"))
    assert plans
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in plans), "plans travel with their repository"


def test_bar_fills_and_leaves_nothing_behind() -> None:
    terminal, seconds = Terminal(), iter([0.0, 0.0, 2.0, 9.0])
    bar = command.Bar(terminal, lambda: next(seconds))
    bar.start("[1/2] net")
    bar.tell(0.5)
    bar.tell(1.0)
    bar.clear()
    drawn = terminal.getvalue().split("\r")
    assert drawn[1] == "[1/2] net [" + "." * 30 + "]   0 %    0 s"
    assert drawn[2] == "[1/2] net [" + "#" * 15 + "." * 15 + "]  50 %    2 s"
    assert drawn[3] == "[1/2] net [" + "#" * 30 + "] 100 %    9 s"
    assert drawn[4].strip() == "" and len(drawn[4]) == len(drawn[3])


def test_bar_says_nothing_where_nobody_watches(repository: Path) -> None:
    file = io.StringIO()
    lines(repository, World(HostDevice()), bar=command.Bar(file))
    assert file.getvalue() == ""


@pytest.fixture
def rtx_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "load", classmethod(lambda cls: fake_api("rtx-1.7", World(None))))
    monkeypatch.setattr("worker.check_built.gpu_is_present", lambda: False)


@pytest.mark.usefixtures("rtx_without_a_gpu")
def test_check_says_which_models_do_not_build_and_why(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(repository), "--backend", "tensorrt"]) == 1
    out = capsys.readouterr().out
    assert "net version 1: OK" in out
    assert "builds with 6 profiles, plan of 0.00 MB, 2 weights outside it; not run, because there is no GPU" in out
    assert "other version 1: OK" in out and "execution" in out, "a bundle's own engine still runs"
    strange = out.split("strange version 1: cannot be served")[1]
    assert "TensorRT 1.7.1.116 does not build it: cannot be parsed: Frobnicate node 'strange'" in strange


@pytest.mark.usefixtures("rtx_without_a_gpu")
def test_build_command_needs_no_gpu_with_rtx(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(repository)]) == 1
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines()] == [
        "empty version 1", "net version 1", "other version 1", "small version 1", "strange version 1",
    ]  # fmt: skip
    assert command.main([str(repository / "net")]) == 0
    assert capsys.readouterr().out.startswith("net version 1: up to date; ")
    assert command.main([str(repository / "empty")]) == 1
    assert "no bundle in it" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["build"], ["check", "--backend", "tensorrt"]])
def test_missing_library_is_told_once_with_how_to_install_it(repository: Path, arguments: list[str]) -> None:
    code = (
        "import sys; sys.modules['tensorrt'] = sys.modules['tensorrt_rtx'] = None\n"
        f"from worker import {arguments[0]} as command\n"
        f"sys.exit(command.main([{str(repository)!r}, *{arguments[1:]!r}]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith(f"ringserve {arguments[0]}: ")
    assert run.stderr.count("pip install 'tensorrt>=10.16'") == 1
