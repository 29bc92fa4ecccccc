"""``python -m worker.check DIR [--json]``: what a bundle offers, or exactly what is wrong with it.

It does what the worker does before it serves a bundle, and more: every compiled executable runs once and its rows are
compared with the same rows run alone, not only the sizes that the probe looks at. Hooks are not run (they belong to
frontends); a ``model.py`` is only compiled, which finds syntax errors.

Exit status: 0 all bundles can be served, 1 at least one cannot.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from engines.base import Model
from engines.bundle.derive import disagreements, read_graph, to_yaml
from engines.bundle.manifest import MANIFEST_FILE, Manifest, ManifestError
from engines.bundle.repository import BrokenBundle, Bundle, load_manifest, scan, scan_bundle
from engines.bundle.signature import Signature
from engines.errors import NotReady, ServingError
from engines.probe import Difference, compare_rows, probe, seeded_input, take_rows
from engines.select import BACKENDS, EngineSet
from engines.tensor import TensorSpec
from engines.tensorrt.planning import Planner
from worker.check_built import ENGINE, build_note, planner_without_device
from worker.config import RuntimeSettings

SEED: Final = 7
MAX_COMPARED_ROWS: Final = 4
"""Rows of one execution that are compared: the first, the last and two between find what goes wrong by position."""
_KEY: Final = re.compile(
    r"^(?P<key>(?:executable_inputs|executable_outputs|input_shapes|batching)[\w.\[\]]*): (?P<rest>.*)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that keeps a bundle from serving; ``key`` is empty where no manifest key is to blame."""

    file: str
    key: str
    message: str


