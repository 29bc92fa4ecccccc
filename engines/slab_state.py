"""Where slabs lie in one allocation of fixed size: placing, removing and compacting, decided and not done.

A slab is all weights of one model, in one piece, so that loading is one copy and evicting is forgetting an entry. Best
fit: the smallest free block that holds it, the lowest of equals. Free neighbours are always one block, so blocks never
have to be merged later. Compacting slides slabs down in the order of their addresses, which leaves one free block at
the end and never needs room of its own; ``copies`` turns such a move into copies whose two ends are disjoint.

Pure: no memory is touched here. All offsets and sizes are bytes and multiples of the alignment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final, Generic, TypeVar

DEFAULT_ALIGNMENT_BYTES: Final = 256

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Slab:
    """A placed slab. ``size_bytes`` is what it occupies: the wanted size, rounded up to the alignment."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class Move(Generic[Key]):
    """A slab that slides down; its bytes must be copied before those of the next move."""

    key: Key
    source_bytes: int
    target_bytes: int
    size_bytes: int


@unique
class Room(Enum):
    """Which memory an offset of a ``Copy`` counts in."""

    ARENA = "arena"
    BOUNCE = "bounce"


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy with disjoint ends; a move's copies must run in order."""

    source: Room
    source_bytes: int
    target: Room
    target_bytes: int
    size_bytes: int


