"""What an inference over HTTP says in headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engines.errors import InvalidInput
from frontend.httpd.exchange import Exchange
from frontend.inference import InferRequest
from frontend.kserve.body_codec import HEADER_LENGTH
from frontend.kserve.compression import Accepted, read_accepted

MAX_TIMEOUT_MS: Final = 24 * 3600 * 1000
"""Largest ``x-request-timeout-ms``."""

_NEVER_REPEATED: Final = (b"content-encoding", b"x-ringserve-explain", b"transfer-encoding")
"""Headers that change what a body means or which answer it gets, and are rare."""


@dataclass(frozen=True, slots=True)
class Options:
    """What headers ask for that has no part in what the body means.

    Attributes:
        timeout_ns: 0 if there is none.
        accepted: encodings of the answer.
        has_id: the answer repeats the ``X-Request-Id``.
    """

    timeout_ns: int
    accepted: Accepted
    has_id: bool

    def plain(self, size: int) -> bool:
        """Return whether an answer of ``size`` bytes looks as if nothing had been asked for."""
        return not self.has_id and self.accepted.for_size(size) == "identity"


def repeat_options(exchange: Exchange) -> Options | None:
    """Return what headers ask of a request whose body may repeat an earlier one.

    None where they decide more than these options tell, or hold a mistake.
    """
    headers = exchange.headers
    # Of HTTP/1.0 an answer's head tells whether the connection stays; the rendered ones do not.
    if exchange.http10:
        return None
    for name in _NEVER_REPEATED:
        if name in headers:
            return None
    timeout_ms = headers.get(b"x-request-timeout-ms")
    try:
        timeout_ns = 0 if timeout_ms is None else _timeout_ms(timeout_ms) * 1_000_000
    except InvalidInput:  # told the ordinary way
        return None
    return Options(timeout_ns, read_accepted(headers.get(b"accept-encoding")), b"x-request-id" in headers)


def header_length(headers: dict[bytes, bytes]) -> int | None:
    """Return ``Inference-Header-Content-Length``, None if absent.

    Raises:
        InvalidInput: it is no number of bytes.
    """
    value = headers.get(b"inference-header-content-length")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise InvalidInput(f"{HEADER_LENGTH} is '{value[:80].decode('latin-1')}', expected a number of bytes")
    return int(value)


def take_options(request: InferRequest, exchange: Exchange) -> None:
    """Add to a request what the headers ask for.

    Raises:
        InvalidInput: a header's value is none of those it may have.
    """
    headers = exchange.headers
    explain = headers.get(b"x-ringserve-explain")
    if explain is not None:
        request.explain = _explain(explain)
    timeout_ms = headers.get(b"x-request-timeout-ms")
    if timeout_ms is not None:
        request.deadline_ns = exchange.arrival_ns + _timeout_ms(timeout_ms) * 1_000_000


def _explain(value: bytes) -> bool:
    if value in (b"0", b"1"):
        return value == b"1"
    raise InvalidInput(f"x-ringserve-explain is '{value[:80].decode('latin-1')}', expected 1 or 0")


def _timeout_ms(value: bytes) -> int:
    if value.isdigit() and len(value) <= 18 and 0 < (timeout_ms := int(value)) <= MAX_TIMEOUT_MS:
        return timeout_ms
    raise InvalidInput(
        f"x-request-timeout-ms is '{value[:80].decode('latin-1')}', "
        f"expected a whole number of milliseconds from 1 to {MAX_TIMEOUT_MS}"
    )
