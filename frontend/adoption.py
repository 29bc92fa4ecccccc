"""A frontend's side of accepting in one place: takes connections from the node and reports those that closed.

See ``frontend.node.acceptor`` for the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from frontend.node.acceptor import CLOSED, STOP

log = logging.getLogger("frontend")

STOP_TIMEOUT_S = 2.0
_MESSAGE_BYTES = 16
_BURST = 64

Adopt = Callable[[socket.socket], None]


class Newcomers:
    """Accepted connections on their way to a server's protocol, on the server's event loop.

    Args:
        protocol: makes the protocol of one connection.
        lost: called for a connection whose client left before it was served.
    """

    def __init__(self, protocol: Callable[[], asyncio.Protocol], lost: Callable[[], None]) -> None:
        self._protocol = protocol
        self._lost = lost
        self._tasks: set[asyncio.Task[None]] = set()

    def adopt(self, sock: socket.socket) -> None:
        """Serve a connection; the socket is the protocol's from here on."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.get_running_loop().create_task(self._serve(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, sock)
        except OSError as error:
            log.debug("adoption.client_left error=%s", error)
            sock.close()
            self._lost()


class Adoption:
    """Connected to the node's acceptor; ``adopt`` by tag gets each accepted socket, which it then owns."""

    def __init__(self, path: str, adopt: dict[bytes, Adopt]) -> None:
        self._path = path
        self._adopt = adopt
        self._socket: socket.socket | None = None
        self._unreported = 0
        self._ended = asyncio.Event()

    def start(self) -> None:
        """Begin to take connections.

        Raises:
            OSError: nobody accepts there.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(self._path)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        self._socket = sock
        asyncio.get_running_loop().add_reader(sock, self._on_readable)

    def closed(self) -> None:
        """Report that an adopted connection has closed; several within one turn of the loop go together."""
        self._unreported += 1
        if self._unreported == 1 and self._socket is not None:
            asyncio.get_running_loop().call_soon(self._report)

    async def stop(self) -> None:
        """Take no more; returns when everything that had been handed over is adopted."""
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._socket.send(STOP)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), STOP_TIMEOUT_S)
        self._end()

    def _report(self) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send(CLOSED * self._unreported)
            self._unreported = 0
        except BlockingIOError:
            asyncio.get_running_loop().call_later(0.01, self._report)
        except OSError:
            self._unreported = 0

    def _on_readable(self) -> None:
        for _ in range(_BURST):
            if self._socket is None:
                return
            try:
                message, descriptors, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("adoption.failed error=%s", error)
                message, descriptors = b"", []
            if not message:
                self._end()
                return
            for descriptor in descriptors:
                self._adopt[message](socket.socket(fileno=descriptor))
            if not descriptors:
                # This process has no descriptor left for it, so the kernel has closed it on the way.
                log.warning("adoption.no_descriptors")
                self.closed()

    def _end(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        self._ended.set()
