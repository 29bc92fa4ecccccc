"""The one table that turns an outcome into an HTTP status and a gRPC code, and the body of an error.

Both protocols read it, so the same mistake gets the same answer on each. It names no gRPC library: codes are the
numbers and names of the gRPC status list, which are protocol facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from engines.errors import Kind, ServingError

JSON_TYPE: Final = "application/json"
"""Exactly this, without a charset: one client compares the header for equality before it reads the error text."""
MAX_ERROR_BYTES: Final = 1500
"""Longest error text. A gRPC status travels percent-encoded (3 bytes for one) in a header that clients cap at 8 KiB,
and the names and shapes that a client sent come back in texts: their size is the client's choice."""
RETRY_AFTER_S: Final = 1
"""Back-off told to a client whose request was refused for lack of room: queues drain in well under a second."""


@dataclass(frozen=True, slots=True)
class Status:
    """How one kind of outcome is told.

    Attributes:
        http: status code.
        grpc: status number of the gRPC status list.
        grpc_name: its name.
        retry_after_s: ``Retry-After`` header and ``retry-after`` trailing metadata; None for no such advice.
    """

    http: int
    grpc: int
    grpc_name: str
    retry_after_s: int | None = None


STATUS: Final[dict[Kind, Status]] = {
    Kind.OK: Status(200, 0, "OK"),
    Kind.INVALID_INPUT: Status(400, 3, "INVALID_ARGUMENT"),
    Kind.NOT_FOUND: Status(404, 5, "NOT_FOUND"),
    Kind.NOT_READY: Status(503, 14, "UNAVAILABLE"),
    Kind.UNAVAILABLE: Status(503, 14, "UNAVAILABLE"),
    Kind.QUEUE_FULL: Status(429, 8, "RESOURCE_EXHAUSTED", RETRY_AFTER_S),
    Kind.ARENA_FULL: Status(429, 8, "RESOURCE_EXHAUSTED", RETRY_AFTER_S),
    Kind.TOO_LARGE: Status(413, 8, "RESOURCE_EXHAUSTED"),
    Kind.DEADLINE_EXCEEDED: Status(504, 4, "DEADLINE_EXCEEDED"),
    Kind.CANCELLED: Status(499, 1, "CANCELLED"),
    Kind.UNSUPPORTED: Status(501, 12, "UNIMPLEMENTED"),
    # 400, not 409: retrying clients of the other API family resend on 409, and this conflict is permanent.
    Kind.ALREADY_EXISTS: Status(400, 6, "ALREADY_EXISTS"),
    Kind.INTERNAL: Status(500, 13, "INTERNAL"),
    Kind.HOOK_FAILED: Status(500, 13, "INTERNAL"),
    Kind.ENGINE_FAILED: Status(500, 13, "INTERNAL"),
}


def status_of(error: ServingError | Kind) -> Status:
    """Return the status of a failure."""
    return STATUS[error if isinstance(error, Kind) else error.kind]


def error_text(error: ServingError | str) -> str:
    """Return the text a client may see: never empty, at most ``MAX_ERROR_BYTES`` of valid UTF-8."""
    text = str(error) or ("unknown error" if isinstance(error, str) else type(error).__name__)
    raw = text.encode("utf-8", "replace")
    if len(raw) > MAX_ERROR_BYTES:
        raw = raw[: MAX_ERROR_BYTES - 3] + b"..."
    return raw.decode("utf-8", "ignore")


def error_body(error: ServingError | str) -> bytes:
    """Return ``{"error": "<text>"}``: a string, as every KServe client expects. Content-Type is ``JSON_TYPE``."""
    return msgspec.json.encode({"error": error_text(error)})
