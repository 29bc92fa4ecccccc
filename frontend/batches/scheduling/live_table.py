"""Live calls per route of all gateway processes of one machine: a table in shared memory, without any lock on its way.

It also tells the runners of the machine when one of them has left room on a route, so that none of them need ask for it
again and again.

Theory of operation
    One file of the run directory, mapped by every process. A process owns one slot; nobody else writes there. It holds
    the routes that the process has had live calls on, how many are under way on each, and how long those that ended
    took. A reader adds the slots up, so a count is exact the moment it is read and costs no call to anybody.

    A slot counts only while its owner lives: the owner holds a lock of the kernel on the slot's byte, which the kernel
    takes away when the process ends, however it ends. A killed process stops counting at once and cannot pin a route.
    The lock belongs to the open file, not to the process, so the threads of one process cannot lose it for each other.

    Layout, in bytes: a header of one page; then ``slots`` slots of ``SLOT_HEAD + entries * ENTRY``. Entry 0 of a slot
    collects routes for which it has no room; a reader counts it for every route that it does not find in a full slot,
    so lack of room makes batches yield too often, never too seldom.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from bisect import bisect_left
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from engines.errors import Unavailable
from frontend.batches.scheduling import live_file

SLOTS: Final = 128
MIN_ENTRIES: Final = 128
BUNDLE_ENTRIES: Final = 64
"""Room for bundles that are served without being configured."""
BOUNDS_S: Final = tuple(round(0.005 * 1.2**power, 6) for power in range(63))
"""Of the buckets of call times, 5 ms to 407 s, each a fifth wider than the one before."""
OTHERS: Final = "*"
"""Name of what is counted in the entries for routes without room."""

_HEADER: Final = 4096
_SLOT_HEAD: Final = 64
_NAME: Final = 160
_LATENCIES: Final = 4 * (len(BOUNDS_S) + 1)
_LIVE, _FREED, _MOVED_NS = 0, 1, 2
"""Words of an entry: live calls, how often lines have left room, when a live call last began or ended."""
_WORDS: Final = 3
_ENTRY: Final = _NAME + 8 * _WORDS + _LATENCIES
_GENERATION, _USED, _CHANGES = 0, 1, 2
"""Words of a slot's head: how often it was taken, entries in use, how often a count has changed."""
_PUBLISHED_NS, _PUBLISHED_CHANGES = 5, 6
"""Words of the header that whoever publishes the table writes."""
_PUBLISHER: Final = SLOTS
"""Byte whose lock the publisher holds."""


class NoLiveTable(Unavailable):
    """The table cannot be opened; the message says why."""


