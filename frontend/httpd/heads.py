"""Heads of requests: what a parsed one says, and how the next one of the same bytes is known without parsing.

A client sends the same request line and headers over and over on its connection. llhttp calls back into Python for
each header, which takes longer than all else that a small request needs. A connection therefore keeps the bytes of its
last plain head; one that begins with them, or differs in nothing but the digits of Content-Length and the values of
headers that trace a request, says the same.

Which values may differ is decided by a rule of names, not by what has differed: of a header that the rule does not
know, something may be derived and kept with the head, or it may concern the framing. And a value is taken only if it is
one to every parser: visible ASCII after ``: ``, in the only line of that name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from frontend.httpd.exchange import Exchange

MAX_KEPT_BYTES: Final = 2048
"""Longer heads are parsed each time: none is kept that costs more memory than its connection."""
MAX_KNOWN_BODY_BYTES: Final = 64 * 1024
"""Longer bodies come in pieces, or their copies outweigh the parsing."""
MAX_VALUE_BYTES: Final = 256
"""Longer values of tracing headers are parsed each time."""
MAX_HOLES: Final = 8
"""Values of one head that may differ; those after them may not."""
_MAX_VAIN: Final = 16
"""Heads of a connection that are searched in vain; then only one of so many is."""
_LENGTH: Final = b"content-length"
_MAX_DIGITS: Final = 6
_VISIBLE: Final = bytes(range(0x21, 0x7F))
_MAY_DIFFER: Final = re.compile(
    rb"\r\n(?!x-ringserve-)"
    rb"(content-length|b3|baggage|idempotency-key|newrelic|[\w-]{0,32}(?:trace|span|correlation)[\w-]{0,32}|[\w-]{0,32}-id)"
    rb": ([!-~]+)(?=\r\n)"
)
"""In lower case, lines whose value may differ: nothing but the body's length follows from it, except where it is read
for each request. Counted repetitions: others take 4 ms for a name that is ``trace`` over and over."""
_NOT_PLAIN: Final = (b"transfer-encoding", b"expect", b"upgrade", b"connection")


class Head:
    """Request line and headers of one request, parsed.

    Attributes:
        method: as sent; ``GET``, ``POST`` ...
        target: request target as sent.
        raw_path: its path, still percent-encoded; ``*`` for ``OPTIONS *``.
        query: after the question mark, still encoded, empty if none.
        headers: lower-case names; values of repeated headers joined by ", " ("; " for cookie). Not to be changed.
        handler: set by the application, to be called in place of its ``begin`` and ``handle`` for later requests with
            this head or one that differs in its length and the traced values only. Their bodies are collected.
    """

    __slots__ = ("handler", "headers", "http10", "keep_alive", "method", "query", "raw_path", "target")

    def __init__(
        self, method: str, target: bytes, headers: dict[bytes, bytes], *, http10: bool, keep_alive: bool
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.http10 = http10
        self.keep_alive = keep_alive
        path, _, self.query = target.partition(b"?")
        if not path.startswith(b"/") and b"://" in path:
            # Absolute form, as sent to proxies: every server must accept it.
            _, slash, rest = path.partition(b"://")[2].partition(b"/")
            path = slash + rest or b"/"
        self.raw_path = path
        self.handler: Callable[[Exchange], None] | None = None

    def with_values(self, values: dict[bytes, bytes]) -> Head:
        """Return a head that differs in the values of these headers, which it has."""
        headers = {**self.headers, **values}
        head = Head(self.method, self.target, headers, http10=self.http10, keep_alive=self.keep_alive)
        head.handler = self.handler
        return head


class KnownHead:
    """The bytes of a head, and the head that they mean."""

    __slots__ = ("_head", "_holes", "_length", "_most_bytes", "_raw", "_rest", "_size", "_vain")

    def __init__(self, raw: bytes, head: Head, most_bytes: int, before: KnownHead | None) -> None:
        """``most_bytes``: longer heads may be too long, for the parser to decide; ``before``: what it replaces."""
        self._raw = raw
        self._head = head
        self._most_bytes = most_bytes
        self._length = int(head.headers.get(_LENGTH, 0))
        # Of a whole message.
        self._size = len(raw) + self._length
        # Per value that may differ its header's name and the bytes before it, from the last such value on; found when
        # first a head differs, as most never do.
        self._holes: list[tuple[bytes, bytes]] | None = None
        self._rest = b""
        self._vain: int = 0 if before is None else before._vain + 1
        if self._vain > _MAX_VAIN and self._vain % _MAX_VAIN:
            self._holes = []

    def match(self, data: bytes) -> tuple[Head, int] | None:
        """Return the head that ``data`` begins with and its bytes; None unless data is one whole message with it."""
        if len(data) == self._size and data.startswith(self._raw):
            return self._head, len(self._raw)
        holes = self._holes
        if holes is None:
            holes = self._find_holes()
        if not holes:
            return None
        at = 0
        values: dict[bytes, bytes] = {}
        for name, before in holes:
            if not data.startswith(before, at):
                return None
            at += len(before)
            end = data.find(b"\r\n", at, at + MAX_VALUE_BYTES + 2)
            if end < 0 or not _may_be(name, value := data[at:end]):
                return None
            values[name] = value
            at = end
        if not data.startswith(self._rest, at):
            return None
        at += len(self._rest)
        digits = values.get(_LENGTH)
        length = self._length if digits is None else int(digits)
        if length != len(data) - at or at > self._most_bytes:
            return None
        if length != self._length and not 0 < length <= MAX_KNOWN_BODY_BYTES:
            return None
        head = self._head = self._head.with_values(values)
        self._raw = data[:at]
        self._length = length
        self._size = len(data)
        self._vain = 0
        return head, at

    def _find_holes(self) -> list[tuple[bytes, bytes]]:
        raw = self._raw
        lower = raw.lower()
        headers = self._head.headers
        holes: list[tuple[bytes, bytes]] = []
        rest = 0
        # An expression: line by line it took as long as parsing.
        for line in _MAY_DIFFER.finditer(lower):
            name: bytes = line[1]
            value = raw[line.start(2) : line.end(2)]
            once = lower.count(b"\r\n" + name + b":") == 1
            if once and headers.get(name) == value and _may_be(name, value) and len(holes) < MAX_HOLES:
                holes.append((name, raw[rest : line.start(2)]))
                rest = line.end(2)
        self._holes = holes
        self._rest = raw[rest:]
        return holes


def _may_be(name: bytes, value: bytes) -> bool:
    if name == _LENGTH:
        return value.isdigit() and len(value) <= _MAX_DIGITS
    return 0 < len(value) <= MAX_VALUE_BYTES and not value.translate(None, _VISIBLE)


def known_head(data: bytes, head: Head, max_header_bytes: int, before: KnownHead | None = None) -> KnownHead | None:
    """Return what recognises ``head`` again, if it is plain; ``data`` is the whole message that it was parsed from."""
    headers = head.headers
    if head.http10 or not head.keep_alive:
        return None
    for name in _NOT_PLAIN:
        if name in headers:
            return None
    end = data.find(b"\r\n\r\n", 0, MAX_KEPT_BYTES) + 4
    length = headers.get(_LENGTH, b"0")
    if end < 4 or len(length) > _MAX_DIGITS or len(data) != end + int(length) or int(length) > MAX_KNOWN_BODY_BYTES:
        return None
    return KnownHead(data[:end], head, min(MAX_KEPT_BYTES, max_header_bytes), before)


def head_fault(head: Head, version: str) -> tuple[int, str] | None:
    """Return status and message of what makes a head unacceptable."""
    headers = head.headers
    encoding = headers.get(b"transfer-encoding")
    if version not in ("1.1", "1.0"):
        return 505, f"HTTP version {version} is not supported"
    if version == "1.1" and b"host" not in headers:
        return 400, "malformed HTTP request: no Host header"
    if encoding is not None:
        if version == "1.0":
            return 400, "malformed HTTP request: Transfer-Encoding in HTTP/1.0"
        if encoding.lower() != b"chunked":
            return 501, "a Transfer-Encoding other than chunked is not supported"
    if head.method == "CONNECT":
        return 501, "CONNECT is not supported"
    if (expect := headers.get(b"expect")) is not None and expect.lower() != b"100-continue":
        return 417, "an expectation other than 100-continue is not supported"
    return None
