"""CPU counts follow the affinity mask and the control group, not the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.cpus import available_cpus, compute_threads, quota_cpus
from engines.onnxruntime import OnnxRuntimeEngine


def files(root: Path, **contents: str) -> tuple[Path, Path]:
    """Write files given as path=text (``__`` for ``/``, ``_dot_`` for ``.``) under proc/ and cgroup/."""
    for name, text in contents.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


def test_mo_06_no_limit(tmp_path: Path) -> None:
    assert quota_cpus(*files(tmp_path)) is None
    proc, cgroups = files(tmp_path, proc__self__cgroup="0::/\n", cgroup__cpu_dot_max="max 100000\n")
    assert quota_cpus(proc, cgroups) is None
    assert available_cpus(proc, cgroups) == len(os.sched_getaffinity(0))


def test_mo_06_quota_of_version_2(tmp_path: Path) -> None:
    proc, cgroups = files(tmp_path, proc__self__cgroup="0::/\n", cgroup__cpu_dot_max="150000 100000\n")
    assert quota_cpus(proc, cgroups) == 1.5
    assert available_cpus(proc, cgroups) == 1


def test_mo_06_a_parents_smaller_quota_holds(tmp_path: Path) -> None:
    proc, cgroups = files(
        tmp_path,
        proc__self__cgroup="0::/pods/one\n",
        cgroup__pods__cpu_dot_max="50000 100000\n",
        cgroup__pods__one__cpu_dot_max="400000 100000\n",
    )
    assert quota_cpus(proc, cgroups) == 0.5
    assert available_cpus(proc, cgroups) == 1


def test_mo_06_quota_of_version_1(tmp_path: Path) -> None:
    proc, cgroups = files(tmp_path, proc__self__cgroup="5:cpu,cpuacct:/box\n3:memory:/box\n")
    folder = cgroups / "cpu,cpuacct" / "box"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("200000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cpus(proc, cgroups) == 2.0
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert quota_cpus(proc, cgroups) is None


@pytest.mark.parametrize("text", ["", "many 100000", "100000", "100000 0", "-5 100000"])
def test_unreadable_limits_count_as_none(tmp_path: Path, text: str) -> None:
    assert quota_cpus(*files(tmp_path, proc__self__cgroup="0::/\n", cgroup__cpu_dot_max=text)) is None


def test_affinity_counts(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert available_cpus(*files(tmp_path)) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_one_cpu_is_left_to_the_feeding_thread() -> None:
    assert [compute_threads(cpus) for cpus in (1, 2, 3, 16)] == [1, 1, 2, 15]
    assert OnnxRuntimeEngine(threads=3).threads == 3
    assert OnnxRuntimeEngine().threads == compute_threads(available_cpus())
