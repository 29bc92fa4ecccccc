"""``ringserve build``: compiles the models of a repository for TensorRT ahead of time.

Plans go into ``.plans`` inside the repository, where serving looks for them, so they may travel with it: a plan fits
every machine with the same GPU, driver and TensorRT. What is there already is not built again. Nothing is executed.

Exit status: 0 every model is built or needs no building, 1 at least one is not.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from engines.bundle.repository import BrokenBundle, Bundle, load_manifest, scan, scan_bundle
from engines.errors import NotReady, ServingError
from engines.tensorrt.builder import BuildOptions
from engines.tensorrt.names import Api
from engines.tensorrt.plan_cache import PlanCache
from engines.tensorrt.planning import Planner
from engines.tensorrt.profiles import profiles_of
from worker.config import PLAN_FOLDER_OF_REPOSITORY

BUILT_FOR: Final = ("auto", "tensorrt")
"""Values of a bundle's ``engine`` that TensorRT may run."""
BAR_CELLS: Final = 30


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one bundle version; ``text`` is for people."""

    name: str
    text: str
    ok: bool


class Bar:
    """One line that fills up while a model is built; silent where nobody watches.

    Args:
        stream: where it is drawn; only a terminal is drawn on.
    """

    def __init__(self, stream: TextIO, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock_s = clock_s
        self._shown = stream.isatty()
        self._title = ""
        self._started_s = 0.0
        self._last = ""

    def start(self, title: str) -> None:
        """Begin a model."""
        self._title, self._started_s, self._last = title, self._clock_s(), ""
        self.tell(0.0)

    def tell(self, fraction: float) -> None:
        """Draw how far it is, 0 to 1."""
        cells = int(fraction * BAR_CELLS)
        elapsed_s = int(self._clock_s() - self._started_s)
        line = f"{self._title} [{'#' * cells}{'.' * (BAR_CELLS - cells)}] {int(fraction * 100):3d} % {elapsed_s:4d} s"
        if self._shown and line != self._last:
            self._stream.write(f"\r{line}")
            self._stream.flush()
            self._last = line

    def clear(self) -> None:
        """Take the line away."""
        if self._shown and self._last:
            self._stream.write("\r" + " " * len(self._last) + "\r")
            self._stream.flush()
            self._last = ""


def main(argv: Sequence[str]) -> int:
    """Build and print a line per bundle version; return the exit status."""
    parser = argparse.ArgumentParser(prog="ringserve build", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", type=Path, help="a repository of bundles, or one bundle")
    parser.add_argument("--numerics", choices=("auto", "tf32", "f32"), default="auto", help="as runtime.numerics")
    parser.add_argument("--gpu", type=int, default=0, help="which GPU to build for (default: the first)")
    parser.add_argument("--force", action="store_true", help="build what is there already, too")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        api = Api.load()
        device_key = key_of_device(api, arguments.gpu)
        repository, bundles = _bundles(arguments.directory)
    except NotReady as error:
        sys.stderr.write(f"ringserve build: {error}\n")
        return 1
    bar = Bar(sys.stderr)
    planner = Planner(
        api, PlanCache(repository / PLAN_FOLDER_OF_REPOSITORY), BuildOptions.of(arguments.numerics), bar.tell
    )
    failed = False
    for result in build(bundles, planner, device_key, bar, anew=arguments.force):
        sys.stdout.write(f"{result.name}: {result.text}\n")
        sys.stdout.flush()
        failed = failed or not result.ok
    return 1 if failed else 0


def key_of_device(api: Api, index: int) -> str:
    """Return what plans of this machine depend on; opens the device for as long as it takes to ask.

    Raises:
        NotReady: TensorRT measures kernels while it builds, and there is no device. RTX needs none.
    """
    if api.is_rtx:
        return "any"
    from engines.device.cupy_device import open_device

    device = open_device(index)
    try:
        return device.key
    finally:
        device.close()


def build(
    bundles: Sequence[Bundle | BrokenBundle], planner: Planner, device_key: str, bar: Bar, *, anew: bool = False
) -> Iterable[Result]:
    """Build each bundle version in turn."""
    for number, bundle in enumerate(bundles, 1):
        bar.start(f"[{number}/{len(bundles)}] {bundle.name}")
        started_s = time.monotonic()
        try:
            result = _built(bundle, planner, device_key, started_s, anew=anew)
        except ServingError as error:
            text = str(error).removeprefix(f"{bundle.name}: ")
            result = Result(_title(bundle), f"cannot be built: {text}", ok=False)
        bar.clear()
        yield result


def _built(bundle: Bundle | BrokenBundle, planner: Planner, device_key: str, started_s: float, *, anew: bool) -> Result:
    title = _title(bundle)
    if isinstance(bundle, BrokenBundle):
        return Result(title, f"cannot be built: {bundle.reason}", ok=False)
    manifest = load_manifest(bundle)
    if manifest.engine not in BUILT_FOR:
        return Result(title, f"left alone: its manifest says engine: {manifest.engine}", ok=True)
    planned, arrays = planner.plan(bundle.name, manifest, bundle.model_file, device_key, anew=anew)
    seconds = time.monotonic() - started_s
    how = "up to date" if planned.cached else f"built in {seconds:.1f} s"
    outside_bytes = sum(array.nbytes for array in arrays.values())
    weights = (
        f"{len(arrays)} weights of {outside_bytes / 1e6:.2f} MB outside it, shared by all batch sizes"
        if arrays
        else f"weights inside it: {planned.reason}"
    )
    return Result(
        title,
        f"{how}; {len(profiles_of(manifest))} profiles, plan of {len(planned.plan) / 1e6:.2f} MB, {weights}",
        ok=True,
    )


def _title(bundle: Bundle | BrokenBundle) -> str:
    return f"{bundle.name} version {bundle.version}" if bundle.version else bundle.name


def _bundles(directory: Path) -> tuple[Path, list[Bundle | BrokenBundle]]:
    """Return the repository that plans belong to, and what to build."""
    directory = directory.absolute()
    if not directory.is_dir():
        raise NotReady(f"{directory}: expected a directory of bundles")
    versions = any(child.is_dir() and child.name.isdigit() for child in directory.iterdir())
    if versions or (directory / "manifest.yaml").exists() or any(directory.glob("*.onnx")):
        return directory.parent, scan_bundle(directory)
    found = scan(directory)
    if not found:
        raise NotReady(f"{directory}: no bundle in it")
    return directory, found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
