"""HTTP connections in front of a real frontend and a real channel, to a worker that copies each input to an output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "channel"))

from channel_worker import EchoWorker, WorkerThread

from engines.bundle.signature import BlockLayout, Signature, Variant
from engines.tensor import TensorSpec
from frontend.app import FrontendApp
from frontend.hooked import HookedModels
from frontend.httpd.hangup import HangupWatch
from frontend.httpd.protocol import Connection
from frontend.httpd.state import ServerState
from frontend.kserve.http_routes import KserveApp
from frontend.settings import EndpointSettings, FrontendSettings
from frontend.table import ModelTable
from worker.channel.channel import Channel
from worker.channel.client import WorkerChannel
from worker.channel.messages import ModelEntry
from worker.channel.records import MASK_32, reply_words
from worker.config import ChannelSettings

T = TypeVar("T")
CHANNEL = ChannelSettings(arena_bytes=4 << 20, max_in_flight=64, max_channels=4)
LIMITS = EndpointSettings(max_request_bytes=2 << 20)
BIG = 1 << 18
HOOKS = "def preprocess(inputs, ctx):\n    return {'x': inputs['x'] * 2}\n"


def entry(
    model_id: int, name: str, *inputs: TensorSpec, sizes: tuple[int, ...] = (1, 8), hooks: str = ""
) -> ModelEntry:
    outputs = tuple(TensorSpec(f"{one.name}_out", one.dtype, one.shape, one.batch_axis) for one in inputs)
    shapes = tuple(one.shape for one in inputs)
    variant = Variant((), shapes, shapes, (False,) * len(outputs))
    signature = Signature(inputs, outputs, inputs, outputs, sizes, (variant,))
    return ModelEntry(
        model_id=model_id, name=name, version="1", state="READY", signature=signature, model_py=hooks, path=hooks,
        hooks="inline",
    )  # fmt: skip


def entries(hooks: Path) -> list[ModelEntry]:
    return [
        entry(1, "echo", TensorSpec("x", "f32", (-1, 4), 0)),
        entry(
            2, "three", TensorSpec("a", "f32", (-1, 3), 0), TensorSpec("flag", "bool", (-1, 5), 0),
            TensorSpec("c", "bf16", (-1, 2, 2), 0),
        ),
        entry(3, "fixed", TensorSpec("x", "i64", (3,), None), sizes=(0,)),
        entry(4, "big", TensorSpec("x", "u8", (-1, BIG), 0)),
        entry(5, "text", TensorSpec("x", "bytes", (-1,), 0)),
        entry(6, "hooked", TensorSpec("x", "f32", (-1, 4), 0), hooks=str(hooks)),
    ]  # fmt: skip


class CopyWorker(EchoWorker):
    """Answers with the inputs; ``taken`` lists the requests that reached it."""

    def __init__(self, socket_path: str, models: list[ModelEntry]) -> None:
        super().__init__(socket_path, settings=CHANNEL)
        self.layouts = {
            one.model_id: BlockLayout.of(one.signature, 0) for one in models if one.signature and one.name != "text"
        }
        self.taken: list[int] = []

    def run(self, channel: Channel, words: Sequence[int]) -> None:
        block, block_rows, row_start, rows = words[2], words[3] & MASK_32, words[3] >> 32, words[4]
        layout = self.layouts[words[1] & MASK_32]
        self.taken.append(words[0])
        arena = channel.arena
        spans = [
            (block + at + row_start * one, rows * one)
            for at, one in zip(layout.offsets(block_rows), layout.row_bytes, strict=True)
        ]
        for (source, size), (target, _) in zip(spans[: layout.input_count], spans[layout.input_count :], strict=True):
            arena[target : target + size] = arena[source : source + size]
        channel.reply(reply_words(words[0], 0, 2, 8, 10, 20, rows, 1, finished_ns=30, dispatch_seq=1))


class Recorder:
    """A transport that keeps what is written; ``stuck`` keeps it in its buffer."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.lent: list[Any] = []
        self.stuck = False
        self.closed = False
        self.eof = False
        self.wrote = asyncio.Event()

    def write(self, data: Any) -> None:
        assert not self.closed, "written after close"
        if self.stuck:
            self.lent.append(data)
        else:
            self.written += data
        self.wrote.set()

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.write(part)

    def drain(self) -> None:
        """Let the client read everything."""
        self.stuck = False
        lent, self.lent = self.lent, []
        for part in lent:
            self.written += part

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.lent))

    def close(self) -> None:
        self.closed = True
        self.wrote.set()

    abort = close

    def write_eof(self) -> None:
        self.eof = True

    def set_write_buffer_limits(self, high: int) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.closed


