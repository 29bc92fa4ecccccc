"""Installs the servers that we compare with: one virtual environment each under PEERS_HOME, pinned, reused when whole.

Only the ordinary clients of two registries are used: pip for the servers, apt-get for the load generators. A peer that
cannot be installed is reported with the reason; the others go on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES: dict[str, tuple[str, ...]] = {
    "fastapi": ("fastapi==0.165.0", "uvicorn[standard]==0.54.0"),
    "litserve": ("litserve==0.2.19",),
    "mosec": ("mosec==0.9.8",),
    "ray": ("ray[serve]==2.60.0",),
    "triton": ("nvidia-pytriton==0.7.0",),
}
"""What pip installs, by environment; each gets the ONNX Runtime that we run as well."""

PROGRAMS = {"wrk": "wrk", "h2load": "nghttp2-client"}
"""Load generators and the Debian packages that bring them."""

INSTALL_TIMEOUT_S = 900
WHOLE = "installed.json"
"""Written last, so that an installation that was cut off is done again."""


class NotInstalled(Exception):
    """A peer or program cannot be had; the text says why."""


def default_home() -> Path:
    """Return PEERS_HOME, or its default in the user's cache."""
    if set_home := os.environ.get("PEERS_HOME"):
        return Path(set_home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringserve" / "peers"


def environment(home: Path, name: str) -> Path:
    """Return where a peer's virtual environment is or will be."""
    return home / "venv" / name


def python_of(home: Path, name: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return environment(home, name) / "bin" / "python"


def install(home: Path, name: str) -> None:
    """Make a peer's environment unless it is whole already.

    Raises:
        NotInstalled: pip failed or took longer than INSTALL_TIMEOUT_S.
    """
    wanted = [*PACKAGES[name], f"onnxruntime=={importlib.metadata.version('onnxruntime')}"]
    folder = environment(home, name)
    if _is_whole(folder, wanted):
        return
    print(f"installing {name}: {' '.join(wanted)}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run(name, [sys.executable, "-m", "venv", str(folder)])
    _run(name, [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted])
    (folder / WHOLE).write_text(json.dumps(wanted))


def program(name: str) -> str:
    """Return the path of a load generator, installing its Debian package if need be and allowed.

    Raises:
        NotInstalled: it is not there and cannot be installed.
    """
    if found := shutil.which(name):
        return found
    package = PROGRAMS[name]
    if os.geteuid() != 0:
        raise NotInstalled(f"{name} is missing; as root: apt-get install {package}")
    _run(name, ["apt-get", "install", "--yes", "--no-install-recommends", package])
    found = shutil.which(name)
    if found is None:
        raise NotInstalled(f"{name} is still missing after apt-get install {package}")
    return found


def _is_whole(folder: Path, wanted: list[str]) -> bool:
    try:
        return bool(json.loads((folder / WHOLE).read_text()) == wanted)
    except (OSError, ValueError):
        return False


def _run(name: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{name}: {error}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise NotInstalled(f"{name}: {Path(command[0]).name} ended with {done.returncode}: {last}")
