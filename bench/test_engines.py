"""One execution of a batch, by how its rows get in and out: engine buffers, in place, or the runtime's own ``run``.

    .venv/bin/pytest bench/test_engines.py --benchmark-group-by=group

The model (multiply and add) is bound by memory, so what differs is copying. *staged* copies rows into the engine's
buffers and out again, as the worker does for rows scattered over blocks; *bound* runs on the caller's arrays, as for
rows that lie together; *run* is the public API of the library with fresh outputs, copied to where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import onnx_models
from engines.array.engine import ArrayEngine
from engines.onnxruntime import OnnxRuntimeEngine
from engines.probe import resolve
from manifests import manifest

ROW_BYTES = (256, 16 * 1024, 1024 * 1024)
BATCH_SIZES = (1, 8, 32)
SHAPES = [(row_bytes, batch) for row_bytes in ROW_BYTES for batch in BATCH_SIZES if row_bytes * batch <= 16 << 20]


class Batch:
    """A loaded model, one executable and the caller's arrays."""

    def __init__(self, engine: Any, folder: Path, row_bytes: int, batch: int) -> None:
        columns = row_bytes // 4
        wanted = manifest([f"INPUT f32 n {columns}"], [f"OUTPUT f32 n {columns}"], (1, batch) if batch > 1 else (1,))
        self.path = onnx_models.affine(folder, columns=columns)
        self.model = engine.open(wanted, self.path)
        self.model.prepare(resolve(self.model, wanted))
        self.executable = self.model.executable(0, batch)
        self.rows = np.random.default_rng(0).random((batch, columns), dtype=np.float32)
        self.out = np.zeros_like(self.rows)

    def staged(self) -> None:
        slot = self.executable.slot()
        slot.inputs[0][...] = self.rows
        self.executable.stage(slot)
        self.executable.launch(slot)
        self.executable.finish(slot)
        self.out[...] = slot.outputs[0]

    def bound(self) -> None:
        slot = self.executable.bind([self.rows], [self.out])
        self.executable.stage(slot)
        self.executable.launch(slot)
        self.executable.finish(slot)


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape[0]}B-x{shape[1]}")
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture
def batch(tmp_path: Path, shape: tuple[int, int]) -> Iterator[Batch]:
    made = Batch(OnnxRuntimeEngine(threads=1), tmp_path / "m", *shape)
    yield made
    made.model.close()


def measure(benchmark: Any, group: str, shape: tuple[int, int], call: Callable[[], None], batch: Batch) -> None:
    benchmark.group = f"{group} {shape[0]} B x {shape[1]}"
    benchmark(call)
    np.testing.assert_allclose(batch.out, batch.rows * 2 + 1, rtol=1e-6)


def test_staged(benchmark: Any, batch: Batch, shape: tuple[int, int]) -> None:
    measure(benchmark, "engine", shape, batch.staged, batch)


def test_bound(benchmark: Any, batch: Batch, shape: tuple[int, int]) -> None:
    measure(benchmark, "engine", shape, batch.bound, batch)


def test_run(benchmark: Any, batch: Batch, shape: tuple[int, int]) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(batch.path), options, providers=["CPUExecutionProvider"])

    def run() -> None:
        batch.out[...] = session.run(["OUTPUT"], {"INPUT": batch.rows})[0]

    measure(benchmark, "engine", shape, run, batch)


def test_bound_array_engine(benchmark: Any, tmp_path: Path) -> None:
    batch = Batch(ArrayEngine(), tmp_path / "m", 16 * 1024, 8)
    measure(benchmark, "engine", (16 * 1024, 8), batch.bound, batch)
    batch.model.close()


def test_load_probe_close(benchmark: Any, tmp_path: Path) -> None:
    """A 32 MB model from file to ready and gone again."""
    wanted = manifest(["INPUT f32 n 1024"], ["OUTPUT f32 n 1024"], (1, 8))
    path = onnx_models.mlp(tmp_path / "m", layers=8, width=1024)
    engine = OnnxRuntimeEngine(threads=1)

    def cycle() -> None:
        model = engine.open(wanted, path)
        model.prepare(resolve(model, wanted))
        model.close()

    benchmark.group = "load, probe and close 32 MB"
    benchmark.pedantic(cycle, rounds=5, warmup_rounds=1)
