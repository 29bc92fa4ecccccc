"""Tells a client that closed its connection from one that only finished sending.

Both look alike on the wire: a FIN. The difference shows when we send: a closed socket answers RST. So the connection
sends the first byte of the answer it owes ("H", the same for every answer) and this watch reports the error that
comes back. The event loop stops polling a socket at its end of file, hence an epoll set of our own, which asks for no
event: the kernel always reports errors and hang-ups. An interim 102 answer would also do but not for HTTP/1.0, and
TCP keep-alive probes do not: a peer in FIN-WAIT-2 acknowledges them.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable

MAX_EVENTS = 64


class HangupWatch:
    """Calls back when a watched socket is reset. Must be closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll: select.epoll | None = None
        self._watched: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, callback: Callable[[], None]) -> int:
        """Return a token for ``forget``, valid until then or until the callback.

        Holds a duplicate of ``fd``, whose number may be reused by others meanwhile.
        """
        if self._epoll is None:
            self._epoll = select.epoll()
            self._loop.add_reader(self._epoll.fileno(), self._ready)
        token = os.dup(fd)
        self._watched[token] = callback
        self._epoll.register(token, 0)
        return token

    def forget(self, token: int) -> None:
        """Stop watching; idempotent."""
        if self._watched.pop(token, None) is not None:
            assert self._epoll is not None
            self._epoll.unregister(token)
            os.close(token)

    def close(self) -> None:
        """Release everything; idempotent."""
        for token in list(self._watched):
            self.forget(token)
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _ready(self) -> None:
        assert self._epoll is not None
        for token, _ in self._epoll.poll(0, MAX_EVENTS):
            callback = self._watched.get(token)
            if callback is not None:
                self.forget(token)
                callback()
