"""One HTTP/1 connection: when it reads, when it stops, and all the ways in which it ends.

Theory of operation
    Reading stops while the client does not read (its answers would pile up), while MAX_PIPELINED requests are in
    progress, and while a sink is held. What one read had already brought is kept as ``_backlog``.
    After a request that will be the last, for whatever reason, nothing more is parsed. If bytes remain
    unread then, the connection lingers: it is shut for writing and swallows input, since closing at once would make
    the kernel send a reset, which destroys the answer on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import cast

from frontend.httpd.answers import AnswerQueue
from frontend.httpd.exchange import Exchange
from frontend.httpd.heads import Head
from frontend.httpd.intake import Intake
from frontend.httpd.outlet import Outlet
from frontend.httpd.pace import WRITE_PROGRESS_BYTES, Pace, Phase
from frontend.httpd.state import ServerState

log = logging.getLogger(__name__)

MAX_PIPELINED = 16
"""Requests of one connection in progress; further ones wait unparsed or, within one slice, unstarted."""
MAX_STARTS_PER_TURN = 64
"""Requests of one connection handled before others have their turn."""
MAX_LINGERING_REFUSALS = 256
"""Refused connections that may linger at once; beyond, they are dropped."""


class Connection(asyncio.Protocol):
    """Serves one client. Made by the server for each accepted socket."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._pace = Pace()
        self._ready: deque[Exchange] = deque()
        self._backlog: memoryview | None = None
        self._reading = True
        self._held = False
        self._eof = False
        self._feeding = False
        self._starting = False
        self._starts = 0
        self._resuming = False
        self._lingering = False
        self._refused = False
        self._watch: int | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        state = self._state
        self._outlet = Outlet(self._transport, state.turn)
        self._answers = AnswerQueue(self._state, self._outlet, self)
        self._intake = Intake(state, self._answers, self)
        state.connections.add(self)
        state.counters.accepted += 1
        state.counters.open += 1
        if state.counters.open - state.refused_open > state.limits.max_connections:
            self._refuse_connection()

    def connection_lost(self, exc: Exception | None) -> None:
        state = self._state
        state.connections.discard(self)
        state.counters.open -= 1
        state.closed()
        state.refused_open -= self._refused
        self._backlog = None
        self._ready.clear()
        self._intake.stop()
        if self._watch is not None:
            state.hangups.forget(self._watch)
        self._outlet.lost()
        self._answers.lost()
        if not state.connections:
            state.emptied()

    def data_received(self, data: bytes) -> None:
        if not self._answers.queue and self._backlog is None and self._intake.take_known(data):
            return  # one request like the last on a connection that waits, as most are
        if self._lingering:
            return
        if self._backlog is not None:
            # Some transports deliver what they had read before they were paused.
            self._backlog = memoryview(bytes(self._backlog) + data)
            return
        self._starts = 0
        self._feed(data)

    def eof_received(self) -> bool:
        self._eof = True
        reading = self._intake.reading()
        self._intake.stop()
        if reading is not None and not reading.answered:
            # The rest of this request will never come; earlier ones are still answered.
            self._answers.drop(reading)
        if any(exchange.ends_with_input for exchange in self._answers.queue):
            self._transport.abort()
        elif self._answers.queue and not self._lingering:
            self._watch_hangup()
        else:
            self._outlet.close()
        return True  # closing here, not by the transport: what is buffered must still be sent

    def pause_writing(self) -> None:
        self._outlet.paused = True
        self._update_reading()

    def resume_writing(self) -> None:
        self._outlet.resumed()
        self._answers.wake()
        self._start_ready()
        self._go_on()

    # What the intake found

    def full(self) -> bool:
        """Return whether no further request may be parsed now."""
        return (
            len(self._answers.queue) >= MAX_PIPELINED
            or self._starts >= MAX_STARTS_PER_TURN
            or self._outlet.paused
            or self._held
        )

    def completed(self, exchange: Exchange) -> None:
        """Hand a complete request to the application, now or when earlier ones are done."""
        self._starts += 1
        if exchange.answered:
            return
        if self._ready or self._starting or self._answers.started >= MAX_PIPELINED or self._outlet.paused:
            self._ready.append(exchange)
            self._start_ready()
        else:
            self._start(exchange)

    def refuse(self, exchange: Exchange | None, status: int, message: str) -> None:
        """Answer a request that cannot be read; None if it has no headers yet."""
        if exchange is None:
            now_ns = self._state.clock()
            head = Head("GET", b"/", {}, http10=False, keep_alive=False)
            exchange = Exchange(self._answers, head, now_ns)
            self._answers.add(exchange)
        self._intake.excess = True
        if not exchange.answered:
            self._fail(exchange, status, message)

    # What the answers tell

    def last_answered(self, exchange: Exchange) -> None:
        self._intake.stop()
        if not exchange.complete:
            self._intake.excess = True

    def progressed(self) -> None:
        if self._ready:
            self._start_ready()
        if not self._feeding:
            self._settle()

    def hold_body(self, exchange: Exchange, *, held: bool) -> None:
        if self._intake.reading() is exchange or not held:
            self._held = held
            self._update_reading()
            self._go_on()

    def abort(self) -> None:
        self._transport.abort()

    # What the server asks

    def tick(self, now_ns: int) -> None:
        """End a phase that lasts too long; called about once a second."""
        phase, step = self._phase()
        limits = self._state.limits
        if not self._pace.overdue(phase, step, now_ns, limits):
            return
        self._state.counters.timeouts += 1
        if phase is Phase.READING:
            limit = limits.read_timeout_seconds
            self._intake.give_up(408, f"the request did not arrive within read_timeout_seconds = {limit:g} s")
        elif phase is Phase.IDLE:
            self._outlet.close()
        else:
            self._transport.abort()

    def drain(self) -> None:
        """Close now if nothing is in progress; otherwise the last answer due closes the connection."""
        if not self._answers.queue and not self._intake.mid_message and not self._lingering:
            self._outlet.close()

    # Inside

    def _feed(self, data: bytes | memoryview) -> None:
        self._feeding = True
        outlet = self._outlet
        outlet.cork()
        try:
            used = self._intake.feed(data)
            if used < len(data):
                self._backlog = memoryview(data)[used:]
        finally:
            outlet.uncork()
            self._feeding = False
        self._settle()

    def _settle(self) -> None:
        """After bytes were read or an answer was finished: end the connection, or see that it goes on."""
        if not self._answers.queue:
            if self._intake.stopped:
                self._shut()
                return
            if self._state.draining:
                self.drain()
        if self._backlog is not None:
            self._update_reading()
            self._go_on()

    def _go_on(self) -> None:
        """Parse what was left, then read again, as far as nothing stands against it."""
        if self._feeding or self._transport.is_closing():
            return
        if self._backlog is None:
            self._update_reading()
        elif not (self._resuming or self._held or self._outlet.paused or len(self._answers.queue) >= MAX_PIPELINED):
            # By way of the loop: other connections come first, and the depth of calls stays bounded.
            self._resuming = True
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._starts = 0
        backlog, self._backlog = self._backlog, None
        if backlog is not None and not self._transport.is_closing():
            self._feed(backlog)
            self._update_reading()

    def _update_reading(self) -> None:
        blocked = not self._lingering and (self._backlog is not None or self._held or self._outlet.paused)
        if blocked == self._reading and not self._eof and not self._transport.is_closing():
            self._reading = not blocked
            if blocked:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _start(self, exchange: Exchange) -> None:
        exchange.started = True
        self._answers.started += 1
        self._starting = True
        try:
            (exchange.head.handler or self._state.app.handle)(exchange)
        except Exception:
            log.exception("http.handler_failed path=%r", exchange.path)
            if not exchange.answered:
                self._fail(exchange, 500, "internal error")
            elif exchange.streaming:
                self._transport.abort()
        finally:
            self._starting = False

    def _start_ready(self) -> None:
        ready, answers, outlet = self._ready, self._answers, self._outlet
        while ready and not self._starting and answers.started < MAX_PIPELINED and not outlet.paused:
            self._start(ready.popleft())

    def _fail(self, exchange: Exchange, status: int, message: str) -> None:
        content_type, body = self._state.app.error_body(exchange, status, message)
        headers = [(b"Content-Type", content_type)]
        if status == 503:
            headers.append((b"Retry-After", b"1"))
        exchange.respond(status, headers, [body])

    def _shut(self) -> None:
        """End the connection after its last answer, in a way that lets the client read it."""
        transport = self._transport
        if transport.is_closing() or self._lingering:
            return
        if self._eof or not (self._intake.excess or self._backlog is not None):
            self._outlet.close()
            return
        self._lingering = True
        self._backlog = None
        self._outlet.end()
        self._update_reading()

    def _refuse_connection(self) -> None:
        state = self._state
        state.counters.refused += 1
        state.refused_open += 1
        self._refused = True
        self._intake.stop()
        if state.refused_open > MAX_LINGERING_REFUSALS:
            self._transport.abort()
            return
        self.refuse(None, 503, f"max_connections = {state.limits.max_connections} connections are open; retry later")

    def _watch_hangup(self) -> None:
        sock = self._transport.get_extra_info("socket")
        self._watch = self._state.hangups.watch(sock.fileno(), self._hung_up)
        if self._answers.nothing_written():
            self._outlet.probe()

    def _hung_up(self) -> None:
        self._watch = None
        self._transport.abort()

    def _phase(self) -> tuple[Phase, int]:
        if self._lingering:
            return Phase.LINGERING, 0
        if self._outlet.paused:
            return Phase.WRITING, self._outlet.backlog_bytes() // WRITE_PROGRESS_BYTES
        intake = self._intake
        if intake.mid_message and not intake.stopped and not self._held:
            reading = intake.reading()
            return Phase.READING, (intake.messages << 32) + (0 if reading is None else reading.read_steps)
        return (Phase.WAITING if self._answers.queue else Phase.IDLE), intake.messages
