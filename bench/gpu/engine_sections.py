"""Sections about engines on the device: answers against numpy, loads and evictions, latency, TensorRT."""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import onnx_models
from bench.gpu.world import World, wall_s
from engines.array.engine import ArrayEngine
from engines.base import Executable, Model
from engines.bundle.manifest import Manifest
from engines.device.shared import SharedDevice
from engines.errors import NotReady
from engines.probe import TOLERANCE, resolve
from engines.tensor import NDArray
from manifests import manifest

RUNS = 5
"""Of each executable: the first is plain, the next on each of its slots may be captured, the others replay."""
MEMORY_SLACK_BYTES = 32 << 20
"""What libraries may keep for themselves between two looks at the GPU's free memory."""


def models(world: World) -> list[tuple[str, Path, Manifest]]:
    """Return models of the kinds that matter, with weights nobody has seen before."""
    seed = int(world.random.integers(1 << 31))
    wide = 1024 if world.report.is_gpu else 32
    root = world.work_dir
    rows = ["OUTPUT f32 n 8"]
    return [
        ("affine", onnx_models.affine(root / "affine", 3.0, -2.0), manifest(["INPUT f32 n 8"], rows, (1, 8, 32))),
        (
            "mlp",
            onnx_models.mlp(root / "mlp", 4, wide, seed=seed),
            manifest([f"INPUT f32 n {wide}"], [f"OUTPUT f32 n {wide}"], (1, 8, 32)),
        ),
        (
            "half_mlp",
            onnx_models.half_mlp(root / "half", 64, seed=seed),
            manifest(["INPUT f16 n 64"], ["OUTPUT f16 n 64"], (1, 8)),
        ),
        (
            "sequence",
            onnx_models.sequence(root / "sequence", seed=seed),
            manifest(["IDS i64 n -1"], ["HIDDEN f32 n -1 8", "MEAN f32 n 8"], (1, 4), [[4], [16]]),
        ),
        (
            "positives",
            onnx_models.positives(root / "positives"),
            manifest(["SCORES f32 8"], ["KEPT f32 -1<=8", "INDEX i64 -1<=8"], (0,)),
        ),
    ]


def run(executable: Executable, inputs: list[NDArray]) -> list[NDArray]:
    """Return what an executable makes of full inputs."""
    slot = executable.slot()
    for buffer, array in zip(slot.inputs, inputs, strict=True):
        buffer[...] = array
    executable.stage(slot)
    executable.launch(slot)
    executable.finish(slot)
    return [output.copy() for output in slot.outputs]


def draw(world: World, executable: Executable) -> list[NDArray]:
    """Return fresh inputs for an executable."""
    return [
        world.random.integers(0, 100, buffer.shape).astype(buffer.dtype)
        if buffer.dtype.kind in "iu"
        else world.random.standard_normal(buffer.shape).astype(buffer.dtype)
        for buffer in executable.slot().inputs
    ]


def compare(world: World, title: str, model: Model, reference: Model, wanted: Manifest, loose: float = 1.0) -> None:
    """Check every executable of a model against one on numpy; ``loose`` widens the tolerance of TF32."""
    worst, right = 0.0, True
    variants = range(max(1, len(wanted.input_shapes)))
    for variant in variants:
        for size in wanted.batch_sizes:
            executable = model.executable(variant, size)
            for _ in range(RUNS):
                inputs = draw(world, executable)
                for got, want in zip(run(executable, inputs), reference.run(inputs), strict=True):
                    right &= got.shape == want.shape and got.dtype == want.dtype
                    if not right or not want.size:
                        continue
                    relative, absolute = TOLERANCE.get("f16" if want.dtype == np.float16 else "f32", (0, 0))
                    scale = float(np.abs(want).max())
                    distance = float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max())
                    worst = max(worst, distance / (scale or 1))
                    right &= distance <= (absolute + relative * scale) * loose
    world.report.check(f"{title}: equal to numpy on fresh inputs", right, f"largest relative difference {worst:.2g}")


def latency(world: World, title: str, model: Model, wanted: Manifest) -> None:
    """Tell what one execution takes."""
    for size in wanted.batch_sizes:
        executable = model.executable(0, size)
        inputs = draw(world, executable)
        wall_us = wall_s(lambda executable=executable, inputs=inputs: run(executable, inputs), 30) * 1e6  # type: ignore[misc]
        world.report.figure(f"{title}, batch {size}, copies in and out included", wall_us, "us")


def opened(engine: Any, path: Path, wanted: Manifest) -> Any:
    model = engine.open(wanted, path)
    try:
        model.prepare(resolve(model, wanted))
    except BaseException:
        model.close()
        raise
    return model


def array_engine(world: World) -> None:
    """Every kind of model on the device against numpy."""
    with world.engine() as (_, engine):
        for name, path, wanted in models(world):
            with closing(opened(engine, path, wanted)) as model, closing(ArrayEngine().open(wanted, path)) as reference:
                compare(world, name, model, reference, wanted)
                latency(world, name, model, wanted)
        graphs_of_engine(world, engine)


