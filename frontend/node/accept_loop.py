"""Accepts connections of one port on the event loop, patiently when the process has no descriptors left.

The loops' own servers try again at once and for ever then: asyncio's logs every attempt, and schedules several more for
each, so that a burst of clients could keep the node busy long after they had gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

log = logging.getLogger("node")

BURST = 16
"""Connections accepted before other callbacks of the loop get their turn."""
BACKLOG = 128
RETRY_S = 0.25


class AcceptLoop:
    """Gives each connection of ``listener`` (bound, not yet listening; owned from here on) to ``take``."""

    def __init__(self, listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._take = take
        self._retry: asyncio.TimerHandle | None = None
        self._told = False

    def start(self) -> None:
        """Listen. Connections wait in the backlog while none can be accepted."""
        allow_reuse(self._listener)
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Stop listening; idempotent."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()

    def _resume(self) -> None:
        self._retry = None
        asyncio.get_running_loop().add_reader(self._listener, self._on_readable)

    def _on_readable(self) -> None:
        for _ in range(BURST):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._pause(error)
                return
            self._told = False
            self._take(connection)

    def _pause(self, error: OSError) -> None:
        if not self._told:
            log.warning("accept.failed error=%s; connections wait", error)
            self._told = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._retry = loop.call_later(RETRY_S, self._resume)


def allow_reuse(listener: socket.socket) -> None:
    """Let the port be taken again although connections of it linger after their end; while it listens it stays refused.

    Connections inherit this. It comes with listening and not with binding: two sockets that are merely bound would not
    notice each other.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
