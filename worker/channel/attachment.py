"""One attachment of a frontend to a worker: rings, arena, doorbells and the requests in flight.

It is never reused: when the worker is gone, everything in flight is failed and the next attach makes a new segment. A
worker that only seems gone may still be writing into the old one, and arrays that callers still read stay valid.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Final, Protocol

from engines.bundle.signature import Signature
from engines.errors import ArenaFull, InvalidInput, Kind, NotReady, QueueFull, TooLarge, Unavailable
from worker.channel.arena import Arena, Span
from worker.channel.doorbell import Barrier, Bell, answer_doorbell
from worker.channel.frames import FrameSocket
from worker.channel.layout import LINE_BYTES
from worker.channel.messages import ModelEntry
from worker.channel.placement import OnReply, Placement, Reply, VariantPlan, kind_of
from worker.channel.records import MASK_32, cancel_words
from worker.channel.ring import Consumer, Producer, Record, RingCorrupt
from worker.channel.segment import Segment, WorkerPage

log = logging.getLogger(__name__)

MAX_UNANNOUNCED: Final = 8
"""Records published for a worker that sleeps before it is woken within a turn of the loop, so that it starts on the
first requests of a long turn while the others are still read. With 64, 16 callers got 0.88 of the requests."""


class Turn(Protocol):
    """Somebody who can do better with all replies of a wake-up than with one after the other."""

    def hold(self) -> None: ...
    def release(self) -> None: ...


class Attachment:
    """The frontend's end; used by one thread. Owns the socket and both doorbells' descriptors.

    Attributes:
        memory: the bytes of the arena itself; whatever views it keeps its mapping.
        arena: who owns which of its bytes.
        lost: no request can be submitted any more.
        late_replies: answers that nobody waited for.
        turn: told before and after the callbacks of several replies.
    """

    def __init__(
        self,
        frames: FrameSocket,
        segment: Segment,
        page: WorkerPage,
        channel_id: int,
        own_doorbell: int,
        worker_doorbell: int,
        barrier: Barrier,
        max_in_flight: int,
        first_request_id: int,
    ) -> None:
        self.frames = frames
        self.turn: Turn | None = None
        self.own_doorbell = own_doorbell
        self.memory = memoryview(segment.arena)  # type: ignore[arg-type]
        self.arena = Arena(len(segment.arena))
        self.lost = False
        self.late_replies = 0
        self.next_request_id = first_request_id
        self.pending: dict[int, Placement] = {}
        self._segment = segment
        self._requests = Producer(segment.request_ring(page.request_tail(channel_id)))
        self._replies = Consumer(segment.reply_ring())
        self._worker_doorbell = worker_doorbell
        self._bell = Bell(worker_doorbell, page.worker_sleeping, barrier)
        self._unannounced = 0
        self._max_in_flight = max_in_flight
        # Placed or submitted, not answered: each may need two records, so this is what bounds the request ring.
        self._admitted = 0
        self._entries: dict[int, ModelEntry] = {}
        self._plans: dict[tuple[int, int], VariantPlan] = {}

    def start(self) -> None:
        """Have the worker ring for every publication, for good.

        Its replies nearly always find this side asleep in the loop or on its way there, and to say truly when it is not
        takes a barrier per wake-up: 12 us where the other processor is busy, against 1 for a ring too many.
        """
        self._segment.frontend_sleeping[0] = 1

    def set_models(self, models: list[ModelEntry]) -> None:
        """Learn the model table; lanes of models that cannot be placed any more are dropped."""
        self._entries = {entry.model_id: entry for entry in models if entry.signature is not None}
        for key in [key for key in self._plans if key[0] not in self._entries]:
            del self._plans[key]
            self.arena.drop(key)

    def place(self, entry: ModelEntry, variant: int, rows: int) -> Placement:
        """See ``WorkerChannel.place``."""
        plan = self._plans.get((entry.model_id, variant))
        if plan is None or plan.entry is not entry:
            plan = self._plan(entry, variant)
        if self._admitted >= self._max_in_flight:
            raise QueueFull(
                f"{self._admitted} requests in flight, the limit global.channel.max_in_flight is {self._max_in_flight}"
            )
        try:
            span = self.arena.allocate(plan.key, plan.layout, rows, plan.shares)
        except ArenaFull:
            # What could never fit is a limit reached, not a shortage that passes.
            needed = max(plan.layout.block_bytes(rows if not plan.shares else max(rows, 1)), LINE_BYTES)
            if needed > self.arena.arena_bytes:
                raise TooLarge(
                    f"{rows} rows of model '{entry.name}' need {needed} bytes, "
                    f"the limit global.channel.arena_bytes is {self.arena.arena_bytes}"
                ) from None
            raise
        self._admitted += 1
        return Placement(self, plan, span)

    def submit(self, placement: Placement, deadline_ns: int, arrival_ns: int, on_reply: OnReply, flags: int) -> int:
        """See ``WorkerChannel.submit``."""
        assert placement.request_id == 0, "a placement is submitted once"
        if self.lost:
            raise Unavailable("the worker this request was placed for is gone")
        request_id = self.next_request_id
        self.next_request_id = request_id + 1
        span = placement.span
        block = span.block
        # ``records.request_words``, without the call.
        self._requests.push(
            (
                request_id,
                placement.plan.head_word | flags << 48,
                block.offset,
                block.rows | span.row_start << 32,
                span.rows,
                deadline_ns,
                arrival_ns,
                0,
            )
        )
        placement.request_id = request_id
        placement.in_flight = True
        placement.on_reply = on_reply
        self.pending[request_id] = placement
        self._announce()
        return request_id

    def cancel(self, request_id: int) -> bool:
        """See ``WorkerChannel.cancel``."""
        placement = self.pending.get(request_id)
        if placement is None or placement.cancelled or self.lost:
            return False
        # Once per request: the ring has room for one cancel each.
        placement.cancelled = True
        self._requests.push(cancel_words(request_id))
        self._announce()
        return True

    def abandon(self, request_id: int) -> None:
        """See ``WorkerChannel.abandon``."""
        placement = self.pending.get(request_id)
        if placement is not None:
            placement.abandoned = True
            placement.on_reply = None
            self.cancel(request_id)

    def give_back(self, placement: Placement, span: Span) -> None:
        """Free a placement's rows; the placement calls it once."""
        if placement.request_id == 0:
            self._admitted -= 1
        self.arena.free(span)

    def drain(self) -> None:
        """Hand every reply to its callback; called when the own doorbell rang.

        Raises:
            RingCorrupt: the worker stored a counter that it cannot have.
        """
        # In this order: what is published after the doorbell was answered rings it again.
        answer_doorbell(self.own_doorbell)
        self._take_replies()

    def fail_all(self, text: str) -> None:
        """Hand out the replies that were published, then fail every other request; nothing can be submitted after."""
        self.lost = True
        try:
            self._take_replies()
        except RingCorrupt as error:
            log.warning("channel.replies_lost reason=%r", str(error))
        pending, self.pending = self.pending, {}
        for placement in pending.values():
            self._answer(placement, Reply(Kind.UNAVAILABLE, text))

    def close(self) -> None:
        """Give the descriptors back; the mapping goes when the last array that views it does."""
        self.lost = True
        self.frames.close()
        os.close(self.own_doorbell)
        os.close(self._worker_doorbell)

    def _announce(self) -> None:
        """Have the worker woken, if it sleeps, when this turn of the loop has published all that it has.

        A ring for the first record would wake the worker for that one alone; it would run a batch of one and sleep
        again while the next sockets are read. (64 callers on two busy cores: 1.3 times the requests for 0.6 of the
        worker's CPU; 16 callers: as many for 0.6.)
        """
        if not self._bell.wanted:
            return
        self._unannounced += 1
        if self._unannounced == 1:
            asyncio.get_running_loop().call_soon(self._ring)
        elif self._unannounced >= MAX_UNANNOUNCED:
            self._ring()

    def _ring(self) -> None:
        if self._unannounced and not self.lost:
            self._unannounced = 0
            self._bell.ring_if_asleep()

    def _take_replies(self) -> None:
        records = self._replies.take_records()
        turn = self.turn
        if turn is None or len(records) < 2:
            self._hand_out(records)
            return
        turn.hold()
        try:
            self._hand_out(records)
        finally:
            turn.release()

    def _hand_out(self, records: list[Record]) -> None:
        for words in records:
            placement = self.pending.pop(words[0], None)
            if placement is None:
                self.late_replies += 1
            elif words[1] & 0xFF:
                self._answer(placement, Reply(kind_of(words), self._text(words), words))
            else:
                self._answer(placement, Reply(Kind.OK, "", words))

    def _answer(self, placement: Placement, reply: Reply) -> None:
        placement.in_flight = False
        self._admitted -= 1
        on_reply = placement.on_reply
        if on_reply is None:
            self.late_replies += 1
            placement.release()
            return
        try:
            on_reply(placement, reply)
        except Exception:
            # One caller's mistake must not cost the others their replies.
            log.exception("channel.callback_failed request_id=%d", placement.request_id)
            placement.release()

    def _text(self, words: Sequence[int]) -> str:
        place = words[5]
        text = self._segment.read_text(place & MASK_32, words[0], place >> 32) if place >> 32 else None
        if text is None:
            kind = kind_of(words)
            return f"{kind.name.lower().replace('_', ' ')} (too many failures at once to keep each one's text)"
        return text

    def _plan(self, entry: ModelEntry, variant: int) -> VariantPlan:
        """Return the plan for an entry that was not the last one used, if this worker still has that very model."""
        known = self._entries.get(entry.model_id)
        signature = entry.signature
        if signature is None:
            raise NotReady(f"model '{entry.name}' version {entry.version} is {entry.state}: {entry.reason}")
        if known is None or not _same_model(known, entry, signature):
            # Ids start again with every worker: an entry of the last one may name another model here.
            raise NotReady(f"model '{entry.name}' version {entry.version} was unloaded or its worker restarted")
        if not 0 <= variant < len(signature.variants):
            raise InvalidInput(f"model '{entry.name}' has {len(signature.variants)} variants, got {variant}")
        plan = self._plans.get((entry.model_id, variant))
        if plan is None:
            plan = self._plans[entry.model_id, variant] = VariantPlan(entry, signature, variant)
        plan.entry = entry
        return plan


def _same_model(known: ModelEntry, entry: ModelEntry, signature: Signature) -> bool:
    if known is entry:
        return True
    return (known.name, known.version) == (entry.name, entry.version) and known.signature == signature
