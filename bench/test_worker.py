"""What the worker itself costs per request: records in, scheduling, gather, scatter, replies out; the model is free.

    .venv/bin/pytest bench/test_worker.py

The rings and sockets are replaced by arrays, the executable by one that copies nothing, so that what is left is the
worker's own code. Divide by the number of requests of a round.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.base import Timing
from engines.bundle.signature import BlockLayout, Signature, Variant
from engines.tensor import TensorSpec
from worker.channel.messages import ModelEntry
from worker.channel.reception import Events
from worker.channel.records import NO_DEADLINE, RECORD_WORDS, request_words
from worker.loop import Loop
from worker.metrics import ModelCounters
from worker.models import LoadedModel
from worker.registry import Registry
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import Discipline, ModelSpec, SchedulerOptions

BLOCK_ROWS = 256
ROUNDS_OF_64 = 64


class Slot:
    def __init__(self, inputs: list[Any], outputs: list[Any]) -> None:
        self.inputs, self.outputs = inputs, outputs


class Nothing:
    """An executable whose execution is free."""

    binds = True
    direct_bytes = 0

    def __init__(self, batch_size: int, width: int) -> None:
        self.batch_size = batch_size
        shape = (batch_size, width)
        self._slot = Slot([np.zeros(shape, np.float32)], [np.zeros(shape, np.float32)])

    def slot(self) -> Slot:
        return self._slot

    def bind(self, inputs: list[Any], outputs: list[Any]) -> Slot:
        return Slot(inputs, outputs)

    def stage(self, slot: Slot) -> None: ...
    def launch(self, slot: Slot) -> None: ...

    def finish(self, slot: Slot) -> Timing:
        return Timing(1000)


class ArrayChannel:
    """A channel whose rings are arrays."""

    def __init__(self, number: int, arena_bytes: int) -> None:
        self.id = number
        self.name = f"frontend{number}"
        self.pid = 1
        self.arena = np.zeros(arena_bytes, np.uint8)
        self.records: list[Any] = []
        self.replies: list[Any] = []

    def take(self) -> Any:
        records, self.records = self.records, []
        return records

    def reply_many(self, words: list[int]) -> None:
        self.replies.extend(words[at : at + RECORD_WORDS] for at in range(0, len(words), RECORD_WORDS))

    def fail(self, request_id: int, kind: int, text: str) -> None:
        raise AssertionError(text)

    def flush(self) -> None: ...


class ArrayServer:
    def __init__(self, channels: list[ArrayChannel]) -> None:
        self.channels = channels
        self._attached = list(channels)

    def poll(self, timeout_ns: int, rest_ns: int = 0, *, spin: bool = True) -> Events:
        attached, self._attached = self._attached, []
        return Events(attached=attached)  # type: ignore[arg-type]

    def rung(self) -> list[ArrayChannel]:
        return [channel for channel in self.channels if len(channel.records)]

    def watch(self, fd: int) -> None: ...
    def publish_models(self, models: Any) -> None: ...


def build(width: int, channels: int) -> tuple[Loop, list[ArrayChannel], BlockLayout]:
    """Return a loop over one model of ``width`` floats with sizes 1, 8 and 32."""
    tensors = (TensorSpec("INPUT", "f32", (-1, width), 0),), (TensorSpec("OUTPUT", "f32", (-1, width), 0),)
    variant = Variant((), ((-1, width),), ((-1, width),), (False,))
    signature = Signature(tensors[0], tensors[1], tensors[0], tensors[1], (1, 8, 32), (variant,))
    layout = BlockLayout.of(signature, 0)
    spec = ModelSpec(1, "m", (1, 8, 32), 1, True)
    model: Any = SimpleNamespace(executable=lambda variant, size: Nothing(size, width))
    entry = ModelEntry(model_id=1, name="m", version="1", state="READY", signature=signature)
    loaded = LoadedModel(entry, model, signature, spec, (layout,), ModelCounters("m", "1"), True)
    scheduler = Scheduler(SchedulerOptions(discipline=Discipline.FAIR))
    scheduler.add_model(spec)
    for size in (1, 8, 32):
        scheduler.seed_cost(1, 0, size, 1000)
    registry = Registry([entry])
    registry.add(loaded)
    ends = [ArrayChannel(number, layout.block_bytes(BLOCK_ROWS)) for number in range(channels)]
    loader: Any = SimpleNamespace(fileno=lambda: -1)
    engines: Any = SimpleNamespace(attach=lambda *_: None)
    server: Any = ArrayServer(ends)
    loop = Loop("worker0", server, scheduler, registry, loader, None, None, engines=engines)
    loop.step()
    return loop, ends, layout


def records(first_id: int, rows: list[int]) -> Any:
    """Return request records of one row each at ``rows`` of block 0."""
    return [request_words(first_id + n, 1, 0, 0, 0, BLOCK_ROWS, row, 1, NO_DEADLINE, 0) for n, row in enumerate(rows)]


@pytest.mark.parametrize("width", [64, 4096], ids=["256B", "16KiB"])
@pytest.mark.parametrize("order", ["contiguous", "scattered"])
@pytest.mark.parametrize("channels", [1, 2])
def test_64_requests_in_batches_of_32(benchmark: Any, width: int, order: str, channels: int) -> None:
    loop, ends, _ = build(width, channels)
    share = 64 // channels
    rows = list(range(share))
    if order == "scattered":
        rows = [row * 2 for row in rows]
    next_id = 1

    def one_round() -> None:
        nonlocal next_id
        for end in ends:
            end.records = records(next_id, rows)
            next_id += share
        answered = sum(len(end.replies) for end in ends)
        while sum(len(end.replies) for end in ends) < answered + 64:
            loop.step()

    def clear() -> None:
        for end in ends:
            end.replies.clear()

    benchmark.pedantic(one_round, setup=clear, rounds=ROUNDS_OF_64, iterations=1, warmup_rounds=8)


def test_one_request_alone(benchmark: Any) -> None:
    loop, ends, _ = build(64, 1)
    next_id = 1

    def one_round() -> None:
        nonlocal next_id
        ends[0].records = records(next_id, [0])
        next_id += 1
        ends[0].replies.clear()
        while not ends[0].replies:
            loop.step()

    benchmark.pedantic(one_round, rounds=500, iterations=1, warmup_rounds=20)
