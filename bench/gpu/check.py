"""The device check: runs every section on the GPU that is there, or its host-side part where there is none.

Started by ``scripts/gpu_check``. A section that fails does not keep the others from running; the exit status is 1 if
anything failed. Without a GPU the same sections run on the host device, small and under its checks, and figures are
left out, since they would be a CPU's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.gpu import device_sections, engine_sections, node_section, rows_section
from bench.gpu.report import Report
from bench.gpu.world import World
from engines.device.base import Device
from engines.device.cupy_device import open_device
from engines.device.errors import DeviceLost, DeviceMissing
from engines.device.host import HostDevice

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGET_S = 200.0
"""Nothing new is begun after this; the command stays under 4 minutes."""
SECTIONS: dict[str, Callable[[World], None]] = {
    "layer": device_sections.layer,
    "registered": device_sections.registered,
    "overlap": device_sections.overlap,
    "graphs": device_sections.graphs,
    "compaction": device_sections.compaction,
    "array": engine_sections.array_engine,
    "rows": rows_section.rows,
    "ahead": rows_section.ahead,
    "loads": engine_sections.loads,
    "tensorrt": engine_sections.tensorrt,
    "node": node_section.node,
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", type=int, default=0, help="number of the GPU (default 0)")
    parser.add_argument("--host", action="store_true", help="only the host-side part, even if there is a GPU")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="only this section; may be repeated")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: another each time)")
    parser.add_argument("--json", type=Path, help="where to write the result (default: bench/results, $OUT if set)")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    device, reason = opened(arguments.device, arguments.host)
    is_gpu = not isinstance(device, HostDevice)
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(4), "little")
    report = Report(device.name, is_gpu, seed)
    report.facts |= {"key": device.key, "python": platform.python_version(), "numpy": np.__version__}
    if is_gpu:
        report.facts["cupy"] = device.xp.__version__
        print(f"gpu_check: {device.key}, seed {seed}")
    else:
        print(f"gpu_check: no GPU is used: {reason}\ngpu_check: the host-side part follows, seed {seed}")
    run(device, report, arguments.only or list(SECTIONS), began + BUDGET_S)
    report.facts["seconds"] = round(time.monotonic() - began, 1)
    path = arguments.json or default_path(is_gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    path.with_suffix(".md").write_text(report.markdown() + "\n")
    ending = f"{len(report.failed)} FAILED" if report.failed else "nothing failed"
    print(f"gpu_check: {ending}, {report.facts['seconds']} s, written to {path}")
    return 1 if report.failed else 0


def opened(index: int, host_only: bool) -> tuple[Device, str]:
    """Return the GPU, or the host device and why."""
    if host_only:
        return HostDevice(96 << 20), "--host was given"
    try:
        return open_device(index), ""
    except DeviceMissing as error:
        return HostDevice(96 << 20), str(error)


def run(device: Device, report: Report, sections: list[str], ends_s: float) -> None:
    """Run sections, each whatever the others did."""
    memory = device.memory()
    fifth = memory.free_bytes // 5 // (1 << 20) << 20
    with tempfile.TemporaryDirectory(prefix="gpu_check") as folder:
        for number, name in enumerate(sections):
            report.section = name
            world = World(
                device,
                report,
                np.random.default_rng((report.seed, number)),
                copy_bytes=min(256 << 20, fifth // 2) if report.is_gpu else 1 << 18,
                arena_bytes=min(8 << 30, fifth) if report.is_gpu else 4 << 20,
                cycles=100 if report.is_gpu else 5,
                work_dir=Path(folder) / name,
                ends_s=ends_s,
            )
            if world.late:
                report.left_out(name, "out of time")
                continue
            try:
                SECTIONS[name](world)
            except DeviceLost as error:
                report.check("the device stayed usable", False, str(error))
                return
            except Exception as error:
                traceback.print_exc()
                report.check("the section ran to its end", False, f"{type(error).__name__}: {error}"[:300])
    report.section = "end"
    try:
        device.close()
        report.check("the device closes without a finding", True)
    except Exception as error:
        report.check("the device closes without a finding", False, str(error)[:300])


def default_path(is_gpu: bool) -> Path:
    """Return where the result goes: a GPU's is kept beside the others, a host's says little."""
    if "OUT" in os.environ:
        return Path(os.environ["OUT"]) / "gpu_check.json"
    return ROOT / "bench" / "results" / "gpu_check.json" if is_gpu else Path(tempfile.gettempdir()) / "gpu_check.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
