"""Write the descriptions of TensorRT's API anew from the real bindings, or compare them; see ``scripts/tensorrt_api``.

The bindings are small wheels on the package index; they import without the library if something answers to its names,
so a few empty functions are compiled in its place. Nothing of the wheels is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorrt_fake.strict import API_DIRECTORY, VERSIONS

DUMP = Path(__file__).with_name("dump_api.py")
STUBS: dict[str, tuple[str, ...]] = {
    "libnvinfer": (
        "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry", "getPluginRegistry",
    ),
    "libnvinfer_plugin": ("initLibNvInferPlugins",),
    "libnvonnxparser": (
        "createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion",
    ),
}  # fmt: skip
"""Per library, the functions that the bindings want to find when they are loaded."""


@dataclass(frozen=True)
class Source:
    """Where one description comes from.

    Attributes:
        stub_version: of the libraries in whose place stubs stand; empty if real ones come as a wheel.
    """

    requirements: tuple[str, ...]
    module: str
    stub_version: str


SOURCES: dict[str, Source] = {
    "10.16": Source(("tensorrt-cu12-bindings==10.16.1.11",), "tensorrt_bindings", "10"),
    "11.4": Source(("tensorrt-cu12-bindings==11.4.0.106",), "tensorrt_bindings", "11"),
    "rtx-1.7": Source(
        ("tensorrt-rtx-cu12-bindings==1.7.1.116", "tensorrt-rtx-cu12-libs==1.7.1.116"), "tensorrt_rtx_bindings", ""
    ),
}


def fresh(version: str) -> dict[str, Any]:
    """Return the description of one version, made from its wheels; needs the package index and a C compiler.

    Raises:
        subprocess.CalledProcessError: a step failed; its output was shown.
    """
    source = SOURCES[version]
    with tempfile.TemporaryDirectory(prefix="tensorrt-api-") as name:
        room = Path(name)
        for requirement in source.requirements:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, requirement]
            subprocess.run(command, check=True)
        for wheel in room.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(room)
        if source.stub_version:
            _compile_stubs(room, source.stub_version)
        environment = {**os.environ, "PYTHONPATH": name, "LD_LIBRARY_PATH": name}
        run = subprocess.run(
            [sys.executable, str(DUMP), source.module], env=environment, check=True, stdout=subprocess.PIPE
        )
    described: dict[str, Any] = json.loads(run.stdout)
    return described


def stored(version: str) -> dict[str, Any]:
    """Return the description that the fake uses."""
    described: dict[str, Any] = json.loads((API_DIRECTORY / VERSIONS[version]).read_text())
    return described


def _compile_stubs(room: Path, version: str) -> None:
    for library, functions in STUBS.items():
        code = "\n".join(f"void *{function}(void) {{ return 0; }}" for function in functions)
        file = f"{library}.so.{version}"
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{file}", "-x", "c", "-", "-o", str(room / file)]
        subprocess.run(command, input=code.encode(), check=True)


def main(argv: Sequence[str]) -> int:
    """Write or compare; return 0 if nothing differs or everything is written."""
    parser = argparse.ArgumentParser(prog="scripts/tensorrt_api", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("versions", nargs="*", default=sorted(SOURCES), help="versions (default: all)")
    arguments = parser.parse_args(argv)
    differing = []
    for version in arguments.versions:
        described = fresh(version)
        if described != stored(version):
            differing.append(version)
        if not arguments.check:
            text = json.dumps(described, indent=1, sort_keys=True) + "\n"
            (API_DIRECTORY / VERSIONS[version]).write_text(text)
    for version in differing:
        print(f"{version}: {'differs from the bindings' if arguments.check else 'written anew, it differed'}")
    return 1 if arguments.check and differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