def graphs_of_engine(world: World, engine: Any) -> None:
    """The same model with and without graphs."""
    path, wanted = (
        onnx_models.affine(world.work_dir / "graphs", 1.5, 0.5),
        manifest(["INPUT f32 n 8"], ["OUTPUT f32 n 8"]),
    )
    answers, capabilities = [], world.device.capabilities
    inputs = [world.random.standard_normal((8, 8)).astype(np.float32)]
    for with_graphs in (True, False):
        world.device.capabilities = dataclasses.replace(capabilities, graphs=with_graphs)  # type: ignore[misc]
        try:
            model = opened(engine, path, wanted)
        finally:
            world.device.capabilities = capabilities  # type: ignore[misc]
        with closing(model):
            executable = model.executable(0, 8)
            answers.append([run(executable, inputs)[0] for _ in range(RUNS)][-1])
            took_us = wall_s(lambda executable=executable: run(executable, inputs), 30) * 1e6  # type: ignore[misc]
            world.report.figure(f"affine, batch 8, {'graph' if with_graphs else 'plain launches'}", took_us, "us")
    world.report.check("graphs and plain launches agree bit by bit", np.array_equal(answers[0], answers[1]))


def loads(world: World) -> None:
    """Loading and evicting weights again and again, and what stays behind."""
    report = world.report
    layers, width = (8, 2048) if report.is_gpu else (2, 32)
    path = onnx_models.mlp(world.work_dir / "loads", layers, width, seed=int(world.random.integers(1 << 31)))
    wanted = manifest([f"INPUT f32 n {width}"], [f"OUTPUT f32 n {width}"], (1, 8))
    with world.engine() as (shared, engine):
        cycle(world, "array", shared, engine, path, wanted)


def cycle(world: World, title: str, shared: SharedDevice, engine: Any, path: Path, wanted: Manifest) -> None:
    """Load and evict one model, then open and close it."""
    report, device = world.report, world.device
    with closing(opened(engine, path, wanted)) as model:
        load_and_evict(world, title, shared, model)
    slack = MEMORY_SLACK_BYTES if report.is_gpu else 0
    before = device.memory().free_bytes
    for _ in range(3):
        opened(engine, path, wanted).close()
    drift = before - device.memory().free_bytes
    report.check(
        f"{title}: opening and closing gives everything back",
        drift <= slack and not shared.arena.memory().used_bytes,
        f"{drift} bytes",
    )


def load_and_evict(world: World, title: str, shared: SharedDevice, model: Any) -> None:
    """Do it again and again, and look at answers and memory."""
    report, device = world.report, world.device
    executable = model.executable(0, 8)
    inputs = draw(world, executable)
    expected = run(executable, inputs)[0]
    free, right, times = device.memory().free_bytes, True, []
    for _ in range(world.cycles):
        model.unload()
        began = time.perf_counter()
        model.load()
        device.synchronize()
        times.append(time.perf_counter() - began)
        right &= np.array_equal(run(executable, inputs)[0], expected)
    report.check(f"{title}: {world.cycles} loads and evictions leave the answers as they were", right)
    drift = free - device.memory().free_bytes
    slack = MEMORY_SLACK_BYTES if report.is_gpu else 0
    report.check(f"{title}: no memory drifts away", drift <= slack, f"{drift} bytes")
    in_arena = shared.arena.memory().used_bytes
    size = getattr(model, "evictable_bytes", in_arena)
    load_s = float(np.median(times))
    report.figure(f"{title}: one load", load_s * 1e3, "ms", f"{size / 1e6:.0f} MB, {size / load_s / 1e9:.1f} GB/s")
    # Weights inside a plan, which TensorRT-RTX can unload, lie beside the arena.
    if in_arena:
        held = in_arena <= model.footprint.weights_bytes
        report.check(f"{title}: the arena holds the model's weights", held)
    report.check(f"{title}: what can be evicted is known", 0 < size <= model.footprint.weights_bytes)


def tensorrt(world: World) -> None:
    """The same with TensorRT where it is installed."""
    from engines.tensorrt.names import Api

    if not world.report.is_gpu:
        world.report.left_out("TensorRT", "there is no GPU")
        return
    try:
        api = Api.load()
    except NotReady as error:
        world.report.left_out("TensorRT", str(error))
        return
    tensorrt_with(world, api)


def tensorrt_with(world: World, api: Any) -> None:
    """Weights outside the plan and inside: answers, latency, loads; ``api`` is the library behind its seam."""
    from engines.tensorrt.builder import BuildOptions
    from engines.tensorrt.engine import TensorRTEngine
    from engines.tensorrt.network import ModelFile
    from engines.tensorrt.plan_cache import PlanCache
    from engines.tensorrt.planning import Planner
    from engines.tensorrt.profiles import profiles_of

    class Inside(Planner):
        """Bakes the weights into the plan."""

        def plan(self, name: str, manifest: Manifest, model_file: Path, device_key: str, *, anew: bool = False) -> Any:
            network, profiles = ModelFile(model_file, manifest).inside(), profiles_of(manifest)
            return self._inside(name, network, profiles, device_key, "asked for", anew, model_file), {}

    report = world.report
    report.facts["tensorrt"] = f"{api.name} {api.version}"
    options = BuildOptions.of("f32")
    _, path, wanted = models(world)[1]
    reference = ArrayEngine().open(wanted, path)
    for title, planner in (
        ("TensorRT, weights outside", Planner(api, PlanCache(None), options)),
        ("TensorRT, weights inside", Inside(api, PlanCache(None), options)),
    ):
        if world.late:
            report.left_out(title, "out of time")
            continue
        shared = SharedDevice(world.device, world.arena_bytes)
        shared.start()
        engine = TensorRTEngine(api, shared, planner)
        engine.start()
        try:
            began = time.perf_counter()
            with closing(opened(engine, path, wanted)) as model:
                report.figure(f"{title}: build, load and probe", time.perf_counter() - began, "s")
                compare(world, title, model, reference, wanted)
                latency(world, title, model, wanted)
                evictable = model.evictable_bytes > 0
            if evictable:
                cycle(world, title, shared, engine, path, wanted)
        finally:
            engine.close()
            shared.close()
    reference.close()
