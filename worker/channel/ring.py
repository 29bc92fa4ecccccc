"""Bounded single-producer single-consumer ring of fixed records over shared words.

Theory of operation
    Two counters, never reset, one writer each:
        tail    records ever published      stored by the producer only
        head    records ever taken          stored by the consumer only
    Records in flight = tail - head, always within 0..capacity; record ``seq`` lies at ``seq & (capacity - 1)``.

    Producer: fill any number of records past the tail, then store the tail once. That store hands them all over.
    Consumer: load the tail once, copy the whole published range out, then store the head once. That store hands the
    room back. Neither ever waits: what a full or an empty ring means is the caller's decision.

    Each side keeps its own counter in private memory and only ever *stores* the shared word; what it *loads* from the
    other side is checked before it is believed. A peer that breaks the rule raises ``RingCorrupt`` here and costs
    nobody else anything.

What the machine must promise
    Stores become visible in program order, loads happen in program order, an aligned 8-byte store is never seen in
    halves. x86-64 promises this; weaker machines need a fence between body and tail on both sides and are refused until
    they have one. Counters are stored through ``memoryview.cast('Q')``, which is one 8-byte store; ``struct.pack_into``
    zeroes its target first, so that a counter would be seen as 0. The body may be written in any way: nobody looks at
    it before the tail covers it.

    A counter would pass 2^64 after 500 years at a thousand million records a second; that is not handled.
"""

from __future__ import annotations

import platform
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from engines.errors import Internal, Unsupported
from engines.tensor import NDArray
from worker.channel.records import RECORD_BYTES, RECORD_WORDS

Record = tuple[int, int, int, int, int, int, int, int]

_RECORD: Final = struct.Struct(f"={RECORD_WORDS}Q")
_ORDERED_MACHINES: Final = ("x86_64", "AMD64")


class RingCorrupt(Internal):
    """The other side stored a counter that no correct peer can store; the channel is beyond use."""


class RingFull(Internal):
    """No room for the records. The limit of requests in flight keeps a correct frontend from ever seeing this."""


class UnsupportedMachine(Unsupported):
    """This processor does not keep the order of stores that the rings rely on."""


def require_ordered_machine(machine: str | None = None) -> None:
    """Return only on a processor whose memory order the rings are written for.

    Raises:
        UnsupportedMachine: anything but x86-64.
    """
    machine = platform.machine() if machine is None else machine
    if machine not in _ORDERED_MACHINES:
        raise UnsupportedMachine(
            f"shared-memory rings need an x86-64 processor, this is {machine!r}: its memory order needs fences"
        )


