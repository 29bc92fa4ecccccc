"""Header blocks to fields and back, and which fields make a request (RFC 9113, section 8).

Decoding is hpack's. It costs about as much as everything else in a small request together, and gRPC clients send the
same fully indexed block with every call: so blocks are remembered by their bytes. That is right as long as the dynamic
table, which their indices point into, does not change; every change forgets them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from frontend.http2.frames import Code, ConnectionFault
from frontend.http2.limits import Limits

Field = tuple[bytes, bytes]

HARD_FACTOR: Final = 4
"""How far above ``max_header_bytes`` fields are still decoded, so that the request can be refused by name; beyond, the
decoder is left in the middle of a block and the connection must end."""
MEMO_BLOCK_BYTES: Final = 1024
"""Longer blocks are not remembered: a memo of large ones would hold megabytes per connection."""
_ENTRY_BYTES: Final = 32
_PSEUDO: Final = (b":method", b":scheme", b":path", b":authority")
_CONNECTION_FIELDS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_NAME_BYTES: Final = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")
_BAD_VALUE: Final = frozenset(b"\0\r\n")


@dataclass(slots=True)
class Head:
    """The decoded header block of a request.

    Attributes:
        fields: regular fields; of a repeated one the values are joined by a comma.
        size_bytes: of all fields, as HTTP/2 counts them.
        content_length: -1 if not told.
        malformed: why this is no request (the stream is reset); empty if it is one.
        value: what the application made of it.
    """

    method: bytes = b""
    path: bytes = b""
    fields: dict[bytes, bytes] = field(default_factory=dict)
    size_bytes: int = 0
    content_length: int = -1
    malformed: str = ""
    value: Any = None


class _WatchedTable(HeaderTable):
    """A dynamic table that counts its changes."""

    changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    @property
    def maxsize(self) -> int:
        return self._maxsize

    @maxsize.setter
    def maxsize(self, newmax: int) -> None:
        self.changes += 1
        HeaderTable.maxsize.fset(self, newmax)  # type: ignore[attr-defined]


class HeadDecoder:
    """Turns the blocks of one connection into heads, in the order they came.

    Every block must pass here, also of requests that are refused: a block may change the table for all later ones.
    ``interpret`` gives ``Head.value`` of a well-formed request; what it returns is shared between requests.
    """

    def __init__(self, limits: Limits, interpret: Callable[[Head], Any]) -> None:
        self._limits = limits
        self._interpret = interpret
        self._table = _WatchedTable()
        self._decoder = Decoder(max_header_list_size=HARD_FACTOR * limits.max_header_bytes)
        self._decoder.header_table = self._table
        self.memo: dict[bytes, Head] = {}

    def head(self, block: bytes) -> Head:
        """Return the head in a block; callers may look into ``memo`` themselves first.

        Raises:
            ConnectionFault: the block cannot be decoded, or is far too large.
        """
        known = self.memo.get(block)
        if known is not None:
            return known
        changes = self._table.changes
        head = head_of(self._decode(block))
        if not head.malformed:
            head.value = self._interpret(head)
        if self._table.changes != changes:
            self.memo.clear()
        elif len(block) <= MEMO_BLOCK_BYTES:
            if len(self.memo) >= self._limits.max_memo:
                self.memo.clear()
            self.memo[block] = head
        return head

    def trailers(self, block: bytes) -> str:
        """Take the trailers of a request, whose content does not matter here; return what is malformed about them."""
        changes = self._table.changes
        fields = self._decode(block)
        if self._table.changes != changes:
            self.memo.clear()
        for name, value in fields:
            if name.startswith(b":") or _malformed(name, value):
                return f"malformed trailer {name!r}"
        return ""

    def _decode(self, block: bytes) -> list[Field]:
        try:
            return list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            limit = self._limits.max_header_bytes
            raise ConnectionFault(
                Code.ENHANCE_YOUR_CALM, f"header fields of more than {HARD_FACTOR} times max_header_bytes = {limit}"
            ) from None
        except (HPACKError, ValueError, IndexError) as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"header block cannot be decoded: {error}"[:200]) from None


def head_of(fields: Iterable[Field]) -> Head:
    """Return the head that decoded fields make; ``malformed`` says what is wrong with them."""
    head = Head()
    pseudo: dict[bytes, bytes] = {}
    for name, value in fields:
        head.size_bytes += len(name) + len(value) + _ENTRY_BYTES
        if head.malformed:
            continue
        if name.startswith(b":"):
            if head.fields:
                head.malformed = f"pseudo-header {name!r} after a regular one"
            elif name not in _PSEUDO or name in pseudo:
                head.malformed = f"pseudo-header {name!r} is unknown or repeated"
            pseudo[name] = value
            continue
        head.malformed = _malformed(name, value)
        before = head.fields.get(name)
        if before is not None and name == b"content-length" and before != value:
            head.malformed = "two values of content-length"
        elif before is not None and name != b"content-length":
            value = before + b"," + value
        head.fields[name] = value
    if not head.malformed:
        _complete(head, pseudo)
    return head


def _complete(head: Head, pseudo: dict[bytes, bytes]) -> None:
    head.method = pseudo.get(b":method", b"")
    head.path = pseudo.get(b":path", b"")
    length = head.fields.get(b"content-length")
    if not (head.method and head.path and pseudo.get(b":scheme")):
        head.malformed = "a request needs :method, :scheme and :path"
    elif any(_BAD_VALUE & set(value) for value in pseudo.values()):
        head.malformed = "a pseudo-header holds a control character"
    elif length is not None:
        if length.isdigit() and len(length) < 20:
            head.content_length = int(length)
        else:
            head.malformed = "content-length is no number"


def _malformed(name: bytes, value: bytes) -> str:
    if not name or not _NAME_BYTES.issuperset(name):
        return f"field name {name[:40]!r} holds a character that is not allowed"
    if not _BAD_VALUE.isdisjoint(value):
        return f"field {name[:40]!r} holds a control character"
    if name in _CONNECTION_FIELDS:
        return f"field {name!r} belongs to HTTP/1.1"
    if name == b"te" and value != b"trailers":
        return "field b'te' may only be 'trailers'"
    return ""


_STATIC_NAMES: Final[dict[str, int]] = {"content-type": 31, "retry-after": 53, "allow": 22, "accept-encoding": 16}
_STATIC_STATUS: Final[dict[str, int]] = {"200": 8, "204": 9, "206": 10, "304": 11, "400": 12, "404": 13, "500": 14}
_STATUS_NAME: Final = 8


def encode_fields(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return a header block that leaves every dynamic table as it is, so that one block serves all connections.

    Names are lower-case; names and values are ASCII.
    """
    out = bytearray()
    for name, value in fields:
        if name == ":status" and value in _STATIC_STATUS:
            out.append(0x80 | _STATIC_STATUS[value])
            continue
        index = _STATUS_NAME if name == ":status" else _STATIC_NAMES.get(name, 0)
        out += _integer(index, 4)
        if not index:
            out += _integer(len(name), 7) + name.encode("ascii")
        out += _integer(len(value), 7) + value.encode("ascii")
    return bytes(out)


def _integer(value: int, prefix_bits: int) -> bytes:
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((value,))
    out = bytearray((most,))
    value -= most
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
