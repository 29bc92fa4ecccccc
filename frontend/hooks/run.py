"""Running ``preprocess`` and ``postprocess`` of one model.

Mode ``thread`` runs a plain ``def`` in the executor; mode ``inline`` runs it on the event loop, for hooks of a few
microseconds. An ``async def`` is awaited on the event loop in both. What user code raises ends there: ``InvalidInput``
goes to the client, anything else is logged with its traceback and becomes a ``HookFailed`` without one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Final, Literal

from engines.errors import HookFailed, InvalidInput, QueueFull, Unavailable
from engines.tensor import NDArray
from frontend.hooks.context import Context
from frontend.hooks.load import Hook, Hooks

MAX_WAITING: Final = 4096
"""Hook calls of one model that may run or wait for a thread; as many as a channel has requests in flight."""

Arrays = dict[str, NDArray]
Mode = Literal["thread", "inline"]
_log = logging.getLogger(__name__)


def place(ctx: Context, hook: str) -> str:
    """Return how messages name a hook of a model version."""
    return f"model '{ctx.model}' version '{ctx.version}': {hook}"


class HookRunner:
    """Runs the hooks of one model on one event loop.

    Args:
        mode: the manifest's ``hooks.mode``.
        executor: runs plain functions in mode ``thread``; its number of threads bounds how many run at once. Owned by
            the caller, and not used in mode ``inline``.
    """

    def __init__(self, mode: Mode, executor: Executor, max_waiting: int = MAX_WAITING) -> None:
        self._mode = mode
        self._executor = executor
        self._max_waiting = max_waiting
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Calls that run or wait for a thread now."""
        return self._waiting

    async def preprocess(self, hooks: Hooks | None, inputs: Arrays, ctx: Context) -> Mapping[str, Any]:
        """Return what ``preprocess`` makes of the client's tensors, unchecked (see ``check_tensors``).

        Without the hook the inputs themselves. A thread that was started when the call is cancelled runs to its end, so
        ``inputs`` must be memory that lives as long as the arrays do.

        Raises:
            InvalidInput: raised by the hook.
            HookFailed: the hook raised anything else, or returned no dict.
            QueueFull: ``max_waiting`` calls run or wait already.
            Unavailable: the executor has been shut down.
        """
        hook = hooks.preprocess if hooks else None
        return inputs if hook is None else await self._call("preprocess", hook, inputs, ctx, _nothing)

    async def postprocess(
        self, hooks: Hooks | None, outputs: Arrays, ctx: Context, release: Callable[[], None] | None = None
    ) -> Mapping[str, Any]:
        """Return what ``postprocess`` makes of the model's outputs, unchecked (see ``check_tensors``).

        Without the hook the outputs themselves. ``outputs`` may be views of shared memory, and so may what the hook
        returns. On success they stay the caller's. If the call fails or is cancelled, ``release`` is called exactly
        once on the event loop, as soon as no hook can touch them any more: for a cancelled call that is when its thread
        ends, which may be after the cancellation has reached the caller.

        Raises: as ``preprocess``.
        """
        hook = hooks.postprocess if hooks else None
        return outputs if hook is None else await self._call("postprocess", hook, outputs, ctx, release or _nothing)

    async def _call(
        self, name: str, hook: Hook, arrays: Arrays, ctx: Context, release: Callable[[], None]
    ) -> Mapping[str, Any]:
        if self._mode == "thread" and not iscoroutinefunction(hook):
            result, error = await self._in_thread(name, hook, arrays, ctx, release)
        else:
            result, error = _guarded(hook, arrays, ctx)
        try:
            if error is None and isawaitable(result):
                result, error = await _awaited(result)
            if error is not None:
                raise _told(error, name, ctx)
            if not isinstance(result, Mapping):
                found = type(result).__name__
                raise HookFailed(f"{place(ctx, name)} must return a dict of tensor name to array, returned {found}")
        except BaseException:
            release()
            raise
        return result

    async def _in_thread(
        self, name: str, hook: Hook, arrays: Arrays, ctx: Context, release: Callable[[], None]
    ) -> tuple[Any, BaseException | None]:
        if self._waiting >= self._max_waiting:
            release()
            raise QueueFull(
                f"{place(ctx, name)}: {self._waiting} calls run or wait for a thread, the limit is {self._max_waiting}"
            )
        try:
            call = self._executor.submit(_guarded, hook, arrays, ctx)
        except RuntimeError:
            release()
            raise Unavailable(f"{place(ctx, name)} did not run: this frontend is stopping") from None
        # Not run_in_executor: cancelling its future looks finished while the thread still uses the arrays. The
        # concurrent future refuses to be cancelled once it runs, and the shield keeps the wrapper waiting for it.
        future = asyncio.wrap_future(call)
        self._waiting += 1
        future.add_done_callback(self._ended)
        try:
            return await asyncio.shield(future)
        except (asyncio.CancelledError, GeneratorExit):
            call.cancel()
            future.add_done_callback(lambda _: release())
            if future.cancelled() and not _being_cancelled():
                raise Unavailable(f"{place(ctx, name)} did not run: this frontend is stopping") from None
            raise

    def _ended(self, _: object) -> None:
        self._waiting -= 1


def _nothing() -> None:
    """Release nothing: the arrays are ordinary memory."""


def _guarded(hook: Hook, arrays: Arrays, ctx: Context) -> tuple[Any, BaseException | None]:
    """Return a plain call's result or what it raised.

    As a value: a future takes no StopIteration, and SystemExit or KeyboardInterrupt from a pool thread would stop the
    event loop. Frontends ignore SIGINT, so that a KeyboardInterrupt is always the hook's own.
    """
    try:
        return hook(arrays, ctx), None
    except BaseException as error:
        return None, error


async def _awaited(result: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    task = asyncio.current_task()
    try:
        return await result, None
    except GeneratorExit as error:
        if not _runs(task):
            raise  # this coroutine is being closed
        return None, error
    except BaseException as error:
        return None, error


def _runs(task: asyncio.Task[Any] | None) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:
        return False  # no loop runs any more


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _told(error: BaseException, name: str, ctx: Context) -> BaseException:
    """Return what the caller gets to see of an exception raised by user code."""
    # A cancellation that nobody asked for (a hook's own task was cancelled) is a failure like any other: passed on, it
    # would look as if the client had gone away, and the request would never be answered.
    if isinstance(error, asyncio.CancelledError) and _being_cancelled():
        return error
    if isinstance(error, InvalidInput):
        return error if str(error) else InvalidInput(f"{place(ctx, name)} refused the input")
    _log.error(
        "hook.failed model=%s version=%s hook=%s request_id=%r", ctx.model, ctx.version, name, ctx.request_id,
        exc_info=error,
    )  # fmt: skip
    return HookFailed(f"{place(ctx, name)} raised {type(error).__name__}; the traceback is in the log")
