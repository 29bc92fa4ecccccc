"""The transport's side of an HTTP/2 connection: when it reads, when it writes, and how it ends.

Theory of operation
    All that a turn of the loop brings to one connection leaves in one write: what is answered while bytes are received
    goes out at their end, what is answered later goes out in the loop's next step.
    The transport's high-water mark is 0, so it tries the socket inside every write: an empty buffer afterwards means
    that the kernel has copied everything, and what was lent is free. While it is not empty data stays in the streams'
    queues, and if much else piles up, nothing more is read.
    A connection that is over is shut for writing and swallows input until the client closes too: closing at once would
    make the kernel send a reset, which destroys the reason on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, cast

from frontend.http2.connection import Connection
from frontend.http2.frames import Code
from frontend.http2.limits import Limits
from frontend.http2.stream import Application, Release

log = logging.getLogger(__name__)

LINGER_TICKS: Final = 3
"""Ticks, of about a second, that a client has to read why its connection ended."""
MAX_LINGERING_REFUSALS: Final = 256
"""Refused connections that may linger at once; beyond, they are dropped."""
WRITE_PROGRESS_BYTES: Final = 64 * 1024
"""A client must take this much of its answers per ``write_ns``."""


@dataclass(slots=True)
class ServerState:
    """What the connections of one server share.

    Attributes:
        clock: monotonic ns; injectable so that tests move time.
        emptied: called when the last connection is gone.
        closed: called whenever one is gone.
        refused_open: connections over the limit that still read why.
    """

    application: Application
    limits: Limits
    max_connections: int
    clock: Callable[[], int]
    emptied: Callable[[], None]
    closed: Callable[[], None]
    draining: bool = False
    accepted: int = 0
    refused: int = 0
    refused_open: int = 0
    connections: set[Http2Protocol] = field(default_factory=set)
    to_flush: list[Http2Protocol] = field(default_factory=list)

    def flush(self) -> None:
        """Write what a turn of the loop has made for every connection."""
        to_flush, self.to_flush = self.to_flush, []
        for connection in to_flush:
            try:
                connection.flush()
            except Exception:
                # One connection's defect must not cost the others their answers.
                log.exception("http2.flush_failed")
                connection.abort()


class Http2Protocol(asyncio.Protocol):
    """Serves one client. Made by the server for each accepted socket."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._lent: deque[Release] = deque()
        self._receiving = False
        self._reading = True
        self._lingering = 0
        self._refused = False
        self._stalled_ns = 0
        self._stalled_bytes = 0
        self.connection = Connection(state.application, state.limits, self._wake, state.clock())
        self._sender = self.connection.sender

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        state = self._state
        state.accepted += 1
        state.connections.add(self)
        self.connection.start()
        if len(state.connections) - state.refused_open > state.max_connections:
            self._refuse()
        elif state.draining:
            self.connection.fail(Code.NO_ERROR, "draining")

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.lost()
        _, releases = self._sender.take()
        self._lent.extend(releases)
        self._return_lent()
        state = self._state
        state.connections.discard(self)
        state.refused_open -= self._refused
        state.closed()
        if not state.connections:
            state.emptied()

    def data_received(self, data: bytes) -> None:
        self._receiving = True
        try:
            self.connection.receive(data)
        except Exception:
            # A defect of ours: this connection cannot go on, all others can.
            log.exception("http2.connection_failed")
            self.connection.fail(Code.INTERNAL_ERROR, "internal error")
        finally:
            self._receiving = False
        if self._sender.awake or self.connection.over:
            self.flush()

    def eof_received(self) -> bool:
        return False  # nobody half-closes a connection whose answers it wants: what waits is withdrawn

    def pause_writing(self) -> None:
        self._sender.held = True

    def resume_writing(self) -> None:
        self._sender.held = False
        self._stalled_ns = 0
        self._return_lent()
        self.flush()

    # What the server asks

    def tick(self, now_ns: int) -> None:
        """End what takes too long; called about once a second."""
        transport = self._transport
        if self._lingering:
            self._lingering += 1
            if self._lingering > LINGER_TICKS:
                transport.abort()
            return
        self.connection.tick(now_ns)
        if self._sender.held:
            self._tick_stalled(now_ns)

    def drain(self) -> None:
        """Finish what is under way, then close."""
        self.connection.drain("draining")

    def abort(self) -> None:
        """Drop the connection and all its requests."""
        self._transport.abort()

    def flush(self) -> None:
        """Hand what is to be sent to the transport."""
        transport, sender = self._transport, self._sender
        if transport.is_closing() or self._receiving or self._lingering:
            return
        again = True
        while again:
            parts, releases = sender.take()
            if parts:
                if releases:
                    transport.writelines(parts)
                else:
                    transport.write(b"".join(parts))
            if releases:
                self._lent.extend(releases)
            again = sender.more()
        if self._lent and not sender.held:
            self._return_lent()
        if self.connection.over:
            self._shut()
        elif sender.held or not self._reading:
            self._update_reading()

    # Inside

    def _refuse(self) -> None:
        state = self._state
        self._refused = True
        state.refused += 1
        state.refused_open += 1
        self.connection.fail(Code.ENHANCE_YOUR_CALM, f"max_connections = {state.max_connections} are open")
        if state.refused_open > MAX_LINGERING_REFUSALS:
            self._transport.abort()

    def _wake(self) -> None:
        if not self._receiving:
            to_flush = self._state.to_flush
            to_flush.append(self)
            if len(to_flush) == 1:
                # One step of the loop for all connections: one each took 0.5 us more per answer.
                self._loop.call_soon(self._state.flush)

    def _update_reading(self) -> None:
        blocked = self._sender.held and self._transport.get_write_buffer_size() > self._state.limits.pending_bytes
        if blocked == self._reading:
            self._reading = not blocked
            if blocked:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _shut(self) -> None:
        if not self._lingering and not self._transport.is_closing():
            self._lingering = 1
            if not self._reading:
                self._reading = True
                self._transport.resume_reading()
            self._transport.write_eof()

    def _return_lent(self) -> None:
        lent = self._lent
        while lent:
            release = lent.popleft()
            try:
                release()
            except Exception:
                log.exception("http2.release_failed")

    def _tick_stalled(self, now_ns: int) -> None:
        left = self._transport.get_write_buffer_size()
        if not self._stalled_ns or left + WRITE_PROGRESS_BYTES <= self._stalled_bytes:
            self._stalled_ns = now_ns
            self._stalled_bytes = left
        elif now_ns - self._stalled_ns > self._state.limits.write_ns:
            log.info("http2.client_does_not_read bytes=%s", left)
            self._transport.abort()
