"""Who may import what: contracts, device libraries, purity, and nothing that pickles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT, imports, shown, sources

DEVICE_LIBRARIES = {"onnxruntime", "cupy", "tensorrt", "torch", "tensorrt_rtx"}
ENGINE_FILES = {
    "onnxruntime": ("engines/onnxruntime",),
    "cupy": ("engines/device/cupy_device",),
    "tensorrt": ("engines/tensorrt/",),
    "tensorrt_rtx": ("engines/tensorrt/",),
    "torch": (),
}
PICKLING = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing", "joblib"}
IMPURE = {
    *("time", "datetime", "os", "sys", "socket", "select", "selectors", "signal", "subprocess", "threading", "asyncio"),
    *("uvloop", "concurrent", "multiprocessing", "random", "secrets", "tempfile", "mmap", "logging", "pathlib"),
}


def test_import_contracts_hold() -> None:
    command = [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["frontend.app", "frontend.__main__", "frontend.cli", "worker.channel.client"])
def test_no_device_library_is_loaded_with(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not DEVICE_LIBRARIES & set(json.loads(done.stdout))


@pytest.mark.parametrize("library", sorted(DEVICE_LIBRARIES))
def test_device_library_is_imported_in_its_engine_only(library: str) -> None:
    importers = {shown(file) for file in sources() if library in {name.partition(".")[0] for name in imports(file)}}
    strangers = {file for file in importers if not file.startswith(ENGINE_FILES[library] or ("nowhere",))}
    assert not strangers


def test_nothing_pickles() -> None:
    found = {
        shown(file): names
        for file in sources()
        if (names := sorted(PICKLING & {name.partition(".")[0] for name in imports(file)}))
    }
    assert found == {}


def pure_files() -> list[Path]:
    named = [ROOT / "worker" / "channel" / name for name in ("ring.py", "arena.py")]
    scheduler = ROOT / "worker" / "scheduling"
    return sorted(
        file for file in sources() if file.parent == scheduler or file.stem.endswith("_state") or file in named
    )


def test_pure_modules_read_no_clock_and_do_nothing_outside() -> None:
    found = {
        shown(file): names
        for file in pure_files()
        if (names := sorted(IMPURE & {name.partition(".")[0] for name in imports(file)}))
    }
    assert len(pure_files()) > 2
    assert found == {}


def test_the_worker_opens_no_tcp_socket() -> None:
    words = ("AF_INET", "start_server", "create_server", "open_connection", "create_connection")
    found = {
        shown(file): [word for word in words if word in file.read_text()]
        for file in sources()
        if shown(file).startswith("worker/")
    }
    assert {file: used for file, used in found.items() if used} == {}
