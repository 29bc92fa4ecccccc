"""The shipping ring and doorbell code under seeded schedules with delayed stores."""

from __future__ import annotations

import os
from array import array

import pytest
from stepping import Memory, RecordRows, RecordWords, Stuck, Word

from worker.channel import doorbell
from worker.channel.doorbell import Bell, Sleeper
from worker.channel.records import RECORD_WORDS
from worker.channel.ring import Consumer, Producer, Record, RingCorrupt, RingFull, RingMemory, record_block

pytestmark = pytest.mark.interpreted

CAPACITY = 4
RECORDS = 12
TAIL, HEAD, FLAG, FIRST = 0, 1, 2, 3
SEEDS = 120


def record(number: int) -> Record:
    return (number,) * RECORD_WORDS  # type: ignore[return-value]


def ring_in(memory: Memory) -> RingMemory:
    words = RecordWords(memory, FIRST)
    return RingMemory(words, RecordRows(words), Word(memory, TAIL), Word(memory, HEAD), CAPACITY)


def new_memory(seed: int, machine: str) -> Memory:
    return Memory(seed, machine, FIRST + CAPACITY * RECORD_WORDS)


def produce(ring: RingMemory) -> None:
    producer = Producer(ring)
    number = 0
    while number < RECORDS:
        count = min(1 + number % 3, RECORDS - number)
        try:
            if count == 1:
                producer.push(record(number))
            elif number % 2:
                producer.publish(record_block([record(number + more) for more in range(count)]))
            else:
                producer.publish_words(array("Q", [word for more in range(count) for word in record(number + more)]))
        except RingFull:
            continue
        number += count


def consume(ring: RingMemory) -> None:
    consumer = Consumer(ring)
    expected = 0
    while expected < RECORDS:
        for words in [*consumer.take().tolist(), *consumer.take_records()]:
            assert tuple(words) == record(expected), f"record {expected} came as {words}"
            expected += 1


def transfer(seed: int, machine: str) -> None:
    memory = new_memory(seed, machine)
    # Both ends read the counters when they are made, before anybody moves.
    memory.run(lambda: produce(ring_in(memory)), lambda: consume(ring_in(memory)))


@pytest.mark.parametrize("machine", ["program", "x86"])
def test_records_arrive_whole_and_in_order_under_any_schedule(machine: str) -> None:
    for seed in range(SEEDS):
        transfer(seed, machine)


def test_the_schedules_can_tell_a_machine_that_reorders_stores() -> None:
    failures = 0
    for seed in range(20):
        try:
            transfer(seed, "weak")
        except (AssertionError, RingCorrupt, Stuck):
            failures += 1
    assert failures > 0


class SteppingBarrier:
    """membarrier for the stepping machine; ``works`` False does nothing, to show that it is needed."""

    def __init__(self, memory: Memory, works: bool, available: bool = True) -> None:
        self._memory = memory
        self._works = works
        self.available = available

    def full(self) -> None:
        self._memory.pause()
        if self._works:
            self._memory.flush_all()


def sleep_and_wake(seed: int, monkeypatch: pytest.MonkeyPatch, works: bool, available: bool = True) -> int:
    """Publish a few records to a side that sleeps between them; return how often the bell was rung."""
    memory = new_memory(seed, "x86")
    barrier = SteppingBarrier(memory, works, available)
    rings = 0

    def ring_bell(_: int, __: int) -> None:
        nonlocal rings
        memory.pause()
        # A system call waits for the own stores.
        memory.flush_own()
        memory.rings += 1
        rings += 1

    monkeypatch.setattr(doorbell.os, "eventfd_write", ring_bell)
    sleeper = Sleeper(Word(memory, FLAG), barrier)  # type: ignore[arg-type]
    bell = Bell(-1, Word(memory, FLAG), barrier)  # type: ignore[arg-type]
    count = 5

    def publish() -> None:
        producer = Producer(ring_in(memory))
        number = 0
        while number < count:
            try:
                producer.push(record(number))
            except RingFull:
                continue
            bell.ring_if_asleep()
            number += 1

    def receive() -> None:
        consumer = Consumer(ring_in(memory))
        sleeper.start()
        taken = 0
        while taken < count:
            taken += len(consumer.take())
            if taken == count:
                return
            sleeper.lie_down()
            if not consumer.waiting():
                while memory.rings == 0:
                    if memory.alone():
                        raise Stuck("asleep, and nobody is left who could ring")
                    memory.pause()
                memory.rings = 0
            sleeper.get_up()

    memory.run(publish, receive)
    return rings


def test_no_wake_up_is_lost_under_any_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    rings = [sleep_and_wake(seed, monkeypatch, works=True) for seed in range(SEEDS)]
    assert min(rings) < 5, "the bell was rung for somebody awake"


def test_without_membarrier_every_publication_rings_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {sleep_and_wake(seed, monkeypatch, works=False, available=False) for seed in range(SEEDS)} == {5}


def test_the_schedules_can_tell_a_missing_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = 0
    for seed in range(SEEDS):
        try:
            sleep_and_wake(seed, monkeypatch, works=False)
        except Stuck:
            lost += 1
    assert lost > 0


def test_the_real_barrier_is_available_here_or_the_flag_stays_set() -> None:
    barrier = doorbell.Barrier()
    flag = memoryview(bytearray(8)).cast("Q")
    sleeper = Sleeper(flag, barrier)
    sleeper.start()
    assert flag[0] == 1
    sleeper.get_up()
    assert flag[0] == 1
    barrier.start()
    sleeper.start()
    assert flag[0] == (0 if barrier.available else 1)
    sleeper.lie_down()
    assert flag[0] == 1


def test_a_bell_rings_only_for_a_sleeper_and_a_full_counter_is_no_error() -> None:
    barrier = doorbell.Barrier()
    barrier.start()
    flag = memoryview(bytearray(8)).cast("Q")
    fd = doorbell.open_doorbell()
    try:
        bell = Bell(fd, flag, barrier)
        flag[0] = 1
        bell.ring_if_asleep()
        assert os.eventfd_read(fd) == 1
        os.eventfd_write(fd, 2**64 - 2)
        bell.ring_if_asleep()
        doorbell.answer_doorbell(fd)
        doorbell.answer_doorbell(fd)
        flag[0] = 0
        bell.ring_if_asleep()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
    finally:
        os.close(fd)
