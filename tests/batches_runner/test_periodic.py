"""Work that is done again and again: when, whatever becomes of it, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from frontend.batches.periodic import Periodic
from frontend.batches.store.errors import StoreUnavailable

NEVER_S = 3600.0


class Work:
    """Counts how often it is done; ``each`` is what happens then, by the number of the time."""

    def __init__(self, each: Callable[[int], Coroutine[Any, Any, None]] | None = None) -> None:
        self.done = 0
        self.cancelled = 0
        self._each = each
        self._changed = asyncio.Event()

    async def __call__(self) -> None:
        self.done += 1
        self._changed.set()
        try:
            if self._each is not None:
                await self._each(self.done)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def until(self, times: int) -> None:
        while self.done < times:
            self._changed.clear()
            await self._changed.wait()


def test_it_is_done_at_once_and_after_every_interval() -> None:
    async def scenario() -> None:
        work, waits = Work(), iter([0.001, 0.002, NEVER_S])
        part = Periodic("x", work, lambda: next(waits))
        part.start()
        await work.until(3)
        await part.close()
        assert work.done == 3

    asyncio.run(scenario())


def test_it_may_wait_first() -> None:
    async def scenario() -> None:
        work = Work()
        part = Periodic("x", work, NEVER_S, at_once=False)
        part.start()
        await asyncio.sleep(0)
        await part.close()
        assert work.done == 0

    asyncio.run(scenario())


def test_failures_are_told_and_do_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(number: int) -> None:
        if number in (1, 2, 5):
            raise StoreUnavailable("the store is away")
        if number == 3:
            raise KeyError("a mistake of ours")

    async def scenario() -> None:
        work = Work(fail)
        part = Periodic("x", work, 0.001)
        part.start()
        await work.until(6)
        await part.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    away = ("WARNING", "x_outage error=the store is away")
    # Once until something else happens: an outage of hours is one line.
    assert told == [away, ("ERROR", "x_failed"), away]
    assert caplog.records[1].exc_info is not None


def test_after_a_failure_it_may_wait_for_another_time() -> None:
    async def fail(number: int) -> None:
        if number == 1:
            raise StoreUnavailable("away")

    async def scenario() -> None:
        work = Work(fail)
        part = Periodic("x", work, NEVER_S, retry_s=0.001)
        part.start()
        await work.until(2)
        await part.close()
        assert work.done == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(("finish_s", "cancelled"), [(0.0, 1), (0.01, 1), (60.0, 0)])
def test_it_ends_with_what_is_under_way_or_without(finish_s: float, cancelled: int) -> None:
    async def scenario() -> None:
        let_go = asyncio.Event()

        async def hold(_: int) -> None:
            await let_go.wait()

        work = Work(hold)
        part = Periodic("x", work, 0.001)
        part.start()
        await work.until(1)
        if not cancelled:
            asyncio.get_running_loop().call_soon(let_go.set)
        await part.close(finish_s)
        await part.close(finish_s)
        assert (work.done, work.cancelled) == (1, cancelled)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_it_can_begin_again() -> None:
    async def scenario() -> None:
        work = Work()
        part = Periodic("x", work, NEVER_S)
        for times in (1, 2):
            part.start()
            await work.until(times)
            await part.close()
        assert work.done == 2

    asyncio.run(scenario())
