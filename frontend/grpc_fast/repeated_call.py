"""A ModelInfer call that repeats an earlier one: a stream, and the request with its answer.

An ordinary call costs four objects here and as many on its way to the worker. This one is begun when its request is
there in full, so that it needs no state of a message under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines.errors import ServingError
from frontend.grpc_fast import replies
from frontend.grpc_fast.plans import Plan
from frontend.grpc_fast.repeats import Found
from frontend.grpc_methods import failure_of, outcome_of
from frontend.http2.connection import Connection
from frontend.http2.stream import WholeStream
from frontend.placed_call import PlacedCall
from worker.channel.client import Placement

if TYPE_CHECKING:
    from frontend.app import FrontendApp


class RepeatedCall(PlacedCall):
    """One such call."""

    def __init__(self, app: FrontendApp, stream: RepeatedStream, plan: Plan, found: Found, arrival_ns: int) -> None:
        self._app = app
        self._stream = stream
        self.arrival_ns = arrival_ns
        self._timeout_ns = plan.timeout_ns
        self._template, self._data, self._first, self._told_id = found

    def begin(self, connection: Connection) -> None:
        self._sender = connection.sender
        # Not kept while the call waits: it may lie in a much longer read.
        data, self._data = self._data, b""
        try:
            self.start(self._app, self._template.rows, memoryview(data), self._first, self.arrival_ns, self._timeout_ns)
        except Exception as error:
            self._fail(failure_of(error))

    def answered(self, placement: Placement) -> None:
        template, memory = self._template, placement.memory
        try:
            opening, size = template.opening_under(self._told_id)
            parts = [opening]
            for number, output_bytes, before in template.outputs:
                at = placement.place_of(number)
                if before:
                    parts.append(before)
                parts.append(memory[at : at + output_bytes].tobytes())
        except Exception as error:
            self.refused(failure_of(error))
            return
        finally:
            placement.release()
        self._sender.answer(self._stream, replies.HEAD, parts, size, replies.OK_TAIL, None)

    def refused(self, error: ServingError) -> None:
        self._sender.finish(self._stream, replies.failure_tail(outcome_of(error), alone=True))


class RepeatedStream(WholeStream):
    """The stream of one such call."""

    def __init__(self, app: FrontendApp, stream_id: int, plan: Plan, found: Found, arrival_ns: int) -> None:
        super().__init__(stream_id)
        self._call = RepeatedCall(app, self, plan, found, arrival_ns)

    def begin(self, connection: Connection) -> None:
        self._call.begin(connection)

    def cancel(self) -> None:
        self._call.withdraw()