class Words(Protocol):
    """A view of u64 words; in service a ``memoryview.cast('Q')``."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Rows(Protocol):
    """The ring's records as a (capacity, 8) uint64 array; reading and writing ranges."""

    def __getitem__(self, rows: slice, /) -> Any: ...

    def __setitem__(self, rows: slice, value: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class RingMemory:
    """One ring's shared memory.

    Attributes:
        words: all records, flat.
        rows: the same memory as rows of 8 words.
        tail, head: a view each whose word 0 is the counter.
        capacity: records; a power of two.
    """

    words: Words
    rows: Rows
    tail: Words
    head: Words
    capacity: int

    @classmethod
    def over(cls, records: memoryview, tail: memoryview, head: memoryview) -> RingMemory:
        """Return the ring over ``records`` (bytes) and two one-word views of format ``Q``."""
        assert records.nbytes % RECORD_BYTES == 0, "records end in the middle of one"
        capacity = records.nbytes // RECORD_BYTES
        rows = np.frombuffer(records, dtype=np.uint64).reshape(capacity, RECORD_WORDS)
        return cls(records.cast("Q"), rows, tail, head, capacity)


class Producer:
    """The publishing end; one per ring, used by one thread."""

    __slots__ = ("_capacity", "_head", "_known_head", "_mask", "_rows", "_seq", "_tail", "_words")

    def __init__(self, memory: RingMemory) -> None:
        assert memory.capacity & (memory.capacity - 1) == 0, f"capacity {memory.capacity} is not a power of two"
        self._words = memory.words
        self._rows = memory.rows
        self._tail = memory.tail
        self._head = memory.head
        self._capacity = memory.capacity
        self._mask = memory.capacity - 1
        self._seq = memory.tail[0]
        self._known_head = memory.head[0]

    @property
    def published(self) -> int:
        """Records ever published."""
        return self._seq

    def push(self, record: Record) -> None:
        """Write one record and hand it over.

        Raises:
            RingFull: no room; nothing was written.
            RingCorrupt: the consumer's counter is impossible.
        """
        seq = self._seq
        if seq - self._known_head >= self._capacity:
            self._require_room(1)
        words = self._words
        at = (seq & self._mask) * RECORD_WORDS
        (
            words[at],
            words[at + 1],
            words[at + 2],
            words[at + 3],
            words[at + 4],
            words[at + 5],
            words[at + 6],
            words[at + 7],
        ) = record
        self._seq = seq + 1
        # Hand-over. Must stay the last store: the consumer reads the record as soon as it sees it.
        self._tail[0] = seq + 1

    def publish(self, records: NDArray) -> None:
        """Write (n, 8) uint64 records and hand all of them over with one store; n may be 0.

        Raises:
            RingFull: no room for all of them; nothing was written.
            RingCorrupt: the consumer's counter is impossible.
        """
        count = len(records)
        if count == 0:
            return
        seq = self._seq
        if seq + count - self._known_head > self._capacity:
            self._require_room(count)
        start = seq & self._mask
        first = min(count, self._capacity - start)
        self._rows[start : start + first] = records[:first]
        if first < count:
            self._rows[0 : count - first] = records[first:]
        self._seq = seq + count
        # Hand-over, after all bodies: see push.
        self._tail[0] = seq + count

    def publish_words(self, words: array[int]) -> None:
        """Write records, given as their words one after another, and hand all of them over with one store.

        For records that were put together one by one: a third of the time of ``publish``.

        Raises:
            RingFull: no room for all of them; nothing was written.
            RingCorrupt: the consumer's counter is impossible.
        """
        count = len(words) // RECORD_WORDS
        seq = self._seq
        if seq + count - self._known_head > self._capacity:
            self._require_room(count)
        start = seq & self._mask
        first = min(count, self._capacity - start)
        ring: Any = self._words
        at, split = start * RECORD_WORDS, first * RECORD_WORDS
        if first == count:
            ring[at : at + split] = words
        else:
            ring[at : at + split] = words[:split]
            ring[0 : len(words) - split] = words[split:]
        self._seq = seq + count
        # Hand-over, after all bodies: see push.
        self._tail[0] = seq + count

    def _require_room(self, count: int) -> None:
        """Look at the consumer's counter again; it is looked at only when the last known one leaves no room."""
        head = self._head[0]
        unread = self._seq - head
        if not 0 <= unread <= self._capacity or head < self._known_head:
            raise RingCorrupt(
                f"ring head is {head}, but {self._seq} records were published, at least {self._known_head} were taken "
                f"and {self._capacity} fit"
            )
        self._known_head = head
        if unread + count > self._capacity:
            raise RingFull(f"ring of {self._capacity} records holds {unread}, {count} more do not fit")


class Consumer:
    """The taking end; one per ring, used by one thread."""

    __slots__ = ("_capacity", "_head", "_mask", "_rows", "_seq", "_tail")

    def __init__(self, memory: RingMemory) -> None:
        assert memory.capacity & (memory.capacity - 1) == 0, f"capacity {memory.capacity} is not a power of two"
        self._rows = memory.rows
        self._tail = memory.tail
        self._head = memory.head
        self._capacity = memory.capacity
        self._mask = memory.capacity - 1
        self._seq = memory.head[0]

    @property
    def taken(self) -> int:
        """Records ever taken."""
        return self._seq

    def waiting(self) -> bool:
        """Return whether there is anything to take."""
        return self._tail[0] != self._seq

    def take_records(self) -> list[Record]:
        """Return all published records, copied, and give their room back.

        For records that are looked at one by one: half the time of ``take`` and ``tolist``.

        Raises:
            RingCorrupt: the producer's counter is impossible; nothing was taken.
        """
        seq = self._seq
        tail = self._tail[0]
        count = self._count(tail)
        start = seq & self._mask
        first = min(count, self._capacity - start)
        records = list(_RECORD.iter_unpack(self._rows[start : start + first]))
        if first < count:
            records += _RECORD.iter_unpack(self._rows[0 : count - first])
        self._seq = tail
        # Hand-back, after the copies: see take.
        self._head[0] = tail
        return records

    def take(self) -> NDArray:
        """Return all published records as an (n, 8) uint64 copy, n from 0, and give their room back.

        Raises:
            RingCorrupt: the producer's counter is impossible; nothing was taken.
        """
        seq = self._seq
        tail = self._tail[0]
        count = self._count(tail)
        records = np.empty((count, RECORD_WORDS), dtype=np.uint64)
        if count == 0:
            return records
        start = seq & self._mask
        first = min(count, self._capacity - start)
        records[:first] = self._rows[start : start + first]
        if first < count:
            records[first:] = self._rows[0 : count - first]
        self._seq = tail
        # Hand-back. Must come after the copies: the producer may fill this room as soon as it sees it.
        self._head[0] = tail
        return records

    def _count(self, tail: int) -> int:
        count = tail - self._seq
        if not 0 <= count <= self._capacity:
            raise RingCorrupt(f"ring tail is {tail}, but {self._seq} records were taken and {self._capacity} fit")
        return count


def record_block(words: Sequence[Record]) -> NDArray:
    """Return records as the (n, 8) uint64 array that ``Producer.publish`` takes."""
    return np.array(words, dtype=np.uint64).reshape(len(words), RECORD_WORDS)