class LiveTable:
    """One process's view of the table of its machine; open between ``start`` and ``close``.

    Used on one thread. ``start`` raises NoLiveTable.

    Args:
        directory: the run directory.
        routes: configured ones.
    """

    def __init__(self, directory: Path, routes: int) -> None:
        self._path = directory / live_file.FILE_NAME
        self._wanted = max(MIN_ENTRIES, 1 << (routes + BUNDLE_ENTRIES).bit_length())
        self._fd = -1
        self._slot = -1
        self._entries = 0
        self._stride = 0
        self._mapping: mmap.mmap | None = None
        self._words = memoryview(b"")
        self._halves = memoryview(b"")
        self._own: dict[str, int] = {}
        self._own_others: dict[str, int] = {}
        self._known: list[tuple[int, int, dict[str, int]]] = []
        """Per slot: generation, entries in use, entry by route."""
        self._places: dict[str, list[tuple[int, int]]] = {}
        """Slots and entries that count for a route; made anew when a slot's owner or routes change."""
        self._heads: npt.NDArray[np.uint64] = np.zeros((0, 0), dtype=np.uint64)
        self._seen_heads = b""
        self._seen_latencies: dict[tuple[int, int], tuple[int, npt.NDArray[np.int64]]] = {}
        self._latencies: dict[str, npt.NDArray[np.int64]] = {}

    @property
    def is_open(self) -> bool:
        return self._mapping is not None

    @property
    def machine(self) -> str:
        """Return the id of this table, for the installation's store."""
        return f"machine-{self._words[4]:016x}"

    def start(self) -> None:
        """Map the table and take a slot."""
        try:
            fd = live_file.open_table(self._path, SLOTS, self._wanted, self._size_bytes)
        except OSError as error:
            raise NoLiveTable(f"cannot open {self._path}: {error.strerror}") from error
        try:
            self._map(fd)
        except (OSError, NoLiveTable) as error:
            self._fd, self._mapping = -1, None
            os.close(fd)
            if isinstance(error, NoLiveTable):
                raise
            # As where the file system knows no such locks.
            raise NoLiveTable(f"cannot use {self._path}: {error.strerror}") from error
        live_file.remove_left_over(self._path.parent)

    def close(self) -> None:
        """Give the slot back: what it counted no longer counts; idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        self._heads = np.zeros((0, 0), dtype=np.uint64)
        for view in (self._words, self._halves):
            view.release()
        mapping, self._mapping = self._mapping, None
        self._slot = -1
        os.close(fd)
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()

    # The owner's side

    def set_live(self, route_id: str, live: int, now_ns: int) -> None:
        """Say how many live calls of this process are under way on a route, since ``now_ns`` (CLOCK_MONOTONIC)."""
        entry = self._own_entry(route_id)
        word = self._word(self._slot, entry)
        if entry == 0 and route_id != OTHERS:
            self._own_others[route_id] = live
            live = sum(self._own_others.values())
        self._words[word + _MOVED_NS] = now_ns
        self._words[word + _LIVE] = live
        self._words[self._head(self._slot) + _CHANGES] += 1

    def observe(self, route_id: str, seconds: float) -> None:
        """Count a live call's time to the first byte of its answer."""
        entry = self._own_entry(route_id)
        bucket = bisect_left(BOUNDS_S, seconds)
        at = self._latency_word(self._slot, entry) + bucket
        self._halves[at] = (self._halves[at] + 1) & 0xFFFF_FFFF

    def add_freed(self, route_id: str) -> None:
        """Tell the other processes that batch lines of this one have left room on a route."""
        self._words[self._word(self._slot, self._own_entry(route_id)) + _FREED] += 1

    # Readers' side

    def live(self, route_id: str) -> int:
        """Return the live calls under way on a route, in all living processes of the machine."""
        total = 0
        for slot, entry in self._places_of(route_id):
            count = self._words[self._word(slot, entry)]
            if count and self._lives(slot):
                total += count
        return total

    def moved_ns(self, route_id: str) -> int | None:
        """Return when a live call last began or ended on a route, also one of a process that is gone since."""
        times = [self._words[self._word(slot, entry) + _MOVED_NS] for slot, entry in self._places_of(route_id)]
        return max(times, default=0) or None

    def freed(self, route_id: str) -> int:
        """Return a number that changes whenever batch lines of some process have left room on a route."""
        return sum(self._words[self._word(slot, entry) + _FREED] for slot, entry in self._places_of(route_id))

    def totals(self) -> dict[str, int]:
        """Return the live calls of every route that has any."""
        self._look()
        found: dict[str, int] = {}
        for slot, (_, _, entries) in enumerate(self._known):
            counts = [(name, self._words[self._word(slot, entry)]) for name, entry in entries.items()]
            counts = [(name, count) for name, count in counts if count]
            if counts and self._lives(slot):
                for name, count in counts:
                    found[name] = found.get(name, 0) + count
        return found

    def latency_counts(self, route_id: str) -> tuple[int, ...]:
        """Return how many live calls have ended per bucket of ``BOUNDS_S``, and one more; never less than before."""
        total = self._latencies.setdefault(route_id, np.zeros(len(BOUNDS_S) + 1, dtype=np.int64))
        for slot, entry in self._places_of(route_id):
            if entry == 0:
                continue
            at = self._latency_word(slot, entry)
            counts = np.array(self._halves[at : at + len(BOUNDS_S) + 1], dtype=np.int64)
            generation = self._known[slot][0]
            before = self._seen_latencies.get((slot, entry))
            fresh = counts if before is None or before[0] != generation else (counts - before[1]) % (1 << 32)
            self._seen_latencies[slot, entry] = (generation, counts)
            total += fresh
        return tuple(total.tolist())

    @property
    def latency_bounds_s(self) -> tuple[float, ...]:
        return BOUNDS_S

    def alone(self) -> bool:
        """Whether no other process has a slot."""
        self._look()
        return not any(
            used and slot != self._slot and self._lives(slot) for slot, (_, used, _) in enumerate(self._known)
        )

    # Publishing to other machines

    def to_publish(self, now_ns: int, changed_ns: int, heartbeat_ns: int, stopped_ns: int) -> bool:
        """Whether this process should write the machine's counts to the store now.

        One process does, as long as it lives and does not stop: another takes over after ``stopped_ns`` of silence.

        Args:
            now_ns: monotonic, the same clock in all processes of the machine.
            changed_ns, heartbeat_ns: how often at most, and at least.
        """
        age_ns = now_ns - self._words[_PUBLISHED_NS]
        if 0 <= age_ns < changed_ns:
            return False
        if not live_file.lock(self._fd, _PUBLISHER) and 0 <= age_ns < stopped_ns:
            return False
        return not 0 <= age_ns < heartbeat_ns or self._changes() != self._words[_PUBLISHED_CHANGES]

    def publishing(self, now_ns: int) -> dict[str, int]:
        """Return what to publish, and note that it is being done."""
        self._words[_PUBLISHED_CHANGES] = self._changes()
        self._words[_PUBLISHED_NS] = now_ns
        return self.totals()

    # Inside

    def _size_bytes(self, entries: int) -> int:
        return _HEADER + SLOTS * (_SLOT_HEAD + entries * _ENTRY)

    def _map(self, fd: int) -> None:
        mapping = mmap.mmap(fd, 0, mmap.MAP_SHARED)
        words = memoryview(mapping).cast("Q")
        self._fd, self._mapping, self._words = fd, mapping, words
        self._halves = memoryview(mapping).cast("I")
        self._entries = words[3]
        self._stride = _SLOT_HEAD + self._entries * _ENTRY
        self._slot = next((slot for slot in range(SLOTS) if live_file.lock(fd, slot)), -1)
        if self._slot < 0:
            raise NoLiveTable(f"{self._path} has room for {SLOTS} processes, and all are there")
        head = self._head(self._slot)
        words[head + _USED] = 0
        start = _HEADER + self._slot * self._stride + _SLOT_HEAD
        mapping[start : start + self._entries * _ENTRY] = bytes(self._entries * _ENTRY)
        self._own, self._own_others = {OTHERS: 0}, {}
        self._write_name(0, OTHERS)
        words[head + _USED] = 1
        words[head + _GENERATION] += 1
        self._known = [(-1, 0, {}) for _ in range(SLOTS)]
        self._seen_heads = b""
        whole = np.frombuffer(mapping, dtype=np.uint64)
        rows = np.lib.stride_tricks.as_strided(
            whole[_HEADER // 8 :], shape=(SLOTS, 3), strides=(self._stride, 8), writeable=False
        )
        self._heads = rows

    def _own_entry(self, route_id: str) -> int:
        entry = self._own.get(route_id)
        if entry is None:
            entry = self._own[route_id] = self._add(route_id)
        return entry

    def _add(self, route_id: str) -> int:
        head = self._head(self._slot)
        used = self._words[head + _USED]
        if used >= self._entries or len(_encoded(route_id)) >= _NAME:
            return 0
        self._write_name(used, route_id)
        # Last: from here on readers look at it.
        self._words[head + _USED] = used + 1
        return used

    def _write_name(self, entry: int, name: str) -> None:
        assert self._mapping is not None
        at = self._entry_byte(self._slot, entry)
        self._mapping[at : at + _NAME] = _encoded(name).ljust(_NAME, b"\0")

    def _places_of(self, route_id: str) -> list[tuple[int, int]]:
        self._look()
        places = self._places.get(route_id)
        if places is None:
            places = self._places[route_id] = []
            for slot, (_, used, entries) in enumerate(self._known):
                entry = entries.get(route_id)
                if entry is not None:
                    places.append((slot, entry))
                elif used and (used >= self._entries or len(_encoded(route_id)) >= _NAME):
                    places.append((slot, 0))
        return places

    def _look(self) -> None:
        """Learn which slots have a new owner or new routes."""
        heads = self._heads[:, :2].tobytes()
        if heads == self._seen_heads:
            return
        self._seen_heads = heads
        for slot, (generation, used) in enumerate(np.frombuffer(heads, dtype=np.uint64).reshape(-1, 2).tolist()):
            if self._known[slot][:2] != (generation, used):
                self._known[slot] = (generation, used, self._names(slot, used))
        self._places.clear()

    def _names(self, slot: int, used: int) -> dict[str, int]:
        assert self._mapping is not None
        found = {}
        for entry in range(min(used, self._entries)):
            at = self._entry_byte(slot, entry)
            found[self._mapping[at : at + _NAME].rstrip(b"\0").decode(errors="replace")] = entry
        return found

    def _changes(self) -> int:
        return int(self._heads[:, _CHANGES].sum())

    def _lives(self, slot: int) -> bool:
        """Whether a slot's owner holds its lock."""
        if slot == self._slot:
            return True
        return live_file.is_locked(self._fd, slot)

    def _entry_byte(self, slot: int, entry: int) -> int:
        return _HEADER + slot * self._stride + _SLOT_HEAD + entry * _ENTRY

    def _head(self, slot: int) -> int:
        return (_HEADER + slot * self._stride) // 8

    def _word(self, slot: int, entry: int) -> int:
        return (self._entry_byte(slot, entry) + _NAME) // 8

    def _latency_word(self, slot: int, entry: int) -> int:
        return (self._entry_byte(slot, entry) + _NAME + 8 * _WORDS) // 4


def _encoded(route_id: str) -> bytes:
    """Return a route's name as the table keeps it; never raises, since live calls go through here."""
    return route_id.encode(errors="replace")
