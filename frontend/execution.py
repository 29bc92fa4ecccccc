"""One request's executable tensors through the worker: placed, submitted, awaited, split and joined if too large.

A request with more rows than the largest compiled size becomes pieces of at most that size, which coalesce like any
other requests; their outputs are joined along each output's batch axis (rule 17). A few pieces are in flight at a time,
so that one huge request neither fills the model's queue nor the arena. One failed piece fails the request and withdraws
the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from engines.errors import ArenaFull, Kind, QueueFull, ServingError, error_of
from engines.tensor import NDArray
from frontend.inference import ExecutableInput
from worker.channel.client import Placement, Reply, WorkerChannel
from worker.channel.messages import ModelEntry
from worker.channel.records import FLAG_BACKGROUND

OnDone = Callable[["Execution", ServingError | None], None]

MAX_PIECES_IN_FLIGHT: Final = 16
"""Pieces of one request that wait or run at once: enough to keep the device busy, far below any queue depth."""


class Execution:
    """Rows of one model on their way through the worker.

    ``on_done`` is called exactly once, from the event loop, unless ``abandon`` came first. After success ``outputs``
    holds arrays that may borrow shared memory until ``release``.

    Attributes:
        reply: of the piece that waited longest.
        pieces: into which the request was cut.
    """

    __slots__ = (
        "_arrival_ns", "_channel", "_deadline_ns", "_entry", "_flags", "_inputs", "_on_done", "_over", "_parts",
        "_pending", "_split", "_variant", "_waiting", "outputs", "pieces", "placement", "reply",
    )  # fmt: skip

    def __init__(self, channel: WorkerChannel, entry: ModelEntry, on_done: OnDone, *, background: bool = False) -> None:
        self._channel = channel
        self._flags = FLAG_BACKGROUND if background else 0
        self._entry = entry
        self._on_done = on_done
        self._inputs: Sequence[NDArray] = ()
        self._variant = 0
        self._deadline_ns = 0
        self._arrival_ns = 0
        self._split = False
        self._waiting: deque[tuple[int, int]] = deque()
        self._pending: dict[int, tuple[int, Placement]] = {}
        self._parts: dict[int, list[NDArray]] = {}
        self._over = False
        self.placement: Placement | None = None
        self.outputs: list[NDArray] = []
        self.reply: Reply | None = None
        self.pieces = 1

    def start(
        self, variant: int, rows: int, inputs: Sequence[ExecutableInput], deadline_ns: int, arrival_ns: int
    ) -> None:
        """Place and submit executable inputs, in signature order, in full shape with ``rows`` along the batch axis.

        Raises:
            ServingError: nothing is in flight (no room, no worker); ``on_done`` is not called.
        """
        self._variant = variant
        self._deadline_ns = deadline_ns
        self._arrival_ns = arrival_ns
        cut = pieces(self._entry, rows)
        if len(cut) == 1:
            self._submit_whole(rows, inputs)
            return
        self._split = True
        self.pieces = len(cut)
        # Pieces are placed over time, and a request's rows should all be of one moment.
        self._inputs = [given if isinstance(given, np.ndarray) else given.as_array() for given in inputs]
        self._waiting.extend(cut)
        try:
            self._submit_pieces()
        except ServingError:
            self.abandon()
            raise

    def reserve(self, variant: int, rows: int, deadline_ns: int, arrival_ns: int) -> list[NDArray]:
        """Place without submitting, what ``pieces`` does not cut; return the room of each input, C-contiguous.

        ``submit`` follows when they are filled, or ``abandon``.

        Raises:
            ServingError: as ``start``.
        """
        self._variant = variant
        self._deadline_ns = deadline_ns
        self._arrival_ns = arrival_ns
        self.placement = self._channel.place(self._entry, variant, rows)
        return self.placement.inputs

    @property
    def stranded(self) -> bool:
        """Whether the worker that a reserved execution was placed for is gone."""
        return self.placement is None or self.placement.attachment.lost

    def submit(self) -> None:
        """Hand over what was reserved, now that it is filled.

        Raises:
            ServingError: as ``start``.
        """
        placement, self.placement = self.placement, None
        assert placement is not None, "nothing was reserved"
        try:
            self._submit(placement, 0)
        except BaseException:
            placement.release()
            raise

    def abandon(self) -> None:
        """The caller is gone or has been answered: withdraw what waits; blocks come back with the replies."""
        self._over = True
        self._waiting.clear()
        for request_id in self._pending:
            self._channel.abandon(request_id)
        self._pending.clear()
        self.release()

    def release(self) -> None:
        """Give shared memory back; ``outputs`` must not be read any more."""
        self.outputs = []
        self._parts = {}
        self._inputs = ()
        placement, self.placement = self.placement, None
        if placement is not None:
            placement.release()

    def _submit_whole(self, rows: int, inputs: Sequence[ExecutableInput]) -> None:
        placement = self._channel.place(self._entry, self._variant, rows)
        try:
            for room, source in zip(placement.inputs, inputs, strict=True):
                if isinstance(source, np.ndarray):
                    room[...] = source
                else:
                    source.fill(room)
            self._submit(placement, 0)
        except BaseException:
            placement.release()
            raise

    def _submit_pieces(self) -> None:
        signature = self._entry.signature
        assert signature is not None
        while self._waiting and len(self._pending) < MAX_PIECES_IN_FLIGHT:
            start, count = self._waiting[0]
            try:
                placement = self._channel.place(self._entry, self._variant, count)
            except (ArenaFull, QueueFull):
                if not self._pending:
                    raise
                # Room comes back with the replies of the pieces under way; each of them submits the next.
                return
            self._waiting.popleft()
            try:
                for spec, room, source in zip(signature.inputs, placement.inputs, self._inputs, strict=True):
                    assert spec.batch_axis is not None, "only a model with a batch axis on every tensor is split"
                    room[...] = source[(slice(None),) * spec.batch_axis + (slice(start, start + count),)]
                self._submit(placement, start)
            except BaseException:
                placement.release()
                raise

    def _submit(self, placement: Placement, start: int) -> None:
        request_id = self._channel.submit(placement, self._deadline_ns, self._arrival_ns, self._on_reply, self._flags)
        self._pending[request_id] = (start, placement)

    def _on_reply(self, placement: Placement, reply: Reply) -> None:
        if self._over:
            placement.release()
            return
        start, _ = self._pending.pop(placement.request_id)
        if reply.kind is Kind.QUEUE_FULL and self._pending:
            # Other pieces of this very request fill the queue: this one goes again when one of them is answered.
            self._waiting.appendleft((start, placement.rows))
            placement.release()
            return
        self.placement = placement
        try:
            if reply.kind is not Kind.OK:
                raise error_of(reply.kind, reply.text)
            if self.reply is None or reply.queue_ns > self.reply.queue_ns:
                self.reply = reply
            if not self._split:
                self.outputs = placement.outputs()
            else:
                self._parts[start] = [array.copy() for array in placement.outputs()]
                self.placement = None
                placement.release()
                self._submit_pieces()
                if self._pending:
                    return
                self._join()
        except ServingError as error:
            self.abandon()
            self._on_done(self, error)
            return
        self._over = True
        self._on_done(self, None)

    def _join(self) -> None:
        signature = self._entry.signature
        assert signature is not None
        parts = [self._parts[start] for start in sorted(self._parts)]
        self._parts = {}
        for index, spec in enumerate(signature.outputs):
            assert spec.batch_axis is not None
            self.outputs.append(np.concatenate([part[index] for part in parts], axis=spec.batch_axis))


def pieces(entry: ModelEntry, rows: int) -> list[tuple[int, int]]:
    """Return (start, count) of the pieces a request is cut into; one piece unless it exceeds every compiled size."""
    signature = entry.signature
    assert signature is not None
    largest = signature.max_rows
    if rows <= largest or not signature.coalesces:
        return [(0, rows)]
    return [(start, min(largest, rows - start)) for start in range(0, rows, largest)]
