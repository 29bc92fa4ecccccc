"""What a gRPC answer has in its header blocks: encoded once where they are always the same."""

from __future__ import annotations

from typing import Final

from frontend.http2.fields import encode_fields
from frontend.http2.frames import Block

ACCEPT_ENCODING: Final = "identity, deflate, gzip"
_OPENING: Final = ((":status", "200"), ("content-type", "application/grpc"), ("grpc-accept-encoding", ACCEPT_ENCODING))

HEAD: Final = Block(encode_fields(_OPENING))
"""Opens every answer that has a message."""
OK_TAIL: Final = Block(encode_fields((("grpc-status", "0"),)))
"""Ends an answer without a failure."""

OK_ALONE: Final = Block(encode_fields((*_OPENING, ("grpc-status", "0"))))
"""The whole answer of a call that succeeds without a message."""

OK: Final = 0
CANCELLED: Final = 1
DEADLINE_EXCEEDED: Final = 4
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14
"""Numbers of the gRPC status list."""

Told = tuple[int, str, int | None]
"""Status, message, and seconds for ``retry-after``."""


def failure_tail(told: Told, *, alone: bool) -> Block:
    """Return the block that tells a failure: after messages, or ``alone`` as the whole answer."""
    status, text, retry_after_s = told
    fields = [*(_OPENING if alone else ()), ("grpc-status", str(status)), ("grpc-message", percent_encoded(text))]
    if retry_after_s is not None:
        fields.append(("retry-after", str(retry_after_s)))
    return Block(encode_fields(fields))


def http_failure(status: int, text: str) -> Block:
    """Return the whole answer to something that is no gRPC call; clients map the status as gRPC lists it."""
    fields = ((":status", str(status)), ("grpc-status", str(INTERNAL)), ("grpc-message", percent_encoded(text)))
    return Block(encode_fields(fields))


def percent_encoded(text: str) -> str:
    """Return a message as gRPC puts it into a header: everything but printable ASCII is escaped, and the percent."""
    return "".join(
        chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}"
        for byte in text.encode("utf-8", "surrogatepass")
    )
