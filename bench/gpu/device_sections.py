"""Sections about the device layer: copies, order, overlap, registered memory, graphs, compaction."""

from __future__ import annotations

import mmap
import os

import numpy as np

from bench.gpu.world import World, fill, wall_s
from engines.device.base import Span
from engines.device.errors import CannotCapture, CannotRegister, OutOfDeviceMemory
from engines.slab import SlabArena

F32 = np.dtype(np.float32)
CHAIN = 40
"""Small operations in a row; launching them costs more than running them."""


def layer(world: World) -> None:
    """Memory, copies each way, order by events."""
    device, report = world.device, world.report
    before = device.memory()
    report.figure("memory, total", before.total_bytes / 1e9, "GB")
    report.figure("memory, free at start", before.free_bytes / 1e9, "GB")
    with (
        world.stream("a") as a,
        world.stream("b") as b,
        world.memory(world.copy_bytes) as (span, host),
        world.memory(world.copy_bytes) as (other, back),
    ):
        ready = device.event()
        device.copy_in(span, host, a)
        a.record(ready)
        b.wait(ready)
        device.copy_within(other, span, b)
        device.copy_out(back, other, b)
        b.synchronize()
        report.check("bytes survive host, device, device, host across two streams", np.array_equal(host, back))
        device.zero(other, b)
        device.copy_out(back, other, b)
        b.synchronize()
        report.check("zeros are zeros", not back.any())
        ready.close()
        gb = world.copy_bytes / 1e9
        report.figure("copy in, pinned", gb / world.device_s(a, lambda: device.copy_in(span, host, a)), "GB/s")
        report.figure("copy out, pinned", gb / world.device_s(a, lambda: device.copy_out(back, span, a)), "GB/s")
        within_s = world.device_s(a, lambda: device.copy_within(other, span, a))
        report.figure("copy within, read and written bytes", 2 * gb / within_s, "GB/s")
    too_much = before.total_bytes * 2
    try:
        device.allocate(too_much, "more than there is").free()
        report.check("more memory than there is is refused", False)
    except OutOfDeviceMemory as error:
        report.check("more memory than there is is refused", "more than there is" in str(error))
    drift = before.free_bytes - device.memory().free_bytes
    report.check("everything is given back", drift <= (64 << 20 if report.is_gpu else 0), f"{drift} bytes fewer")


def registered(world: World) -> None:
    """Copies straight from shared memory beside copies through pinned staging."""
    device, report, size = world.device, world.report, world.copy_bytes
    descriptor = os.memfd_create("ringserve-gpu-check")
    try:
        os.ftruncate(descriptor, size)
        mapping = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    # The mapping goes with the last array over it.
    shared = np.frombuffer(mapping, np.uint8)
    fill(shared, world.random)
    with world.stream("s") as stream, world.memory(size) as (span, staging):
        gb = size / 1e9

        def through_staging() -> None:
            np.copyto(staging, shared)
            device.copy_in(span, staging, stream)
            stream.synchronize()

        report.figure("copy in through pinned staging, wall", gb / wall_s(through_staging, 3), "GB/s")
        try:
            registration = device.register(shared, "shared memory")
        except CannotRegister as error:
            report.left_out("copies straight from shared memory", str(error))
            return

        def straight() -> None:
            device.copy_in(span, shared, stream)
            stream.synchronize()

        report.figure("copy in straight from shared memory, wall", gb / wall_s(straight, 3), "GB/s")
        device.copy_out(staging, span, stream)
        stream.synchronize()
        report.check("shared memory arrives as it is", np.array_equal(staging, shared))
        registration.release()

        def once() -> None:
            device.register(shared, "shared memory").release()

        report.figure("registering and undoing it", wall_s(once, 3) * 1e3, "ms", f"{gb:.2f} GB")


def overlap(world: World) -> None:
    """Copies in and out beside execution: how much of the shorter is hidden."""
    device, report = world.device, world.report
    elements = 1 << 20 if report.is_gpu else 1 << 8
    with (
        world.stream("compute") as compute,
        world.stream("in") as into,
        world.stream("out") as out,
        world.memory(world.copy_bytes) as (first, host),
        world.memory(world.copy_bytes) as (second, back),
        world.memory(elements * 4) as (values, start),
    ):
        start.view(F32)[...] = world.random.random(elements, np.float32)
        device.copy_in(values, start, compute)
        device.copy_in(second, host, compute)
        device.synchronize()
        turns = [CHAIN]

        def work() -> None:
            array = device.array(values, (elements,), F32)
            for _ in range(turns[0]):
                array[...] = device.xp.sqrt(array * array + F32.type(1)) - F32.type(0.5)

        def execute() -> None:
            device.launch(compute, work, reads=[values], writes=[values])

        copy_s = world.device_s(into, lambda: device.copy_in(first, host, into))
        if report.is_gpu:
            turns[0] = max(1, int(CHAIN * copy_s / world.device_s(compute, execute)))
        compute_s = world.device_s(compute, execute)
        began, ended = device.event(), device.event()

        def both() -> None:
            compute.record(began)
            into.wait(began)
            out.wait(began)
            device.copy_in(first, host, into)
            device.copy_out(back, second, out)
            execute()
            for stream in (into, out):
                stream.record(ended)
                compute.wait(ended)

        together_s = world.device_s(compute, both)
        device.synchronize()
        report.check("copies beside execution arrive", np.array_equal(back, host))
        report.figure("copy in alone", copy_s * 1e3, "ms")
        report.figure("execution alone", compute_s * 1e3, "ms")
        report.figure("copy in, copy out and execution together", together_s * 1e3, "ms")
        alone = copy_s * 2 + compute_s
        report.figure("hidden of what could be", (alone - together_s) / (alone - max(copy_s, compute_s)) * 100, "%")
        began.close()
        ended.close()


