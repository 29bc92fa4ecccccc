"""A server of metrics that does as it is told and counts who comes. Raw sockets on a thread of its own."""

from __future__ import annotations

import asyncio
import gzip
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Any

WAIT_S = 20.0
GOOD = b"vllm:num_requests_waiting 3\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.2\n"
Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


class MetricsServer:
    """Use as a context manager.

    Attributes:
        answer: what everybody gets from now on: bytes as they are, or what writes them.
        heads: the request heads that came, in lower case.
    """

    def __init__(self) -> None:
        self.answer: Answer = page(GOOD)
        self.heads: list[str] = []
        self.port = 0
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    def wait(self, requests: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.heads) >= requests, WAIT_S)

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                with self._changed:
                    self.heads.append(head.decode("latin-1").lower())
                    self._changed.notify_all()
                answer = self.answer
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


def page(body: bytes, status: int = 200, *headers: str) -> bytes:
    """Return a whole answer."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Content-Type: text/plain", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def sized(size: int) -> bytes:
    """Return a page of exactly so many bytes, with a good reading at its end."""
    return b"# " + b"x" * (size - len(GOOD) - 3) + b"\n" + GOOD


def gzipped(body: bytes) -> bytes:
    return page(gzip.compress(body), 200, "Content-Encoding: gzip")


async def silence(writer: asyncio.StreamWriter) -> None:
    """Accept, and say nothing."""
    await asyncio.Event().wait()


async def silence_after_the_head(writer: asyncio.StreamWriter) -> None:
    writer.write(page(b"x" * 100)[:-100])
    await writer.drain()
    await asyncio.Event().wait()


async def trickle(writer: asyncio.StreamWriter) -> None:
    """One byte every 50 ms: each comes in time, all of them never do."""
    writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b"#")
        await writer.drain()
        await asyncio.sleep(0.05)


async def endless(writer: asyncio.StreamWriter) -> None:
    """A body without a length that does not end."""
    writer.write(b"HTTP/1.1 200 X\r\nConnection: close\r\n\r\n")
    while True:
        writer.write(b"# " + b"x" * 65536)
        await writer.drain()


async def cut(writer: asyncio.StreamWriter) -> None:
    writer.write(page(GOOD)[:-10])
    await writer.drain()
    writer.close()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
