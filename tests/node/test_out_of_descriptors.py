"""A process without descriptors keeps connections waiting, quietly, and takes them once it has some."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.adoption import Adoption
from frontend.node import ports
from frontend.node.accept_loop import AcceptLoop
from frontend.node.acceptor import HTTP_TAG, Acceptor


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    # The limit is on the number that a new descriptor would get, so that open ones stay usable.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def unaccepted(port: int, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]


async def _connections_wait(caplog: pytest.LogCaptureFixture) -> None:
    listener = ports.reserve("127.0.0.1", 0, "metrics_port")
    taken: asyncio.Queue[socket.socket] = asyncio.Queue()
    accepting = AcceptLoop(listener, taken.put_nowait)
    accepting.start()
    clients = unaccepted(listener.getsockname()[1], 5)
    paused = asyncio.Event()
    caplog.set_level(logging.WARNING)
    real_pause = accepting._pause

    def pause(error: OSError) -> None:
        real_pause(error)
        paused.set()

    accepting._pause = pause  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        with no_descriptors():
            for _ in range(2):
                await paused.wait()
                paused.clear()
        accepted = [await taken.get() for _ in clients]
    assert [record.getMessage() for record in caplog.records] == [
        "accept.failed error=[Errno 24] Too many open files; connections wait"
    ]
    accepting.close()
    accepting.close()
    for sock in (*clients, *accepted):
        sock.close()


async def _lost_on_the_way(tmp_path: Path) -> None:
    listener = ports.reserve("127.0.0.1", 0, "http_port")
    acceptor = Acceptor({HTTP_TAG: listener}, str(tmp_path / "accept.sock"))
    await acceptor.start()
    adopted: asyncio.Queue[socket.socket] = asyncio.Queue()
    adoption = Adoption(str(tmp_path / "accept.sock"), {HTTP_TAG: adopted.put_nowait})
    adoption.start()
    client, handed = unaccepted(listener.getsockname()[1], 1)[0], socket.socket()
    async with asyncio.timeout(20):
        first = await adopted.get()
        assert acceptor.open == [1]
        # As the acceptor does, but while this process can receive nothing.
        socket.send_fds(acceptor._takers[0].sock, [HTTP_TAG], [handed.fileno()])
        acceptor._takers[0].open += 1
        with no_descriptors():
            while acceptor.open != [1]:  # noqa: ASYNC110 - it announces nothing
                await asyncio.sleep(0)
    assert adopted.empty()
    acceptor.close()
    await adoption.stop()
    for sock in (client, first, handed):
        sock.close()


def test_connections_wait_and_one_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(_connections_wait(caplog))


def test_a_connection_that_could_not_be_handed_over_is_not_counted_for_ever(tmp_path: Path) -> None:
    asyncio.run(_lost_on_the_way(tmp_path))
