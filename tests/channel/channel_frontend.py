"""A frontend as a process of its own: ``python channel_frontend.py SOCKET NAME MODE ARENA_BYTES``.

Modes: ``wait`` submits five requests and waits; ``load`` sends requests for ever and checks every answer; ``tight`` has
little address space left. Prints ``attached``, then ``submitted`` or one ``ok`` per hundred answers; a failed attach
prints its reason and ends with status 3, a wrong answer ends with status 4.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from channel_worker import limit_address_space

from engines.errors import Kind, ServingError
from worker.channel.client import Placement, Reply, WorkerChannel
from worker.channel.messages import ModelEntry
from worker.channel.records import NO_DEADLINE
from worker.config import ChannelSettings

WRONG = 4


async def caller(channel: WorkerChannel, entry: ModelEntry, number: int) -> None:
    loop = asyncio.get_running_loop()
    turn = 0
    while True:
        turn += 1
        value = float(number * 100_000 + turn % 50_000)
        placement = channel.place(entry, 0, 1 + turn % 3)
        placement.inputs[0][:] = value
        answered: asyncio.Future[Reply] = loop.create_future()

        def on_reply(_: Placement, reply: Reply, answered: asyncio.Future[Reply] = answered) -> None:
            answered.set_result(reply)

        channel.submit(placement, NO_DEADLINE, 1, on_reply)
        reply = await answered
        if reply.kind is not Kind.OK or (placement.outputs()[0] != value + 1).any():
            sys.exit(WRONG)
        placement.release()
        if turn % 100 == 0:
            print("ok", number, turn, flush=True)


async def main() -> None:
    socket_path, name, mode, arena_bytes = sys.argv[1:5]
    settings = ChannelSettings(arena_bytes=int(arena_bytes), max_in_flight=64, max_channels=4)
    models: list[ModelEntry] = []
    channel = WorkerChannel(socket_path, name, settings, models.extend, lambda _: None)
    if mode == "tight":
        limit_address_space(64 << 20)
    try:
        await channel.start()
    except ServingError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(3)
    print("attached", flush=True)
    if mode == "load":
        await asyncio.gather(*(caller(channel, models[0], number) for number in range(8)))
    for _ in range(5):
        channel.submit(channel.place(models[0], 0, 1), NO_DEADLINE, 1, lambda *_: None)
    print("submitted", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
