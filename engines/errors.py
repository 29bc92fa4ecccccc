"""What can go wrong, as classes a caller can catch and numbers that cross a process.

A ``Kind`` says what the caller may do next; it knows no HTTP status and no gRPC code. The two tables
that turn it into one live with their protocols. ``Kind`` values travel in reply records: append, never renumber.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import ClassVar


@unique
class Kind(IntEnum):
    """Outcome of a request, as stored in a reply record."""

    OK = 0
    INVALID_INPUT = 1
    """The request contradicts the model's signature or the protocol; sending it again cannot help."""
    NOT_FOUND = 2
    """No such model, version or object."""
    NOT_READY = 3
    """The model exists but cannot serve now: loading, failed or unloaded. Nothing ran."""
    UNAVAILABLE = 4
    """The worker is gone or the node is draining; no answer will come."""
    QUEUE_FULL = 5
    """The model's queue is at its limit. Nothing ran; retry after a back-off."""
    ARENA_FULL = 6
    """The frontend has no shared memory left for this request. Nothing ran; retry after a back-off."""
    TOO_LARGE = 7
    """The request exceeds a named size limit."""
    DEADLINE_EXCEEDED = 8
    """The deadline passed before an answer was ready."""
    CANCELLED = 9
    """The caller went away or asked to stop."""
    UNSUPPORTED = 10
    """A known part of a protocol that this server does not offer."""
    ALREADY_EXISTS = 11
    INTERNAL = 12
    """A promise of our own code was broken."""
    HOOK_FAILED = 13
    """User code in model.py raised."""
    ENGINE_FAILED = 14
    """The model itself failed while running."""


class ServingError(Exception):
    """Base of every foreseen failure; ``str(error)`` may be shown to the caller."""

    kind: ClassVar[Kind] = Kind.INTERNAL
    retryable: ClassVar[bool] = False


class InvalidInput(ServingError):
    """The request is wrong; the message names the tensor, what was expected and what came.

    Hooks raise it to answer 400 / INVALID_ARGUMENT.
    """

    kind = Kind.INVALID_INPUT


class NotFound(ServingError):
    """No such model, version or object."""

    kind = Kind.NOT_FOUND


class NotReady(ServingError):
    """The model is known but cannot serve now; nothing ran, so the caller may retry."""

    kind = Kind.NOT_READY
    retryable = True


class Unavailable(ServingError):
    """The worker that would answer is gone, or the node is draining."""

    kind = Kind.UNAVAILABLE
    retryable = True


class QueueFull(ServingError):
    """The model's queue is at ``max_queue_depth``. Nothing ran; retry after a back-off."""

    kind = Kind.QUEUE_FULL
    retryable = True


class ArenaFull(ServingError):
    """The frontend's shared memory has no room for the request now. Nothing ran; retry after a back-off."""

    kind = Kind.ARENA_FULL
    retryable = True


class TooLarge(ServingError):
    """The request exceeds a size limit; the message names the limit and its setting."""

    kind = Kind.TOO_LARGE


class DeadlineExceeded(ServingError):
    """The deadline passed before an answer was ready."""

    kind = Kind.DEADLINE_EXCEEDED


class Cancelled(ServingError):
    """The caller went away; nobody waits for this answer."""

    kind = Kind.CANCELLED


class Unsupported(ServingError):
    """A known part of a protocol that this server does not offer."""

    kind = Kind.UNSUPPORTED


class AlreadyExists(ServingError):
    """An object of that name exists."""

    kind = Kind.ALREADY_EXISTS


class Internal(ServingError):
    """A promise of our own code was broken; details are in the log only."""

    kind = Kind.INTERNAL


class HookFailed(ServingError):
    """User code in model.py raised; the message names model and hook, the traceback is in the log only."""

    kind = Kind.HOOK_FAILED


class EngineFailed(ServingError):
    """The model failed while running, or returned something its signature does not allow."""

    kind = Kind.ENGINE_FAILED


_CLASSES: dict[Kind, type[ServingError]] = {
    error.kind: error
    for error in (
        InvalidInput, NotFound, NotReady, Unavailable, QueueFull, ArenaFull, TooLarge, DeadlineExceeded,
        Cancelled, Unsupported, AlreadyExists, Internal, HookFailed, EngineFailed,
    )
}  # fmt: skip


def error_of(kind: Kind, message: str) -> ServingError:
    """Return the exception for a kind that arrived as a number; ``Kind.OK`` has none."""
    assert kind is not Kind.OK, "OK is not an error"
    return _CLASSES[kind](message)
