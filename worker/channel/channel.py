"""The worker's end of one channel: requests out of its ring, replies into the other."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Final

from engines.errors import Kind
from engines.tensor import NDArray
from worker.channel.doorbell import Bell
from worker.channel.layout import TEXT_SLOTS
from worker.channel.records import FLAG_CANCEL, RECORD_WORDS, reply_words
from worker.channel.ring import Consumer, Producer, Record, RingCorrupt, RingFull
from worker.channel.segment import Segment

_CANCEL: Final = FLAG_CANCEL << 48


class Channel:
    """One attached frontend, as the worker's loop sees it; single-threaded.

    Args:
        read_up_to: the table's list of tails without unread records; the channel stores its own entry.

    Attributes:
        id: position in the worker's page; another channel gets it after ``release``.
        name: what the frontend calls itself.
        arena: (arena_bytes,) uint8, shared with the frontend; valid until ``release`` even after the frontend died.
        in_flight: requests taken and not yet answered.
        closed: the frontend is gone or was cut off; replies are dropped.
    """

    # For mypyc: what ``release`` takes away.
    __deletable__ = ("arena", "_segment", "_requests", "_replies", "_bell")

    def __init__(
        self,
        channel_id: int,
        name: str,
        pid: int,
        records: int,
        segment: Segment,
        requests: Consumer,
        bell: Bell,
        bell_fd: int,
        read_up_to: list[int],
        on_corrupt: Callable[[Channel, str], None],
        on_release: Callable[[Channel], None],
    ) -> None:
        self.id = channel_id
        self.name = name
        self.pid = pid
        self.arena: NDArray = segment.arena
        self.in_flight = 0
        self.closed = False
        self.released = False
        self._records = records
        self._segment = segment
        self._requests = requests
        self._replies = Producer(segment.reply_ring())
        self._bell = bell
        self._bell_fd = bell_fd
        self._read_up_to = read_up_to
        self._on_corrupt = on_corrupt
        self._on_release = on_release
        self._buffered: list[int] = []
        self._next_text_slot = 0

    def take(self) -> list[Record]:
        """Return every unread request and cancel record, as a private copy; nothing once the channel is closed.

        A ring that no correct frontend can have written closes the channel instead of raising.
        """
        if self.closed:
            return []
        try:
            records = self._requests.take_records()
        except RingCorrupt as error:
            self._on_corrupt(self, str(error))
            return []
        self._read_up_to[self.id] = self._requests.taken
        for record in records:
            if not record[1] & _CANCEL:
                self.in_flight += 1
        if self.in_flight > self._records:
            self._on_corrupt(self, f"{self.in_flight} requests in flight, {self._records} were agreed")
            return []
        return records

    def reply(self, words: Record) -> None:
        """Buffer one reply record; ``flush`` sends it. Dropped if the channel is closed."""
        self.in_flight -= 1
        if not self.closed:
            self._buffered.extend(words)

    def reply_many(self, words: list[int]) -> None:
        """Buffer reply records, given as their words one after another; ``flush`` sends them."""
        self.in_flight -= len(words) // RECORD_WORDS
        if not self.closed:
            self._buffered.extend(words)

    def fail(self, request_id: int, kind: Kind, text: str, **timings: int) -> None:
        """Buffer a failure with its text; ``timings`` are further fields of ``reply_words``.

        The last ``TEXT_SLOTS`` texts can be read; a frontend that comes too late for one tells the kind only.
        """
        if self.closed:
            self.in_flight -= 1
            return
        slot = self._next_text_slot
        self._next_text_slot = (slot + 1) % TEXT_SLOTS
        stored_bytes = self._segment.write_text(slot, request_id, text.encode())
        self.reply(reply_words(request_id, int(kind), text_slot=slot, text_bytes=stored_bytes, **timings))

    def flush(self) -> None:
        """Publish every buffered reply with one store and ring once if the frontend sleeps."""
        buffered = self._buffered
        if not buffered:
            return
        self._buffered = []
        if self.closed:
            return
        try:
            self._replies.publish_words(array("Q", buffered))
        except (RingCorrupt, RingFull) as error:
            self._on_corrupt(self, str(error))
            return
        self._bell.ring_if_asleep()

    def close(self) -> None:
        """Stop talking; the server calls it when the frontend is gone."""
        self.closed = True
        self._buffered = []

    def release(self) -> None:
        """Give mapping, doorbell and id back, once, when nothing of this channel runs any more."""
        assert self.closed, "a channel that is still attached cannot be released"
        assert not self.released, "the channel was released before"
        self.released = True
        os.close(self._bell_fd)
        del self.arena, self._segment, self._requests, self._replies, self._bell
        self._on_release(self)
