"""Running hooks: modes, what their exceptions become, and who owns the arrays when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from engines.errors import HookFailed, InvalidInput, Kind, QueueFull, Unavailable
from frontend.hooks.context import Context
from frontend.hooks.load import Hook, Hooks
from frontend.hooks.run import HookRunner, Mode

MODES: list[Mode] = ["thread", "inline"]
ARRAYS = {"x": np.arange(3)}


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def hooks(pre: Hook | None = None, post: Hook | None = None) -> Hooks:
    return Hooks("m", "1", None, pre, post, "unregistered")


def context() -> Context:
    return Context(model="m", version="1", request_id="r")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await coroutine

    return asyncio.run(bounded())


@pytest.mark.parametrize("mode", MODES)
def test_hooks_see_arrays_and_one_context(mode: Mode, executor: ThreadPoolExecutor) -> None:
    def pre(inputs: Any, ctx: Any) -> Any:
        ctx.seen = inputs["x"].sum()
        return {"y": inputs["x"] + 1}

    async def post(outputs: Any, ctx: Any) -> Any:
        await asyncio.sleep(0)
        return {"z": outputs["y"] * ctx.seen}

    async def both() -> Any:
        runner, ctx = HookRunner(mode, executor), context()
        prepared = await runner.preprocess(hooks(pre, post), ARRAYS, ctx)
        return await runner.postprocess(hooks(pre, post), dict(prepared), ctx)

    assert run(both())["z"].tolist() == [3, 6, 9]


@pytest.mark.parametrize("without", [None, hooks()])
def test_without_a_hook_arrays_pass_through(without: Hooks | None, executor: ThreadPoolExecutor) -> None:
    runner = HookRunner("thread", executor)
    assert run(runner.preprocess(without, ARRAYS, context())) is ARRAYS
    assert run(runner.postprocess(without, ARRAYS, context())) is ARRAYS


def test_mode_decides_where_a_plain_function_runs(executor: ThreadPoolExecutor) -> None:
    def where(inputs: Any, ctx: Any) -> Any:
        return {"thread": threading.get_ident()}

    async def where_async(inputs: Any, ctx: Any) -> Any:
        return {"thread": threading.get_ident()}

    here = threading.get_ident()
    assert run(HookRunner("thread", executor).preprocess(hooks(where), {}, context()))["thread"] != here
    assert run(HookRunner("inline", executor).preprocess(hooks(where), {}, context()))["thread"] == here
    assert run(HookRunner("thread", executor).preprocess(hooks(where_async), {}, context()))["thread"] == here


def raising(error: BaseException, *, coroutine: bool) -> Hook:
    def plain(inputs: Any, ctx: Any) -> Any:
        raise error

    async def waiting(inputs: Any, ctx: Any) -> Any:
        await asyncio.sleep(0)
        raise error

    return waiting if coroutine else plain


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("coroutine", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("secret"),
        SystemExit("secret"),
        StopAsyncIteration("secret"),
        asyncio.CancelledError("secret"),
        KeyboardInterrupt("secret"),
        GeneratorExit("secret"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_becomes_a_failure_that_names_model_and_hook(
    mode: Mode, coroutine: bool, error: BaseException, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    released: list[int] = []
    runner = HookRunner(mode, executor)
    hook = raising(error, coroutine=coroutine)
    with pytest.raises(HookFailed) as caught:
        run(runner.postprocess(hooks(post=hook), ARRAYS, context(), lambda: released.append(1)))
    assert str(caught.value) == (
        f"model 'm' version '1': postprocess raised {type(error).__name__}; the traceback is in the log"
    )
    assert caught.value.kind is Kind.HOOK_FAILED
    assert released == [1]
    assert "secret" in caplog.text
    assert "raise error" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_stop_iteration_does_not_hang_the_request(mode: Mode, executor: ThreadPoolExecutor) -> None:
    def exhausted(inputs: Any, ctx: Any) -> Any:
        return next(iter(()))

    with pytest.raises(HookFailed, match="preprocess raised StopIteration"):
        run(HookRunner(mode, executor).preprocess(hooks(exhausted), ARRAYS, context()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("coroutine", [False, True])
def test_invalid_input_passes_through(mode: Mode, coroutine: bool, executor: ThreadPoolExecutor) -> None:
    runner = HookRunner(mode, executor)
    for given, told in (("no image in row 2", "no image in row 2"), ("", "model 'm' version '1': preprocess refused")):
        hook = raising(InvalidInput(given), coroutine=coroutine)
        with pytest.raises(InvalidInput, match=told):
            run(runner.preprocess(hooks(hook), ARRAYS, context()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("result", "name"), [(None, "NoneType"), ([1], "list"), (np.zeros(1), "ndarray")])
def test_a_result_that_is_no_dict_is_told(mode: Mode, result: Any, name: str, executor: ThreadPoolExecutor) -> None:
    with pytest.raises(HookFailed, match=f"preprocess must return a dict of tensor name to array, returned {name}"):
        run(HookRunner(mode, executor).preprocess(hooks(lambda inputs, ctx: result), ARRAYS, context()))


class Gate:
    """A hook that waits in its thread until the test opens it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.calls = 0

    def __call__(self, arrays: Any, ctx: Any) -> Any:
        self.calls += 1
        self.entered.set()
        assert self.opened.wait(20)
        return arrays


