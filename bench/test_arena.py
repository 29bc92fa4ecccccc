"""What finding and giving back room for one request costs."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from engines.bundle.signature import BlockLayout, Signature, Variant
from engines.tensor import TensorSpec
from worker.channel.arena import Arena
from worker.channel.messages import ModelEntry
from worker.channel.placement import VariantPlan

ARENA_BYTES = 256 << 20


def layout_of(row_bytes: int) -> BlockLayout:
    spec = TensorSpec("x", "u8", (-1, row_bytes), 0)
    variant = Variant((), ((-1, row_bytes),), ((-1, row_bytes),), (False,))
    return BlockLayout.of(Signature((spec,), (spec,), (), (), (1, 8, 32), (variant,)), 0)


@pytest.mark.parametrize("row_bytes", [256, 16 << 10, 3 << 20])
@pytest.mark.parametrize("held", [0, 20, 40])
def test_allocate_and_free_in_shared_blocks(benchmark: BenchmarkFixture, row_bytes: int, held: int) -> None:
    arena, layout = Arena(ARENA_BYTES), layout_of(row_bytes)
    spans = [arena.allocate("lane", layout, 1, True) for _ in range(held)]

    def turn() -> None:
        arena.free(arena.allocate("lane", layout, 1, True))

    benchmark(turn)
    assert arena.statistics().spans == len(spans)


def test_allocate_and_free_own_blocks(benchmark: BenchmarkFixture) -> None:
    """Models whose requests cannot share a block: the page allocator is asked every time."""
    arena, layout = Arena(ARENA_BYTES), layout_of(4000)
    held = [arena.allocate("lane", layout, 1 + number % 7, False) for number in range(200)]
    for span in held[::2]:
        arena.free(span)

    def turn() -> None:
        arena.free(arena.allocate("lane", layout, 3, False))

    benchmark(turn)
    assert arena.statistics().spans == 100


def test_plan_of_a_variant(benchmark: BenchmarkFixture) -> None:
    """Done once per model and variant, not per request."""
    spec = TensorSpec("x", "f32", (-1, 64), 0)
    signature = Signature((spec,), (spec,), (), (), (1,), (Variant((), ((-1, 64),), ((-1, 64),), (False,)),))
    entry = ModelEntry(model_id=1, name="echo", version="1", state="READY", signature=signature)
    plan = benchmark(VariantPlan, entry, signature, 0)
    assert plan.shares
