"""The arena allocator: rules on its own, then against a model that remembers every byte."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from engines.bundle.signature import LINE_BYTES, BlockLayout, Signature, Variant
from engines.errors import ArenaFull
from engines.tensor import TensorSpec
from worker.channel.arena import LARGE_ROW_BYTES, MAX_BLOCK_ROWS, MAX_BLOCK_SHARE, Arena, PagePool, RowPool, Span
from worker.channel.layout import PAGE_BYTES

ARENA_BYTES = 1 << 20


def layout_of(row_bytes: int, batch_axis: int | None = 0) -> BlockLayout:
    shape = (-1, row_bytes) if batch_axis == 0 else (row_bytes,)
    spec = TensorSpec("x", "u8", shape, batch_axis)
    signature = Signature(
        inputs=(spec,),
        outputs=(spec,),
        client_inputs=(),
        client_outputs=(),
        batch_sizes=(1, 8),
        variants=(Variant((), (shape,), (shape,), (False,)),),
    )
    return BlockLayout.of(signature, 0)


def ranges(span: Span, layout: BlockLayout, shares: bool) -> list[tuple[int, int]]:
    """Return the [start, end) bytes of the arena that the span's owner may touch, its whole block if it is alone."""
    if not shares:
        return [(span.block_offset, span.block_offset + max(layout.block_bytes(span.block_rows), 1))]
    firsts = [
        span.block_offset + offset + span.row_start * size
        for offset, size in zip(layout.offsets(span.block_rows), layout.row_bytes, strict=True)
    ]
    return [(first, first + span.rows * size) for first, size in zip(firsts, layout.row_bytes, strict=True)]


def test_small_rows_reuse_the_lowest_rows_first() -> None:
    arena, layout = Arena(ARENA_BYTES), layout_of(256)
    spans = [arena.allocate("lane", layout, 1, True) for _ in range(4)]
    arena.free(spans[1])
    assert [span.row_start for span in spans] == [0, 1, 2, 3]
    assert arena.allocate("lane", layout, 1, True).row_start == 1


def test_large_rows_go_round_so_that_arrivals_are_contiguous() -> None:
    arena, layout = Arena(16 * ARENA_BYTES), layout_of(LARGE_ROW_BYTES)
    first = arena.allocate("lane", layout, 2, True)
    arena.free(first)
    second = arena.allocate("lane", layout, 2, True)
    third = arena.allocate("lane", layout, 3, True)
    assert [second.row_start, third.row_start] == [2, 4]
    assert second.block_offset == third.block_offset == first.block_offset


def test_large_rows_come_back_to_the_start_of_the_block() -> None:
    pool = RowPool(4, rotates=True)
    assert [pool.take(2), pool.take(2)] == [0, 2]
    pool.give(0, 2)
    assert pool.take(2) == 0


@pytest.mark.parametrize("row_bytes", [1, 64, 256, 3000, LARGE_ROW_BYTES, 300_000])
def test_a_shared_block_is_bounded_in_rows_and_share(row_bytes: int) -> None:
    arena, layout = Arena(ARENA_BYTES), layout_of(row_bytes)
    span = arena.allocate("lane", layout, 1, True)
    assert 1 <= span.block_rows <= MAX_BLOCK_ROWS
    if span.block_rows > 1:
        assert layout.block_bytes(span.block_rows) <= ARENA_BYTES // MAX_BLOCK_SHARE


def test_a_request_larger_than_a_shared_block_gets_a_block_of_its_size() -> None:
    arena, layout = Arena(ARENA_BYTES), layout_of(64)
    span = arena.allocate("lane", layout, MAX_BLOCK_ROWS + 100, True)
    assert (span.row_start, span.rows, span.block_rows) == (0, 356, 356)


def test_requests_that_do_not_share_get_a_block_of_exactly_their_rows() -> None:
    arena, layout = Arena(ARENA_BYTES), layout_of(64)
    spans = [arena.allocate("lane", layout, rows, False) for rows in (1, 7, 7)]
    assert [(span.row_start, span.block_rows) for span in spans] == [(0, 1), (0, 7), (0, 7)]
    assert len({span.block_offset for span in spans}) == 3


@pytest.mark.parametrize("shares", [True, False])
def test_zero_rows_are_a_request_like_any_other(shares: bool) -> None:
    arena, layout = Arena(ARENA_BYTES), layout_of(64)
    span = arena.allocate("lane", layout, 0, shares)
    other = arena.allocate("lane", layout, 3, shares)
    assert (span.rows, other.rows) == (0, 3)
    assert arena.bytes_used > 0
    arena.free(span)
    arena.free(other)
    assert arena.bytes_used == 0


def test_a_tensor_without_batch_axis_lies_whole() -> None:
    arena, layout = Arena(ARENA_BYTES), layout_of(100_000, batch_axis=None)
    span = arena.allocate("lane", layout, 1, False)
    assert layout.block_bytes(span.block_rows) >= 200_000
    assert arena.bytes_used >= 200_000


def test_a_full_arena_names_its_size_and_what_was_needed_and_free() -> None:
    arena, layout = Arena(ARENA_BYTES), layout_of(300_000)
    held = arena.allocate("lane", layout, 1, True)
    with pytest.raises(ArenaFull, match=r"3 rows: 18\d{5} bytes needed, \d+ free .* of arena_bytes = 1048576"):
        arena.allocate("lane", layout, 3, True)
    arena.free(held)
    assert arena.statistics().spans == 0


