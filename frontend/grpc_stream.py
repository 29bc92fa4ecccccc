"""One ModelStreamInfer stream: many requests in, their answers out in the order the requests came. Moves no bytes.

A request that fails, or makes no sense, is answered with an error under its id, and the stream goes on. Up to
``MAX_STREAM_IN_FLIGHT`` requests run at once; then no more are read, and the transport holds the client back.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from engines.errors import Internal, ServingError, Unavailable
from frontend.inference import InferResponse
from frontend.kserve.grpc_codec import encode_stream_error, open_envelope, read_envelope
from frontend.kserve.grpc_codec import stream_infer_parts as render
from frontend.kserve.raw_data import Buffer
from frontend.serving import Call, Serving
from frontend.settings import EndpointSettings

log = logging.getLogger("frontend.grpc")

MAX_STREAM_IN_FLIGHT: Final = 256
"""Requests of one stream between being read and being answered; several times the largest batch in common use."""
STOPPING_TEXT: Final = "Server is stopping"

Answer = tuple[list[Buffer], Callable[[], None] | None]
"""Parts of one message, and who to call when they are needed no more; None if they borrow nothing."""


class _Slot:
    """The place of one request in the order of answers."""

    __slots__ = ("_stream", "call", "outcome", "request_id")

    def __init__(self, stream: InferStream) -> None:
        self._stream = stream
        self.request_id = ""
        self.call: Call | None = None
        self.outcome: InferResponse | ServingError | None = None

    def finish(self, outcome: InferResponse | ServingError) -> None:
        self.outcome = outcome
        self._stream.finished(self)

    def answer(self) -> Answer:
        """Return the outcome rendered."""
        outcome = self.outcome
        assert outcome is not None, "only finished requests are answered"
        if isinstance(outcome, ServingError):
            return [encode_stream_error(outcome, self.request_id)], None
        try:
            return render(outcome), outcome.release
        except ServingError as error:
            failure = error
        except Exception:
            log.exception("stream.rendering_failed")
            failure = Internal("internal error")
        outcome.release()
        return [encode_stream_error(failure, self.request_id)], None

    def withdraw(self) -> None:
        """Nobody waits any more: cancel what runs, release what has come."""
        if isinstance(self.outcome, InferResponse):
            self.outcome.release()
        elif self.outcome is None and self.call is not None:
            self.call.cancel()


class InferStream:
    """The requests of one stream that were read and not answered yet.

    ``wake`` is called when ``next_answer`` may have something to give, also from within ``accept``.
    """

    def __init__(
        self, serving: Serving, limits: EndpointSettings, deadline_ns: int | None, wake: Callable[[], None]
    ) -> None:
        self._serving = serving
        self._limits = limits
        self._deadline_ns = deadline_ns
        self._wake = wake
        self._slots: deque[_Slot] = deque()
        self._draining = False

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def full(self) -> bool:
        """Whether ``accept`` must wait for answers to be taken."""
        return len(self._slots) >= MAX_STREAM_IN_FLIGHT

    def drain(self) -> None:
        """Start no further request: what is accepted from now on is told that the server stops."""
        self._draining = True

    def accept(self, data: Buffer) -> None:
        """Start the request in a message; whatever is wrong with it becomes its answer."""
        arrival_ns = time.monotonic_ns()
        slot = _Slot(self)
        self._slots.append(slot)
        try:
            envelope = open_envelope(data, self._limits)
            slot.request_id = envelope.request_id
            request = read_envelope(envelope, self._limits)
            request.deadline_ns = self._deadline_ns
            if self._draining:
                raise Unavailable(f"{STOPPING_TEXT}: the request was not started")
            slot.call = self._serving.start(request, arrival_ns, slot.finish)
        except ServingError as error:
            slot.finish(error)
        except Exception:
            log.exception("stream.request_failed")
            slot.finish(Internal("internal error"))

    def finished(self, slot: _Slot) -> None:
        """One of the slots has its outcome."""
        if not self._slots or self._slots[0] is slot:
            self._wake()

    def next_answer(self) -> Answer | None:
        """Take the next answer in order, None if it is not there yet; the taker calls its release."""
        if not self._slots or self._slots[0].outcome is None:
            return None
        return self._slots.popleft().answer()

    def withdraw(self) -> None:
        """End it: cancel what runs and release what was not taken. Idempotent."""
        slots, self._slots = self._slots, deque()
        for slot in slots:
            slot.withdraw()