@dataclass(slots=True)
class Report:
    """What was found out about one bundle version; empty fields were not reached.

    Attributes:
        variants: per variant the sizes of its variable axes and its full input and output shapes, -1 at the batch axis.
        differences: per output, the largest difference between rows of a batch and the same rows alone.
        compute_ms: per variant and batch size, one execution on random values.
    """

    name: str
    version: str
    path: str
    derived: bool = False
    manifest: str = ""
    engine: str = ""
    batch_sizes: list[int] = field(default_factory=list)
    coalesces: bool = False
    shares_blocks: bool = False
    inputs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    client_inputs: list[dict[str, Any]] = field(default_factory=list)
    client_outputs: list[dict[str, Any]] = field(default_factory=list)
    variants: list[dict[str, Any]] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)
    compute_ms: list[dict[str, Any]] = field(default_factory=list)
    weights_bytes: int = 0
    scratch_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the bundle can be served."""
        return not self.mistakes


def main(argv: Sequence[str]) -> int:
    """Print a report per bundle version and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m worker.check", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", type=Path, help="a bundle, one of its versions, or a repository of bundles")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--threads", type=int, default=0, help="threads to compute with (default: by CPUs)")
    parser.add_argument("--backend", default="auto", choices=BACKENDS, help="as runtime.backend (default: auto)")
    arguments = parser.parse_args(argv)
    try:
        reports = check(arguments.directory, RuntimeSettings(threads=arguments.threads, backend=arguments.backend))
    except NotReady as error:
        sys.stderr.write(f"ringserve check: {error}\n")
        return 1
    ok = all(report.ok for report in reports)
    if arguments.json:
        bundles = [{"ok": report.ok, **asdict(report)} for report in reports]
        json.dump({"ok": ok, "bundles": bundles}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.write("\n\n".join(rendered(report) for report in reports) + "\n")
    return 0 if ok else 1


def check(directory: Path, runtime: RuntimeSettings) -> list[Report]:
    """Return a report per bundle version that ``directory`` holds; at least one.

    Raises:
        NotReady: the backend cannot be used on this machine.
    """
    try:
        bundles = _bundles(directory)
    except NotReady as error:
        report = Report(directory.name, "", str(directory))
        report.mistakes.append(Mistake(str(directory), "", str(error)))
        return [report]
    planner = planner_without_device(runtime.numerics) if runtime.backend == "tensorrt" else None
    # Bundles that name another engine are still run by that one.
    engines = EngineSet(runtime if planner is None else msgspec.structs.replace(runtime, backend="cpu"))
    try:
        engines.start()
        return [_check_bundle(bundle, engines, planner) for bundle in bundles]
    finally:
        engines.close()


def _bundles(directory: Path) -> list[Bundle | BrokenBundle]:
    directory = directory.absolute()
    if not directory.is_dir():
        what = "is a file, expected the directory it lies in" if directory.exists() else "does not exist"
        raise NotReady(f"{directory} {what}")
    if directory.name.isdigit() and _has_bundle_files(directory):
        return [bundle for bundle in scan_bundle(directory.parent) if bundle.path == directory]
    versions = [child for child in directory.iterdir() if child.is_dir() and child.name.isdigit()]
    if versions or _has_bundle_files(directory):
        return scan_bundle(directory)
    found = scan(directory)
    return found or scan_bundle(directory)


def _has_bundle_files(directory: Path) -> bool:
    return (directory / MANIFEST_FILE).exists() or any(directory.glob("*.onnx"))


def _check_bundle(bundle: Bundle | BrokenBundle, engines: EngineSet, planner: Planner | None) -> Report:
    report = Report(bundle.name, bundle.version, str(bundle.path))
    if isinstance(bundle, BrokenBundle):
        report.mistakes.append(Mistake(str(bundle.path), "", bundle.reason))
        return report
    report.notes.extend(bundle.notes)
    _compile_hooks(bundle, report)
    manifest_file = str(bundle.manifest_path or bundle.model_file)
    try:
        manifest = load_manifest(bundle)
        report.derived = manifest.derived
        report.manifest = to_yaml(manifest)
        if planner is not None and manifest.engine in ("auto", "tensorrt"):
            report.engine = ENGINE
            report.notes.append(build_note(planner, bundle.name, manifest, bundle.model_file))
        else:
            _run_model(bundle, manifest, engines, report)
    except ManifestError as error:
        report.mistakes.extend(
            Mistake(problem.file, problem.key, f"expected {problem.expected}, found {problem.found}; {problem.fix}")
            for problem in error.problems
        )
    except ServingError as error:
        found = _KEY.match(str(error))
        key, message = (found["key"], found["rest"]) if found is not None else ("", str(error))
        report.mistakes.append(Mistake(manifest_file, key, message))
    return report


def _compile_hooks(bundle: Bundle, report: Report) -> None:
    if bundle.model_py is None:
        return
    try:
        compile(bundle.model_py.read_bytes(), str(bundle.model_py), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        report.mistakes.append(Mistake(str(bundle.model_py), "", f"is not valid Python: {reason}{line}"))
    except OSError as error:
        report.mistakes.append(Mistake(str(bundle.model_py), "", f"cannot be read: {error.strerror or error}"))
    else:
        report.notes.append(f"{bundle.model_py.name} compiles; its functions run in frontends and were not tried")


def _run_model(bundle: Bundle, manifest: Manifest, engines: EngineSet, report: Report) -> None:
    engine = engines.choose(manifest.engine)
    report.engine = engine.name
    try:
        model = engine.open(manifest, bundle.model_file)
    except NotReady:
        if not manifest.derived:
            # The same contradictions, each with its own place and fix.
            problems = [
                problem
                for problem in disagreements(manifest, read_graph(bundle.model_file), str(bundle.manifest_path))
                # An output size left to the probe serves just as well as the one that the file names.
                if not (problem.key.startswith("executable_outputs") and problem.found == "-1")
            ]
            if problems:
                raise ManifestError(problems) from None
        raise
    try:
        found = probe(model, manifest)
        model.prepare(found.signature)
        _describe(found.signature, report)
        largest = {difference.output: difference for difference in found.differences}
        _run_executables(model, found.signature, largest, report)
        report.differences = [asdict(difference) for difference in largest.values()]
        report.weights_bytes = model.footprint.weights_bytes
        report.scratch_bytes = model.footprint.scratch_bytes
    finally:
        model.close()


def _describe(signature: Signature, report: Report) -> None:
    report.batch_sizes = list(signature.batch_sizes)
    report.coalesces = signature.coalesces
    report.shares_blocks = signature.shares_blocks
    report.inputs = [_tensor(spec) for spec in signature.inputs]
    report.outputs = [_tensor(spec) for spec in signature.outputs]
    report.client_inputs = [_tensor(spec) for spec in signature.client_inputs]
    report.client_outputs = [_tensor(spec) for spec in signature.client_outputs]
    report.variants = [
        {"sizes": list(variant.sizes), "inputs": list(variant.inputs), "outputs": list(variant.outputs)}
        for variant in signature.variants
    ]


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name, "dtype": spec.dtype, "datatype": spec.element.wire, "shape": list(spec.shape),
        "batch_axis": spec.batch_axis, "limits": list(spec.limits),
    }  # fmt: skip


def _run_executables(model: Model, signature: Signature, largest: dict[str, Difference], report: Report) -> None:
    """Run every (variant, batch size) as the worker will and compare each row with the same row run alone.

    Raises:
        NotReady: rows differ by more than the tolerance; names variant, size and output.
        EngineFailed: an execution failed.
    """
    solo_runs = signature.batch_sizes != (0,) and (signature.batch_sizes[0] == 1 or len(signature.batch_sizes) > 1)
    for index, variant in enumerate(signature.variants):
        where = f" (input_shapes {list(variant.sizes)})" if variant.sizes else ""
        for batch_size in signature.batch_sizes:
            random = np.random.default_rng(SEED)
            executable = model.executable(index, batch_size)
            slot = executable.slot()
            for spec, array in zip(signature.inputs, slot.inputs, strict=True):
                array[...] = seeded_input(spec, array.shape, random)
            executable.stage(slot)
            executable.launch(slot)
            timing = executable.finish(slot)
            report.compute_ms.append(
                {"sizes": list(variant.sizes), "batch_size": batch_size, "compute_ms": timing.compute_ns / 1e6}
            )
            if not solo_runs:
                continue
            together = [output.copy() for output in slot.outputs]
            for row in _sampled(batch_size):
                alone = model.run(take_rows(signature.inputs, slot.inputs, [row]))
                for spec, solo, batch in zip(signature.outputs, alone, together, strict=True):
                    if spec.batch_axis is not None:
                        difference = compare_rows(spec, solo, batch, row, batch_size, where)
                        before = largest.get(spec.name)
                        if before is None or difference.largest > before.largest:
                            largest[spec.name] = difference


def _sampled(rows: int) -> list[int]:
    return sorted({round(place * (rows - 1) / (MAX_COMPARED_ROWS - 1)) for place in range(MAX_COMPARED_ROWS)})


def rendered(report: Report) -> str:
    """Return a report as text for a person."""
    title = f"{report.name} version {report.version}" if report.version else report.name
    lines = [f"{title}: {'OK' if report.ok else 'cannot be served'}", f"  path          {report.path}"]
    if report.derived:
        lines += ["  manifest      derived from the model file; as a manifest.yaml it would read:"]
        lines += [f"                  {line}" for line in report.manifest.rstrip().splitlines()]
    if report.engine:
        lines.append(f"  engine        {report.engine}")
    if report.batch_sizes:
        sizes = ", ".join(map(str, report.batch_sizes)) if report.batch_sizes != [0] else "none (no batch axis)"
        lines.append(f"  batch sizes   {sizes}; requests {'share' if report.coalesces else 'do not share'} batches")
    for label, tensors in (("input", report.inputs), ("output", report.outputs)):
        lines += [f"  {label:<13} {_tensor_text(tensor)}" for tensor in tensors]
    for label, tensors, executable in (
        ("client input", report.client_inputs, report.inputs),
        ("client output", report.client_outputs, report.outputs),
    ):
        if tensors != executable:
            lines += [f"  {label:<13} {_tensor_text(tensor)}" for tensor in tensors]
    for variant in report.variants:
        shapes = " -> ".join(", ".join(map(_shape_text, variant[key])) for key in ("inputs", "outputs"))
        lines.append(f"  variant       {variant['sizes'] or 'only one'}: {shapes}")
    for found in report.differences:
        lines.append(
            f"  batch check   output {found['output']}: rows of a batch differ from the same rows alone by at most "
            f"{found['largest']:.3g} (allowed {found['allowed']:.3g})"
        )
    for run in report.compute_ms:
        place = f"{run['sizes']} " if run["sizes"] else ""
        lines.append(f"  execution     {place}batch size {run['batch_size']}: {run['compute_ms']:.3f} ms")
    if report.weights_bytes or report.scratch_bytes:
        lines.append(
            f"  memory        weights {report.weights_bytes / 1e6:.1f} MB, scratch about "
            f"{report.scratch_bytes / 1e6:.1f} MB"
        )
    lines += [f"  note          {note}" for note in report.notes]
    lines += [f"  mistake       {_mistake_text(mistake)}" for mistake in report.mistakes]
    return "\n".join(lines)


def _mistake_text(mistake: Mistake) -> str:
    text = mistake.message.rstrip().replace("\n", "\n                  ")
    if text.startswith(mistake.file):
        return text
    return f"{mistake.file}: {mistake.key}: {text}" if mistake.key else f"{mistake.file}: {text}"


def _tensor_text(tensor: dict[str, Any]) -> str:
    axes = [
        "n" if axis == tensor["batch_axis"]
        else f"<={tensor['limits'][axis]}" if tensor["limits"] and tensor["limits"][axis]
        else "*" if size < 0 else str(size)
        for axis, size in enumerate(tensor["shape"])
    ]  # fmt: skip
    return f"{tensor['name']} {tensor['datatype']} [{', '.join(axes)}]"


def _shape_text(shape: Sequence[int]) -> str:
    return "[" + ", ".join("n" if size < 0 else str(size) for size in shape) + "]"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
