"""``scripts/gpu_check`` without a GPU: it says so, runs its host-side part, and tells what failed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.gpu import check, engine_sections
from bench.gpu.report import Report
from bench.gpu.world import World
from engines.device.base import Span
from engines.device.host import HostDevice
from tensorrt_fake.library import World as FakeWorld
from tensorrt_fake.library import fake_api

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.process
def test_host_side_part_says_why_and_passes(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    sections = [name for name in check.SECTIONS if name != "node"]
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--host", "--seed", "5", "--json", str(result)]
    command += [word for name in sections for word in ("--only", name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU is used: --host was given" in done.stdout
    found = json.loads(result.read_text())
    assert (found["gpu"], found["seed"], found["failed"]) == (False, 5, 0)
    assert {row["section"] for row in found["rows"]} == {*sections, "end"}
    assert all(row["value"] is None for row in found["rows"]), "figures of a CPU were given as a GPU's"
    assert "| layer | zeros are zeros | ok |" in result.with_suffix(".md").read_text()


def test_what_fails_is_counted_and_does_not_stop_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def race(world: World) -> None:
        with world.stream("a") as a, world.stream("b") as b, world.memory(64) as (span, host):
            world.device.copy_in(span, host, a)
            world.device.copy_within(span.part(0, 32), Span(span.buffer, 32, 32), b)

    def late(world: World) -> None:
        world.report.check("the section after it ran", True)

    monkeypatch.setattr(check, "SECTIONS", {"race": race, "late": late})
    result = tmp_path / "result.json"
    assert check.main(["--host", "--json", str(result)]) == 1
    rows = {row["what"]: row for row in json.loads(result.read_text())["rows"]}
    assert rows["the section ran to its end"]["ok"] is False
    assert "nothing orders the two" in rows["the section ran to its end"]["note"]
    assert rows["the section after it ran"]["ok"] is True
    assert rows["the device closes without a finding"]["ok"] is False
    assert "2 FAILED" in capsys.readouterr().out


def test_a_machine_without_a_gpu_is_told_which_piece_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    device, reason = check.opened(0, host_only=False)
    assert device.name == "host"
    assert "CuPy does not load" in reason
    device.close()


@pytest.mark.parametrize("version", ["11.4", "rtx-1.7"])
def test_tensorrt_section_runs_on_the_strict_fake(tmp_path: Path, version: str) -> None:
    device = HostDevice()
    report = Report("host", False, 3)
    world = World(device, report, np.random.default_rng(3), 1 << 18, 4 << 20, 3, tmp_path, time.monotonic() + 600)
    engine_sections.tensorrt_with(world, fake_api(version, FakeWorld(device)))
    device.close()
    assert not report.failed
    told = {row.what for row in report.rows}
    for title in ("TensorRT, weights outside", "TensorRT, weights inside"):
        assert f"{title}: equal to numpy on fresh inputs" in told
    assert "TensorRT, weights outside: no memory drifts away" in told
    # Only RTX unloads weights that are inside a plan.
    assert ("TensorRT, weights inside: no memory drifts away" in told) is (version == "rtx-1.7")
