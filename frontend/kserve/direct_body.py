"""An inference body whose raw tensors go straight from the socket's chunks to where the worker reads them.

The JSON in front is collected, decoded and checked before any tensor is accepted: what is wrong is told at once, in the
words of the ordinary way. Only a BOOL that is neither 0 nor 1 is found last, after any other mistake. What cannot be
received so (JSON data, BYTES, hooks, client memory, a crowded arena) is given back, and takes the ordinary way from its
first byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from engines.errors import ServingError
from frontend.httpd.exchange import Exchange
from frontend.inference import InferRequest, InferResponse, Promised
from frontend.kserve.body_codec import decode_promised
from frontend.kserve.http_options import take_options
from frontend.kserve.http_paths import Place
from frontend.serving import Receiving, Serving

DIRECT_BYTES: Final = 256 * 1024
"""Bodies from this size on are received so. Frontend's time from first byte to submission, against collecting: x1.2 at
128 KiB, x0.6 at 256 KiB, where a buffer's pages come from the kernel, x0.5 at 3 MiB, x0.3 at 16 MiB."""
MAX_JSON_BYTES: Final = 64 * 1024
"""Longest JSON in front of tensors received so; real ones have a few hundred bytes."""

Finish = Callable[[Exchange, bool, InferResponse | ServingError], None]


class DirectBody:
    """Provides ``BodySink``. Its states: JSON, then tensors, then complete; over at any time.

    Args:
        json_bytes: length of the JSON, at least 1.
        complete: where it is found by ``handle`` once the body is complete.
        finish: answers the exchange.
    """

    limit_name = "max_request_bytes"

    def __init__(
        self,
        serving: Serving,
        exchange: Exchange,
        place: Place,
        json_bytes: int,
        complete: dict[Exchange, DirectBody],
        finish: Finish,
    ) -> None:
        self.max_bytes = serving.limits.max_request_bytes
        self._serving = serving
        self._exchange = exchange
        self._place = place
        self._json_bytes = json_bytes
        self._complete = complete
        self._finish = finish
        self._head = bytearray()
        self._rooms: deque[memoryview] = deque()
        self._call: Receiving | None = None
        self._binary_default = False
        self._outcome: InferResponse | ServingError | None = None
        self._over = False

    # BodySink

    def write(self, chunk: bytes | memoryview) -> bytes | None:
        if self._over:
            return None
        if self._call is not None:
            self._fill(chunk)
            return None
        missing = self._json_bytes - len(self._head)
        self._head += chunk[:missing]
        if len(chunk) < missing:
            return None
        try:
            taken = self._open()
        except ServingError as error:
            self._done(error)
            return None
        rest = chunk[missing:]
        if not taken:
            self._over = True
            return bytes(self._head) + rest
        if not self._over:
            self._fill(rest)
        return None

    def close(self) -> None:
        self._complete[self._exchange] = self

    def abort(self) -> None:
        self._complete.pop(self._exchange, None)
        if not self._over:
            self._end()
            if self._call is not None:
                self._call.cancel()

    # Application

    def handle(self) -> None:
        """Go on, now that the exchange is complete."""
        if self._outcome is not None:
            self._finish(self._exchange, self._binary_default, self._outcome)
        elif self._call is not None:
            self._rooms.clear()
            self._call.complete()

    # Inside

    def _open(self) -> bool:
        """Begin the request that the JSON describes; return whether its tensors are received here."""
        exchange, place = self._exchange, self._place
        tensor_bytes = int(exchange.headers[b"content-length"]) - self._json_bytes
        request = decode_promised(place.name, place.version, self._head, tensor_bytes, self._serving.limits)
        if not _receivable(request):
            return False
        take_options(request, exchange)
        self._binary_default = request.binary_default
        call = self._serving.receive(request, exchange.arrival_ns, self._done)
        if call is None:
            return False
        self._call = call
        if not self._over:
            self._rooms.extend(tensor.room.place for tensor in request.inputs if isinstance(tensor.room, Promised))
            exchange.on_disconnect = self.abort
        return True

    def _fill(self, chunk: bytes | memoryview) -> None:
        """Copy the next bytes; the sizes of the rooms add up to those of the body."""
        rooms = self._rooms
        at = 0
        while at < len(chunk):
            room = rooms[0]
            size = min(len(room), len(chunk) - at)
            # Of a chunk that lies in one tensor nothing is cut: slices of bytes are copies.
            room[:size] = chunk if size == len(chunk) else memoryview(chunk)[at : at + size]
            at += size
            if size == len(room):
                rooms.popleft()
            else:
                rooms[0] = room[size:]

    def _done(self, outcome: InferResponse | ServingError) -> None:
        self._end()
        if self._exchange in self._complete:
            # Its turn to be answered has not come.
            self._outcome = outcome
        else:
            self._finish(self._exchange, self._binary_default, outcome)

    def _end(self) -> None:
        """Write nothing more: the places may be others' from here on."""
        self._over = True
        self._rooms.clear()


def _receivable(request: InferRequest) -> bool:
    """Return whether all elements are raw and all sizes are known; outputs in client memory keep the ordinary way."""
    for tensor in request.inputs:
        if tensor.room is None or not tensor.room.size_bytes or tensor.datatype == "BYTES" or 0 in tensor.shape:
            return False
    return bool(request.inputs) and all(output.region is None for output in request.outputs or ())
