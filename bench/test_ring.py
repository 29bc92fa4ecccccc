"""What a record costs in the rings, and what a request costs each end of a channel beside its tensors."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from engines.bundle.signature import Signature, Variant
from engines.tensor import TensorSpec
from worker.channel.attachment import Attachment
from worker.channel.channel import Channel
from worker.channel.doorbell import Barrier, Bell, open_doorbell
from worker.channel.frames import FrameSocket
from worker.channel.layout import WORKER_PAGE_BYTES, SegmentLayout
from worker.channel.messages import MAX_FRAME_BYTES, ModelEntry
from worker.channel.placement import Placement, Reply
from worker.channel.records import NO_DEADLINE, RECORD_BYTES, RECORD_WORDS, reply_words, request_words
from worker.channel.ring import Consumer, Producer, RingMemory, record_block
from worker.channel.segment import Segment, WorkerPage, reserve

RECORD = request_words(1, 2, 0, 0, 1 << 20, 256, 3, 1, NO_DEADLINE, 1 << 50)


def ring(capacity: int = 1024) -> tuple[Producer, Consumer]:
    counters = memoryview(bytearray(128)).cast("Q")
    memory = RingMemory.over(memoryview(bytearray(capacity * RECORD_BYTES)), counters[0:1], counters[8:9])
    return Producer(memory), Consumer(memory)


class BothEnds:
    """A frontend's attachment and the worker's channel over one segment, in one process, without an event loop."""

    def __init__(self, records: int = 1024, arena_bytes: int = 16 << 20) -> None:
        layout = SegmentLayout.of(records, arena_bytes)
        segment_fd, page_fd = reserve(layout.segment_bytes), reserve(WORKER_PAGE_BYTES)
        barrier = Barrier()
        barrier.start()
        page = WorkerPage(page_fd)
        ours, theirs = Segment(segment_fd, layout), Segment(segment_fd, layout)
        os.close(segment_fd)
        os.close(page_fd)
        doorbells = [open_doorbell() for _ in range(2)]
        near, self._far = socket.socketpair()
        self.attachment = Attachment(
            FrameSocket(near, MAX_FRAME_BYTES), ours, page, 0, doorbells[0], doorbells[1], barrier, records, 1
        )
        requests = Consumer(theirs.request_ring(page.request_tail(0)))
        bell = Bell(doorbells[0], theirs.frontend_sleeping, barrier)
        self.channel = Channel(
            0, "bench", 1, records, theirs, requests, bell, os.dup(doorbells[0]), [0], lambda *_: None, lambda _: None
        )
        spec = TensorSpec("x", "f32", (-1, 64), 0)
        variant = Variant((), ((-1, 64),), ((-1, 64),), (False,))
        signature = Signature((spec,), (spec,), (spec,), (spec,), (1, 8, 32), (variant,))
        self.entry = ModelEntry(model_id=1, name="echo", version="1", state="READY", signature=signature)
        self.attachment.set_models([self.entry])
        self.attachment.start()

    def close(self) -> None:
        self.attachment.close()
        self._far.close()
        self.channel.close()
        self.channel.release()


@pytest.mark.parametrize("count", [1, 32])
def test_push_and_take(benchmark: BenchmarkFixture, count: int) -> None:
    """One push per record, one take for all, as words: the frontend's half and a naive worker's."""
    producer, consumer = ring()

    def turn() -> int:
        for _ in range(count):
            producer.push(RECORD)
        return len(consumer.take().tolist())

    assert benchmark(turn) == count


@pytest.mark.parametrize("count", [1, 32])
def test_publish_and_take(benchmark: BenchmarkFixture, count: int) -> None:
    """Both halves in bulk, as arrays."""
    producer, consumer = ring()
    block = record_block([RECORD] * count)

    def turn() -> tuple[int, ...]:
        producer.publish(block)
        return consumer.take().shape

    assert benchmark(turn) == (count, RECORD_WORDS)


@pytest.mark.parametrize("count", [1, 32])
def test_a_request_through_both_ends(benchmark: BenchmarkFixture, count: int) -> None:
    """Place, submit, take, reply, drain, release: all that a channel costs but the tensors' copies and sleep."""
    ends = BothEnds()
    attachment, channel, entry = ends.attachment, ends.channel, ends.entry
    answered = 0

    def on_reply(placement: Placement, _: Reply) -> None:
        nonlocal answered
        answered += 1
        placement.release()

    def turn() -> None:
        for _ in range(count):
            attachment.submit(attachment.place(entry, 0, 1), NO_DEADLINE, 1, on_reply, 0)
        for request_id in channel.take()[:, 0].tolist():
            channel.reply(reply_words(request_id, 0, 1, 32, 1, 1, 32, 32, finished_ns=1, dispatch_seq=1))
        channel.flush()
        attachment.drain()

    turn()
    assert answered == count
    benchmark(turn)
    assert (len(attachment.pending), attachment.arena.bytes_used) == (0, 0)
    ends.close()


def test_views_of_inputs_and_outputs(benchmark: BenchmarkFixture) -> None:
    """Making the arrays that a request is filled and read through."""
    ends = BothEnds()
    placement = ends.attachment.place(ends.entry, 0, 1)

    def turn() -> int:
        return len(placement.inputs) + len(placement.outputs())

    assert benchmark(turn) == 2
    placement.release()
    ends.close()


def test_replies_as_an_array(benchmark: BenchmarkFixture) -> None:
    """The worker's half for 32 replies of one batch, built as one array."""
    ends = BothEnds()
    ids = np.arange(32, dtype=np.uint64)

    def turn() -> None:
        replies = np.zeros((32, RECORD_WORDS), dtype=np.uint64)
        replies[:, 0] = ids
        ends.channel.reply_many(replies)
        ends.channel.flush()
        ends.attachment.drain()

    benchmark(turn)
    assert ends.attachment.late_replies >= 32
    ends.close()