class World:
    """Everything on one loop of its own; ``now_ns`` moves only when a test moves it."""

    def __init__(self, folder: Path) -> None:
        (folder / "model.py").write_text(HOOKS)
        self.socket_path = str(folder / "worker.sock")
        self.models = entries(folder / "model.py")
        self.loop = uvloop.new_event_loop()
        self.offset_ns = 0
        self.worker = CopyWorker(self.socket_path, self.models)
        self.thread = WorkerThread(self.worker, self.models)
        self.thread.__enter__()
        self.run(self._start(folder))

    def clock(self) -> int:
        return time.monotonic_ns() + self.offset_ns

    async def _start(self, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        settings = FrontendSettings(
            name="f", run_dir=str(folder), worker_sockets=(self.socket_path,), endpoints=LIMITS, channel=CHANNEL
        )
        table = ModelTable()
        self.table = table
        hooked = HookedModels(1, lambda: None)
        self.hooked = hooked

        def on_models(models: list[ModelEntry]) -> None:
            table.update(models)
            hooked.update(models)

        self.channel = WorkerChannel(self.socket_path, "f", CHANNEL, on_models, lambda _: None)
        self.app = FrontendApp(settings, loop, self.channel, table, hooked, self.clock)
        hooked.start(self.app)
        await self.channel.start()
        self.kserve = KserveApp(self.app)
        self.state = ServerState(self.kserve, LIMITS, self.clock, HangupWatch(loop), 1 << 30, lambda: None)
        await self.until(lambda: not hooked.loading())
        assert not hooked.broken()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(30):
                return await work

        return self.loop.run_until_complete(limited())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what announces itself to nobody."""
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def connect(self) -> tuple[Connection, Recorder]:
        connection, transport = Connection(self.state), Recorder()
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection, transport

    async def feed(self, connection: Connection, transport: Recorder, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            if transport.closed:
                break
            connection.data_received(piece)
            while connection._backlog is not None and not transport.closed:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def answers(self, pieces: Sequence[bytes], count: int = 1) -> list[tuple[int, bytes]]:
        """Return (status, body) of ``count`` answers, fewer if the connection ended before; all is at rest after."""
        connection, transport = self.connect()
        await self.feed(connection, transport, pieces)
        while len(found := split(bytes(transport.written))) < count and not (transport.closed or transport.eof):
            transport.wrote.clear()
            await transport.wrote.wait()
        connection.connection_lost(None)
        await self.at_rest()
        return found

    async def at_rest(self) -> None:
        """Everything that was taken is given back: rows, places, budgets, counts."""
        await self.until(lambda: self.channel.in_flight == 0)
        attachment = self.channel._attachment
        assert self.channel.arena_bytes_used == 0
        assert attachment is None or attachment._admitted == 0
        assert self.app.traffic.in_flight == 0
        assert len(self.app.deadlines) == 0
        assert self.state.counters.in_flight == 0
        assert self.state.buffered_bytes == 0
        assert not self.kserve._direct

    def close(self) -> None:
        self.hooked.close()
        self.run(self.channel.close())
        self.state.hangups.close()
        self.app.memory.close()
        self.thread.__exit__()
        self.loop.close()
        if os.path.exists(self.socket_path):
            os.unlink(self.socket_path)


def split(stream: bytes) -> list[tuple[int, bytes]]:
    """Return status and body of every complete answer."""
    found = []
    while (end := stream.find(b"\r\n\r\n")) >= 0:
        head = stream[:end].lower()
        if head.startswith(b"http/1.1 100"):
            stream = stream[end + 4 :]
            continue
        length = int(head.split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0])
        if len(stream) < end + 4 + length:
            break
        found.append((int(head[9:12]), stream[end + 4 : end + 4 + length]))
        stream = stream[end + 4 + length :]
    return found


def tensor(name: str, datatype: str, array: np.ndarray, **parameters: Any) -> dict[str, Any]:
    size = {"binary_data_size": array.nbytes}
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": size | parameters}


def infer(
    model: str, document: dict[str, Any] | bytes, binary: bytes, *headers: str, length: int | None = None
) -> bytes:
    """Return one request; ``length`` overrides what the JSON's length is said to be."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1", "Host: test", f"Content-Length: {len(text) + len(binary)}",
        f"Inference-Header-Content-Length: {len(text) if length is None else length}", *headers, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + text + binary
