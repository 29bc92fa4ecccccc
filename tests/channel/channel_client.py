"""A client on an event loop, with what it was told and a way to wait for one reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvloop
from channel_worker import SETTINGS

from worker.channel.client import Placement, Reply, WorkerChannel
from worker.channel.messages import ModelEntry
from worker.channel.records import NO_DEADLINE


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


class Frontend:
    """A client with what it was told, and a way to wait for one reply."""

    def __init__(self, socket_path: str, settings: object = SETTINGS) -> None:
        self.models: list[list[ModelEntry]] = []
        self.states: list[str] = []
        self.changed = asyncio.Event()
        self.channel = WorkerChannel(socket_path, "test", settings, self.on_models, self.on_state)  # type: ignore[arg-type]

    def on_models(self, models: list[ModelEntry]) -> None:
        self.models.append(models)
        self.changed.set()

    def on_state(self, state: str) -> None:
        self.states.append(state)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    @property
    def entry(self) -> ModelEntry:
        return self.models[-1][0]

    async def infer(self, rows: int, value: float) -> tuple[Reply, list[float]]:
        placement = self.channel.place(self.entry, 0, rows)
        placement.inputs[0][:] = value
        reply = await self.reply_to(placement)
        seen = placement.outputs()[0][:, 0].tolist()
        placement.release()
        return reply, seen

    def reply_to(self, placement: Placement) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.channel.submit(placement, NO_DEADLINE, 1, lambda _, reply: future.set_result(reply))
        return future


@asynccontextmanager
async def frontend(socket_path: str, settings: object = SETTINGS) -> AsyncIterator[Frontend]:
    one = Frontend(socket_path, settings)
    await one.channel.start()
    try:
        yield one
    finally:
        await one.channel.close()
