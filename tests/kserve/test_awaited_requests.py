"""Requests that coroutines wait for: nothing of theirs is left behind, whoever ends first."""

from __future__ import annotations

import asyncio

import pytest
from serving_double import DoubleServing

from frontend.inference import InferRequest, InputTensor


def request_of(model: str) -> InferRequest:
    return InferRequest(model, "", "r", [InputTensor("x", "FP32", (1, 4), raw=bytes(16))])


@pytest.mark.parametrize("answered_first", [True, False])
def test_do_05_a_response_that_meets_a_cancelled_coroutine_is_released(answered_first: bool) -> None:
    async def test() -> None:
        serving = DoubleServing()
        waiting = asyncio.create_task(serving.infer(request_of("held"), 0))
        await serving.until(lambda: bool(serving.held))
        # Both happen within one turn of the loop, so that the coroutine sees the two at once.
        steps = [serving.release_held, waiting.cancel]
        for step in steps if answered_first else reversed(steps):
            step()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert serving.responses_out == 0

    asyncio.run(test())


def test_do_05_a_cancelled_coroutine_withdraws_its_request() -> None:
    async def test() -> None:
        serving = DoubleServing()
        waiting = asyncio.create_task(serving.infer(request_of("held"), 0))
        await serving.until(lambda: bool(serving.held))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert serving.cancelled == ["r"]
        serving.release_held()
        assert serving.responses_out == 0

    asyncio.run(test())
