"""Records become requests, or refusals: nothing that a frontend wrote is believed before it is checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.bundle.signature import BlockLayout, Signature, Variant
from engines.errors import Kind
from engines.tensor import TensorSpec
from worker import intake
from worker.arrival import Attached
from worker.channel.messages import ModelEntry
from worker.channel.records import FLAG_BACKGROUND, FLAG_COMMITTED, cancel_words, request_words
from worker.intake import Intake
from worker.metrics import ModelCounters
from worker.models import LoadedModel
from worker.scheduling.types import ModelSpec

pytestmark = pytest.mark.interpreted

SHARED, WHOLE = 1, 2
ARENA_BYTES = 1 << 14
BLOCK_ROWS = 8


def loaded_of(model_id: int, axis: int) -> LoadedModel:
    shape = (-1, 4) if axis == 0 else (4, -1)
    tensors = (TensorSpec("X", "f32", shape, axis),), (TensorSpec("Y", "f32", shape, axis),)
    signature = Signature(*tensors, *tensors, (1, 8), (Variant((), (shape,), (shape,), (False,)),))
    entry = ModelEntry(model_id=model_id, name="m", version="1", state="READY", signature=signature)
    spec = ModelSpec(model_id, "m", (1, 8), 1, True)
    model: Any = None
    layouts = (BlockLayout.of(signature, 0),)
    return LoadedModel(entry, model, signature, spec, layouts, ModelCounters("m", "1"), signature.shares_blocks)


class Records:
    """A channel of which each ``take`` gives what was written."""

    def __init__(self) -> None:
        self.arena = np.zeros(ARENA_BYTES, np.uint8)
        self.written: list[tuple[int, ...]] = []

    def take(self) -> list[tuple[int, ...]]:
        written, self.written = self.written, []
        return written


@pytest.fixture
def models() -> dict[int, LoadedModel]:
    return {SHARED: loaded_of(SHARED, 0), WHOLE: loaded_of(WHOLE, 1)}


@pytest.fixture
def reader(models: dict[int, LoadedModel]) -> Intake:
    return Intake(models.get)


@pytest.fixture
def attached() -> Attached:
    channel: Any = Records()
    return Attached(channel)


def write(attached: Attached, *records: tuple[int, ...]) -> None:
    channel: Any = attached.channel
    channel.written.extend(records)


def words(request_id: int = 1, model: int = SHARED, variant: int = 0, flags: int = 0, offset: int = 0,
          block_rows: int = BLOCK_ROWS, at: int = 0, rows: int = 1) -> tuple[int, ...]:  # fmt: skip
    return request_words(request_id, model, variant, flags, offset, block_rows, at, rows, 700, 600)


def test_a_record_becomes_a_request_and_owes_a_reply(reader: Intake, attached: Attached) -> None:
    write(attached, words(5, at=3, rows=2, flags=FLAG_BACKGROUND), words(6, flags=FLAG_COMMITTED), cancel_words(5))
    (first, second), cancels, refusals = reader.read(attached)
    assert (first.request_id, first.row_start, first.rows, first.model_id, first.variant) == (5, 3, 2, SHARED, 0)
    assert (first.deadline_ns, first.arrival_ns) == (700, 600)
    assert (first.background, first.committed, second.background, second.committed) == (True, False, False, True)
    assert first.key != second.key and not first.gone
    assert attached.live == {5: first, 6: second}
    assert (cancels, refusals) == ([5], [])


def test_a_block_is_checked_and_viewed_once(reader: Intake, attached: Attached) -> None:
    write(attached, words(1, at=0), words(2, at=1), words(3, at=1, offset=1024))
    first, second, third = reader.read(attached)[0]
    assert first.block is second.block is not third.block
    assert first.block.inputs[0].shape == (BLOCK_ROWS, 4)
    assert np.shares_memory(first.block.inputs[0], attached.channel.arena)
    assert first.place + 1 == second.place < third.place, "neighbours in memory are neighbours in order"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (words(model=9), "the model was unloaded"),
        (words(variant=1), "variant 1 of 1"),
        (words(offset=32), "outside its arena"),
        (words(offset=ARENA_BYTES - 64), "outside its arena"),
        (words(offset=2**63), "outside its arena"),
        (words(block_rows=2**31), "outside its arena"),
        (words(at=BLOCK_ROWS), "outside its block"),
        (words(at=7, rows=2), "outside its block"),
        (words(rows=2**64 - 1), "outside its block"),
        (words(model=WHOLE, rows=7), "cannot be shared"),
        (words(model=WHOLE, at=1, rows=7), "cannot be shared"),
    ],
)
def test_a_record_that_does_not_hold_is_refused_and_touches_nothing(
    reader: Intake, attached: Attached, record: tuple[int, ...], text: str
) -> None:
    for _ in range(2):
        write(attached, record, words(2))
        requests, cancels, refusals = reader.read(attached)
        assert [request.request_id for request in requests] == [2]
        assert cancels == []
        (refusal,) = refusals
        assert refusal.request_id == 1 and text in refusal.text
        assert refusal.kind is (Kind.NOT_READY if "unloaded" in text else Kind.INTERNAL)
        assert list(attached.live) == [2]
        attached.live.clear()


def test_an_id_in_use_is_refused(reader: Intake, attached: Attached) -> None:
    write(attached, words(1), words(1, at=1))
    requests, _, refusals = reader.read(attached)
    assert len(requests) == 1 and "request id 1 is in use" in refusals[0].text
    assert attached.live[1] is requests[0]


def test_odd_traffic_does_not_grow_the_table(
    reader: Intake, attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_BLOCKS", 4)
    for number in range(20):
        write(attached, words(number, offset=64 * number))
        (request,) = reader.read(attached)[0]
        assert request.block.rows == BLOCK_ROWS
        assert len(attached.blocks) <= 4


def test_an_unloaded_model_is_refused_once_blocks_are_forgotten(
    reader: Intake, attached: Attached, models: dict[int, LoadedModel]
) -> None:
    write(attached, words(1))
    assert len(reader.read(attached)[0]) == 1
    del models[SHARED]
    attached.blocks.clear()
    write(attached, words(2))
    assert reader.read(attached)[2][0].kind is Kind.NOT_READY


def test_a_channel_without_news_gives_nothing(reader: Intake) -> None:
    channel: Any = SimpleNamespace(take=list)
    assert reader.read(Attached(channel)) == ([], [], [])
