"""Around the end of an execution: what starts before what is answered, and whose answers those are."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.base import Timing
from engines.bundle.signature import BlockLayout, Signature, Variant
from engines.errors import EngineFailed, Kind
from engines.tensor import TensorSpec
from worker.answers import Answers
from worker.arrival import Arrival, Attached, Block, block_views
from worker.channel.messages import ModelEntry
from worker.channel.records import NO_DEADLINE, RECORD_WORDS
from worker.executions import LEAD_NS, Executions
from worker.metrics import ModelCounters
from worker.models import LoadedModel
from worker.registry import Registry
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import ModelSpec, SchedulerOptions

pytestmark = pytest.mark.interpreted

WAIT_S = 60.0
LONG_NS = 10_000_000
BAD = 666.0
BLOCK_ROWS = 64
WIDTH = 2


class Doubling:
    """Doubles its input when it is let go; two slots that take turns, as every engine has."""

    binds = False
    direct_bytes = 0

    def __init__(
        self, batch_size: int, gate: threading.Semaphore, launched: list[Any], ended: threading.Semaphore
    ) -> None:
        self.batch_size = batch_size
        self._gate = gate
        self._launched = launched
        self._ended = ended
        shape = (batch_size, WIDTH)
        self._slots = [
            SimpleNamespace(inputs=[np.zeros(shape, np.float32)], outputs=[np.zeros(shape, np.float32)])
            for _ in range(2)
        ]

    def slot(self) -> Any:
        self._slots.reverse()
        return self._slots[0]

    def stage(self, slot: Any) -> None: ...

    def launch(self, slot: Any) -> None:
        assert self._gate.acquire(timeout=WAIT_S)
        self._launched.append(slot.inputs[0][:, 0].tolist())
        if (slot.inputs[0] == BAD).any():
            raise EngineFailed("bad row")
        slot.outputs[0][...] = slot.inputs[0] * 2

    def finish(self, slot: Any) -> Timing:
        self._ended.release()
        return Timing(LONG_NS)


class Frontend(SimpleNamespace):
    __hash__ = object.__hash__


class World:
    """One model of batch sizes 1 and 4 on a device that waits to be let go, one frontend, and a clock that is set."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.gate = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.launched: list[Any] = []
        self.replies: dict[int, int] = {}
        self.running_at_reply: list[int] = []
        tensors = (TensorSpec("X", "f32", (-1, WIDTH), 0),), (TensorSpec("Y", "f32", (-1, WIDTH), 0),)
        variant = Variant((), ((-1, WIDTH),), ((-1, WIDTH),), (False,))
        signature = Signature(tensors[0], tensors[1], tensors[0], tensors[1], (1, 4), (variant,))
        layout = BlockLayout.of(signature, 0)
        spec = ModelSpec(1, "m", (1, 4), 1, True)
        entry = ModelEntry(model_id=1, name="m", version="1", state="READY", signature=signature)
        made: dict[int, Doubling] = {}
        model: Any = SimpleNamespace(
            executable=lambda _, size: made.setdefault(size, Doubling(size, self.gate, self.launched, self.ended))
        )
        self.loaded = LoadedModel(entry, model, signature, spec, (layout,), ModelCounters("m", "1"), True)
        self.scheduler = Scheduler(SchedulerOptions())
        self.scheduler.add_model(spec)
        for size in (1, 4):
            self.scheduler.seed_cost(1, 0, size, LONG_NS)
        registry = Registry([entry])
        registry.add(self.loaded)
        channel: Any = Frontend(
            id=1,
            arena=np.zeros(layout.block_bytes(BLOCK_ROWS), np.uint8),
            reply_many=self._reply_many,
            fail=self._fail,
            flush=lambda: None,
        )
        self.attached = Attached(channel)
        views = block_views(channel.arena, signature, 0, layout, 0, BLOCK_ROWS)
        self.block = Block(self.loaded, 1 << 32, BLOCK_ROWS, *views)
        self.executions = Executions(
            self.scheduler, registry, Answers(lambda attached: None), None, lambda: self.now_ns
        )
        self.device_fd = self.executions.open()

    def _reply_many(self, words: list[int]) -> None:
        for at in range(0, len(words), RECORD_WORDS):
            assert words[at] not in self.replies, "answered twice"
            self.replies[words[at]] = words[at + 1] & 0xFF
        self.running_at_reply.append(len(self.executions.running))

    def _fail(self, request_id: int, kind: Kind, text: str) -> None:
        assert request_id not in self.replies, "answered twice"
        self.replies[request_id] = kind

    def offer(self, numbers: range, bad: int = -1, deadline_ns: int = NO_DEADLINE) -> None:
        """Queue a request of one row per number; its input is the number, or ``BAD``."""
        arrivals = []
        for number in numbers:
            self.block.inputs[0][number] = BAD if number == bad else number
            request = Arrival(number + 1, self.attached, number, self.block, number, 1, 1, deadline_ns, self.now_ns)
            self.attached.live[number] = request
            arrivals.append(request)
        assert self.scheduler.offer_many(arrivals, self.now_ns) == []

    def let_go(self) -> None:
        """Let one execution end and the loop see it."""
        self.gate.release()
        assert select.select([self.device_fd], [], [], WAIT_S)[0]
        self.executions.clear()
        self.executions.collect()

    def turn(self) -> None:
        self.executions.start(self.now_ns)
        self.executions.answer()

    def finish(self) -> None:
        """Run everything that is queued."""
        self.turn()
        while self.executions.running:
            self.let_go()
            self.turn()

    def check(self, count: int) -> None:
        """Everybody was answered once, and every output is the double of its own input."""
        assert sorted(self.replies) == list(range(count))
        assert not self.attached.live
        good = [number for number, kind in self.replies.items() if kind == Kind.OK]
        np.testing.assert_array_equal(self.block.outputs[0][good, 0], [number * 2 for number in good])


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    one.gate.release(100)
    one.executions.close()


