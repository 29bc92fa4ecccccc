"""One call of the management API, read: path, query and body, each refused with a fixed message that names the part."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from frontend.httpd.exchange import Exchange
from frontend.openai.errors import ApiError
from frontend.openai.principal import Principal
from frontend.platform.documents import Document
from frontend.platform.versions import Versions

MAX_BODY_BYTES: Final = 64 * 1024
LIMIT_NAME: Final = "the management API's body limit"
MAX_NAME_CHARS: Final = 256
MAX_QUERY_FIELDS: Final = 32
_NUMBER: Final = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a known caller to a known endpoint.

    Attributes:
        path: values of the placeholders of the endpoint's path, decoded.
        query: fields of the query, each known to the endpoint and given once.
        body: decoded JSON object; empty for endpoints that take none.
        versions: of what is changed that the caller wants to replace; None for endpoints that have none.
    """

    principal: Principal
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any]
    versions: Versions = None

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """Return a whole number of the query. Raises: ApiError."""
        text = self.query.get(name)
        if text is None:
            return default
        if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
            raise ApiError(400, f"expected a whole number from {least} to {most}", param=name)
        return int(text)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of the choices, the first by default. Raises: ApiError."""
        text = self.query.get(name, choices[0])
        if text not in choices:
            raise ApiError(400, f"expected one of {', '.join(choices)}", param=name)
        return text

    def name(self, name: str) -> str | None:
        """Return a name of the query, None if it is not given. Raises: ApiError."""
        text = self.query.get(name)
        if text is not None and not (1 <= len(text) <= MAX_NAME_CHARS and text.isprintable()):
            raise ApiError(400, f"expected 1 to {MAX_NAME_CHARS} printable characters", param=name)
        return text


Handler = Callable[[Call], Awaitable[Document]]


@dataclass(frozen=True, slots=True)
class QueryField:
    """A field of a query, for the document; ``schema`` is JSON Schema."""

    name: str
    about: str
    schema: Mapping[str, Any]


def _anybody(principal: Principal) -> None:
    """What is asked for decides."""


@dataclass(frozen=True, slots=True)
class Who:
    """Roles that may call an endpoint, in words, and what refuses others before anything of a request is looked at.

    Where that depends on what is asked for, the handler refuses.
    """

    roles: str
    admit: Callable[[Principal], None] = _anybody


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path: how it is found, answered and described.

    Attributes:
        path: with ``{name}`` for whole segments.
        body: type of the request's body, None if it takes none.
        fails: statuses beyond those every endpoint may give.
        version: what the ``ETag`` of an answer says; None for endpoints without one. A change heeds ``If-Match`` then.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    who: Who
    answer: type[Document]
    query: tuple[QueryField, ...] = ()
    body: type[Document] | None = None
    fails: tuple[int, ...] = ()
    version: Callable[[Any], str] | None = None

    @property
    def segments(self) -> tuple[str, ...]:
        return tuple(self.path[1:].split("/"))

    def match(self, raw_segments: list[bytes]) -> dict[str, str] | None:
        """Return the placeholders' values if the path is this one's, None if not. Raises: ApiError."""
        own = self.segments
        if len(own) != len(raw_segments):
            return None
        found = {}
        for name, raw in zip(own, raw_segments, strict=True):
            if name.startswith("{"):
                found[name[1:-1]] = raw
            elif name.encode() != raw:
                return None
        return {name: read_segment(name, raw) for name, raw in found.items()}


def read_segment(name: str, raw: bytes) -> str:
    """Return a path segment as text. Raises: ApiError 404 for one that can name nothing."""
    try:
        text = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        text = ""
    if not text or len(text) > MAX_NAME_CHARS or not text.isprintable():
        raise ApiError(404, f"no such {name}", param=name)
    return text


def read_query(exchange: Exchange, endpoint: Endpoint) -> dict[str, str]:
    """Return the query's fields. Raises: ApiError."""
    try:
        pairs = parse_qsl(
            exchange.query.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS
        )
    except ValueError:
        raise ApiError(400, f"the query cannot be read: expected UTF-8, at most {MAX_QUERY_FIELDS} fields") from None
    known = {field.name for field in endpoint.query}
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            expected = f"expected only {', '.join(sorted(known))}" if known else "this path takes none"
            raise ApiError(400, f"unknown query parameter, {expected}", param=name[:64] or None)
        if name in found:
            raise ApiError(400, "given twice", param=name)
        found[name] = value
    return found


def read_body(body: bytes | bytearray | memoryview, content_encoding: bytes, endpoint: Endpoint) -> dict[str, Any]:
    """Return the body's JSON object; what its fields may be is the handler's business. Raises: ApiError."""
    if endpoint.body is None:
        if len(body):
            raise ApiError(400, "this call takes no body")
        return {}
    if content_encoding.lower() != b"identity":
        raise ApiError(415, "send the body without Content-Encoding")
    if len(body) > MAX_BODY_BYTES:
        raise body_too_large()
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError):
        raise ApiError(400, "the body is no JSON: expected a JSON object") from None
    if not isinstance(given, dict):
        raise ApiError(400, "expected a JSON object")
    return given


def body_too_large() -> ApiError:
    """Return the refusal of a body beyond the limit."""
    return ApiError(413, f"the request body is larger than {MAX_BODY_BYTES} bytes")
