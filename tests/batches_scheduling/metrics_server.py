"""Pages of metrics and everything that can be wrong with them, told by the stub upstream."""

from __future__ import annotations

import asyncio
import gzip
import socket
import struct

from stub_upstream import Raw, Say, StubUpstream

GOOD = b"vllm:num_requests_waiting 3\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.2\n"
Answer = Raw


class MetricsServer(StubUpstream):
    """Attributes:
    answer: what everybody gets from now on: bytes as they are, or what writes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answer: Answer = page(GOOD)
        self.default = lambda seen: Say(raw=self.answer)

    @property
    def heads(self) -> list[str]:
        """Return the request heads that came, in lower case."""
        return [seen.head for seen in self.calls]


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
