"""Compile the modules that every request passes through, with mypyc, from the very sources that also run as they are.

    .venv/bin/python scripts/compile.py                 the tree that scripts/serve runs: .venv/compiled
    .venv/bin/python scripts/compile.py --check         exit 0 if that tree is there and of today's sources, 3 if this
                                                        machine has no compiler for it
    .venv/bin/python scripts/compile.py --wheel DIR     a wheel for machines like this one

The tree is a copy of the checkout with extension modules beside the sources; the checkout itself stays free of them, so
that no stale one can hide a changed source. Needs a C compiler, Python's headers and the ``compile`` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = Path(sys.prefix) / "compiling"
TREE = Path(sys.prefix) / "compiled"
RESULTS = ROOT / "bench" / "results"
STAMP = "compiled.stamp"
PACKAGES = ("engines", "worker", "frontend")

MODULES = tuple(
    f"{package}/{name}"
    for package, names in {
        "frontend": "app attempts deadlines dispatcher metrics placed_call repeat_call",
        "frontend/grpc_fast": "calls messages plans repeated_call repeats replies service streams",
        "frontend/http2": "connection fields frames intake protocol sender stream",
        "frontend/httpd": "answers body exchange heads intake outlet pace protocol state wire",
        "frontend/kserve": "http_answers http_options http_routes json_data json_repeats repeats request_ids",
        "worker": "answers arrival dispatch executions gather intake loop",
        "worker/channel": "arena attachment channel client doorbell placement reception records ring server",
        "worker/scheduling": "admission batching cost edf ema fair fifo model order queues scheduler types waits",
    }.items()
    for name in names.split()
)
"""What a repeated request passes through between socket and engine. The rest gains little and costs minutes here."""

GROUP = "ringserve"
"""All modules are one unit for the C compiler, which then inlines functions of one into another: 800 MB of memory."""
COMPILER_FLAGS = ("-fno-semantic-interposition", "-fno-plt", "-g0")
LINKER_FLAGS = ("-Wl,-Bsymbolic",)
"""Nothing outside takes the place of a function in there: calls go straight to it."""


def main() -> None:
    """Do what the command line says; exit 3 if this machine cannot compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the tree is of today's sources")
    parser.add_argument("--wheel", type=Path, metavar="DIR", help="put a wheel there instead")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(0 if is_current() else 3 if missing_compiler() else 1)
    if lacking := missing_compiler() or missing_mypyc():
        print(f"compile: {lacking}", file=sys.stderr)
        sys.exit(3)
    if arguments.wheel is not None:
        sync(WORK)
        build("bdist_wheel", "--dist-dir", str(arguments.wheel.resolve()))
    elif not is_current():
        sync(WORK)
        build("build_ext", "--inplace")
        publish()


def missing_compiler() -> str:
    """Return what the machine lacks to compile, empty if nothing."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"needs the C compiler that this Python was built with, {compiler} (Debian: apt-get install gcc)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "needs the headers of this Python (Debian: apt-get install python3-dev)"
    return ""


def missing_mypyc() -> str:
    """Return what the environment lacks to compile, empty if nothing."""
    try:
        import mypyc.build  # noqa: F401
    except ImportError:
        return "needs mypyc (scripts/setup --compiled installs it)"
    return ""


def is_current() -> bool:
    """Return whether the tree that would be built is there already."""
    try:
        return (TREE / STAMP).read_text() == digest()
    except OSError:
        return False


def digest() -> str:
    """Return what identifies the sources, this script and the interpreter."""
    total = hashlib.sha256(sys.version.encode())
    for path in sorted(sources()):
        total.update(f"{path}\0".encode() + (ROOT / path).read_bytes())
    return total.hexdigest()


def sources() -> Iterator[Path]:
    """Yield every file that a node, its tests or its measurements are made of, relative to the checkout."""
    for name in (*PACKAGES, "tests", "bench", "scripts"):
        for folder, folders, files in os.walk(ROOT / name):
            folders[:] = [one for one in folders if one != "__pycache__" and Path(folder, one) != RESULTS]
            for file in files:
                yield Path(folder, file).relative_to(ROOT)
    for name in ("pyproject.toml", "README.md", "LICENSE", "ARCHITECTURE.md", "CHANGELOG.md"):
        yield Path(name)


def sync(folder: Path) -> None:
    """Make ``folder`` hold today's sources; what is the same keeps its time, so that it is not compiled again."""
    wanted = set(sources())
    for path in wanted:
        target = folder / path
        data = (ROOT / path).read_bytes()
        if not target.is_file() or target.read_bytes() != data:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            shutil.copymode(ROOT / path, target)
    for name in PACKAGES:
        for target in (folder / name).rglob("*"):
            path = target.relative_to(folder)
            module = path.with_name(path.name.split(".")[0]).as_posix()
            if target.is_file() and path not in wanted and not (target.suffix == ".so" and module in MODULES):
                target.unlink()


def build(*command: str) -> None:
    """Run the build in WORK; its output is shown only if it fails."""
    # Optional libraries need not be there: extras of the server, and what only tests install.
    names = ["--ignore-missing-imports", *(f"{module}.py" for module in MODULES)]
    program = (
        "import sys; from mypyc.build import mypycify; from setuptools import setup; "
        f"modules = mypycify({names!r}, opt_level='3', debug_level='0', group_name={GROUP!r}); "
        f"[one.extra_compile_args.extend({COMPILER_FLAGS!r}) for one in modules]; "
        f"[one.extra_link_args.extend({LINKER_FLAGS!r}) for one in modules]; "
        "setup(ext_modules=modules, script_args=sys.argv[1:])"
    )
    parallel = ["build_ext", "--parallel", str(len(os.sched_getaffinity(0)))]
    words = [*parallel, *(command[1:] if command[0] == "build_ext" else command)]
    # mypyc (2.4) cannot go on from what mypy remembers of modules that did not change.
    shutil.rmtree(WORK / ".mypy_cache", ignore_errors=True)
    # Its own process: mypy's state is of one run, and setuptools reads the folder it stands in.
    environment = {**os.environ, "PYTHONPATH": str(WORK)}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=WORK, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"compile: failed\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")


def publish() -> None:
    """Put the finished copy in place. A node that runs keeps the files that it has opened."""
    new, old = TREE.with_name("compiled.new"), TREE.with_name("compiled.old")
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(WORK, new, ignore=shutil.ignore_patterns("build", "__pycache__", "*.egg-info", ".mypy_cache"))
    (new / STAMP).write_text(digest())
    with contextlib.suppress(FileNotFoundError):
        TREE.rename(old)
    new.rename(TREE)
    shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    main()
