"""One ModelStreamInfer stream: many requests in, their answers out in the order the requests came.

A request that fails, or makes no sense, is answered with an error under its id, and the stream goes on. Up to
``MAX_STREAM_IN_FLIGHT`` requests run at once; then no more are read, and the transport holds the client back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import grpc
import grpc.aio

from engines.errors import Internal, ServingError, Unavailable
from frontend.inference import InferRequest, InferResponse
from frontend.kserve.grpc_codec import encode_stream_error, encode_stream_infer, open_envelope, read_envelope
from frontend.serving import Call, Serving
from frontend.settings import EndpointSettings

log = logging.getLogger("frontend.grpc")

MAX_STREAM_IN_FLIGHT: Final = 256
"""Requests of one stream between being read and being answered; several times the largest batch in common use."""


class _Slot:
    """The place of one request in the order of answers."""

    __slots__ = ("_outcome", "call", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.call: Call | None = None
        self._outcome: asyncio.Future[InferResponse | ServingError] = asyncio.get_running_loop().create_future()

    def finish(self, outcome: InferResponse | ServingError) -> None:
        if self._outcome.done():
            if isinstance(outcome, InferResponse):
                outcome.release()
        else:
            self._outcome.set_result(outcome)

    async def answer(self) -> bytes:
        """Wait for the outcome and return it rendered."""
        outcome = await self._outcome
        if isinstance(outcome, ServingError):
            return encode_stream_error(outcome, self.request_id)
        try:
            return encode_stream_infer(outcome)
        except ServingError as error:
            return encode_stream_error(error, self.request_id)
        except Exception:
            log.exception("stream.rendering_failed")
            return encode_stream_error(Internal("internal error"), self.request_id)
        finally:
            outcome.release()

    def withdraw(self) -> None:
        """Nobody waits any more: cancel what runs, release what has come."""
        if self._outcome.done() and not self._outcome.cancelled():
            outcome = self._outcome.result()
            if isinstance(outcome, InferResponse):
                outcome.release()
        elif self.call is not None:
            self.call.cancel()


class InferStream:
    """Serves one stream from its first request to its end."""

    def __init__(
        self,
        serving: Serving,
        limits: EndpointSettings,
        context: Any,
        deadline_ns: int | None,
        draining: asyncio.Event,
    ) -> None:
        self._serving = serving
        self._limits = limits
        self._context = context
        self._deadline_ns = deadline_ns
        self._draining = draining
        self._room = asyncio.Semaphore(MAX_STREAM_IN_FLIGHT)
        self._slots: asyncio.Queue[_Slot | None] = asyncio.Queue()
        self._half_closed = False

    async def run(self) -> None:
        """Answer until the client half-closes or the server drains; a cancelled stream withdraws what waits."""
        reading = asyncio.create_task(self._read_until_drained())
        current: _Slot | None = None
        try:
            while (current := await self._slots.get()) is not None:
                answer = await current.answer()
                current = None
                await self._context.write(answer)
                self._room.release()
        finally:
            reading.cancel()
            if current is not None:
                current.withdraw()
            while not self._slots.empty():
                waiting = self._slots.get_nowait()
                if waiting is not None:
                    waiting.withdraw()
        if not self._half_closed:
            # What the client sent meanwhile was not read: an orderly end would tell it that all was answered.
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, "Server is stopping")

    async def _read_until_drained(self) -> None:
        reading = asyncio.create_task(self._read())
        draining = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait((reading, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            draining.cancel()
            await asyncio.gather(reading, draining, return_exceptions=True)
        self._slots.put_nowait(None)

    async def _read(self) -> None:
        while True:
            await self._room.acquire()
            data = await self._context.read()
            if data is grpc.aio.EOF:
                self._half_closed = True
                return
            # No await between start and put: a request that was started has its place in the order.
            self._slots.put_nowait(self._start(data))

    def _start(self, data: bytes) -> _Slot:
        arrival_ns = time.monotonic_ns()
        slot = _Slot("")
        try:
            envelope = open_envelope(data, self._limits)
            slot.request_id = envelope.request_id
            request: InferRequest = read_envelope(envelope, self._limits)
            request.deadline_ns = self._deadline_ns
            if self._draining.is_set():
                raise Unavailable("Server is stopping: the request was not started")
            slot.call = self._serving.start(request, arrival_ns, slot.finish)
        except ServingError as error:
            slot.finish(error)
        except Exception:
            log.exception("stream.request_failed")
            slot.finish(Internal("internal error"))
        return slot
