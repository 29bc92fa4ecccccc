"""What an inference over HTTP says in headers."""

from __future__ import annotations

from typing import Final

from engines.errors import InvalidInput
from frontend.httpd.exchange import Exchange
from frontend.inference import InferRequest
from frontend.kserve.body_codec import HEADER_LENGTH

MAX_TIMEOUT_MS: Final = 24 * 3600 * 1000
"""Largest ``x-request-timeout-ms``."""


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
