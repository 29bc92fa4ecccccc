"""Who owns which bytes of a frontend's arena: blocks of rows for requests of one model, over a page allocator.

Theory
    The arena is a range of pages. A *block* (``engines.bundle.signature``) is a run of pages shaped for ``block_rows``
    rows of one lane; a *lane* is one (model, variant). A request gets a *span*: consecutive rows of a block.

    Pages: best fit over free extents, which are joined with their neighbours when they come back; ties go to the lower
    address, so that equal histories give equal placements.

    Rows: a block's free rows are the set bits of an integer. Small rows are taken lowest first, which keeps using
    memory that is warm in the cache. Large rows go round the block, so that requests which arrive one after the other
    lie one after the other and the worker can run them in place.

    An empty block is kept, one per lane, since the next request of that lane will want it. It is taken back as soon as
    anybody lacks room. Lanes of models that are gone are dropped; their blocks in use follow when they are empty.

    Everything here is private to the frontend: a peer's crash cannot corrupt it, and ours takes it along.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from engines.bundle.signature import BlockLayout
from engines.errors import ArenaFull
from worker.channel.layout import PAGE_BYTES

MAX_BLOCK_ROWS: Final = 256
"""Rows of a shared block: enough for any batch, few enough that searching its bits stays cheap."""
MAX_BLOCK_SHARE: Final = 16
"""A shared block is at most this fraction of the arena, so that one idle lane cannot hold much of it."""
LARGE_ROW_BYTES: Final = 16 * 1024
"""From here on running rows in place beats gathering them."""


class Span:
    """Rows that a request owns until ``Arena.free``.

    Attributes:
        row_start, rows: the rows owned.
    """

    __slots__ = ("block", "live", "row_start", "rows")

    def __init__(self, block: Block, row_start: int, rows: int) -> None:
        self.block = block
        self.row_start = row_start
        self.rows = rows
        self.live = True

    @property
    def block_offset(self) -> int:
        """Bytes from the arena's start."""
        return self.block.offset

    @property
    def block_rows(self) -> int:
        """Rows the block was laid out for."""
        return self.block.rows


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """A snapshot for metrics and tests.

    Attributes:
        bytes_used: pages of blocks that some request holds rows of.
        bytes_kept: pages of empty blocks.
        bytes_free: pages of no block.
        largest_free_bytes: the longest free extent.
    """

    arena_bytes: int
    bytes_used: int
    bytes_kept: int
    bytes_free: int
    largest_free_bytes: int
    free_extents: int
    blocks: int
    lanes: int
    spans: int