def test_the_next_batch_runs_while_the_ended_one_is_answered(world: World) -> None:
    world.offer(range(6))
    world.turn()
    world.let_go()
    assert not world.replies, "recorded, not answered yet"
    world.turn()
    assert sorted(world.replies) == [0, 1, 2, 3] and world.running_at_reply == [1]
    world.finish()
    world.check(6)


def test_a_full_batch_is_handed_over_before_the_running_one_ends(world: World) -> None:
    world.offer(range(12))
    world.turn()
    end_ns = world.executions.expected_end_ns
    assert world.executions.ahead_from_ns == end_ns - LEAD_NS
    world.now_ns = end_ns - LEAD_NS - 1
    world.turn()
    assert len(world.executions.running) == 1, "too early to decide"
    world.now_ns += 1
    world.turn()
    assert len(world.executions.running) == 2
    world.turn()
    assert len(world.executions.running) == 2 and world.scheduler.queued == 4, "one ahead at most"
    world.now_ns = end_ns
    world.let_go()
    world.turn()
    assert sorted(world.replies) == [0, 1, 2, 3] and world.running_at_reply == [1]
    queued_ns = world.executions.running[0].started_ns - world.executions.running[0].order[0].arrival_ns
    assert queued_ns == end_ns - 1_000_000_000, "waiting ends when the execution begins"
    world.finish()
    world.check(12)
    assert world.launched == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_batch_that_may_still_grow_is_chosen_late(world: World) -> None:
    world.offer(range(7))
    world.turn()
    world.now_ns = world.executions.expected_end_ns
    world.turn()
    assert len(world.executions.running) == 1
    world.offer(range(7, 8))
    world.let_go()
    world.finish()
    world.check(8)
    assert world.launched == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_ended_batch_is_answered_before_its_slot_is_filled_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third batch may run the moment it is handed over, in the slot of the first one."""
    world.offer(range(12))
    world.turn()
    world.now_ns = world.executions.expected_end_ns
    world.turn()
    world.let_go()
    world.gate.release(2)
    for _ in range(2):
        assert world.ended.acquire(timeout=WAIT_S)
    submit = world.executions._device.submit

    def submit_and_wait(batch: Any) -> None:
        submit(batch)
        assert world.ended.acquire(timeout=WAIT_S)

    monkeypatch.setattr(world.executions._device, "submit", submit_and_wait)
    world.now_ns = world.executions.expected_end_ns
    world.turn()
    assert len(world.launched) == 3
    world.executions.collect()
    world.turn()
    world.check(12)


def test_both_ended_before_the_loop_came_round(world: World) -> None:
    world.offer(range(8))
    world.turn()
    world.now_ns = world.executions.expected_end_ns
    world.turn()
    world.gate.release(2)
    while len(world.launched) < 2 or world.executions.running:
        assert select.select([world.device_fd], [], [], WAIT_S)[0]
        world.executions.clear()
        world.executions.collect()
    world.turn()
    world.check(8)


def test_a_failure_with_the_next_batch_handed_over_hurts_only_the_bad_row(world: World) -> None:
    world.offer(range(8), bad=2)
    world.turn()
    world.now_ns = world.executions.expected_end_ns
    world.turn()
    assert len(world.executions.running) == 2
    world.let_go()
    assert world.executions.ahead_from_ns > world.now_ns + LONG_NS, "what runs again goes first"
    world.finish()
    world.check(8)
    assert [number for number, kind in world.replies.items() if kind != Kind.OK] == [2]


def test_a_batch_whose_cost_is_unknown_is_not_overtaken_by_a_guess(world: World) -> None:
    world.scheduler.remove_model(1, world.now_ns)
    world.scheduler.add_model(world.loaded.spec)
    world.offer(range(12))
    world.turn()
    world.now_ns += 100 * LONG_NS
    world.turn()
    assert len(world.executions.running) == 1
    world.finish()
    world.check(12)
