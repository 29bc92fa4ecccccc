"""Sections about batches on their way: rows straight from arenas, and the next batch copied while one runs."""

from __future__ import annotations

import numpy as np

import onnx_models
from bench.gpu.engine_sections import opened
from bench.gpu.world import World, fill, wall_s
from engines.base import Executable, Rows, Slot
from engines.device.base import Span, Stream
from engines.device.errors import CannotRegister
from engines.device.transfer import DIRECT_BYTES
from engines.tensor import NDArray
from manifests import manifest

ROW_KIB = (1, 4, 16, 64, 256)
SCATTERED = 16
"""Rows of a batch, each between rows of others."""


def rows(world: World) -> None:
    """Scattered rows of registered memory: brought together by the host first, or one copy each."""
    device, report = world.device, world.report
    sizes = ROW_KIB if report.is_gpu else ROW_KIB[:2]
    arena = np.zeros(2 * SCATTERED * max(sizes) * 1024, np.uint8)
    fill(arena, world.random)
    try:
        registration = device.register(arena, "arena")
    except CannotRegister as error:
        report.left_out("rows straight from arenas", str(error))
        return
    with world.stream("in") as stream, world.memory(SCATTERED * max(sizes) * 1024) as (span, staging):
        for kib in sizes:
            _both_ways(
                world, stream, span, staging, arena[: 2 * SCATTERED * kib * 1024].reshape(2 * SCATTERED, -1), kib
            )
    registration.release()
    report.figure("rows get a copy of their own from", DIRECT_BYTES / 1024, "KiB", "as it is set")
    _through_the_engine(world)


def _both_ways(world: World, stream: Stream, span: Span, staging: NDArray, source: NDArray, kib: int) -> None:
    device, report = world.device, world.report
    size = source.shape[1]
    chosen = np.arange(0, 2 * SCATTERED, 2)
    room = staging[: SCATTERED * size].reshape(SCATTERED, size)
    target = span.part(0, SCATTERED * size)

    def gathered() -> None:
        np.take(source, chosen, axis=0, out=room, mode="clip")
        device.copy_in(target, room, stream)
        stream.synchronize()

    def straight() -> None:
        for at, row in enumerate(chosen):
            device.copy_in(target.part(at * size, size), source[row], stream)
        stream.synchronize()

    for title, way in (("gathered by the host, then one copy", gathered), ("one copy each", straight)):
        report.figure(f"{SCATTERED} rows of {kib} KiB, {title}", wall_s(way, 20) * 1e6, "us")
    room[...] = 0
    device.copy_out(room, target, stream)
    stream.synchronize()
    report.check(f"rows of {kib} KiB arrive each from its own place", np.array_equal(room, source[chosen]))


def _through_the_engine(world: World) -> None:
    """A batch of rows from an arena, rows in the slot and padding, against the same batch from the slot alone."""
    wanted = manifest(["INPUT f32 n 8"], ["OUTPUT f32 n 8"], (8,))
    path = onnx_models.affine(world.work_dir / "rows", 2.0, 1.0)
    with world.engine() as (shared, engine):
        model = opened(engine, path, wanted)
        executable = model.executable(0, 8)
        arena = np.zeros((2, 16, 8), np.float32)
        registered = shared.register(arena, "arena")
        right = True
        for at in range(6):
            given = world.random.standard_normal((6, 8)).astype(np.float32)
            arena[0, at : at + 4] = given[:4]
            slot = executable.slot()
            slot.inputs[0][...] = 0
            slot.inputs[0][4:6] = given[4:]
            executable.rows(slot, [Rows(0, 0, arena[0, at : at + 4])], [Rows(0, 0, arena[1, at : at + 4])])
            _execute(executable, slot)
            got = np.concatenate([arena[1, at : at + 4], slot.outputs[0][4:6]])
            right &= bool(np.allclose(got, given * 2 + 1, rtol=1e-6))
        shared.unregister(arena)
        model.close()
    world.report.check("a batch of rows from several places is right", right, "" if registered else "not registered")


def ahead(world: World) -> None:
    """Batches one after the other, and each copied in while the one before it runs."""
    report = world.report
    layers, width, batch = (8, 2048, 64) if report.is_gpu else (2, 32, 4)
    wanted = manifest([f"INPUT f32 n {width}"], [f"OUTPUT f32 n {width}"], (batch,))
    path = onnx_models.mlp(world.work_dir / "ahead", layers, width, seed=int(world.random.integers(1 << 31)))
    batches = [world.random.standard_normal((batch, width)).astype(np.float32) for _ in range(8)]
    with world.engine() as (_, engine):
        model = opened(engine, path, wanted)
        executable = model.executable(0, batch)
        one_by_one: list[NDArray] = []
        overlapped: list[NDArray] = []

        def plainly() -> None:
            one_by_one.clear()
            for given in batches:
                slot = _filled(executable, given)
                _execute(executable, slot)
                one_by_one.append(slot.outputs[0].copy())

        def looking_ahead() -> None:
            overlapped.clear()
            running: Slot | None = None
            for given in batches:
                slot = _filled(executable, given)
                executable.stage(slot)
                if running is not None:
                    executable.finish(running)
                executable.launch(slot)
                if running is not None:
                    overlapped.append(running.outputs[0].copy())
                running = slot
            assert running is not None
            executable.finish(running)
            overlapped.append(running.outputs[0].copy())

        repeats = 10 if report.is_gpu else 1
        plain_s, ahead_s = wall_s(plainly, repeats), wall_s(looking_ahead, repeats)
        model.close()
    each = len(batches) / 1e6
    report.figure("a batch, one after the other", plain_s / each, "us")
    report.figure("a batch, copied in while another runs", ahead_s / each, "us")
    same = all(np.array_equal(left, right) for left, right in zip(one_by_one, overlapped, strict=True))
    report.check("batches that overlap give the same answers", same)


def _filled(executable: Executable, given: NDArray) -> Slot:
    slot = executable.slot()
    slot.inputs[0][...] = given
    return slot


def _execute(executable: Executable, slot: Slot) -> None:
    executable.stage(slot)
    executable.launch(slot)
    executable.finish(slot)
