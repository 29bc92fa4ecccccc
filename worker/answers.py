"""Replies: every live request gets exactly one, and what one round has to say goes out in bulk."""

from __future__ import annotations

from collections.abc import Callable

from engines.errors import Kind
from worker.arrival import Arrival, Attached
from worker.channel.channel import Channel
from worker.dispatch import Batch
from worker.intake import Refusal

_OK = int(Kind.OK)


class Answers:
    """Writes reply records; ``flush`` hands them over.

    Args:
        release: told of a channel that is gone once nothing of it is live any more.
    """

    def __init__(self, release: Callable[[Attached], None]) -> None:
        self._release = release
        self._touched: set[Channel] = set()

    def succeed(self, batch: Batch, compute_ns: int, now_ns: int) -> int:
        """Answer all requests of a batch; return the sum of their queue waits in ns.

        ``now_ns`` is when the outputs were complete.
        """
        dispatch = batch.dispatch
        order = batch.order
        started_ns = batch.started_ns
        head = _OK | dispatch.reason << 8 | (dispatch.batch_size if dispatch.batch_size > 0 else 0) << 32
        shared = (compute_ns, dispatch.rows | len(order) << 32, 0, now_ns, dispatch.seq)
        total_queue_ns = 0
        attached = order[0].attached
        words: list[int] = []
        for request in order:
            if request.attached is not attached:
                self._reply(attached, words)
                words = []
                attached = request.attached
            # Stamped by another process: its clock is ours, but it may be read after ours was.
            queue_ns = started_ns - request.arrival_ns
            if queue_ns < 0:
                queue_ns = 0
            total_queue_ns += queue_ns
            attached.live.pop(request.request_id, None)
            words += (request.request_id, head, queue_ns)
            words += shared
        self._reply(attached, words)
        return total_queue_ns

    def fail(self, request: Arrival, kind: Kind, text: str) -> None:
        """Answer one request with an error."""
        attached = request.attached
        attached.live.pop(request.request_id, None)
        if attached.gone:
            self._let_go(attached)
            return
        attached.channel.fail(request.request_id, kind, text)
        self._touched.add(attached.channel)

    def refuse(self, attached: Attached, refusal: Refusal) -> None:
        """Answer a record that did not become a request."""
        attached.channel.fail(refusal.request_id, refusal.kind, refusal.text)
        self._touched.add(attached.channel)

    def flush(self) -> None:
        """Hand over what was written since the last time, with one doorbell per channel at most."""
        if self._touched:
            for channel in self._touched:
                channel.flush()
            self._touched.clear()

    def _reply(self, attached: Attached, words: list[int]) -> None:
        if attached.gone:
            self._let_go(attached)
            return
        attached.channel.reply_many(words)
        self._touched.add(attached.channel)

    def _let_go(self, attached: Attached) -> None:
        if not attached.live:
            self._touched.discard(attached.channel)
            self._release(attached)
