"""A request body as an async iterator, read from the client no faster than it is consumed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from frontend.httpd.exchange import ClientDisconnected, Exchange

HOLD_BYTES: Final = 1024 * 1024
"""From here on the client waits; one more read of the socket may come on top."""
RELEASE_BYTES: Final = 256 * 1024
STEP_BYTES: Final = 1024 * 1024
"""A client must send this much per ``read_timeout_seconds``: a large file may take longer than any small request."""
PIECE_BYTES: Final = 256 * 1024
"""Small reads are joined up to about this much, so that the cost per piece is spread."""


class BodyPipe:
    """Provides ``BodySink`` to the server and the body to one consumer."""

    def __init__(self, exchange: Exchange, max_bytes: int, limit_name: str) -> None:
        self.max_bytes = max_bytes
        self.limit_name = limit_name
        self._exchange = exchange
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0
        self._received = 0
        self._held = False
        self._complete = False
        self._broken = False
        self._abandoned = False
        self._arrived = asyncio.Event()

    # BodySink

    def write(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes."""
        if self._abandoned:
            return
        self._pieces.append(bytes(chunk))
        self._waiting_bytes += len(chunk)
        self._received += len(chunk)
        self._exchange.read_steps = self._received // STEP_BYTES
        self._arrived.set()
        if self._waiting_bytes >= HOLD_BYTES and not self._held:
            self._held = True
            self._exchange.hold_body(held=True)

    def close(self) -> None:
        """The body is complete."""
        self._complete = True
        self._arrived.set()

    def abort(self) -> None:
        """No more will come."""
        self._broken = True
        self._arrived.set()

    # The consumer

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body. Raises: ClientDisconnected if it ends before its time."""
        while True:
            if self._pieces:
                yield self._next()
            elif self._complete:
                return
            elif self._broken:
                raise ClientDisconnected
            else:
                self._arrived.clear()
                await self._arrived.wait()

    def abandon(self) -> None:
        """Drop what has arrived and what will; the client is no longer held. Idempotent."""
        self._abandoned = True
        self._pieces.clear()
        self._waiting_bytes = 0
        self._release()

    def _next(self) -> bytes:
        size = count = 0
        while count < len(self._pieces) and size < PIECE_BYTES:
            size += len(self._pieces[count])
            count += 1
        piece = self._pieces[0] if count == 1 else b"".join(self._pieces[:count])
        del self._pieces[:count]
        self._waiting_bytes -= size
        if self._waiting_bytes <= RELEASE_BYTES:
            self._release()
        return piece

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._exchange.hold_body(held=False)