def graphs(world: World) -> None:
    """Replaying a graph of many small operations beside launching them."""
    device, report = world.device, world.report
    elements = 1 << 10
    with world.stream("compute") as stream, world.memory(elements * 4) as (values, start):
        start.view(F32)[...] = world.random.random(elements, np.float32)

        def work() -> None:
            array = device.array(values, (elements,), F32)
            for _ in range(CHAIN):
                array[...] = array * F32.type(0.5) + F32.type(1)

        def plain() -> None:
            device.launch(stream, work, reads=[values], writes=[values])

        def result() -> np.ndarray:
            back = np.empty_like(start)
            with world.memory(start.nbytes) as (_, pinned):
                device.copy_out(pinned, values, stream)
                stream.synchronize()
                np.copyto(back, pinned)
            return back

        device.copy_in(values, start, stream)
        plain()
        expected = result()
        try:
            graph = device.capture(stream, work, reads=[values], writes=[values])
        except CannotCapture as error:
            report.left_out("graphs", str(error))
            return
        device.copy_in(values, start, stream)
        graph.launch(stream)
        report.check("a graph computes what the plain launch does, bit by bit", np.array_equal(result(), expected))

        def wall(run: object) -> float:
            def once() -> None:
                run()  # type: ignore[operator]
                stream.synchronize()

            return wall_s(once, 30) * 1e6

        plain_us, graph_us = wall(plain), wall(lambda: graph.launch(stream))
        report.figure(f"{CHAIN * 2} operations, launched one by one", plain_us, "us")
        report.figure(f"{CHAIN * 2} operations, one graph", graph_us, "us", f"{plain_us / graph_us:.1f} times as fast")
        graph.close()


def compaction(world: World) -> None:
    """Sliding slabs down, by much and by little, beside the device's copy rate."""
    device, report = world.device, world.report
    with world.stream("compute") as stream:
        arena = SlabArena(device, world.arena_bytes)
        arena.start()
        piece = world.arena_bytes // 8 // 4096 * 4096
        gap = {"half a slab": piece // 2, "a sliver": 4096}
        spans: dict[object, Span] = {}

        def place(key: object, size_bytes: int) -> None:
            span = arena.place(key, size_bytes, lambda moved: spans.__setitem__(key, moved))
            assert span is not None
            spans[key] = span

        sample = min(piece, 1 << 20)
        with world.memory(sample * 2) as (_, pinned):
            for name, gap_bytes in gap.items():
                place("gap", gap_bytes)
                for key in range(5):
                    place(key, piece)
                    fill(pinned[:sample], np.random.default_rng((report.seed, key)))
                    # Only both ends carry a pattern; between them every byte is written all the same.
                    device.zero(spans[key], stream)
                    device.copy_in(spans[key].part(0, sample), pinned[:sample], stream)
                    device.copy_in(spans[key].part(piece - sample, sample), pinned[:sample], stream)
                    stream.synchronize()
                arena.remove("gap")
                start, end = device.event(), device.event()
                stream.record(start)
                moved_bytes = arena.compact(stream)
                stream.record(end)
                stream.synchronize()
                seconds = max(device.elapsed_ns(start, end) / 1e9, 1e-9)
                whole = arena.memory().fragmentation == 0 and moved_bytes == 5 * piece
                for key in range(5):
                    fill(pinned[:sample], np.random.default_rng((report.seed, key)))
                    for offset in (0, piece - sample):
                        device.copy_out(pinned[sample:], spans[key].part(offset, sample), stream)
                        stream.synchronize()
                        whole &= np.array_equal(pinned[:sample], pinned[sample:])
                report.check(f"slabs that slide by {name} keep their contents and leave one free block", whole)
                rate = 2 * moved_bytes / seconds / 1e9
                report.figure(f"compaction by {name}, read and written bytes", rate, "GB/s", f"{moved_bytes} moved")
                for key in range(5):
                    arena.remove(key)
                start.close()
                end.close()
        arena.close()
