"""A ModelInfer call that repeats an earlier one: stream, request and answer in one object.

An ordinary call costs four objects here and as many on its way to the worker. This one is begun when its request is
there in full, so that it needs no state of a message under way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from engines.tensor import NDArray
from frontend.grpc_fast import replies
from frontend.grpc_fast.plans import Plan
from frontend.grpc_fast.repeats import Found
from frontend.grpc_methods import failure_of, outcome_of
from frontend.http2.connection import Connection
from frontend.http2.stream import WholeStream
from frontend.serving import Call

if TYPE_CHECKING:
    from frontend.grpc_fast.service import Service

log = logging.getLogger("frontend.grpc")


class RepeatedCall(WholeStream):
    """One such call."""

    _call: Call | None = None

    def __init__(self, service: Service, stream_id: int, plan: Plan, found: Found) -> None:
        self.id = stream_id
        self._service = service
        self._plan = plan
        self._template, self._raws, self._request_id = found

    def begin(self, connection: Connection) -> None:
        self._sender = connection.sender
        service, template = self._service, self._template
        timeout_ns = self._plan.timeout_ns
        plan = template.timed(timeout_ns) if timeout_ns else template.plan
        assert service.repeat is not None
        try:
            call = service.repeat(plan, self._raws, service.clock(), self._answer, self._refuse)
        except Exception as error:
            self._refuse(error)
            return
        if self.open:
            self._call = call

    def cancel(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _answer(self, outputs: list[NDArray], release: Callable[[], None]) -> None:
        # The call refers to this stream by what it calls back.
        self._call = None
        try:
            parts, size = self._template.answer(outputs, self._request_id)
        except Exception as error:
            self._refuse(error)
            return
        finally:
            release()
        self._sender.answer(self, replies.HEAD, parts, size, replies.OK_TAIL, None)

    def _refuse(self, error: Exception) -> None:
        self._call = None
        if self.open:
            told = outcome_of(failure_of(error))
            self._sender.finish(self, replies.failure_tail(told, alone=True))
