"""Accepts connections for all frontends and hands each to the one with the fewest open.

With SO_REUSEPORT the kernel draws a frontend per connection, which is even for hundreds and useless for a handful, and
gRPC clients open just one. Here one place accepts and passes the descriptor (SCM_RIGHTS): eight connections over four
frontends are two each. It also means that a killed frontend takes no connection with it that it had not been given.

Frontends connect to ``accept.sock`` (SOCK_SEQPACKET) and get one message per connection: a tag that names the port, and
the descriptor. They send one byte per closed connection, and ``STOP`` when they want no more; the end of file that
answers it comes after everything that had been handed over. While no frontend takes connections, clients wait in the
backlog.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from dataclasses import dataclass

from frontend.node.accept_loop import AcceptLoop, allow_reuse

log = logging.getLogger("node")

ACCEPT_SOCKET = "accept.sock"
BACKLOG = 4096
ACCEPT_BURST = 64
"""Connections accepted before other callbacks of the node get their turn."""
HTTP_TAG = b"h"
GRPC_TAG = b"g"
CLOSED = b"c"
STOP = b"s"
_RETRY_S = 0.01
_RECEIVE_BYTES = 4096


@dataclass(slots=True, eq=False)
class Taker:
    """A frontend that takes connections; ``open`` are those it was given and has not reported closed."""

    sock: socket.socket
    open: int = 0


class Acceptor:
    """Owns the listening sockets of a node.

    Args:
        listeners: bound sockets by tag (one byte), not listening yet; closed by ``close``.
        path: of the Unix socket where frontends come for connections.
    """

    def __init__(self, listeners: dict[bytes, socket.socket], path: str) -> None:
        self._listeners = listeners
        self._path = path
        self._door: AcceptLoop | None = None
        self._takers: list[Taker] = []
        self._waiting = False
        self._told = False
        self._held: tuple[bytes, socket.socket] | None = None
        self._closed = False

    async def start(self) -> None:
        """Open the ports and let frontends come; clients that are earlier than they wait in the backlog."""
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        door.bind(self._path)
        os.chmod(self._path, 0o600)
        self._door = AcceptLoop(door, self._on_door)
        self._door.start()
        for listener in self._listeners.values():
            allow_reuse(listener)
            listener.setblocking(False)
            listener.listen(BACKLOG)

    def close(self) -> None:
        """Stop accepting; connections in a backlog are refused. Frontends keep what they have. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._held is not None:
            self._held[1].close()
        loop = asyncio.get_running_loop()
        for listener in self._listeners.values():
            loop.remove_reader(listener)
            listener.close()
        for taker in list(self._takers):
            self._remove(taker)
        if self._door is not None:
            self._door.close()

    @property
    def open(self) -> list[int]:
        """Connections each frontend has, in the order they came."""
        return [taker.open for taker in self._takers]

    @property
    def holds(self) -> bool:
        """Whether an accepted connection waits for a frontend that can take it."""
        return self._held is not None

    def _on_door(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        taker = Taker(sock)
        self._takers.append(taker)
        asyncio.get_running_loop().add_reader(sock, self._on_taker, taker)
        self._resume()

    def _on_taker(self, taker: Taker) -> None:
        try:
            said = taker.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        taker.open = max(0, taker.open - said.count(CLOSED))
        if not said or STOP in said:
            self._remove(taker)

    def _remove(self, taker: Taker) -> None:
        if taker in self._takers:
            self._takers.remove(taker)
            asyncio.get_running_loop().remove_reader(taker.sock)
            taker.sock.close()

    def _resume(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = False
        if self._held is not None:
            tag, connection = self._held
            if not self._hand_over(tag, connection):
                self._pause(retry=True)
                return
            self._held = None
            connection.close()
        for tag, listener in self._listeners.items():
            loop.add_reader(listener, self._on_connections, tag, listener)

    def _pause(self, retry: bool) -> None:
        """Leave connections in the backlog: nobody takes them now."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners.values():
            loop.remove_reader(listener)
        if retry and not self._waiting:
            self._waiting = True
            loop.call_later(_RETRY_S, self._retry)

    def _retry(self) -> None:
        if not self._waiting:
            return
        self._waiting = False
        if not self._closed and self._takers:
            self._resume()

    def _on_connections(self, tag: bytes, listener: socket.socket) -> None:
        for _ in range(ACCEPT_BURST):
            if not self._takers:
                self._pause(retry=False)
                return
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, or the client has gone already.
                if not self._told:
                    log.warning("accept.failed error=%s; connections wait", error)
                    self._told = True
                self._pause(retry=True)
                return
            self._told = False
            if not self._hand_over(tag, connection):
                # Every frontend's buffer is full: kept until one has read, since it cannot go back to the backlog.
                self._held = (tag, connection)
                self._pause(retry=True)
                return
            connection.close()

    def _hand_over(self, tag: bytes, connection: socket.socket) -> bool:
        for taker in sorted(self._takers, key=_open):
            try:
                socket.send_fds(taker.sock, [tag], [connection.fileno()])
            except BlockingIOError:
                continue
            except OSError:
                self._remove(taker)
                continue
            taker.open += 1
            return True
        return False


def _open(taker: Taker) -> int:
    return taker.open
