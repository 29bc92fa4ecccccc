"""The life of a request whose way is known: placed, submitted, and answered exactly once; whatever protocol it came by.

The same promises as ``InferCall``: exactly one answer, memory given back once, withdrawn when the client goes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.bundle.variants import match_variant
from engines.errors import DeadlineExceeded, Internal, Kind, ServingError, error_of
from engines.tensor import element_count
from frontend.infer_call import expired_text
from frontend.inference import InferRequest
from worker.channel.client import Placement, Reply
from worker.channel.messages import ModelEntry

if TYPE_CHECKING:
    from frontend.app import FrontendApp

log = logging.getLogger("frontend.app")

Elements = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Rows:
    """What is submitted, known before a request's elements are.

    Attributes:
        inputs: per executable input its first byte and the one after its last, counted from the first element.
        timeout_us: of the request itself; 0 if it carries none.
    """

    entry: ModelEntry
    variant: int
    rows: int
    inputs: tuple[tuple[int, int], ...]
    timeout_us: int


def rows_of(entry: ModelEntry, request: InferRequest, starts: Sequence[int]) -> Rows | None:
    """Return how a request's tensors are placed by their bytes alone; None if more must be looked at.

    Args:
        starts: per input, in the request's order, where its elements begin.
    """
    signature = entry.signature
    if signature is None or entry.model_py or any(tensor.region is not None for tensor in request.inputs):
        return None
    given = {tensor.name: (tensor.shape, start) for tensor, start in zip(request.inputs, starts, strict=True)}
    inputs: list[tuple[int, int]] = []
    rows = 1
    for spec in signature.inputs:
        # A BOOL byte must be looked at, and a BYTES tensor taken apart.
        if spec.name not in given or spec.dtype in ("bool", "bytes"):
            return None
        shape, start = given[spec.name]
        count = element_count(shape)
        if not count:
            return None
        inputs.append((start, start + count * spec.element.itemsize))
        if spec.batch_axis is not None:
            rows = shape[spec.batch_axis]
    variant = match_variant(signature, [given[spec.name][0] for spec in signature.inputs])
    if variant < 0 or any(signature.variants[variant].dynamic_outputs):
        return None
    if signature.coalesces and rows > signature.max_rows:
        return None
    return Rows(entry, variant, rows, tuple(inputs), request.timeout_us)


class PlacedCall:
    """One such request; how it is answered is the subclass's. It may be a stream as well, hence no slots."""

    arrival_ns = 0
    deadline_ns = 0
    _request_id = 0
    _over = False

    def start(self, app: FrontendApp, rows: Rows, data: Elements, first: int, arrival_ns: int, timeout_ns: int) -> None:
        """Place and submit; any failure is the answer.

        Args:
            first: where the elements begin in ``data``, which is read now.
            arrival_ns: of the request's head, from which all its time counts; 0 if it arrives just now.
            timeout_ns: of the call, 0 if it has none.
        """
        self._app = app
        self._entry = rows.entry
        # One look at the clock serves both.
        now_ns = app.clock_ns()
        self.arrival_ns = arrival_ns = arrival_ns or now_ns
        self.deadline_ns = deadline_ns = app.repeat_deadline_ns(rows.timeout_us, arrival_ns)
        if timeout_ns and arrival_ns + timeout_ns < deadline_ns:
            self.deadline_ns = deadline_ns = arrival_ns + timeout_ns
        app.traffic.in_flight += 1
        try:
            if deadline_ns <= now_ns:
                raise DeadlineExceeded(expired_text(self))
            placement = app.channel.place(rows.entry, rows.variant, rows.rows)
            try:
                memory = placement.memory
                for number, (start, stop) in enumerate(rows.inputs):
                    at = placement.place_of(number)
                    memory[at : at + stop - start] = data[first + start : first + stop]
                self._request_id = app.channel.submit(placement, deadline_ns, arrival_ns, self._on_reply)
            except BaseException:
                placement.release()
                raise
        except ServingError as error:
            self._fail(error)
            return
        except Exception:
            log.exception("request.failed model=%s", rows.entry.name)
            self._fail(Internal("internal error"))
            return
        app.deadlines.add(self)

    def answered(self, placement: Placement) -> None:
        """Give the answer, whose outputs the placement has; release it."""
        raise NotImplementedError

    def refused(self, error: ServingError) -> None:
        """Give the failure as the answer."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """Nobody waits for the answer any more. Idempotent."""
        if not self._over:
            self._app.traffic.count(self._entry.name, Kind.CANCELLED, 0)
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
        app = self._app
        app.traffic.count(self._entry.name, Kind.OK, app.clock_ns() - self.arrival_ns)
        self._close()
        self.answered(placement)

    def _fail(self, error: ServingError) -> None:
        if self._over:
            return
        app = self._app
        app.traffic.count(self._entry.name, error.kind, app.clock_ns() - self.arrival_ns)
        self._close()
        self.refused(error)

    def _close(self) -> None:
        app = self._app
        self._over = True
        app.traffic.in_flight -= 1
        app.deadlines.discard(self)
        if self._request_id:
            app.channel.abandon(self._request_id)
            self._request_id = 0