async def entered(gate: Gate) -> None:
    await asyncio.get_running_loop().run_in_executor(None, gate.entered.wait, 20)


def test_cancelled_call_gives_the_arrays_back_only_when_its_thread_ends(executor: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        gate, runner, released = Gate(), HookRunner("thread", executor), asyncio.Event()
        task = asyncio.create_task(runner.postprocess(hooks(post=gate), ARRAYS, context(), released.set))
        await entered(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not released.is_set()
        assert runner.waiting == 1
        gate.opened.set()
        await released.wait()
        assert runner.waiting == 0

    run(scenario())


def test_cancelled_call_that_waits_for_a_thread_never_runs(executor: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        first, second = Gate(), Gate()
        runner, released = HookRunner("thread", executor), asyncio.Event()
        running = asyncio.create_task(runner.preprocess(hooks(first), ARRAYS, context()))
        await entered(first)
        waiting = asyncio.create_task(runner.postprocess(hooks(post=second), ARRAYS, context(), released.set))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await released.wait()
        first.opened.set()
        await running
        assert second.calls == 0

    run(scenario())


def test_cancelled_async_hook_is_cancelled_and_releases_at_once(executor: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        began, released = asyncio.Event(), []

        async def hook(outputs: Any, ctx: Any) -> Any:
            began.set()
            await asyncio.Event().wait()

        call = HookRunner("thread", executor).postprocess(hooks(post=hook), {}, context(), lambda: released.append(1))
        task = asyncio.create_task(call)
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert released == [1]

    run(scenario())


def test_success_leaves_the_arrays_with_the_caller(executor: ThreadPoolExecutor) -> None:
    released: list[int] = []
    runner = HookRunner("thread", executor)
    run(runner.postprocess(hooks(post=lambda outputs, ctx: outputs), ARRAYS, context(), lambda: released.append(1)))
    assert released == []


def test_waiting_calls_are_limited(executor: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        gate, released = Gate(), []
        runner = HookRunner("thread", executor, max_waiting=2)
        calls = [asyncio.create_task(runner.preprocess(hooks(gate), ARRAYS, context())) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match=r"2 calls run or wait for a thread, the limit is 2"):
            await runner.postprocess(hooks(post=gate), ARRAYS, context(), lambda: released.append(1))
        assert released == [1]
        gate.opened.set()
        await asyncio.gather(*calls)
        await runner.preprocess(hooks(gate), ARRAYS, context())

    run(scenario())


@pytest.mark.parametrize("when", ["before", "while waiting"])
def test_stopped_executor_is_unavailable(when: str) -> None:
    async def scenario(executor: ThreadPoolExecutor, first: Gate) -> None:
        released: list[int] = []
        runner = HookRunner("thread", executor)
        running = asyncio.create_task(runner.preprocess(hooks(first), ARRAYS, context()))
        await entered(first)
        post = hooks(post=Gate())
        if when == "before":
            executor.shutdown(wait=False)
        waiting = asyncio.create_task(runner.postprocess(post, ARRAYS, context(), lambda: released.append(1)))
        await asyncio.sleep(0)
        executor.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(Unavailable, match="postprocess did not run: this frontend is stopping"):
            await waiting
        await asyncio.sleep(0)
        assert released == [1]
        first.opened.set()
        await running

    with ThreadPoolExecutor(1) as executor:
        run(scenario(executor, Gate()))


@pytest.mark.parametrize("mode", MODES)
def test_one_failing_request_leaves_its_neighbours_alone(mode: Mode) -> None:
    def picky(inputs: Any, ctx: Any) -> Any:
        if inputs["x"] == 5:
            raise InvalidInput("row 5")
        return inputs

    async def scenario(runner: HookRunner) -> list[Any]:
        calls = [runner.preprocess(hooks(picky), {"x": np.asarray(row)}, context()) for row in range(8)]
        return await asyncio.gather(*calls, return_exceptions=True)

    with ThreadPoolExecutor(4) as executor:
        results = run(scenario(HookRunner(mode, executor)))
    assert [isinstance(result, InvalidInput) for result in results] == [row == 5 for row in range(8)]