def test_one_empty_block_is_kept_per_lane_and_taken_back_under_pressure() -> None:
    arena = Arena(ARENA_BYTES)
    small, large = layout_of(256), layout_of(500_000)
    spans = [arena.allocate("small", small, 200, True) for _ in range(3)]
    for span in spans:
        arena.free(span)
    assert arena.statistics().blocks == 1
    assert arena.statistics().bytes_kept > 0
    arena.allocate("large", large, 1, True)
    assert arena.statistics().blocks == 1


def test_a_dropped_lane_gives_its_blocks_back_when_they_are_empty() -> None:
    arena, layout = Arena(ARENA_BYTES), layout_of(256)
    kept = arena.allocate("lane", layout, 1, True)
    arena.drop("lane")
    assert arena.statistics().blocks == 1
    arena.free(kept)
    assert arena.statistics().blocks == 0
    assert arena.statistics().bytes_free == ARENA_BYTES
    arena.drop("never seen")


def test_a_key_may_come_back_with_another_layout_after_it_was_dropped() -> None:
    arena = Arena(ARENA_BYTES)
    old = arena.allocate("lane", layout_of(256), 1, True)
    arena.drop("lane")
    new = arena.allocate("lane", layout_of(512), 1, True)
    assert old.block_offset != new.block_offset


def test_giving_back_twice_is_caught() -> None:
    arena, layout = Arena(ARENA_BYTES), layout_of(256)
    span = arena.allocate("lane", layout, 1, True)
    arena.free(span)
    with pytest.raises(AssertionError, match="given back before"):
        arena.free(span)


def test_pages_prefer_the_smallest_extent_that_fits() -> None:
    pool = PagePool(100)
    runs = [pool.take(size) for size in (10, 5, 20, 65)]
    pool.give(runs[0], 10)
    pool.give(runs[2], 20)
    assert pool.take(9) == runs[0]
    assert pool.take(21) == -1
    assert pool.take(20) == runs[2]


LAYOUTS = [(layout_of(size), True) for size in (8, 700, LARGE_ROW_BYTES)] + [
    (layout_of(900), False),
    (layout_of(5000, batch_axis=None), False),
]


class ArenaMachine(RuleBasedStateMachine):
    """Whatever is asked in whatever order: nobody's bytes overlap, nothing lies outside, everything comes back."""

    spans = Bundle("spans")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(ARENA_BYTES)
        self.held: dict[int, tuple[Span, list[tuple[int, int]]]] = {}
        self.epoch = dict.fromkeys(range(len(LAYOUTS)), 0)

    @rule(target=spans, lane=st.integers(0, len(LAYOUTS) - 1), rows=st.integers(0, 40) | st.integers(0, 400))
    def allocate(self, lane: int, rows: int) -> object:
        layout, shares = LAYOUTS[lane]
        try:
            span = self.arena.allocate((lane, self.epoch[lane]), layout, rows, shares)
        except ArenaFull:
            self.arena.reclaim()
            needed = -(-layout.block_bytes(max(rows, 1)) // PAGE_BYTES) * PAGE_BYTES
            assert self.arena.statistics().largest_free_bytes < needed, "refused although there was room"
            return None
        assert span.rows == rows
        assert 0 <= span.row_start <= span.row_start + rows <= span.block_rows
        assert span.block_offset % LINE_BYTES == 0
        mine = ranges(span, layout, shares)
        assert all(0 <= start <= end <= ARENA_BYTES for start, end in mine)
        for _, others in self.held.values():
            for start, end in mine:
                assert all(end <= low or high <= start for low, high in others if low < high and start < end)
        self.held[id(span)] = (span, mine)
        return span

    @rule(span=consumes(spans))
    def free(self, span: Span | None) -> None:
        if span is not None and span.live:
            self.arena.free(self.held.pop(id(span))[0])

    @rule(lane=st.integers(0, len(LAYOUTS) - 1))
    def drop(self, lane: int) -> None:
        self.arena.drop((lane, self.epoch[lane]))
        self.epoch[lane] += 1

    @precondition(lambda self: self.held)
    @rule()
    def free_everything(self) -> None:
        for span, _ in self.held.values():
            self.arena.free(span)
        self.held.clear()
        self.arena.reclaim()
        statistics = self.arena.statistics()
        assert (statistics.bytes_free, statistics.free_extents, statistics.blocks) == (ARENA_BYTES, 1, 0)

    @rule(span=spans)
    def freed_spans_stay_freed(self, span: Span | None) -> None:
        if span is not None and id(span) not in self.held:
            assert not span.live

    @invariant()
    def every_byte_is_used_kept_or_free(self) -> None:
        statistics = self.arena.statistics()
        assert statistics.spans == len(self.held)
        assert statistics.bytes_used == self.arena.bytes_used <= ARENA_BYTES
        assert statistics.bytes_used + statistics.bytes_kept + statistics.bytes_free == ARENA_BYTES
        assert statistics.bytes_kept >= 0
        assert (statistics.bytes_used == 0) == (not self.held)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