class SlabState(Generic[Key]):
    """Which bytes belong to which key.

    Args:
        capacity_bytes: size of the allocation; a rest smaller than the alignment is not used.
        alignment_bytes: a power of two.
    """

    def __init__(self, capacity_bytes: int, alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES) -> None:
        assert alignment_bytes > 0 and alignment_bytes & (alignment_bytes - 1) == 0, "alignment: a power of two"
        assert capacity_bytes >= 0
        self.alignment_bytes = alignment_bytes
        self.capacity_bytes = capacity_bytes - capacity_bytes % alignment_bytes
        self._slabs: dict[Key, Slab] = {}
        self._order: list[tuple[int, Key]] = []
        self._free: list[tuple[int, int]] = []
        """(offset, size) of every free block, by offset."""
        self._by_size: list[tuple[int, int]] = []
        """(size, offset) of the same blocks."""
        if self.capacity_bytes:
            self._give(0, self.capacity_bytes)

    @property
    def slabs(self) -> Mapping[Key, Slab]:
        return self._slabs

    @property
    def free_blocks(self) -> tuple[Slab, ...]:
        """Free blocks by address; no two touch."""
        return tuple(Slab(offset, size) for offset, size in self._free)

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    @property
    def largest_free_bytes(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def fragmentation(self) -> float:
        """The part of the free bytes that the largest free block does not have: 0 to below 1."""
        free = self.free_bytes
        return 1 - self.largest_free_bytes / free if free else 0.0

    def rounded(self, size_bytes: int) -> int:
        """Return what a slab of this size occupies; at least one unit of alignment."""
        return max(1, -(-size_bytes // self.alignment_bytes)) * self.alignment_bytes

    def place(self, key: Key, size_bytes: int) -> Slab | None:
        """Return room for a new key; None if no free block is large enough. ``free_bytes`` says if compacting helps."""
        assert size_bytes >= 0
        assert key not in self._slabs, f"'{key}' has a slab already"
        size = self.rounded(size_bytes)
        at = bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size):
            return None
        block_size, offset = self._by_size[at]
        self._take(offset, block_size)
        if block_size > size:
            self._give(offset + size, block_size - size)
        slab = self._slabs[key] = Slab(offset, size)
        insort(self._order, (offset, key), key=_offset_of)
        return slab

    def remove(self, key: Key) -> Slab:
        """Return the slab that was the key's; its bytes are free now."""
        slab = self._slabs.pop(key)
        at = bisect_left(self._order, slab.offset_bytes, key=_offset_of)
        assert self._order[at][1] == key
        del self._order[at]
        offset, size = slab.offset_bytes, slab.size_bytes
        at = bisect_left(self._free, (slab.end_bytes, 0))
        if at < len(self._free) and self._free[at][0] == slab.end_bytes:
            after = self._free[at]
            self._take(*after)
            size += after[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            before = self._free[at - 1]
            self._take(*before)
            offset, size = before[0], size + before[1]
        self._give(offset, size)
        return slab

    def compact(self, wanted_bytes: int | None = None) -> tuple[Move[Key], ...]:
        """Slide slabs down until one free block holds ``wanted_bytes``, or until all free bytes are one block.

        The new places hold at once; the caller carries the moves out, in order, before it uses them.
        """
        wanted = None if wanted_bytes is None else self.rounded(wanted_bytes)
        moves: list[Move[Key]] = []
        end = 0
        for index, (offset, key) in enumerate(self._order):
            if wanted is not None and self._enough(wanted, end, offset):
                break
            slab = self._slabs[key]
            if offset != end:
                moves.append(Move(key, offset, end, slab.size_bytes))
                self._slabs[key] = Slab(end, slab.size_bytes)
                self._order[index] = (end, key)
                self._slide(end, offset, slab.size_bytes)
            end += slab.size_bytes
        return tuple(moves)

    def check(self) -> None:
        """Assert what must always hold; for tests."""
        pieces = sorted([(slab.offset_bytes, slab.size_bytes) for slab in self._slabs.values()] + self._free)
        at, free_before = 0, False
        for offset, size in pieces:
            assert offset == at and size > 0 and size % self.alignment_bytes == 0
            is_free = (offset, size) in self._free
            assert not (is_free and free_before), "two free blocks touch"
            at, free_before = offset + size, is_free
        assert at == self.capacity_bytes
        assert sorted((size, offset) for offset, size in self._free) == self._by_size
        assert self._order == sorted(((s.offset_bytes, k) for k, s in self._slabs.items()), key=_offset_of)

    def _enough(self, wanted: int, end: int, offset: int) -> bool:
        """Whether a free block holds the wanted bytes: the gap before ``offset`` or any other."""
        return max(offset - end, self.largest_free_bytes) >= wanted

    def _slide(self, target: int, source: int, size: int) -> None:
        """Let the free block before a slab pass behind it, and join the one that follows."""
        gap = source - target
        self._take(target, gap)
        at = bisect_left(self._free, (source + size, 0))
        if at < len(self._free) and self._free[at][0] == source + size:
            after = self._free[at]
            self._take(*after)
            gap += after[1]
        self._give(target + size, gap)

    def _take(self, offset: int, size: int) -> None:
        at = bisect_left(self._free, (offset, size))
        assert self._free[at] == (offset, size)
        del self._free[at]
        del self._by_size[bisect_left(self._by_size, (size, offset))]

    def _give(self, offset: int, size: int) -> None:
        insort(self._free, (offset, size))
        insort(self._by_size, (size, offset))


def copies(move: Move[Key], bounce_bytes: int, max_direct: int = 64) -> Iterator[Copy]:
    """Yield a move's copies, in order; none has overlapping ends.

    A slab that slides by less than its size is copied in pieces as large as the shift, each into the bytes that the one
    before has left. Where that needs more than ``max_direct`` pieces, larger pieces go through the bounce buffer: twice
    the traffic, but far fewer copies.
    """
    shift = move.source_bytes - move.target_bytes
    assert shift > 0 and bounce_bytes > 0
    direct = -(-move.size_bytes // shift) <= max_direct or bounce_bytes <= shift
    step = shift if direct else bounce_bytes
    for at in range(0, move.size_bytes, step):
        size = min(step, move.size_bytes - at)
        source, target = move.source_bytes + at, move.target_bytes + at
        if direct:
            yield Copy(Room.ARENA, source, Room.ARENA, target, size)
        else:
            yield Copy(Room.ARENA, source, Room.BOUNCE, 0, size)
            yield Copy(Room.BOUNCE, 0, Room.ARENA, target, size)


def _offset_of(entry: tuple[int, object]) -> int:
    return entry[0]
