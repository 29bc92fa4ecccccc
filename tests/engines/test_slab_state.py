"""The slab planner over random sequences: nothing overlaps, nothing is exceeded, compaction leaves one free block."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engines.slab_state import Move, Room, SlabState, copies

CHUNK = 500


def apply(move: Move[int], memory: np.ndarray, bounce: np.ndarray, max_direct: int = 4) -> None:
    """Carry a move out as its copies say, and assert that no copy's ends overlap."""
    rooms = {Room.ARENA: memory, Room.BOUNCE: bounce}
    for copy in copies(move, len(bounce), max_direct):
        if copy.source is copy.target:
            assert abs(copy.source_bytes - copy.target_bytes) >= copy.size_bytes
        source = rooms[copy.source][copy.source_bytes : copy.source_bytes + copy.size_bytes]
        target = rooms[copy.target][copy.target_bytes : copy.target_bytes + copy.size_bytes]
        assert len(source) == len(target) == copy.size_bytes
        target[...] = source


def one_sequence(draw: random.Random, memory: np.ndarray) -> None:
    """Place, remove and compact at random on ``memory``, whose bytes say which slab they belong to."""
    alignment = draw.choice([1, 2, 4])
    capacity = draw.randrange(1, len(memory))
    state: SlabState[int] = SlabState(capacity, alignment)
    bounce = np.zeros(draw.randrange(1, 8), np.uint8)
    used = 0
    for key in range(1, draw.randrange(4, 18)):
        action = draw.random()
        if action < 0.6:
            size = draw.randrange(0, max(2, capacity // draw.choice([1, 3, 6])))
            largest, free = state.largest_free_bytes, state.free_bytes
            slab = state.place(key, size)
            assert (slab is None) == (state.rounded(size) > largest)
            if slab is not None:
                assert slab.offset_bytes % alignment == 0
                assert slab.end_bytes <= capacity
                memory[slab.offset_bytes : slab.end_bytes] = key
                used += slab.size_bytes
                assert state.free_bytes == free - slab.size_bytes
        elif action < 0.85 and state.slabs:
            used -= state.remove(draw.choice(list(state.slabs))).size_bytes
        else:
            wanted = None if draw.random() < 0.5 else draw.randrange(0, capacity + 1)
            free = state.free_bytes
            for move in state.compact(wanted):
                apply(move, memory, bounce)
            if wanted is None:
                assert len(state.free_blocks) == (1 if free else 0)
            else:
                assert (state.largest_free_bytes >= state.rounded(wanted)) == (free >= state.rounded(wanted))
        assert state.capacity_bytes - state.free_bytes == used
        state.check()
        for key_of, slab in state.slabs.items():
            assert (memory[slab.offset_bytes : slab.end_bytes] == key_of).all()
    moves = state.compact()
    for move in moves:
        apply(move, memory, bounce)
    state.check()
    assert len(state.free_blocks) == (1 if used < state.capacity_bytes else 0)
    assert state.fragmentation == 0
    for key_of, slab in state.slabs.items():
        assert (memory[slab.offset_bytes : slab.end_bytes] == key_of).all()


@pytest.mark.parametrize(
    "chunk", [*range(4), *(pytest.param(at, marks=pytest.mark.slow) for at in range(4, 100_000 // CHUNK))]
)
def test_random_sequences(chunk: int) -> None:
    memory = np.zeros(64, np.uint8)
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            one_sequence(random.Random(seed), memory)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_best_fit_takes_the_smallest_block_that_holds_it_the_lowest_of_equals() -> None:
    state: SlabState[str] = SlabState(1000, 1)
    for key, size in (("a", 100), ("gap30", 30), ("b", 100), ("gap20", 20), ("c", 100), ("gap20b", 20), ("d", 630)):
        assert state.place(key, size) is not None
    for key in ("gap30", "gap20", "gap20b"):
        state.remove(key)
    slab = state.place("new", 18)
    assert slab is not None
    assert slab.offset_bytes == 230
    assert state.place("too large", 31) is None
    assert state.free_bytes == 52
    assert state.largest_free_bytes == 30
    assert 0 < state.fragmentation < 1


def test_compaction_stops_once_there_is_room() -> None:
    state: SlabState[str] = SlabState(400, 1)
    for key in "abcd":
        state.place(key, 100)
    state.remove("a")
    state.remove("c")
    assert state.place("e", 150) is None
    assert [move.key for move in state.compact(150)] == ["b"]
    assert state.place("e", 150) is not None
    assert state.slabs["d"].offset_bytes == 300
    assert state.compact(50) == ()


@pytest.mark.parametrize(
    ("shift", "size", "bounce", "traffic", "count"),
    [(1000, 500, 64, 500, 1), (100, 500, 64, 500, 5), (10, 1000, 250, 2000, 8), (300, 64_000, 100, 64_000, 214)],
    ids=["apart", "pieces", "bounced", "bounce smaller than the shift"],
)
def test_copies_go_the_cheaper_way(shift: int, size: int, bounce: int, traffic: int, count: int) -> None:
    planned = list(copies(Move("m", 2000 + shift, 2000, size), bounce))
    assert sum(copy.size_bytes for copy in planned) == traffic
    assert len(planned) == count


def test_a_key_is_placed_once() -> None:
    state: SlabState[str] = SlabState(100, 1)
    state.place("a", 1)
    with pytest.raises(AssertionError, match="'a' has a slab already"):
        state.place("a", 1)
