"""HTTP/2 frames as bytes (RFC 9113): numbers, and the frames a server sends."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20

SETTINGS_ENABLE_PUSH: Final = 0x2
SETTINGS_MAX_CONCURRENT_STREAMS: Final = 0x3
SETTINGS_INITIAL_WINDOW_SIZE: Final = 0x4
SETTINGS_MAX_FRAME_SIZE: Final = 0x5
SETTINGS_MAX_HEADER_LIST_SIZE: Final = 0x6

FRAME_HEADER_BYTES: Final = 9
DEFAULT_WINDOW_BYTES: Final = 65_535
DEFAULT_FRAME_BYTES: Final = 16_384
MOST_FRAME_BYTES: Final = 2**24 - 1
MOST_WINDOW_BYTES: Final = 2**31 - 1
MOST_STREAM_ID: Final = 2**31 - 1
DATA_OPENS: Final = bytes((DATA, 0))
"""What stands between length and stream of a DATA frame that is not the last of its stream."""

HEADER: Final = Struct(">HBBBI")
"""Length (upper 16 bits, lower 8), type, flags, stream."""
SETTING: Final = Struct(">HI")
_WORD: Final = Struct(">I")
_HEADER_WORD: Final = Struct(">HBBBII")
_GOAWAY: Final = Struct(">HBBBIII")


class Code(IntEnum):
    """Error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB


class ConnectionFault(Exception):
    """The client broke the protocol in a way that ends the connection; the text goes into GOAWAY."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFault(Exception):
    """The client broke the protocol on one stream, which is reset."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class Block:
    """An encoded header block to send.

    Attributes:
        data: the block.
        opens, ends: what stands before the stream's number in the HEADERS frame that opens, or ends, a stream.
    """

    __slots__ = ("data", "ends", "opens")

    def __init__(self, data: bytes) -> None:
        assert len(data) <= DEFAULT_FRAME_BYTES, "every peer takes a frame of that size"
        self.data = data
        self.opens = len(data).to_bytes(3, "big") + bytes((HEADERS, END_HEADERS))
        self.ends = len(data).to_bytes(3, "big") + bytes((HEADERS, END_HEADERS | END_STREAM))

    def frame(self, stream_id: int) -> bytes:
        """Return the HEADERS frame that opens an answer."""
        return b"".join((self.opens, stream_id.to_bytes(4, "big"), self.data))

    def last_frame(self, stream_id: int) -> bytes:
        """Return the HEADERS frame that ends a stream."""
        return b"".join((self.ends, stream_id.to_bytes(4, "big"), self.data))


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return one whole frame."""
    size = len(payload)
    return HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values.items()))


SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0)


def window_update(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return _HEADER_WORD.pack(0, 4, WINDOW_UPDATE, 0, stream_id, increment)


def rst_stream(stream_id: int, code: Code) -> bytes:
    """Return an RST_STREAM frame."""
    return _HEADER_WORD.pack(0, 4, RST_STREAM, 0, stream_id, code)


def ping(data: bytes, *, ack: bool) -> bytes:
    """Return a PING frame with 8 bytes of data."""
    return frame(PING, ACK if ack else 0, 0, data)


def goaway(last_stream_id: int, code: Code, text: str = "") -> bytes:
    """Return a GOAWAY frame; the text is debug data."""
    debug = text.encode()
    size = 8 + len(debug)
    return _GOAWAY.pack(size >> 8, size & 0xFF, GOAWAY, 0, 0, last_stream_id, code) + debug


def word(data: bytes, at: int) -> int:
    """Return the 31-bit number at a position."""
    value: int = _WORD.unpack_from(data, at)[0]
    return value & 0x7FFF_FFFF
