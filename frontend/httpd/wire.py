"""Bytes of HTTP/1.1 answers: status lines, heads, chunk framing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

Part = bytes | bytearray | memoryview
"""A piece of a body; memoryviews are one-dimensional and of bytes, so that ``len`` counts bytes."""
Headers = Sequence[tuple[bytes, bytes]]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_WITHOUT_BODY = frozenset({204, 304})


def render_head(
    status: int,
    headers: Headers,
    *,
    length: int | None,
    date: bytes,
    keep_alive: bool,
    http10: bool,
) -> bytes:
    """Return status line, headers and the empty line.

    Args:
        length: body bytes; None means chunked, or delimited by closing for an HTTP/1.0 client.
        date: a complete header line.

    Raises:
        ValueError: a header holds a line break (it would let a value forge further headers), or an unknown status.
    """
    line = STATUS_LINES.get(status)
    if line is None:
        raise ValueError(f"unknown HTTP status {status}")
    block = b"".join([b"%b: %b\r\n" % header for header in headers])
    if block.count(b"\n") != len(headers) or block.count(b"\r") != len(headers):
        raise ValueError(f"line break in a response header: {block!r}")
    if length is not None:
        framing = b"" if status in _WITHOUT_BODY else b"Content-Length: %d\r\n" % length
    else:
        framing = b"" if http10 else b"Transfer-Encoding: chunked\r\n"
    connection = (b"Connection: keep-alive\r\n" if http10 else b"") if keep_alive else b"Connection: close\r\n"
    return b"".join((line, block, framing, date, connection, b"\r\n"))


def render_front(headers: Headers, length: int) -> bytes:
    """Return what of a 200's head comes before its date: the same for every answer with these headers and length."""
    date = b"Date: \r\n"
    head = render_head(200, headers, length=length, date=date, keep_alive=True, http10=False)
    return head[: -len(date) - 2]


def chunk(data: Part) -> list[Part]:
    """Return ``data`` framed as one chunk of a chunked body; ``data`` is not empty."""
    assert len(data) > 0, "an empty chunk would end the body"
    return [b"%x\r\n" % len(data), data, b"\r\n"]
