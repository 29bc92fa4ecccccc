"""The answers of one connection, put on the wire in the order of the requests, whenever they are given."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from frontend.httpd import wire
from frontend.httpd.exchange import Exchange
from frontend.httpd.outlet import Outlet, run_guarded
from frontend.httpd.state import ServerState
from frontend.httpd.wire import Headers, Part


class Owner(Protocol):
    """What the answers of a connection need of it."""

    def last_answered(self, exchange: Exchange) -> None:
        """The answer that closes the connection is written; nothing more will be sent."""
        ...

    def progressed(self) -> None:
        """An answer was finished and those behind it moved up."""
        ...

    def hold_body(self, exchange: Exchange, *, held: bool) -> None: ...
    def abort(self) -> None: ...


class AnswerQueue:
    """Exchanges in the order of their requests; the first one's answer is on the wire, later ones wait rendered.

    Attributes:
        queue: read by the connection, changed here only.
        started: exchanges the application was given and whose answers are not finished.
    """

    __slots__ = ("_outlet", "_owner", "_state", "_waiters", "queue", "started")

    def __init__(self, state: ServerState, outlet: Outlet, owner: Owner) -> None:
        self._state = state
        self._outlet = outlet
        self._owner = owner
        self.queue: deque[Exchange] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self.started = 0

    def add(self, exchange: Exchange) -> None:
        """Append a request whose headers are complete."""
        self.queue.append(exchange)
        counters = self._state.counters
        counters.requests += 1
        counters.in_flight += 1

    def drop(self, exchange: Exchange) -> None:
        """Remove a request that will never be complete."""
        self.queue.remove(exchange)
        self._abandon(exchange)

    def invite(self, exchange: Exchange) -> None:
        """Ask for the body of a request with ``Expect: 100-continue``, in turn."""
        if self.queue[0] is exchange:
            self._outlet.write([wire.CONTINUE], None)
        else:
            exchange.wants_continue = True

    def nothing_written(self) -> bool:
        """Return whether the first answer due has not begun."""
        return not self.queue[0].answered

    def lost(self) -> None:
        """The client is gone."""
        self._abandon_all()
        self.wake()

    def wake(self) -> None:
        """Let streamed answers go on."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # Line: what exchanges ask for

    def answer(
        self,
        exchange: Exchange,
        status: int,
        headers: Headers,
        parts: Sequence[Part],
        on_sent: Callable[[], None] | None,
    ) -> None:
        if exchange.lost:
            exchange.answered = True
            if on_sent is not None:
                run_guarded(on_sent)
            return
        length = 0
        for part in parts:
            length += len(part)
        out: list[Part] = [self._render(exchange, status, headers, length)]
        if exchange.method != "HEAD":
            out += parts
        exchange.answered = True
        exchange.on_sent = on_sent
        self._state.counters.answers[status // 100] += 1
        if self.queue[0] is not exchange:
            exchange.pending = out
            return
        self._write_answer(exchange, out)
        self._advance()

    def answer_ready(self, exchange: Exchange, front: bytes, parts: Sequence[Part]) -> None:
        exchange.answered = True
        if exchange.lost:
            return
        state = self._state
        if state.draining:
            self._choose_end(exchange)
        end = b"\r\n" if exchange.keep_alive else b"Connection: close\r\n\r\n"
        data = b"".join((front, state.date, end, *parts))
        state.counters.answers[2] += 1
        queue = self.queue
        if queue[0] is not exchange:
            exchange.pending = [data]
            return
        self._outlet.send(data)
        self._finish_head()
        if queue:
            self._advance()
        else:
            self._owner.progressed()

    def open_stream(self, exchange: Exchange, status: int, headers: Headers) -> None:
        if exchange.lost:
            exchange.answered = True
            return
        head = self._render(exchange, status, headers, None)
        exchange.answered = exchange.streaming = True
        self._state.counters.answers[status // 100] += 1
        if self.queue[0] is exchange:
            self._outlet.write([head], None)
        else:
            exchange.pending = [head]

    def stream(self, exchange: Exchange, parts: Sequence[Part], *, last: bool) -> None:
        self._outlet.write(parts, None)
        if last:
            exchange.streaming = False
            self._finish_head()
            self._advance()

    def writable(self, exchange: Exchange) -> Awaitable[None] | None:
        if exchange.lost or (self.queue[0] is exchange and not self._outlet.paused):
            return None
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def hold_body(self, exchange: Exchange, *, held: bool) -> None:
        self._owner.hold_body(exchange, held=held)

    def abort(self) -> None:
        self._owner.abort()

    # Inside

    def _render(self, exchange: Exchange, status: int, headers: Headers, length: int | None) -> bytes:
        if length is None and exchange.http10:
            exchange.keep_alive = False  # only closing can mark the end
        self._choose_end(exchange)
        return wire.render_head(
            status,
            headers,
            length=length,
            date=self._state.date,
            keep_alive=exchange.keep_alive,
            http10=exchange.http10,
        )

    def _choose_end(self, exchange: Exchange) -> None:
        """Have the connection closed after an answer that must be its last."""
        if not exchange.complete:
            exchange.keep_alive = False  # its body will not be read
        elif self._state.draining and self.queue[-1] is exchange:
            exchange.keep_alive = False

    def _write_answer(self, exchange: Exchange, out: Sequence[Part]) -> None:
        on_sent, exchange.on_sent = exchange.on_sent, None
        self._outlet.write(out, on_sent)
        self._finish_head()

    def _finish_head(self) -> None:
        exchange = self.queue.popleft()
        self._settle(exchange)
        if not exchange.keep_alive:
            self._owner.last_answered(exchange)
            self._abandon_all()

    def _advance(self) -> None:
        queue = self.queue
        while queue:
            head = queue[0]
            out, head.pending = head.pending, None
            if out is not None and not head.streaming:
                self._write_answer(head, out)
                continue
            if out is not None:
                self._outlet.write(out, None)
            elif head.wants_continue:
                head.wants_continue = False
                self._outlet.write([wire.CONTINUE], None)
            if self._waiters:
                self.wake()
            break
        self._owner.progressed()

    def _settle(self, exchange: Exchange) -> None:
        state = self._state
        state.counters.in_flight -= 1
        state.buffered_bytes -= exchange.charged_bytes
        exchange.charged_bytes = 0
        if exchange.started:
            self.started -= 1

    def _abandon_all(self) -> None:
        queue, self.queue = self.queue, deque()
        for exchange in queue:
            self._abandon(exchange)

    def _abandon(self, exchange: Exchange) -> None:
        """Nobody waits for this answer any more."""
        exchange.lost = True
        self._settle(exchange)
        if exchange.answered and not exchange.streaming:
            on_sent, exchange.on_sent = exchange.on_sent, None
            if on_sent is not None:
                run_guarded(on_sent)
            return
        self._state.counters.disconnects += 1
        on_disconnect, exchange.on_disconnect = exchange.on_disconnect, None
        if on_disconnect is not None:
            run_guarded(on_disconnect)
