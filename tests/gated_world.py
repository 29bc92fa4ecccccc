"""A batch runner with every gate: live traffic in a real table, a server load and a time that tests set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from frontend.batches.runner.runner import BatchRunner
from frontend.batches.scheduling.effective_caps import EffectiveCaps, FixedCaps
from frontend.batches.scheduling.gates import LoadReader
from frontend.batches.scheduling.live_counts import LiveCounts
from frontend.batches.scheduling.live_table import LiveTable
from frontend.batches.scheduling.load_limits import ReadError, Reading
from frontend.batches.scheduling.route_watch import RouteWatch
from frontend.batches.store.route_rows import SignalRow
from frontend.batches.store.sql_store import SqlStore
from frontend.gateway_settings import GatewaySettings
from frontend.openai.routes import Routes
from runner_world import END_S, RunnerWorld, StubExecutor

URL = "http://10.0.0.5:8000/metrics"


async def until(what: str, probe: Callable[[], Awaitable[object]]) -> None:
    """Wait until ``probe`` says yes."""
    for _ in range(int(END_S / 0.01)):
        if await probe():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


class FixedLoad:
    """Provides ``LoadReader``: what the test says, None for not read yet."""

    def __init__(self) -> None:
        self.latest: Reading | None = None
        self.asked = 0

    def say(self, **values: Any) -> None:
        self.latest = Reading(time.time_ns() // 1000, time.monotonic_ns(), **values)

    def fail(self, error: ReadError) -> None:
        self.say(error=error)

    def reading(self, url: str) -> Reading | None:
        assert url == URL
        self.asked += 1
        return self.latest


class GatedWorld:
    """What the gates of one installation look at.

    Attributes:
        frontend: another process's view of the table: set live calls there.
        moved_us: how far the wall clock of the runners is ahead of the real one.
    """

    def __init__(self, runners: RunnerWorld, directory: Path) -> None:
        self.runners = runners
        self.store = runners.store
        self.load = FixedLoad()
        self.moved_us = 0
        self._directory = directory
        self.frontend = LiveTable(directory, 4)
        self._watches = 0

    def __enter__(self) -> GatedWorld:
        self.frontend.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.frontend.close()

    def set_live(self, route: str, live: int) -> None:
        """Have so many live calls under way in the other process."""
        self.frontend.set_live(route, live, time.monotonic_ns())

    def now_us(self) -> int:
        return time.time_ns() // 1000 + self.moved_us

    @asynccontextmanager
    async def running(
        self,
        executor: StubExecutor,
        *,
        store: SqlStore | None = None,
        load: LoadReader | None = None,
        caps: EffectiveCaps | None = None,
        default_cap: int = 2,
        **options: Any,
    ) -> AsyncIterator[tuple[BatchRunner, RouteWatch]]:
        """Run batches as one process does."""
        self._watches += 1
        runner_id = f"runner-{self._watches}"
        used = store or self.store
        opened = asyncio.Event()
        opened.set()
        async with AsyncExitStack() as stack:
            live = LiveCounts(self._directory, Routes(GatewaySettings(), {}), used, opened, reads=True)
            live.start()
            stack.push_async_callback(live.close)
            watch = RouteWatch(
                runner_id, used, default_cap, live, load or self.load, caps or FixedCaps(), lambda route: "vllm",
                now_us=self.now_us,
            )  # fmt: skip
            runner = self.runners.runner(
                executor, store=used, gates=[watch.gates], limits=watch.limits, observer=watch, runner_id=runner_id,
                **options,
            )  # fmt: skip
            stack.push_async_callback(watch.close)
            stack.push_async_callback(runner.close)
            await runner.start()
            watch.start(runner)
            yield runner, watch

    async def signal(self, route: str) -> SignalRow | None:
        return next((row for row in await self.store.scheduling.signals() if row.route_id == route), None)

    async def until_signal(self, route: str, **expected: Any) -> SignalRow:
        """Wait until the stored signal of a route has these values."""
        found: SignalRow | None = None
        for _ in range(int(END_S / 0.02)):
            found = await self.signal(route)
            if found is not None and all(getattr(found, name) == value for name, value in expected.items()):
                return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"the signal is {found}, expected {expected}")
