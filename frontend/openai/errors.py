"""The one table that turns a failure of ours into OpenAI's error object, and the bytes of that object.

Clients read ``error.message``, ``type``, ``param`` and ``code``; all four keys are always there. The SDK sends again
after 408, 409, 429 and every status from 500 on, unless ``x-should-retry`` says otherwise: what cannot get better
says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from engines.errors import Kind, ServingError
from frontend.openai.auth import Forbidden, Unauthorized

MAX_MESSAGE_BYTES: Final = 4096
RETRY_AFTER_S: Final = 1
INVALID: Final = "invalid_request_error"
_PERMANENT: Final = frozenset({409, 501})
"""Statuses of permanent conditions that the SDK would nevertheless send again."""


@dataclass(frozen=True, slots=True)
class Status:
    """How one kind of failure is told."""

    http: int
    type: str
    code: str | None
    retry_after_s: int | None = None


STATUS: Final[dict[Kind, Status]] = {
    Kind.OK: Status(200, "", None),
    Kind.INVALID_INPUT: Status(400, INVALID, None),
    Kind.NOT_FOUND: Status(404, INVALID, "not_found"),
    Kind.NOT_READY: Status(503, "server_error", "model_not_ready", RETRY_AFTER_S),
    Kind.UNAVAILABLE: Status(503, "server_error", "unavailable", RETRY_AFTER_S),
    Kind.QUEUE_FULL: Status(429, "rate_limit_error", "queue_full", RETRY_AFTER_S),
    Kind.ARENA_FULL: Status(429, "rate_limit_error", "queue_full", RETRY_AFTER_S),
    Kind.TOO_LARGE: Status(413, INVALID, "request_too_large"),
    Kind.DEADLINE_EXCEEDED: Status(504, "server_error", "timeout"),
    Kind.CANCELLED: Status(499, INVALID, "cancelled"),
    Kind.UNSUPPORTED: Status(501, INVALID, "unsupported_capability"),
    Kind.ALREADY_EXISTS: Status(409, INVALID, "already_exists"),
    Kind.INTERNAL: Status(500, "server_error", "internal_error"),
    Kind.HOOK_FAILED: Status(500, "server_error", "internal_error"),
    Kind.ENGINE_FAILED: Status(500, "server_error", "internal_error"),
}
_BY_CLASS: Final[dict[type[ServingError], Status]] = {
    Unauthorized: Status(401, "authentication_error", "invalid_api_key"),
    Forbidden: Status(403, "permission_error", "insufficient_permissions"),
}
TYPES: Final[dict[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""``error.type`` by status; other 4xx are ``invalid_request_error``, 5xx ``server_error``."""


class ApiError(ServingError):
    """A failure with its own status, code and parameter.

    Attributes:
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        error_type: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.type = error_type or type_of(status)
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Rendered:
    """An error as it goes out."""

    status: int
    code: str | None
    body: bytes
    headers: tuple[tuple[str, str], ...]


def type_of(status: int) -> str:
    """Return OpenAI's ``type`` for a status."""
    return TYPES.get(status, "server_error" if status >= 500 else INVALID)


def render(error: ServingError) -> Rendered:
    """Return what a client gets for a failure."""
    if isinstance(error, ApiError):
        body = error_body(str(error), error.type, error.param, error.code)
        return Rendered(error.status, error.code, body, with_retry_advice(error.status, error.headers))
    status = _BY_CLASS.get(type(error)) or STATUS[error.kind]
    headers: tuple[tuple[str, str], ...] = ()
    if status.retry_after_s is not None:
        headers = (("Retry-After", str(status.retry_after_s)),)
    if status.http == 401:
        headers = (("WWW-Authenticate", "Bearer"),)
    body = error_body(str(error), status.type, None, status.code)
    return Rendered(status.http, status.code, body, with_retry_advice(status.http, headers))


def with_retry_advice(status: int, headers: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the headers, telling SDKs not to repeat what cannot get better."""
    if status in _PERMANENT and not any(name.lower() == "x-should-retry" for name, _ in headers):
        return (*headers, ("x-should-retry", "false"))
    return headers


def error_body(message: str, error_type: str, param: str | None, code: str | None) -> bytes:
    """Return the error object as JSON; a message over ``MAX_MESSAGE_BYTES`` is cut."""
    raw = (message or "unknown error").encode("utf-8", "replace")
    if len(raw) > MAX_MESSAGE_BYTES:
        raw = raw[: MAX_MESSAGE_BYTES - 3] + b"..."
    text = raw.decode("utf-8", "ignore")
    return msgspec.json.encode({"error": {"message": text, "type": error_type, "param": param, "code": code}})
