"""Runs a freshly loaded model a few times and returns the signature that it really has.

What a manifest or a model file says about the batch axis is a claim. Exporters name dynamic axes as they like, freeze
row counts inside a Reshape, and declare batched outputs that mix rows. So each variant runs on one row, on three rows
and on its largest batch size, and the answers are compared: sizes that follow the batch, rows that equal the same rows
run alone. A model that fails is refused with what to change; serving it would give callers each other's answers.

What is not checked: other values than a seeded draw, and sizes between those that ran.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from engines.base import Model
from engines.bundle.manifest import Manifest, variable_axes
from engines.bundle.signature import Signature, Variant
from engines.errors import EngineFailed, NotReady
from engines.tensor import NDArray, TensorSpec

SEED: Final = 20
PROBE_ROWS: Final = 3
"""Rows of the second run: unlike 1 and 2 it is hardly ever the size of some other axis."""

TOLERANCE: Final[dict[str, tuple[float, float]]] = {
    "f64": (1e-9, 1e-12), "f32": (1e-4, 1e-6), "f16": (2e-2, 1e-3), "bf16": (1e-1, 1e-2),
}  # fmt: skip
"""Per data type (relative to the largest value of the output, absolute) how far a row may differ from the same row run
alone. Kernels for other row counts sum in another order; that is rounding. All other types must be equal."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far rows of a batch were from the same rows run alone.

    Attributes:
        largest: largest absolute difference over the runs.
        allowed: what the data type's tolerance allowed in the run where that was found.
    """

    output: str
    largest: float
    allowed: float


@dataclass(frozen=True, slots=True)
class Probe:
    """What the runs showed.

    Attributes:
        differences: per output with a batch axis, over all variants; empty if no run had more than one row.
        warm_ns: per variant, what its last run took, the one at the largest batch size.
    """

    signature: Signature
    differences: tuple[Difference, ...]
    warm_ns: tuple[int, ...]


def resolve(model: Model, manifest: Manifest) -> Signature:
    """Return the signature with every output size known.

    Raises:
        NotReady: the model fails, contradicts its manifest, or its rows depend on each other; says what to change.
    """
    return probe(model, manifest).signature


def probe(model: Model, manifest: Manifest) -> Probe:
    """Return the signature and what the runs showed; raises like ``resolve``."""
    variants: list[Variant] = []
    largest: dict[str, Difference] = {}
    warm_ns: list[int] = []
    for sizes in manifest.input_shapes or ((),):
        runner = _VariantProbe(model, manifest, tuple(sizes))
        variants.append(runner.resolve())
        warm_ns.append(runner.warm_ns)
        for difference in runner.differences:
            before = largest.get(difference.output)
            if before is None or difference.largest > before.largest:
                largest[difference.output] = difference
    signature = Signature(
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        client_inputs=manifest.client_inputs,
        client_outputs=manifest.client_outputs,
        batch_sizes=manifest.batch_sizes,
        variants=tuple(variants),
    )
    return Probe(signature, tuple(largest.values()), tuple(warm_ns))


def seeded_input(spec: TensorSpec, shape: tuple[int, ...], random: np.random.Generator) -> NDArray:
    """Return values that hardly any model refuses: floats in [0, 1), integers 0 or 1."""
    dtype = spec.element.numpy
    if spec.dtype in TOLERANCE:
        return random.random(shape).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)


class _VariantProbe:
    """The runs of one variant."""

    def __init__(self, model: Model, manifest: Manifest, sizes: tuple[int, ...]) -> None:
        self._model = model
        self._manifest = manifest
        self._sizes = sizes
        self._where = f" (input_shapes {list(sizes)})" if sizes else ""
        self._shapes = _input_shapes(manifest, sizes)
        self.differences: list[Difference] = []
        self.warm_ns = 0

    def resolve(self) -> Variant:
        batch_sizes = self._manifest.batch_sizes
        solo_rows = 1 if len(batch_sizes) > 1 or batch_sizes[0] <= 1 else batch_sizes[0]
        zeros = self._run([np.zeros(shape, dtype) for shape, dtype in self._layout(solo_rows)], "zeros", solo_rows)
        drawn = self._draw(solo_rows)
        solo = self._run(drawn, "small random values", solo_rows)
        self._check_types(solo)
        outputs = tuple(
            self._resolve_output(index, solo_rows, zeros[index].shape, solo[index].shape) for index in range(len(solo))
        )
        if solo_rows > 1:
            self._check_fixed_batch(drawn, solo, solo_rows)
        elif batch_sizes[-1] > 1:
            self._check_batches(batch_sizes[-1])
        return Variant(
            sizes=self._sizes,
            inputs=self._shapes,
            outputs=outputs,
            dynamic_outputs=tuple(any(spec.limits) for spec in self._manifest.outputs),
        )

    def _check_batches(self, max_rows: int) -> None:
        """Compare batches with the same rows run alone."""
        rows = min(PROBE_ROWS, max_rows)
        batch = self._draw(rows)
        alone = [
            self._run(take_rows(self._manifest.inputs, batch, [row]), "small random values", 1) for row in range(rows)
        ]
        for size in sorted({rows, max_rows}):
            together = self._run(
                take_rows(self._manifest.inputs, batch, [row % rows for row in range(size)]),
                "small random values",
                size,
            )
            self._check_types(together)
            for index, spec in enumerate(self._manifest.outputs):
                solo_shape, shape = alone[0][index].shape, together[index].shape
                self._check_growth(index, spec, solo_shape, shape, size)
                if spec.batch_axis is None:
                    continue
                reference = [alone[row % rows][index] for row in range(size)]
                self._compare(spec, reference, together[index], size)

    def _check_fixed_batch(self, drawn: list[NDArray], first: list[NDArray], rows: int) -> None:
        """Where only one size can run: change every row but the first, and the first row's answer must stay."""
        changed = self._draw(rows, SEED + 1)
        for spec, array, original in zip(self._manifest.inputs, changed, drawn, strict=True):
            if spec.batch_axis is None:
                array[...] = original
            else:
                np.moveaxis(array, spec.batch_axis, 0)[0] = np.moveaxis(original, spec.batch_axis, 0)[0]
        second = self._run(changed, "small random values", rows)
        for spec, before, after in zip(self._manifest.outputs, first, second, strict=True):
            if spec.batch_axis is not None:
                self._compare(spec, [np.take(before, [0], axis=spec.batch_axis)], after, rows)

    def _layout(self, rows: int) -> list[tuple[tuple[int, ...], np.dtype[np.generic]]]:
        return [
            (tuple(rows if axis == spec.batch_axis else size for axis, size in enumerate(shape)), spec.element.numpy)
            for spec, shape in zip(self._manifest.inputs, self._shapes, strict=True)
        ]

    def _draw(self, rows: int, seed: int = SEED) -> list[NDArray]:
        random = np.random.default_rng(seed)
        return [
            seeded_input(spec, shape, random)
            for spec, (shape, _) in zip(self._manifest.inputs, self._layout(rows), strict=True)
        ]

    def _run(self, inputs: list[NDArray], values: str, rows: int) -> list[NDArray]:
        started_ns = time.monotonic_ns()
        try:
            outputs = self._model.run(inputs)
        except EngineFailed as error:
            if self._manifest.batch_sizes == (0,):
                raise NotReady(f"the model fails on {values}{self._where}: {error}") from error
            if rows > 1 and rows not in self._manifest.batch_sizes[:1]:
                raise NotReady(
                    f"the model runs with 1 row but fails with {rows}{self._where}: {error}; a row count seems to be "
                    "frozen inside it: export it with a dynamic batch axis, or serve it with "
                    "batching.compiled_batch_sizes: [1]"
                ) from error
            padding = "; padding rows are zeros, so it must accept them" if values == "zeros" else ""
            raise NotReady(f"the model fails on {values}{self._where}: {error}{padding}") from error
        self.warm_ns = time.monotonic_ns() - started_ns
        return outputs

    def _check_types(self, outputs: list[NDArray]) -> None:
        for index, (spec, array) in enumerate(zip(self._manifest.outputs, outputs, strict=True)):
            if array.dtype != spec.element.numpy:
                raise NotReady(
                    f"executable_outputs[{index}].dtype: '{spec.name}' is {array.dtype.name} when run, "
                    f"{spec.dtype} in the manifest"
                )
            if array.ndim != len(spec.shape):
                raise NotReady(
                    f"executable_outputs[{index}].shape: '{spec.name}' has {array.ndim} axes when run "
                    f"{list(array.shape)}{self._where}, {len(spec.shape)} in the manifest"
                )

    def _resolve_output(
        self, index: int, rows: int, zeros_shape: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        spec = self._manifest.outputs[index]
        place = f"executable_outputs[{index}]"
        resolved: list[int] = []
        for axis, (declared, size) in enumerate(zip(spec.shape, shape, strict=True)):
            limit = spec.limits[axis] if axis < len(spec.limits) else 0
            if axis == spec.batch_axis:
                if size != rows:
                    raise NotReady(
                        f"{place}.shape: the batch axis {axis} of '{spec.name}' has {size} entries when run with "
                        f"{rows} row(s){self._where}; expected one entry per row"
                    )
                resolved.append(-1)
            elif limit:
                if max(size, zeros_shape[axis]) > limit:
                    raise NotReady(
                        f"{place}.max: axis {axis} of '{spec.name}' had {max(size, zeros_shape[axis])} entries when "
                        f"run{self._where}, max allows {limit}"
                    )
                resolved.append(limit)
            elif size != zeros_shape[axis]:
                raise NotReady(
                    f"{place}.max: the size of axis {axis} of '{spec.name}' depends on the data ({zeros_shape[axis]} "
                    f"entries on zeros, {size} on random values{self._where}); declare its largest size under max"
                )
            elif declared >= 0 and declared != size:
                raise NotReady(
                    f"{place}.dims: axis {axis} of '{spec.name}' is {size} when run{self._where}, {declared} in the "
                    f"manifest; write {size}, or -1 if it follows the inputs"
                )
            else:
                resolved.append(size)
        return tuple(resolved)

    def _check_growth(
        self, index: int, spec: TensorSpec, solo: tuple[int, ...], shape: tuple[int, ...], rows: int
    ) -> None:
        """Compare which axis really grew with the batch with the one declared."""
        place = f"executable_outputs[{index}].shape: output '{spec.name}'"
        limited = [axis for axis, limit in enumerate(spec.limits) if limit]
        grew = [axis for axis in range(len(shape)) if axis not in limited and shape[axis] != solo[axis]]
        if spec.batch_axis is None:
            if grew:
                raise NotReady(
                    f"{place} has no batch axis in the manifest, but axis {grew[0]} grows from {solo[grew[0]]} to "
                    f"{shape[grew[0]]} with {rows} rows{self._where}; mark it with the letter n"
                )
            return
        axis = spec.batch_axis
        if shape[axis] != rows:
            follows = next((other for other in grew if solo[other] == 1 and shape[other] == rows), None)
            hint = f"; axis {follows} follows the batch: mark that one with the letter n" if follows is not None else ""
            raise NotReady(
                f"{place}: the batch axis {axis} has {shape[axis]} entries when run with {rows} rows{self._where}, "
                f"expected {rows}{hint or '; serve it with batching.compiled_batch_sizes: [1]'}"
            )
        if grew != [axis]:
            other = next(grown for grown in grew if grown != axis)
            raise NotReady(
                f"{place}: axis {other} grows from {solo[other]} to {shape[other]} with {rows} rows{self._where} as "
                "well as the batch axis; only one axis may follow the batch"
            )

    def _compare(self, spec: TensorSpec, alone: list[NDArray], together: NDArray, rows: int) -> None:
        for row, solo in enumerate(alone):
            self.differences.append(compare_rows(spec, solo, together, row, rows, self._where))


def take_rows(specs: Sequence[TensorSpec], arrays: Sequence[NDArray], rows: list[int]) -> list[NDArray]:
    """Return inputs with only these rows, in this order; tensors without a batch axis as they are."""
    return [
        array if spec.batch_axis is None else np.ascontiguousarray(np.take(array, rows, axis=spec.batch_axis))
        for spec, array in zip(specs, arrays, strict=True)
    ]


def compare_rows(
    spec: TensorSpec, alone: NDArray, together: NDArray, row: int, batch_rows: int, where: str
) -> Difference:
    """Return how far row ``row`` of a batch is from its answer alone, given as a batch of one row.

    Sizes that depend on the data are not compared: some models pad them to the longest row of a batch.

    Raises:
        NotReady: by more than the tolerance of the output's type.
    """
    assert spec.batch_axis is not None
    got = np.take(together, [row], axis=spec.batch_axis)
    if got.shape != alone.shape:
        return Difference(spec.name, 0.0, 0.0)
    distance, allowed = _distance(spec, alone, got)
    if distance > allowed:
        raise NotReady(
            f"output '{spec.name}': row {row} of a batch of {batch_rows} differs from the same row with other "
            f"neighbours by {distance:.6g}, allowed is {allowed:.3g} for {spec.dtype}{where}: the model mixes rows or "
            "is wrong above one row, so requests cannot share a batch; serve it with batching.compiled_batch_sizes: [1]"
        )
    return Difference(spec.name, distance, allowed)


def _input_shapes(manifest: Manifest, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return full input shapes of a variant, -1 left at the batch axis only."""
    axes = variable_axes(manifest.inputs)
    if len(axes) != len(sizes):
        raise NotReady(f"input_shapes: expected {len(axes)} sizes, one per variable axis, got {list(sizes)}")
    shapes = [list(spec.shape) for spec in manifest.inputs]
    for (index, axis), size in zip(axes, sizes, strict=True):
        shapes[index][axis] = size
    return tuple(tuple(shape) for shape in shapes)


def _distance(spec: TensorSpec, reference: NDArray, got: NDArray) -> tuple[float, float]:
    """Return (largest difference, what is allowed); inf if one is NaN or infinite where the other is not."""
    if reference.size == 0:
        return 0.0, 0.0
    if spec.dtype not in TOLERANCE:
        if np.array_equal(reference, got):
            return 0.0, 0.0
        return float(np.abs(reference.astype(np.float64) - got.astype(np.float64)).max()) or 1.0, 0.0
    a, b = reference.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(a)
    same_elsewhere = np.array_equal(a[~finite], b[~finite], equal_nan=True) and bool(np.isfinite(b[finite]).all())
    if not same_elsewhere:
        return float("inf"), 0.0
    relative, absolute = TOLERANCE[spec.dtype]
    if not finite.any():
        return 0.0, absolute
    scale = float(np.abs(a[finite]).max())
    return float(np.abs(a[finite] - b[finite]).max()), absolute + relative * scale
