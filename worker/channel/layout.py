"""Where everything lies in the two kinds of shared memory between a frontend and the worker.

Theory
    *Worker page*, one per worker, made by the worker, mapped by every frontend::

        0x0000  magic, layout version, generation of the worker         written once, by the worker
        0x0040  worker_sleeping                                         worker
        0x1000 + 64 k   request tail of channel k                       frontend k

    All request tails lie in one page so that the worker looks at every channel with one read.

    *Segment*, one per channel and attach, made by the frontend, mapped by the worker::

        0x0000  magic, layout version, generation, pid, records, arena bytes    written once, by the frontend
        0x0040  request head                                            worker
        0x0080  reply tail                                              worker
        0x00c0  reply head                                              frontend
        0x0100  frontend_sleeping                                       frontend
        0x1000  request ring, ``ring_capacity(records)`` records of 64 bytes
                reply ring, as many
                text slots, 64 of 1 KiB: request id, then the text of an error
                arena, from the next page

    Every word has one writer and a cache line of its own, so that no side's store evicts a word the other side polls.

A ring has room for two records per request that may be in flight (the request and its cancel), rounded up to a power of
two: a frontend that keeps its limit can never find a ring full.

Any change here or in ``records`` raises ``messages.LAYOUT_VERSION``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engines.errors import InvalidInput
from worker.channel.records import RECORD_BYTES

WORD_BYTES: Final = 8
LINE_BYTES: Final = 64
LINE_WORDS: Final = LINE_BYTES // WORD_BYTES
PAGE_BYTES: Final = 4096

WORKER_MAGIC: Final = int.from_bytes(b"ringwork", "little")
SEGMENT_MAGIC: Final = int.from_bytes(b"ringsegm", "little")

# Worker page, in words.
MAGIC_WORD: Final = 0
VERSION_WORD: Final = 1
GENERATION_WORD: Final = 2
WORKER_SLEEPING_WORD: Final = LINE_WORDS
REQUEST_TAILS_WORD: Final = PAGE_BYTES // WORD_BYTES
MAX_CHANNELS: Final = PAGE_BYTES // LINE_BYTES
WORKER_PAGE_BYTES: Final = 2 * PAGE_BYTES

# Segment, in words; the first three are the same as in the worker page.
PID_WORD: Final = 3
RECORDS_WORD: Final = 4
ARENA_BYTES_WORD: Final = 5
REQUEST_HEAD_WORD: Final = 1 * LINE_WORDS
REPLY_TAIL_WORD: Final = 2 * LINE_WORDS
REPLY_HEAD_WORD: Final = 3 * LINE_WORDS
FRONTEND_SLEEPING_WORD: Final = 4 * LINE_WORDS
RINGS_OFFSET: Final = PAGE_BYTES

TEXT_SLOTS: Final = 64
TEXT_SLOT_BYTES: Final = 1024
MAX_TEXT_BYTES: Final = TEXT_SLOT_BYTES - WORD_BYTES

MAX_RECORDS: Final = 1 << 16
MAX_ARENA_BYTES: Final = 1 << 40


def request_tail_word(channel_id: int) -> int:
    """Return the word of the worker page that holds a channel's request tail."""
    assert 0 <= channel_id < MAX_CHANNELS, f"channel {channel_id} is outside the page"
    return REQUEST_TAILS_WORD + channel_id * LINE_WORDS


def ring_capacity(records: int) -> int:
    """Return the records per ring for ``records`` requests in flight: at least twice as many, a power of two."""
    return 1 << (2 * records - 1).bit_length()


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Byte offsets of a segment's parts.

    Attributes:
        capacity: records per ring.
        arena_offset: a multiple of ``PAGE_BYTES``.
    """

    capacity: int
    request_ring_offset: int
    reply_ring_offset: int
    text_offset: int
    arena_offset: int
    arena_bytes: int
    segment_bytes: int

    @classmethod
    def of(cls, records: int, arena_bytes: int) -> SegmentLayout:
        """Return the layout for a limit of requests in flight and an arena.

        Raises:
            InvalidInput: a number is outside its limits.
        """
        if not 1 <= records <= MAX_RECORDS:
            raise InvalidInput(f"records: expected 1 to {MAX_RECORDS}, got {records}")
        if not PAGE_BYTES <= arena_bytes <= MAX_ARENA_BYTES:
            raise InvalidInput(f"arena_bytes: expected {PAGE_BYTES} to {MAX_ARENA_BYTES}, got {arena_bytes}")
        capacity = ring_capacity(records)
        replies = RINGS_OFFSET + capacity * RECORD_BYTES
        texts = replies + capacity * RECORD_BYTES
        arena = _page_up(texts + TEXT_SLOTS * TEXT_SLOT_BYTES)
        return cls(capacity, RINGS_OFFSET, replies, texts, arena, arena_bytes, _page_up(arena + arena_bytes))


def _page_up(count: int) -> int:
    return -(-count // PAGE_BYTES) * PAGE_BYTES
