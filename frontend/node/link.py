"""The asyncio end of a link (worker/channel/node_link.py): frontends speak to the node, the node to every process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from frontend.settings import FrontendSettings
from worker.channel.node_link import MAX_PENDING_BYTES, Lines, LinkError, Order, encode

T = TypeVar("T")
NODE_SOCKET = "node.sock"
JOIN_TIMEOUT_S = 10.0
_RECEIVE_BYTES = 65536


class AsyncLink(asyncio.Protocol, Generic[T]):
    """One end of a link on an event loop; messages of type ``kind`` arrive at ``on_message``.

    A frontend makes ``AsyncLink(sock, Order, on_order)``; the node uses ``Report``. ``gone`` is set once the peer is,
    or once it has sent something that is not a message (then ``why`` says what); ``on_gone`` is then called.
    """

    def __init__(self, sock: socket.socket, kind: type[T], on_message: Callable[[T], None]) -> None:
        self._socket = sock
        self._lines = Lines(kind)
        self._on_message = on_message
        self._transport: asyncio.Transport | None = None
        self.gone = asyncio.Event()
        self.on_gone: Callable[[], None] | None = None
        self.why = ""

    async def start(self) -> None:
        """Begin to receive; call it on the loop that will use the link."""
        self._socket.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=self._socket)

    def send(self, message: Any) -> bool:
        """Queue a message without waiting; False if it was dropped: the peer is gone or does not read."""
        transport = self._transport
        if transport is None or self.gone.is_set() or transport.is_closing():
            return False
        line = encode(message)
        if transport.get_write_buffer_size() + len(line) > MAX_PENDING_BYTES:
            return False
        transport.write(line)
        return True

    def close(self) -> None:
        """Close after what was sent has been written; ``gone`` is set when that is done."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._lines.feed(data)
        except LinkError as error:
            self.why = str(error)
            assert self._transport is not None
            self._transport.abort()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        if self.on_gone is not None:
            self.on_gone()


def frontend_link(link_fd: int, on_order: Callable[[Order], None]) -> AsyncLink[Order]:
    """Return a frontend's link on the descriptor it inherited; ``await link.start()``, then ``send(Report(...))``."""
    return AsyncLink(socket.socket(fileno=link_fd), Order, on_order)


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """First line on ``node.sock`` from a frontend that was started by hand."""

    pid: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """First and only line on ``node.sock`` from a client: a ``join`` (the socket becomes a link) or an ``ask``."""

    join: Join | None = None
    ask: str = ""
    args: dict[str, Any] = {}


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The node's answer to an ask about scheduling: a value, or a ``Kind`` number and its text."""

    kind: int = 0
    text: str = ""
    value: Any = None


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """The node's answer to a join: settings, or why not."""

    settings: FrontendSettings | None = None
    refused: str = ""


def call_node(run_dir: str, call: Call, timeout_s: float) -> tuple[socket.socket, bytes]:
    """Send one line to the node of ``run_dir``; return the open socket (the caller's to close) and the answer.

    Raises:
        OSError: no node listens there, or it did not answer in time.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(os.path.join(run_dir, NODE_SOCKET))
        sock.sendall(encode(call))
        answer = bytearray()
        # One byte too many read here would be lost to whoever uses the socket as a link afterwards; the node says
        # nothing after its first line until the frontend has reported.
        while not answer.endswith(b"\n"):
            data = sock.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the node closed the connection before it answered")
            answer += data
        sock.settimeout(None)
        return sock, bytes(answer)
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise


def join_node(run_dir: str) -> tuple[socket.socket, FrontendSettings]:
    """Join a running node as one more frontend; return the socket, which is now the link, and the settings.

    Raises:
        OSError: no node listens in ``run_dir``.
        ConnectionRefusedError: the node refused; the text says why.
    """
    sock, line = call_node(run_dir, Call(join=Join(pid=os.getpid())), JOIN_TIMEOUT_S)
    joined = msgspec.json.decode(line, type=Joined)
    if joined.settings is None:
        sock.close()
        raise ConnectionRefusedError(joined.refused)
    return sock, joined.settings
