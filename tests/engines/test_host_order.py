"""The host device's race detector against brute force, and its lazy order against the plain one, on random programs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engines.device.base import Span
from engines.device.host import HostDevice
from engines.device.host_order import DeviceMisuse, Ranges

STREAMS, EVENTS, SIZE = 3, 3, 8
CHUNK = 200


@dataclass(frozen=True)
class Step:
    """One call of the host."""

    do: str
    stream: int = 0
    event: int = 0
    start: int = 0
    end: int = 0


def draw_program(draw: random.Random) -> list[Step]:
    steps, recorded = [], set()
    for _ in range(draw.randrange(4, 30)):
        do = draw.choices(["read", "write", "record", "wait", "sync stream", "sync event"], [4, 4, 3, 4, 1, 1])[0]
        stream, event = draw.randrange(STREAMS), draw.randrange(EVENTS)
        if do in ("wait", "sync event"):
            if not recorded:
                continue
            event = draw.choice(sorted(recorded))
        if do == "record":
            recorded.add(event)
        start = draw.randrange(SIZE)
        steps.append(Step(do, stream, event, start, draw.randrange(start + 1, SIZE + 1)))
    return steps


def first_race(steps: list[Step]) -> int | None:
    """Return the first step that races with an earlier one, by reachability over every single order that is given."""
    before: list[set[int]] = []
    last_of: dict[int, int] = {}
    recorded: dict[int, int] = {}
    host: set[int] = set()
    for index, step in enumerate(steps):
        seen: set[int] = set(host)

        def reach(node: int | None, seen: set[int] = seen) -> None:
            if node is not None:
                seen |= before[node] | {node}

        if step.do == "sync stream":
            reach(last_of.get(step.stream))
            host |= seen
        elif step.do == "sync event":
            reach(recorded[step.event])
            host |= seen
        else:
            reach(last_of.get(step.stream))
            if step.do == "wait":
                reach(recorded[step.event])
            last_of[step.stream] = index
            if step.do == "record":
                recorded[step.event] = index
        before.append(seen)
        if step.do in ("read", "write"):
            for other, earlier in enumerate(steps[:index]):
                overlaps = earlier.start < step.end and step.start < earlier.end
                touches = earlier.do in ("read", "write") and "write" in (earlier.do, step.do)
                if touches and overlaps and other not in seen:
                    return index
    return None


class Run:
    """A program on a host device."""

    def __init__(self) -> None:
        self.device = HostDevice()
        self.streams = [self.device.stream(str(number)) for number in range(STREAMS)]
        self.events = [self.device.event() for _ in range(EVENTS)]
        self.buffer = self.device.allocate(SIZE, "memory")
        self.read: dict[int, list[int]] = {}
        self.device.zero(Span.whole(self.buffer), self.streams[0])
        self.device.synchronize()

    def step(self, index: int, step: Step) -> None:
        stream, event = self.streams[step.stream], self.events[step.event]
        span = Span.whole(self.buffer).part(step.start, step.end - step.start)

        def write() -> None:
            self.device.array(span, (span.size_bytes,), np.dtype(np.uint8))[...] = np.uint8(index + 1)

        def read() -> None:
            self.read[index] = self.device.array(span, (span.size_bytes,), np.dtype(np.uint8)).get().tolist()

        calls: dict[str, Any] = {
            "read": lambda: self.device.launch(stream, read, reads=[span], writes=[]),
            "write": lambda: self.device.launch(stream, write, reads=[], writes=[span]),
            "record": lambda: stream.record(event),
            "wait": lambda: stream.wait(event),
            "sync stream": stream.synchronize,
            "sync event": event.synchronize,
        }
        calls[step.do]()


def check_program(steps: list[Step]) -> bool:
    """Compare detector and oracle, and what a program without a race reads; return whether it raced."""
    run, race = Run(), first_race(steps)
    for index, step in enumerate(steps):
        if index == race:
            with pytest.raises(DeviceMisuse, match="nothing orders the two"):
                run.step(index, step)
            return True
        run.step(index, step)
    run.device.synchronize()
    memory, expected = [0] * SIZE, {}
    for index, step in enumerate(steps):
        if step.do == "write":
            memory[step.start : step.end] = [index + 1] * (step.end - step.start)
        elif step.do == "read":
            expected[index] = memory[step.start : step.end]
    assert run.read == expected
    run.buffer.free()
    run.device.close()
    return False


@pytest.mark.parametrize("chunk", [0, 1, *(pytest.param(at, marks=pytest.mark.slow) for at in range(2, 50))])
def test_detector_finds_the_first_race_and_only_races(chunk: int) -> None:
    raced = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        steps = draw_program(random.Random(seed))
        try:
            raced += check_program(steps)
        except (AssertionError, DeviceMisuse) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    # Programs of both kinds must come up, or nothing was compared.
    assert CHUNK // 10 < raced < CHUNK - CHUNK // 10


def test_ranges_are_a_set_of_numbers() -> None:
    draw = random.Random(7)
    for _ in range(300):
        ranges, numbers = Ranges(), set[int]()
        for _ in range(draw.randrange(1, 15)):
            start = draw.randrange(20)
            end = draw.randrange(start + 1, 21)
            if draw.random() < 0.6:
                ranges.add(start, end)
                numbers |= set(range(start, end))
            else:
                ranges.remove(start, end)
                numbers -= set(range(start, end))
            low = draw.randrange(20)
            high = draw.randrange(low + 1, 21)
            wanted = set(range(low, high))
            parts = ranges.within(low, high)
            assert {number for part in parts for number in range(*part)} == numbers & wanted
            assert ranges.missing(low, high) == min(wanted - numbers, default=None)
