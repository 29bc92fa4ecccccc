"""What the head of a request asks for, worked out once per distinct head (gRPC over HTTP/2, "Requests")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from frontend.grpc_fast import replies
from frontend.grpc_methods import MAX_DEADLINE_S
from frontend.http2.fields import Head, encode_fields
from frontend.http2.frames import Block

CONTENT_TYPE: Final = b"application/grpc"
ENCODINGS: Final = {b"identity": "identity", b"gzip": "gzip", b"deflate": "deflate"}
_UNIT_NS: Final = {
    b"H": 3_600_000_000_000,
    b"M": 60_000_000_000,
    b"S": 1_000_000_000,
    b"m": 1_000_000,
    b"u": 1_000,
    b"n": 1,
}
_TIMEOUT_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call is served.

    Attributes:
        begin: makes the receiver; None if the call is refused.
        timeout_ns: 0 if the caller set none that matters; negative is impossible.
        encoding: of compressed messages.
        refusal: the whole answer to a call that is refused.
    """

    begin: Callable[..., Any] | None = None
    timeout_ns: int = 0
    encoding: str = "identity"
    refusal: Block | None = None


def plan_of(head: Head, methods: Mapping[bytes, Callable[..., Any]], max_header_bytes: int) -> Plan:
    """Return the plan for a well-formed request; every mistake becomes a refusal."""
    fields = head.fields
    if head.method != b"POST":
        return Plan(refusal=Block(encode_fields(((":status", "405"), ("allow", "POST")))))
    content_type = fields.get(b"content-type", b"").lower()
    if not content_type.startswith(CONTENT_TYPE) or content_type[16:17] not in (b"", b"+", b";"):
        text = f"invalid content-type '{_shown(content_type)}', expected application/grpc"
        return Plan(refusal=replies.http_failure(415, text))
    if head.size_bytes > max_header_bytes:
        text = f"metadata of {head.size_bytes} bytes exceeds max_header_bytes = {max_header_bytes}"
        return _refused(replies.RESOURCE_EXHAUSTED, text)
    begin = methods.get(head.path)
    if begin is None:
        return _refused(replies.UNIMPLEMENTED, f"Method not found: '{_shown(head.path)}'")
    encoding = fields.get(b"grpc-encoding", b"identity")
    if encoding not in ENCODINGS:
        text = f"grpc-encoding '{_shown(encoding)}' is not supported, expected {replies.ACCEPT_ENCODING}"
        return _refused(replies.UNIMPLEMENTED, text)
    timeout = fields.get(b"grpc-timeout")
    timeout_ns = 0
    if timeout is not None:
        told_ns = read_timeout(timeout)
        if told_ns is None:
            text = f"malformed grpc-timeout '{_shown(timeout)}', expected 1 to 8 digits and one of H, M, S, m, u, n"
            return _refused(replies.INTERNAL, text)
        if told_ns < MAX_DEADLINE_S * 1e9:
            # A timeout of 0 is one that has passed, not none.
            timeout_ns = max(told_ns, 1)
    return Plan(begin, timeout_ns, ENCODINGS[encoding])


def read_timeout(value: bytes) -> int | None:
    """Return the nanoseconds of a ``grpc-timeout``; None if it is malformed."""
    digits, unit_ns = value[:-1], _UNIT_NS.get(value[-1:])
    if unit_ns is None or not 1 <= len(digits) <= _TIMEOUT_DIGITS or not digits.isdigit():
        return None
    return int(digits) * unit_ns


def _refused(status: int, text: str) -> Plan:
    return Plan(refusal=replies.failure_tail((status, text, None), alone=True))


def _shown(value: bytes) -> str:
    return value[:200].decode("utf-8", "replace")
