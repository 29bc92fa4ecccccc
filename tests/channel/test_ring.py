"""The ring alone: limits, wrap-around, corrupt peers, and a model that is a bounded deque."""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.channel.records import RECORD_BYTES
from worker.channel.ring import (
    Consumer,
    Producer,
    Record,
    RingCorrupt,
    RingFull,
    RingMemory,
    UnsupportedMachine,
    record_block,
    require_ordered_machine,
)

CAPACITY = 8


def memory_from(start: int = 0, capacity: int = CAPACITY) -> RingMemory:
    counters = memoryview(bytearray(128)).cast("Q")
    counters[0] = counters[8] = start
    return RingMemory.over(memoryview(bytearray(capacity * RECORD_BYTES)), counters[0:1], counters[8:9])


def record(number: int) -> Record:
    return (number, *(number * 1000 + word for word in range(1, 8)))  # type: ignore[return-value]


def test_records_come_out_whole_and_in_order_over_the_wrap() -> None:
    memory = memory_from(5)
    producer, consumer = Producer(memory), Consumer(memory)
    for number in range(6):
        producer.push(record(number))
    producer.publish(record_block([record(6), record(7)]))
    assert consumer.take().tolist() == [list(record(number)) for number in range(8)]
    assert consumer.take().shape == (0, 8)


def test_taken_records_are_a_copy() -> None:
    memory = memory_from()
    producer, consumer = Producer(memory), Consumer(memory)
    producer.push(record(1))
    taken = consumer.take()
    for number in range(2, 2 + CAPACITY):
        producer.push(record(number))
    assert taken.tolist() == [list(record(1))]
    taken_records = consumer.take_records()
    assert len(taken_records) == CAPACITY
    for number in range(CAPACITY):
        producer.push(record(100 + number))
    assert taken_records == [record(number) for number in range(2, 2 + CAPACITY)]


def test_a_full_ring_refuses_and_changes_nothing() -> None:
    memory = memory_from()
    producer, consumer = Producer(memory), Consumer(memory)
    producer.publish(record_block([record(number) for number in range(CAPACITY - 1)]))
    with pytest.raises(RingFull, match="holds 7, 2 more do not fit"):
        producer.publish(record_block([record(97), record(98)]))
    producer.push(record(7))
    with pytest.raises(RingFull, match="holds 8, 1 more"):
        producer.push(record(99))
    assert consumer.take()[:, 0].tolist() == list(range(8))


@pytest.mark.parametrize("tail", [3, 5 + CAPACITY + 1, 2**64 - 1, 0])
def test_a_tail_no_producer_can_store_is_caught(tail: int) -> None:
    memory = memory_from(5)
    consumer = Consumer(memory)
    memory.tail[0] = tail
    with pytest.raises(RingCorrupt, match=f"ring tail is {tail}, but 5 records were taken and 8 fit"):
        consumer.take()
    with pytest.raises(RingCorrupt, match=f"ring tail is {tail}, but 5 records were taken and 8 fit"):
        consumer.take_records()


@pytest.mark.parametrize("head", [0, 14, 2**64 - 1])
def test_a_head_no_consumer_can_store_is_caught(head: int) -> None:
    memory = memory_from(5)
    producer = Producer(memory)
    producer.publish(record_block([record(number) for number in range(CAPACITY)]))
    memory.head[0] = head
    with pytest.raises(RingCorrupt, match=f"ring head is {head}"):
        producer.push(record(1))


def test_a_machine_with_a_weaker_memory_order_is_refused() -> None:
    require_ordered_machine("x86_64")
    with pytest.raises(UnsupportedMachine, match="aarch64"):
        require_ordered_machine("aarch64")


class RingMachine(RuleBasedStateMachine):
    """The ring behaves as a bounded deque of records, wherever its counters start."""

    @initialize(start=st.sampled_from([0, 1, 2**32 - 3, 2**32, 2**63 - 5, 2**63 - 1, 2**63]), bits=st.integers(1, 4))
    def begin(self, start: int, bits: int) -> None:
        self.capacity = 1 << bits
        self.memory = memory_from(start, self.capacity)
        self.producer, self.consumer = Producer(self.memory), Consumer(self.memory)
        self.model: deque[int] = deque()
        self.start, self.pushed, self.popped = start, 0, 0

    @rule()
    def push(self) -> None:
        if len(self.model) == self.capacity:
            with pytest.raises(RingFull):
                self.producer.push(record(self.pushed))
            return
        self.producer.push(record(self.pushed))
        self.model.append(self.pushed)
        self.pushed += 1

    @rule(count=st.integers(0, 20), flat=st.booleans())
    def publish(self, count: int, flat: bool) -> None:
        numbers = list(range(self.pushed, self.pushed + count))
        block = record_block([record(number) for number in numbers])

        def publish() -> None:
            if flat:
                self.producer.publish_words(array("Q", block.ravel().tolist()))
            else:
                self.producer.publish(block)

        if len(self.model) + count > self.capacity:
            with pytest.raises(RingFull):
                publish()
            return
        publish()
        self.model.extend(numbers)
        self.pushed += count

    @rule()
    def take(self) -> None:
        assert self.consumer.waiting() == bool(self.model)
        taken = self.consumer.take()
        assert taken.dtype == np.uint64
        assert taken.tolist() == [list(record(number)) for number in self.model]
        self.popped += len(self.model)
        self.model.clear()

    @rule()
    def take_records(self) -> None:
        assert self.consumer.take_records() == [record(number) for number in self.model]
        self.popped += len(self.model)
        self.model.clear()

    @precondition(lambda self: self.model)
    @rule()
    def a_new_consumer_starts_where_the_last_one_stopped(self) -> None:
        self.consumer = Consumer(self.memory)

    @invariant()
    def counters_count(self) -> None:
        assert self.memory.tail[0] == self.producer.published == self.start + self.pushed
        assert self.memory.head[0] == self.consumer.taken == self.start + self.popped


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
