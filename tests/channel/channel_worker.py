"""A worker that owns no device: every output is its input plus one. Runs in a thread, or as a process of its own.

As a process: ``python channel_worker.py SOCKET GENERATION [hold] [tight]`` prints ``ready`` once it listens, then one
line per event; with ``hold`` it takes requests and never answers, with ``tight`` it has little address space left.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engines.bundle.signature import BlockLayout, Signature, Variant
from engines.errors import Kind
from engines.tensor import TensorSpec
from worker.channel.channel import Channel
from worker.channel.messages import Answer, ModelEntry
from worker.channel.records import FLAG_CANCEL, MASK_32, reply_words
from worker.channel.server import ChannelServer, Events
from worker.config import ChannelSettings

WIDTH = 64
SETTINGS = ChannelSettings(arena_bytes=4 << 20, max_in_flight=64, max_channels=4)


def echo_signature(width: int = WIDTH) -> Signature:
    spec = TensorSpec("x", "f32", (-1, width), 0)
    variant = Variant((), ((-1, width),), ((-1, width),), (False,))
    return Signature((spec,), (TensorSpec("y", "f32", (-1, width), 0),), (spec,), (spec,), (1, 8, 32), (variant,))


def echo_entry(model_id: int = 1, name: str = "echo", width: int = WIDTH) -> ModelEntry:
    return ModelEntry(model_id=model_id, name=name, version="1", state="READY", signature=echo_signature(width))


class EchoWorker:
    """The loop's part that these tests need, around a real server."""

    def __init__(self, socket_path: str, generation: int = 1, settings: ChannelSettings = SETTINGS) -> None:
        self.server = ChannelServer(socket_path, settings, generation)
        self.attached: list[Channel] = []
        self.detached: list[Channel] = []
        self.cancels = 0
        self.served = 0
        self.hold = False
        self.fail_with: str | None = None
        self.layout = BlockLayout.of(echo_signature(), 0)

    def turn(self, timeout_ns: int) -> Events:
        events = self.server.poll(timeout_ns)
        self.attached += events.attached
        for connection, ask in events.asks:
            if ask.what == "drain":
                self.server.draining()
            if ask.what == "unload":
                self.server.publish_models([])
            if ask.what == "fail":
                answer = Answer(id=ask.id, kind=int(Kind.NOT_FOUND), text="no such thing")
            else:
                answer = Answer(id=ask.id, value={"what": ask.what, "args": ask.args})
            self.server.answer(connection, answer)
        for channel in self.server.rung():
            self.serve(channel)
        for channel in events.detached:
            self.detached.append(channel)
            channel.release()
        return events

    def serve(self, channel: Channel) -> None:
        for words in channel.take():
            if words[1] >> 48 & FLAG_CANCEL:
                self.cancels += 1
            elif self.fail_with is not None:
                channel.fail(words[0], Kind.ENGINE_FAILED, self.fail_with, queue_ns=5)
            elif not self.hold:
                self.run(channel, words)
        channel.flush()

    def run(self, channel: Channel, words: Sequence[int]) -> None:
        block, block_rows, row_start, rows = words[2], words[3] & MASK_32, words[3] >> 32, words[4]
        arrays = [
            np.ndarray((block_rows, WIDTH), np.float32, channel.arena, block + offset)
            for offset in self.layout.offsets(block_rows)
        ]
        np.add(arrays[0][row_start : row_start + rows], 1, out=arrays[1][row_start : row_start + rows])
        self.served += 1
        channel.reply(reply_words(words[0], 0, 2, 8, 10, 20, rows, 1, finished_ns=30, dispatch_seq=self.served))


class WorkerThread:
    """An EchoWorker that runs until the block ends."""

    def __init__(self, worker: EchoWorker, models: list[ModelEntry] | None = None) -> None:
        self.worker = worker
        self._models = models or [echo_entry()]
        self._stop_fd = os.eventfd(0)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> EchoWorker:
        self.worker.server.open()
        self.worker.server.publish_models(self._models)
        self.worker.server.watch(self._stop_fd)
        self._thread.start()
        return self.worker

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        self.worker.server.close()
        os.close(self._stop_fd)

    def _run(self) -> None:
        while not self.worker.turn(-1).fds:
            pass


def limit_address_space(more_bytes: int) -> None:
    """Let this process map ``more_bytes`` more than it has now, and nothing beyond."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    worker = EchoWorker(sys.argv[1], int(sys.argv[2]))
    worker.hold = "hold" in sys.argv
    worker.server.open()
    worker.server.publish_models([echo_entry()])
    if "tight" in sys.argv:
        limit_address_space(64 << 20)
    print("ready", flush=True)
    taken = 0
    while True:
        events = worker.turn(-1)
        for channel in events.attached:
            print("attached", channel.id, channel.name, flush=True)
        for channel in events.detached:
            print("detached", channel.id, channel.name, channel.in_flight, flush=True)
        in_flight = sum(channel.in_flight for channel in worker.attached if not channel.closed)
        if in_flight > taken:
            taken = in_flight
            print("holding", taken, flush=True)


if __name__ == "__main__":
    main()
