"""Work that is done again and again beside everything else, whatever becomes of one time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from engines.errors import ServingError

log = logging.getLogger("batches")


class Periodic:
    """One piece of work, every so often between ``start`` and ``close``; never twice at once.

    Work that fails is logged and done again the next time: a ServingError, such as a store that is away, in one line
    and once until it succeeds or fails with another message; anything else with its traceback, each time.

    Args:
        what: begins its log lines, such as ``batches.caps``.
        work: what is done; what it returns is of no interest.
        interval_s: between the end of one time and the beginning of the next; a callable is asked each time.
        at_once: whether the first time is at the start, and not after an interval.
        retry_s: in place of the interval after a failure.
    """

    def __init__(
        self,
        what: str,
        work: Callable[[], Awaitable[object]],
        interval_s: float | Callable[[], float],
        *,
        at_once: bool = True,
        retry_s: float | None = None,
    ) -> None:
        self._what = what
        self._work = work
        self._interval_s = interval_s
        self._at_once = at_once
        self._retry_s = retry_s
        self._told = ""
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running loop."""
        self._closing.clear()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self, finish_s: float = 0.0) -> None:
        """Stop: wait so long for work that is under way, then cancel it; idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        self._closing.set()
        if finish_s > 0:
            await asyncio.wait((task,), timeout=finish_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        wait_s = 0.0 if self._at_once else self._next_s()
        while not await self._closes_within(wait_s):
            wait_s = self._next_s()
            try:
                await self._work()
                self._told = ""
            except ServingError as error:
                wait_s = self._retry_s or wait_s
                if str(error) != self._told:
                    self._told = str(error)
                    log.warning("%s_outage error=%s", self._what, error)
            except Exception:
                wait_s = self._retry_s or wait_s
                log.exception("%s_failed", self._what)

    def _next_s(self) -> float:
        return self._interval_s() if callable(self._interval_s) else self._interval_s

    async def _closes_within(self, wait_s: float) -> bool:
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closing.wait()
        return self._closing.is_set()
