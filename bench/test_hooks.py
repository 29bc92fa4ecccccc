"""What hooks cost a request: the hop to a thread, the checks of what they return, the choice of a variant.

Run with ``pytest bench/test_hooks.py``; figures are comparable within one run only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from engines.bundle.signature import Signature, Variant
from engines.bundle.variants import match_variant
from engines.tensor import TensorSpec
from frontend.hooks.check import check_tensors
from frontend.hooks.context import Context
from frontend.hooks.load import Hook, Hooks
from frontend.hooks.run import HookRunner, Mode

ARRAYS = {"x": np.zeros((4, 1024), np.float32)}


def plain(inputs: Any, ctx: Any) -> Any:
    return inputs


async def coroutine(inputs: Any, ctx: Any) -> Any:
    return inputs


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize(
    ("mode", "hook"), [("inline", plain), ("inline", coroutine), ("thread", plain)], ids=["inline", "async", "thread"]
)
def test_one_hook_call(benchmark: BenchmarkFixture, loop: asyncio.AbstractEventLoop, mode: Mode, hook: Hook) -> None:
    hooks, ctx = Hooks("m", "1", None, hook, None, "unregistered"), Context("m", "1")
    with ThreadPoolExecutor(1) as executor:
        runner = HookRunner(mode, executor)
        result = benchmark(lambda: loop.run_until_complete(runner.preprocess(hooks, ARRAYS, ctx)))
    assert result is ARRAYS


def test_check_of_a_numeric_tensor(benchmark: BenchmarkFixture) -> None:
    declared = (TensorSpec("x", "f32", (-1, 1024), 0),)
    _, rows = benchmark(check_tensors, declared, ARRAYS, "here")
    assert rows == 4


@pytest.mark.parametrize("kind", ["bytes", "str"])
def test_check_of_1000_byte_elements(benchmark: BenchmarkFixture, kind: str) -> None:
    declared = (TensorSpec("t", "bytes", (-1,), 0),)
    array = np.empty(1000, np.object_)
    array[:] = [b"label" if kind == "bytes" else "label"] * 1000
    checked, _ = benchmark(check_tensors, declared, {"t": array}, "here")
    assert checked["t"][999] == b"label"


@pytest.mark.parametrize("variants", [1, 8, 64])
def test_match_of_the_last_variant(benchmark: BenchmarkFixture, variants: int) -> None:
    inputs = tuple(TensorSpec(name, "i64", (-1, -1), 0) for name in ("ids", "mask", "types"))
    output = (TensorSpec("v", "f32", (-1, 384), 0),)
    listed = tuple(
        Variant((size,) * 3, ((-1, size),) * 3, ((-1, 384),), (False,)) for size in range(16, 16 * variants + 1, 16)
    )
    signature = Signature(inputs, output, inputs, output, (1, 8), listed)
    shapes = [(4, 16 * variants)] * 3
    assert benchmark(match_variant, signature, shapes) == variants - 1
