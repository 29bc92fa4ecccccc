"""Heads of requests: what a parsed one says, and how the next one of the same bytes is known without parsing.

A client sends the same request line and headers over and over on its connection. llhttp calls back into Python for
each header, which takes longer than all else that a small request needs. A connection therefore keeps the bytes of its
last plain head; one that begins with them, or differs in nothing but the digits of Content-Length, says the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from frontend.httpd.exchange import Exchange

MAX_KEPT_BYTES: Final = 2048
"""Longer heads are parsed each time: none is kept that costs more memory than its connection."""
MAX_KNOWN_BODY_BYTES: Final = 64 * 1024
"""Longer bodies come in pieces, or their copies outweigh the parsing."""
_LENGTH: Final = b"\r\ncontent-length: "
_MAX_DIGITS: Final = 6
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
            this head or one that differs in its Content-Length only. Their bodies are collected.
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

    def of_length(self, digits: bytes) -> Head:
        """Return a head that differs in the value of its Content-Length."""
        headers = {**self.headers, b"content-length": digits}
        head = Head(self.method, self.target, headers, http10=self.http10, keep_alive=self.keep_alive)
        head.handler = self.handler
        return head


class KnownHead:
    """The bytes of a head, and the head that they mean."""

    __slots__ = ("_after", "_before", "_head", "_raw", "_size")

    def __init__(self, raw: bytes, head: Head, at: int) -> None:
        """``at``: of the first digit of Content-Length in ``raw``; 0 if there is none."""
        self._raw = raw
        self._head = head
        # Of a whole message.
        self._size = len(raw) + int(head.headers.get(b"content-length", 0))
        self._before = raw[:at]
        self._after = raw[raw.index(b"\r\n", at) :] if at else b""

    def match(self, data: bytes) -> tuple[Head, int] | None:
        """Return the head that ``data`` begins with and its bytes; None unless data is one whole message with it."""
        if len(data) == self._size and data.startswith(self._raw):
            return self._head, len(self._raw)
        before = self._before
        if not before or not data.startswith(before):
            return None
        start = len(before)
        end = data.find(b"\r\n", start, start + _MAX_DIGITS + 2)
        digits = data[start : max(end, start)]
        if not digits.isdigit() or not data.startswith(self._after, end):
            return None
        at = end + len(self._after)
        length = int(digits)
        if length != len(data) - at or not 0 < length <= MAX_KNOWN_BODY_BYTES:
            return None
        head = self._head = self._head.of_length(digits)
        self._raw = data[:at]
        self._size = len(data)
        return head, at


def known_head(data: bytes, head: Head) -> KnownHead | None:
    """Return what recognises ``head`` again, if it is plain; ``data`` is the whole message that it was parsed from."""
    headers = head.headers
    if head.http10 or not head.keep_alive:
        return None
    for name in _NOT_PLAIN:
        if name in headers:
            return None
    end = data.find(b"\r\n\r\n", 0, MAX_KEPT_BYTES) + 4
    length = headers.get(b"content-length", b"0")
    if end < 4 or len(length) > _MAX_DIGITS or len(data) != end + int(length) or int(length) > MAX_KNOWN_BODY_BYTES:
        return None
    raw = data[:end]
    # Of several lines of this name, or one written in another way, nothing is assumed.
    at = raw.lower().find(_LENGTH) + len(_LENGTH) if raw.lower().count(_LENGTH) == 1 else 0
    if at and raw[at : at + len(length) + 2] != length + b"\r\n":
        at = 0
    return KnownHead(raw, head, at)


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
