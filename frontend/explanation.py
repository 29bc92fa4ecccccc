"""Why a request's batch had the size it had, for clients that ask: parameters of the answer (opt-in)."""

from __future__ import annotations

from typing import Final

from frontend.inference import Parameter
from worker.channel.placement import Reply
from worker.channel.records import Reason

REASONS: Final[dict[Reason, str]] = {
    Reason.NONE: "nothing is known",
    Reason.FILLED: "the rows that waited filled the compiled size",
    Reason.QUEUE_DRAINED: "no more rows waited when the device was free; the rest is padding",
    Reason.CAPPED: "max_batch_size stopped it",
    Reason.NOT_COALESCING: "the model's requests run one by one: not every tensor has a batch axis",
    Reason.OTHER_SHAPE: "the next request in the queue had another shape",
    Reason.OVERSIZE: "the request alone was larger than the size that the queue called for",
    Reason.RETRIED: "it ran once more and alone, after the batch it was in had failed",
}


def explanation(reply: Reply, pieces: int) -> dict[str, Parameter]:
    """Return the answer's parameters about a batch; times in whole microseconds.

    Args:
        reply: of the request, or of that of its ``pieces`` that waited longest.
    """
    told: dict[str, Parameter] = {
        "batch_size": reply.batch_size,
        "batch_rows": reply.batch_rows,
        "batch_requests": reply.batch_requests,
        "batch_reason": reply.reason.name.lower(),
        "batch_reason_text": REASONS[reply.reason],
        "queue_us": reply.queue_ns // 1000,
        "compute_us": reply.compute_ns // 1000,
        "dispatch": reply.dispatch_seq,
    }
    if pieces > 1:
        told["pieces"] = pieces
    return told


def explanation_headers(parameters: dict[str, Parameter]) -> list[tuple[bytes, bytes]]:
    """Return the same for HTTP headers: ``x-ringserve-batch-size``, ``x-ringserve-batch-queue-us`` and so on."""
    return [
        (b"x-ringserve-batch-" + key.removeprefix("batch_").replace("_", "-").encode(), str(value).encode())
        for key, value in parameters.items()
    ]
