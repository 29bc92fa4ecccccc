"""Bytes between an execution's room, the caller's memory and the device, over random layouts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.device.base import ALIGNMENT_BYTES, Span
from engines.device.host import HostDevice
from engines.device.shared import SharedDevice
from engines.device.staging import Layout
from engines.device.transfer import Transfer
from engines.tensor import NDArray

Piece = tuple[int, int, int, bool]
"""Tensor, first byte, end, and whether the device reaches it."""


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, list[Piece]]:
    sizes = draw(st.lists(st.integers(0, 700), min_size=1, max_size=5))
    pieces: list[Piece] = []
    for tensor, size in enumerate(sizes):
        cuts = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
        for start, stop in pairwise(cuts):
            if draw(st.booleans()):
                pieces.append((tensor, start, stop, draw(st.booleans())))
    return Layout.of(sizes), draw(st.permutations(pieces))


class Bench:
    """A transfer of a layout, and the pieces that lie elsewhere, each in memory of its own."""

    def __init__(self, layout: Layout, pieces: list[Piece]) -> None:
        self.device = HostDevice(1 << 20)
        self.shared = SharedDevice(self.device, 0)
        self.shared.start()
        self.layout = layout
        self.buffer = self.device.allocate(max(1, layout.size_bytes), "region")
        self.span = Span.whole(self.buffer).part(0, layout.size_bytes)
        self.pinned = self.device.pinned(max(1, layout.size_bytes), "room")
        self.room = self.pinned.array[: layout.size_bytes]
        self.transfer = Transfer(self.shared, self.room, layout.extents)
        self.arrays: list[tuple[Piece, NDArray]] = []
        for piece in pieces:
            tensor, start, stop, reached = piece
            array = np.zeros(stop - start, np.uint8)
            if reached:
                assert self.shared.register(array, "arena")
            self.arrays.append((piece, array))
            self.transfer.use(tensor, start, array)

    def parts(self) -> list[Span]:
        return [self.span.part(offset, size) for offset, size in self.layout.extents if size]

    def tensors(self, flat: NDArray) -> list[list[int]]:
        return [flat[offset : offset + size].tolist() for offset, size in self.layout.extents]

    def close(self) -> None:
        self.transfer.close()
        for _, array in self.arrays:
            self.shared.unregister(array)
        self.buffer.free()
        self.room = np.empty(0, np.uint8)
        self.pinned.free()
        self.shared.close()
        self.device.close()


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_tensors_arrive_whole_wherever_their_parts_lie(case: tuple[Layout, list[Piece]]) -> None:
    bench = Bench(*case)
    random = np.random.default_rng(len(case[1]))
    whole = random.integers(0, 256, bench.layout.size_bytes, np.uint8)
    bench.room[...] = whole
    for (tensor, start, stop, _), array in bench.arrays:
        offset = bench.layout.offsets[tensor]
        array[...] = whole[offset + start : offset + stop]
        # What lies elsewhere is not read here.
        bench.room[offset + start : offset + stop] = 0
    bench.transfer.collect()
    bench.transfer.copy_in(bench.span, bench.shared.copy_in)
    assert bench.transfer.straight_bytes == sum(stop - start for _, start, stop, reached in case[1] if reached)
    seen: list[Any] = []

    def read() -> None:
        flat = np.zeros(bench.layout.size_bytes, np.uint8)
        for part in bench.parts():
            flat[part.offset_bytes : part.offset_bytes + part.size_bytes] = bench.device.array(
                part, (part.size_bytes,), np.dtype(np.uint8)
            )
        seen.append(bench.tensors(flat))

    # The reads are declared without gaps: all of them were written, or the device refuses this.
    bench.device.launch(bench.shared.copy_in, read, reads=bench.parts(), writes=[])
    bench.shared.copy_in.synchronize()
    assert seen == [bench.tensors(whole)]
    bench.close()


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_results_are_written_where_each_part_lies_and_nowhere_else(case: tuple[Layout, list[Piece]]) -> None:
    bench = Bench(*case)
    random = np.random.default_rng(len(case[1]))
    whole = random.integers(1, 256, bench.layout.size_bytes, np.uint8)
    stream = bench.shared.copy_out
    if bench.layout.size_bytes:
        filled = bench.device.pinned(bench.layout.size_bytes, "results")
        filled.array[...] = whole
        bench.device.copy_in(bench.span, filled.array, stream)
        bench.room[...] = 0
    bench.transfer.copy_out(bench.span, stream)
    stream.synchronize()
    bench.transfer.deliver()
    untouched = np.zeros(bench.layout.size_bytes, bool)
    for (tensor, start, stop, reached), array in bench.arrays:
        at = bench.layout.offsets[tensor]
        np.testing.assert_array_equal(array, whole[at + start : at + stop])
        untouched[at + start : at + stop] = reached
    # Straight results leave the room alone; the rest of every tensor is there.
    assert not bench.room[untouched].any()
    for offset, size in bench.layout.extents:
        own = ~untouched[offset : offset + size]
        np.testing.assert_array_equal(bench.room[offset : offset + size][own], whole[offset : offset + size][own])
    if bench.layout.size_bytes:
        filled.free()
    bench.close()


def test_neighbours_take_one_copy_and_gaps_alone_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of([300, 300, 0, 300])
    bench = Bench(layout, [])
    copies: list[tuple[int, int]] = []
    monkeypatch.setattr(
        bench.device, "copy_in", lambda target, source, stream: copies.append((target.offset_bytes, target.size_bytes))
    )
    bench.transfer.copy_in(bench.span, bench.shared.copy_in)
    # A tensor of no size stands for one that does not travel, whose room may be large.
    assert copies == [(0, 812), (1024, 300)]
    array = np.zeros(300, np.uint8)
    assert bench.shared.register(array, "arena")
    bench.transfer.use(1, 0, array)
    bench.transfer.collect()
    copies.clear()
    bench.transfer.copy_in(bench.span, bench.shared.copy_in)
    assert copies == [(0, 300), (1024, 300), (512, 300)]
    assert layout.size_bytes % ALIGNMENT_BYTES == 0
    bench.transfer.reset()
    bench.shared.unregister(array)
    bench.close()
