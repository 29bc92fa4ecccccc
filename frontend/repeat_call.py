"""The life of a request that repeats an earlier one: placed, submitted and answered by a plan (``kserve.repeats``).

The same promises as ``InferCall``: exactly one answer, memory given back once, withdrawn when the client goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engines.errors import DeadlineExceeded, Kind, ServingError, error_of
from frontend.httpd.exchange import Exchange
from frontend.httpd.wire import Part
from frontend.infer_call import expired_text
from frontend.kserve.repeats import Plan
from worker.channel.client import Placement, Reply

if TYPE_CHECKING:
    from frontend.app import FrontendApp

Refuse = Callable[[Exchange, ServingError], None]


class RepeatCall:
    """One such request: answers its exchange with the outputs, or has ``refuse`` answer with the error."""

    __slots__ = ("_app", "_exchange", "_over", "_plan", "_refuse", "_request_id", "arrival_ns", "deadline_ns")

    def __init__(self, app: FrontendApp, plan: Plan, exchange: Exchange, refuse: Refuse) -> None:
        self._app = app
        self._plan = plan
        self._exchange = exchange
        self._refuse = refuse
        self._over = False
        self._request_id = 0
        self.arrival_ns = exchange.arrival_ns
        self.deadline_ns = app.repeat_deadline_ns(plan.timeout_us, exchange.arrival_ns)

    def begin(self) -> None:
        """Place and submit; any failure is the answer."""
        app, plan, exchange = self._app, self._plan, self._exchange
        app.traffic.in_flight += 1
        try:
            if plan.timeout_us and self.deadline_ns <= app.clock_ns():
                raise DeadlineExceeded(expired_text(self))
            placement = app.channel.place(plan.entry, plan.variant, plan.rows)
            try:
                body, memory = exchange.body, placement.memory
                for index, (start, stop) in enumerate(plan.inputs):
                    at = placement.place_of(index)
                    memory[at : at + stop - start] = body[start:stop]
                self._request_id = app.channel.submit(placement, self.deadline_ns, self.arrival_ns, self._on_reply)
            except BaseException:
                placement.release()
                raise
        except ServingError as error:
            self._fail(error)
            return
        exchange.on_disconnect = self.cancel
        app.deadlines.add(self)

    def cancel(self) -> None:
        """Withdraw the request: nobody waits for it any more. Idempotent."""
        if not self._over:
            self._app.traffic.count(self._plan.entry.name, Kind.CANCELLED, 0)
            self._close()

    def expire(self) -> None:
        """Answer that the deadline has passed."""
        self._fail(DeadlineExceeded(expired_text(self)))

    def _on_reply(self, placement: Placement, reply: Reply) -> None:
        self._request_id = 0
        if reply.kind is not Kind.OK:
            placement.release()
            self._fail(error_of(reply.kind, reply.text))
            return
        app, plan, exchange = self._app, self._plan, self._exchange
        app.traffic.count(plan.entry.name, Kind.OK, app.clock_ns() - self.arrival_ns)
        self._close()
        memory = placement.memory
        parts: list[Part] = [plan.json]
        for tensor, size in plan.outputs:
            at = placement.place_of(tensor)
            parts.append(memory[at : at + size])
        if plan.front:
            exchange.respond_ready(plan.front, parts)
            placement.release()
        else:
            exchange.respond(200, plan.headers, parts, placement.release)

    def _fail(self, error: ServingError) -> None:
        if self._over:
            return
        self._app.traffic.count(self._plan.entry.name, error.kind, self._app.clock_ns() - self.arrival_ns)
        self._close()
        self._refuse(self._exchange, error)

    def _close(self) -> None:
        self._over = True
        self._exchange.on_disconnect = None
        self._app.traffic.in_flight -= 1
        self._app.deadlines.discard(self)
        if self._request_id:
            self._app.channel.abandon(self._request_id)
            self._request_id = 0