class PagePool:
    """Free extents of pages: best fit, lowest address on ties, joined when they come back."""

    __slots__ = ("_by_size", "_ends", "_starts", "free_pages")

    def __init__(self, pages: int) -> None:
        self.free_pages = 0
        self._by_size: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        if pages:
            self._add(0, pages)

    @property
    def extents(self) -> list[tuple[int, int]]:
        """Free (start page, pages), by address."""
        return sorted(self._starts.items())

    @property
    def largest(self) -> int:
        """Pages of the longest free extent; 0 if none."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, pages: int) -> int:
        """Return the first page of a run of ``pages``, at least 1; -1 if no free extent is that long."""
        assert pages > 0, f"{pages=}"
        at = bisect_left(self._by_size, (pages, 0))
        if at == len(self._by_size):
            return -1
        length, start = self._by_size[at]
        self._remove(start, length)
        if length > pages:
            self._add(start + pages, length - pages)
        return start

    def give(self, start: int, pages: int) -> None:
        """Take back a run that ``take`` returned."""
        before = self._ends.get(start)
        if before is not None:
            length = start - before
            self._remove(before, length)
            start, pages = before, pages + length
        after = self._starts.get(start + pages)
        if after is not None:
            self._remove(start + pages, after)
            pages += after
        self._add(start, pages)

    def _add(self, start: int, pages: int) -> None:
        self._starts[start] = pages
        self._ends[start + pages] = start
        insort(self._by_size, (pages, start))
        self.free_pages += pages

    def _remove(self, start: int, pages: int) -> None:
        del self._starts[start]
        del self._ends[start + pages]
        del self._by_size[bisect_left(self._by_size, (pages, start))]
        self.free_pages -= pages


class RowPool:
    """Free rows of one block, as the set bits of an integer."""

    __slots__ = ("_all", "_cursor", "_free", "_rotates", "rows")

    def __init__(self, rows: int, rotates: bool) -> None:
        self.rows = rows
        self._all = (1 << rows) - 1
        self._free = self._all
        self._rotates = rotates
        self._cursor = 0

    @property
    def free_rows(self) -> int:
        return self._free.bit_count()

    def take(self, rows: int) -> int:
        """Return the first of ``rows`` consecutive rows, now taken; -1 if there is no such run. 0 rows always fit."""
        starts = self._free
        if rows == 1 and starts and not self._rotates:
            # Most requests. The lowest set bit, as below.
            lowest = starts & -starts
            self._free = starts ^ lowest
            return lowest.bit_length() - 1
        if rows == 0:
            return 0
        # After this loop bit i is set where rows i .. i + rows - 1 are all free; the reach doubles each time.
        reach = 1
        while reach < rows and starts:
            step = min(reach, rows - reach)
            starts &= starts >> step
            reach += step
        if self._rotates:
            ahead = starts >> self._cursor << self._cursor
            starts = ahead or starts
        if not starts:
            return -1
        start = (starts & -starts).bit_length() - 1
        self._free &= ~(((1 << rows) - 1) << start)
        self._cursor = start + rows
        return start

    def give(self, start: int, rows: int) -> None:
        """Take rows back."""
        run = ((1 << rows) - 1) << start
        assert not self._free & run, f"rows {start}..{start + rows - 1} were free already"
        self._free |= run


class Block:
    """A run of pages laid out for ``rows`` rows of one lane; ``pool`` is empty where only one request may use it.

    Attributes:
        offset: bytes from the arena's start.
        starts: each tensor's first byte in the arena.
    """

    __slots__ = ("lane", "offset", "pages", "pool", "rows", "spans", "start_page", "starts")

    def __init__(self, lane: Lane, start_page: int, pages: int, rows: int) -> None:
        self.lane = lane
        self.start_page = start_page
        self.pages = pages
        self.rows = rows
        self.offset = start_page * PAGE_BYTES
        self.starts = tuple(self.offset + offset for offset in lane.layout.offsets(rows))
        self.pool = RowPool(rows if lane.shares else 0, lane.rotates)
        self.spans = 0


class Lane:
    """Blocks of one (model, variant).

    Attributes:
        current: the block that the next request tries first.
        kept: the one block that may stay while it is empty.
    """

    __slots__ = ("blocks", "current", "dropped", "kept", "layout", "rotates", "row_bytes", "shares")

    def __init__(self, layout: BlockLayout, shares: bool) -> None:
        self.layout = layout
        self.shares = shares
        self.row_bytes = sum(layout.row_bytes)
        self.rotates = self.row_bytes >= LARGE_ROW_BYTES
        self.blocks: dict[int, Block] = {}
        self.current: Block | None = None
        self.kept: Block | None = None
        self.dropped = False


class Arena:
    """Allocator of one frontend's arena of ``arena_bytes``; single-threaded."""

    def __init__(self, arena_bytes: int) -> None:
        self.arena_bytes = arena_bytes
        self._pages = PagePool(arena_bytes // PAGE_BYTES)
        self._lanes: dict[Hashable, Lane] = {}
        self._dropped: set[Lane] = set()
        self._used_pages = 0
        self._spans = 0

    @property
    def bytes_used(self) -> int:
        """Bytes of blocks that some request holds rows of; 0 when nobody holds anything."""
        return self._used_pages * PAGE_BYTES

    def allocate(self, lane_key: Hashable, layout: BlockLayout, rows: int, shares: bool) -> Span:
        """Return ``rows`` rows, 0 or more, of a block of this lane.

        Args:
            lane_key: names one (model, variant); the layout and ``shares`` of a key never change until it is dropped.
            shares: whether requests may share a block; otherwise the block is laid out for exactly these rows.

        Raises:
            ArenaFull: no room, even after taking back every empty block.
        """
        lane = self._lanes.get(lane_key)
        if lane is None:
            lane = self._lanes[lane_key] = Lane(layout, shares)
        assert lane.layout is layout, f"lane {lane_key} changed its layout"
        block = lane.current
        start = -1
        if block is not None:
            start = block.pool.take(rows)
        if start < 0:
            block, start = self._other_block(lane, rows)
        assert block is not None
        if block.spans == 0:
            self._used_pages += block.pages
            if lane.kept is block:
                lane.kept = None
        block.spans += 1
        self._spans += 1
        return Span(block, start, rows)

    def free(self, span: Span) -> None:
        """Give a span back, once."""
        assert span.live, "the span was given back before"
        span.live = False
        block = span.block
        if span.rows and block.lane.shares:
            block.pool.give(span.row_start, span.rows)
        block.spans -= 1
        self._spans -= 1
        if block.spans == 0:
            self._used_pages -= block.pages
            self._emptied(block)

    def drop(self, lane_key: Hashable) -> None:
        """Forget a lane: its empty blocks go back now, the others when their last span does."""
        lane = self._lanes.pop(lane_key, None)
        if lane is None:
            return
        lane.dropped = True
        self._release_kept(lane)
        if lane.blocks:
            self._dropped.add(lane)

    def reclaim(self) -> None:
        """Take back every empty block."""
        for lane in self._lanes.values():
            self._release_kept(lane)

    def statistics(self) -> ArenaStatistics:
        """Return counts and sizes as they are now."""
        lanes = [*self._lanes.values(), *self._dropped]
        total = self.arena_bytes // PAGE_BYTES * PAGE_BYTES
        free = self._pages.free_pages * PAGE_BYTES
        return ArenaStatistics(
            arena_bytes=self.arena_bytes,
            bytes_used=self.bytes_used,
            bytes_kept=total - free - self.bytes_used,
            bytes_free=free,
            largest_free_bytes=self._pages.largest * PAGE_BYTES,
            free_extents=len(self._pages.extents),
            blocks=sum(len(lane.blocks) for lane in lanes),
            lanes=len(self._lanes),
            spans=self._spans,
        )

    def _other_block(self, lane: Lane, rows: int) -> tuple[Block, int]:
        """Return a block with ``rows`` rows taken from it: another one of the lane if it has room, else a new one."""
        if lane.shares:
            for block in lane.blocks.values():
                if block is lane.current:
                    continue
                start = block.pool.take(rows)
                if start >= 0:
                    lane.current = block
                    return block, start
        block = self._new_block(lane, rows)
        if not lane.shares:
            return block, 0
        lane.current = block
        return block, block.pool.take(rows)

    def _new_block(self, lane: Lane, rows: int) -> Block:
        smallest = preferred = rows
        if lane.shares:
            smallest = max(rows, 1)
            preferred = max(smallest, min(MAX_BLOCK_ROWS, self._rows_within_share(lane)))
        block = self._try_block(lane, preferred)
        if block is None:
            self.reclaim()
            block = self._try_block(lane, preferred) or self._try_block(lane, smallest)
        if block is not None:
            return block
        needed = _pages_of(lane.layout, smallest) * PAGE_BYTES
        raise ArenaFull(
            f"no room for {rows} rows: {needed} bytes needed, {self._pages.free_pages * PAGE_BYTES} free "
            f"(longest run {self._pages.largest * PAGE_BYTES}) of arena_bytes = {self.arena_bytes}"
        )

    def _try_block(self, lane: Lane, block_rows: int) -> Block | None:
        pages = _pages_of(lane.layout, block_rows)
        start_page = self._pages.take(pages)
        if start_page < 0:
            return None
        block = lane.blocks[start_page] = Block(lane, start_page, pages, block_rows)
        return block

    def _rows_within_share(self, lane: Lane) -> int:
        share = self.arena_bytes // MAX_BLOCK_SHARE
        overhead = lane.layout.block_bytes(0) + PAGE_BYTES
        return max(share - overhead, 0) // max(lane.row_bytes, 1)

    def _emptied(self, block: Block) -> None:
        lane = block.lane
        if lane.shares and not lane.dropped and lane.kept is None:
            lane.kept = block
        else:
            self._release(block)

    def _release_kept(self, lane: Lane) -> None:
        if lane.kept is not None:
            self._release(lane.kept)

    def _release(self, block: Block) -> None:
        lane = block.lane
        del lane.blocks[block.start_page]
        if lane.current is block:
            lane.current = None
        if lane.kept is block:
            lane.kept = None
        self._pages.give(block.start_page, block.pages)
        if lane.dropped and not lane.blocks:
            self._dropped.discard(lane)


def _pages_of(layout: BlockLayout, block_rows: int) -> int:
    return max(1, -(-layout.block_bytes(block_rows) // PAGE_BYTES))
