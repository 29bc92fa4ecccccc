"""The life of a request that repeats an earlier one: placed, submitted and answered by a plan (``kserve.repeats``).

The same promises as ``InferCall``: exactly one answer, memory given back once, withdrawn when the client goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from engines.errors import DeadlineExceeded, Kind, ServingError, error_of
from engines.tensor import NDArray
from frontend.infer_call import expired_text
from frontend.kserve.repeats import Plan
from worker.channel.client import Placement, Reply

if TYPE_CHECKING:
    from frontend.app import FrontendApp

Answer = Callable[[list[NDArray], Callable[[], None]], None]
Refuse = Callable[[ServingError], None]


class RepeatCall:
    """One such request: ``answer`` gets the outputs and what releases them, or ``refuse`` the error."""

    __slots__ = ("_answer", "_app", "_over", "_plan", "_refuse", "_request_id", "arrival_ns", "deadline_ns")

    def __init__(self, app: FrontendApp, plan: Plan, arrival_ns: int, answer: Answer, refuse: Refuse) -> None:
        self._app = app
        self._plan = plan
        self._answer = answer
        self._refuse = refuse
        self._over = False
        self._request_id = 0
        self.arrival_ns = arrival_ns
        self.deadline_ns = app.repeat_deadline_ns(plan.timeout_us, arrival_ns)

    def begin(self, body: memoryview) -> None:
        """Place and submit; any failure is the answer."""
        app, plan = self._app, self._plan
        app.traffic.in_flight += 1
        try:
            if self.deadline_ns <= app.clock_ns():
                raise DeadlineExceeded(expired_text(self))
            placement = app.channel.place(plan.entry, plan.variant, plan.rows)
            try:
                for room, (dtype, count, start) in zip(placement.inputs, plan.inputs, strict=True):
                    room[...] = np.frombuffer(body, dtype, count, start).reshape(room.shape)
                self._request_id = app.channel.submit(placement, self.deadline_ns, self.arrival_ns, self._on_reply)
            except BaseException:
                placement.release()
                raise
        except ServingError as error:
            self._fail(error)
            return
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
        try:
            if reply.kind is not Kind.OK:
                raise error_of(reply.kind, reply.text)
            outputs = placement.outputs()
        except ServingError as error:
            placement.release()
            self._fail(error)
            return
        self._app.traffic.count(self._plan.entry.name, Kind.OK, self._app.clock_ns() - self.arrival_ns)
        self._close()
        self._answer(outputs, placement.release)

    def _fail(self, error: ServingError) -> None:
        if self._over:
            return
        self._app.traffic.count(self._plan.entry.name, error.kind, self._app.clock_ns() - self.arrival_ns)
        self._close()
        self._refuse(error)

    def _close(self) -> None:
        self._over = True
        self._app.traffic.in_flight -= 1
        self._app.deadlines.discard(self)
        if self._request_id:
            self._app.channel.abandon(self._request_id)
            self._request_id = 0
