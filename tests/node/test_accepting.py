"""Accepting in one place: an even spread, and no connection lost with a frontend that ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from frontend.adoption import Adoption
from frontend.node import ports
from frontend.node.accept_loop import AcceptLoop
from frontend.node.acceptor import ACCEPT_SOCKET, HTTP_TAG, Acceptor


class Frontend:
    """Takes connections, says its name on each, and keeps them until told."""

    def __init__(self, path: Path, name: bytes) -> None:
        self.name = name
        self.sockets: list[socket.socket] = []
        self.changed = asyncio.Event()
        self.adoption = Adoption(str(path), {HTTP_TAG: self._adopt})

    def _adopt(self, sock: socket.socket) -> None:
        sock.send(self.name)
        self.sockets.append(sock)
        self.changed.set()

    def close_one(self) -> None:
        self.sockets.pop().close()
        self.adoption.closed()


@asynccontextmanager
async def accepting(folder: Path) -> AsyncIterator[tuple[Acceptor, int, Path]]:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", 0))
    path = folder / ACCEPT_SOCKET
    acceptor = Acceptor({HTTP_TAG: listener}, str(path))
    port = listener.getsockname()[1]
    await acceptor.start()
    try:
        yield acceptor, port, path
    finally:
        acceptor.close()


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await case()

    asyncio.run(bounded())


async def client(port: int) -> tuple[bytes, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    return await reader.readexactly(1), writer


async def until(found: Callable[[], bool]) -> None:
    """Let the loop turn until something that its own callbacks bring about is so."""
    while not found():  # noqa: ASYNC110 - nothing announces it; the turn itself is what is waited for
        await asyncio.sleep(0)


@pytest.mark.parametrize(("connections", "each"), [(8, 2), (64, 16), (3, 1)])
def test_connections_are_spread_evenly(tmp_path: Path, connections: int, each: int) -> None:
    async def case() -> None:
        async with accepting(tmp_path) as (acceptor, port, path):
            frontends = [Frontend(path, bytes([65 + n])) for n in range(4)]
            for frontend in frontends:
                frontend.adoption.start()
            await until(lambda: len(acceptor.open) == 4)
            opened = [await client(port) for _ in range(connections)]
            counts = sorted(acceptor.open)
            assert sum(counts) == connections
            assert counts[-1] - counts[0] <= 1
            assert counts[-1] == each
            for _, writer in opened:
                writer.close()
            for frontend in frontends:
                await frontend.adoption.stop()

    run(case)


def test_the_next_connection_goes_where_one_has_closed(tmp_path: Path) -> None:
    async def case() -> None:
        async with accepting(tmp_path) as (acceptor, port, path):
            first, second = Frontend(path, b"A"), Frontend(path, b"B")
            first.adoption.start()
            second.adoption.start()
            await until(lambda: len(acceptor.open) == 2)
            opened = [await client(port) for _ in range(4)]
            second.close_one()
            await until(lambda: sum(acceptor.open) == 3)
            name, writer = await client(port)
            assert name == b"B"
            for _, other in [*opened, (name, writer)]:
                other.close()
            await first.adoption.stop()
            await second.adoption.stop()

    run(case)


def test_clients_wait_while_no_frontend_takes_connections(tmp_path: Path) -> None:
    async def case() -> None:
        async with accepting(tmp_path) as (acceptor, port, path):
            first = Frontend(path, b"A")
            first.adoption.start()
            name, writer = await client(port)
            assert name == b"A"
            await first.adoption.stop()
            assert acceptor.open == []
            waiting = asyncio.ensure_future(client(port))
            await until(lambda: True)
            second = Frontend(path, b"B")
            second.adoption.start()
            name, other = await waiting
            assert name == b"B"
            writer.close()
            other.close()
            await second.adoption.stop()

    run(case)


def test_what_was_handed_over_before_a_stop_is_adopted(tmp_path: Path) -> None:
    async def case() -> None:
        async with accepting(tmp_path) as (acceptor, port, path):
            first = Frontend(path, b"A")
            first.adoption.start()
            await until(lambda: len(acceptor.open) == 1)
            opened = [asyncio.ensure_future(client(port)) for _ in range(40)]
            await until(lambda: sum(acceptor.open) >= 20)
            given = sum(acceptor.open)
            await first.adoption.stop()
            assert len(first.sockets) >= given
            second = Frontend(path, b"B")
            second.adoption.start()
            names = [(await one)[0] for one in opened]
            assert names.count(b"A") == len(first.sockets)
            assert names.count(b"A") + names.count(b"B") == 40
            for one in opened:
                one.result()[1].close()
            await second.adoption.stop()

    run(case)


def test_a_frontend_that_dies_gets_no_more(tmp_path: Path) -> None:
    async def case() -> None:
        async with accepting(tmp_path) as (acceptor, port, path):
            dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            dead.connect(str(path))
            await until(lambda: len(acceptor.open) == 1)
            alive = Frontend(path, b"A")
            alive.adoption.start()
            await until(lambda: len(acceptor.open) == 2)
            dead.close()
            opened = [await client(port) for _ in range(4)]
            assert [name for name, _ in opened] == [b"A"] * 4
            for _, writer in opened:
                writer.close()
            await alive.adoption.stop()

    run(case)


@pytest.mark.parametrize("listens", ["acceptor", "accept_loop"])
def test_a_port_is_free_again_although_its_last_connections_linger(listens: str, tmp_path: Path) -> None:
    async def serve_once() -> int:
        reserved = ports.reserve("127.0.0.1", 0, "http_port")
        port = int(reserved.getsockname()[1])
        taken: asyncio.Queue[socket.socket] = asyncio.Queue()
        if listens == "acceptor":
            acceptor = Acceptor({HTTP_TAG: reserved}, str(tmp_path / ACCEPT_SOCKET))
            await acceptor.start()
            adoption = Adoption(str(tmp_path / ACCEPT_SOCKET), {HTTP_TAG: taken.put_nowait})
            adoption.start()
        else:
            accepting = AcceptLoop(reserved, taken.put_nowait)
            accepting.start()
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            # Who closes first keeps the port in TIME_WAIT for a minute; a drain closes first.
            (await asyncio.wait_for(taken.get(), 20)).close()
            assert client.recv(1) == b""
        if listens == "acceptor":
            acceptor.close()
            await adoption.stop()
        else:
            accepting.close()
        return port

    port = asyncio.run(serve_once())
    ports.reserve("127.0.0.1", port, "http_port").close()


def test_a_connection_waits_while_every_frontend_is_behind(tmp_path: Path) -> None:
    """A frontend that does not read fills its buffer; what was accepted then is kept, not closed."""

    async def case() -> None:
        async with accepting(tmp_path) as (acceptor, port, path):
            stopped = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stopped.connect(str(path))
            await until(lambda: len(acceptor.open) == 1)
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(700)]
            await until(lambda: acceptor.holds)
            alive = Frontend(path, b"A")
            alive.adoption.start()
            stopped.close()
            # Those given to the one that ended are lost with it; the one that was held, and the backlog, are served.
            served = sum([await said(reader) for reader, _ in opened])
            assert served == len(alive.sockets) > 0
            for _, writer in opened:
                writer.close()
            await alive.adoption.stop()

    async def said(reader: asyncio.StreamReader) -> bool:
        try:
            return await reader.read(1) == b"A"
        except OSError:
            return False

    run(case)
