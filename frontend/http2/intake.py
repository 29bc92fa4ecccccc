"""Frames out of bytes: hands heads, data and control frames to the connection, in whatever pieces bytes come. Pure.

DATA is handed on as it comes, also out of a frame that is not whole, and never collected. All other frames are short
and wait until they are whole; a header block may be spread over several of them.
"""

from __future__ import annotations

from typing import Final, Protocol

from frontend.http2 import frames
from frontend.http2.fields import Head, HeadDecoder
from frontend.http2.frames import Code, ConnectionFault
from frontend.http2.limits import Limits

_SPLIT: Final = frames.PADDED | frames.PRIORITIZED | frames.END_HEADERS
"""Flags of HEADERS that say how its payload is read; with END_HEADERS alone it is a block and nothing else."""


class Frames(Protocol):
    """Who takes what was found; any of them may raise ConnectionFault."""

    last_id: int
    over: bool

    def open(self, stream_id: int, head: Head, *, ends: bool) -> None:
        """A request, on a stream above ``last_id``."""
        ...

    def whole(self, stream_id: int, head: Head, widened: int, data: bytes, at: int, stop: int) -> bool:
        """A request, on a stream above ``last_id``, whose whole body is ``data[at:stop]``, within a stream's window.

        ``widened`` is by how much it widens its own. False if it must be handed on in its parts.
        """
        ...

    def trailers(self, stream_id: int, malformed: str, *, ends: bool) -> None:
        """HEADERS on a stream not above ``last_id``; ``malformed`` says what is wrong with them."""
        ...

    def admit(self, stream_id: int, frame_bytes: int, data_bytes: int, *, ends: bool) -> None:
        """The header of a DATA frame on a stream not above ``last_id``."""
        ...

    def data(self, stream_id: int, data: bytes, at: int, stop: int) -> None:
        """A piece of that frame's data, at least a byte."""
        ...

    def data_end(self, stream_id: int, *, ends: bool) -> None:
        """The end of that frame."""
        ...

    def window_update(self, stream_id: int, increment: int) -> None:
        """A WINDOW_UPDATE of the right length."""
        ...

    def control(self, stream_id: int, kind: int, flags: int, payload: bytes) -> None:
        """Any other frame."""
        ...


class Intake:
    """Reads what one client sends."""

    __slots__ = (
        "_block", "_block_bytes", "_block_flags", "_block_stream", "_data_ends", "_data_left", "_data_padding",
        "_data_stream", "_decoder", "_frames", "_limits", "_memo", "_most_body", "_most_frame", "_most_whole", "_rest",
        "_state",
    )  # fmt: skip

    def __init__(self, target: Frames, decoder: HeadDecoder, limits: Limits) -> None:
        self._frames = target
        self._decoder = decoder
        self._memo = decoder.memo
        self._limits = limits
        # The longest frame besides DATA that can be right, with its padding and priority.
        self._most_whole = max(frames.DEFAULT_FRAME_BYTES, limits.max_header_bytes + 512)
        self._most_frame = limits.frame_bytes
        self._most_body = min(limits.frame_bytes, limits.stream_window_bytes)
        self._rest = b""
        # 0: the preface is due, 1: SETTINGS are due, 2: anything.
        self._state = 0
        self._block: list[bytes] | None = None
        self._block_stream = self._block_flags = self._block_bytes = 0
        self._data_stream = self._data_left = self._data_padding = 0
        self._data_ends = False

    @property
    def greeted(self) -> bool:
        """Whether preface and SETTINGS have come."""
        return self._state == 2

    def receive(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            ConnectionFault: nothing may be read any more.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at = 0
        if self._state == 0:
            at = self._greet(data)
            if self._state == 0:
                self._rest = data
                return
        if self._data_stream:
            at = self._data_piece(data, at, len(data))
        at = self._whole_frames(data, at)
        if at < len(data):
            self._rest = data[at:]

    def _greet(self, data: bytes) -> int:
        preface = frames.PREFACE
        if data[: len(preface)] != preface[: len(data)]:
            text = "this port speaks HTTP/2 in clear text with prior knowledge (gRPC)"
            raise ConnectionFault(Code.PROTOCOL_ERROR, text)
        if len(data) >= len(preface):
            self._state = 1
        return len(preface)

    def _whole_frames(self, data: bytes, at: int) -> int:
        """Handle every frame that is there; return where what is left begins."""
        end = len(data)
        unpack, word = frames.HEADER.unpack_from, frames.word
        memo = self._memo
        target = self._frames
        most = self._most_frame
        while end - at >= 9 and not target.over:
            high, low, kind, flags, stream_id = unpack(data, at)
            length = high << 8 | low
            if length > most:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"frame of {length} bytes, MAX_FRAME_SIZE is {most}")
            stream_id &= 0x7FFF_FFFF
            stop = at + 9 + length
            if kind == 0:  # DATA, the only frame that is not awaited whole
                if flags & frames.PADDED and length and end - at < 10:
                    break
                at = self._on_data(stream_id, flags, length, data, at + 9, end)
                continue
            if stop > end:
                if length > self._most_whole:
                    text = f"frame of {length} bytes that must be held whole, the limit is {self._most_whole}"
                    raise ConnectionFault(Code.ENHANCE_YOUR_CALM, text)
                break
            if kind == 1 and flags & _SPLIT == 4 and stream_id > target.last_id:
                # HEADERS as every gRPC client sends them: whole, and a block that came before.
                head = memo.get(data[at + 9 : stop])
                if head is not None and self._block is None and self._state == 2:
                    if flags == 4 and end - stop > 9:
                        at = self._whole_request(stream_id, head, data, stop, end)
                        if at:
                            continue
                    target.open(stream_id, head, ends=flags & 1 == 1)
                    at = stop
                    continue
            if kind == 8 and length == 4 and self._block is None and self._state == 2:
                # One or two come with every call of clients on gRPC's C core.
                target.window_update(stream_id, word(data, at + 9))
            else:
                self._on_frame(stream_id, kind, flags, data[at + 9 : stop])
            at = stop
        return at

    def _whole_request(self, stream_id: int, head: Head, data: bytes, at: int, end: int) -> int:
        """Hand on a request if all of it has come in one DATA frame; return where reading goes on, or 0 if not."""
        high, low, kind, flags, same = frames.HEADER.unpack_from(data, at)
        widened = 0
        if kind == 8 and low == 4 and not high and same == stream_id and end - at > 22:
            # Clients on gRPC's C core widen the window of each of their streams.
            widened = frames.word(data, at + 9)
            at += 13
            high, low, kind, flags, same = frames.HEADER.unpack_from(data, at)
            if not widened:
                return 0
        at += 9
        length = high << 8 | low
        stop = at + length
        if kind or flags != 1 or same != stream_id or stop > end or length > self._most_body:
            return 0
        return stop if self._frames.whole(stream_id, head, widened, data, at, stop) else 0

    def _on_frame(self, stream_id: int, kind: int, flags: int, payload: bytes) -> None:
        if self._state < 2:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            self._state = 2
        if self._block is not None and kind != frames.CONTINUATION:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block was not finished")
        if kind == frames.HEADERS:
            self._on_headers(stream_id, flags, payload)
        elif kind == frames.CONTINUATION:
            self._on_continuation(stream_id, flags, payload)
        else:
            self._frames.control(stream_id, kind, flags, payload)

    def _on_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS on stream 0")
        if flags & frames.PADDED:
            if not payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "padded HEADERS without the length of the padding")
            if payload[0] >= len(payload):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "padding larger than its frame")
            payload = payload[1 : len(payload) - payload[0]]
        if flags & frames.PRIORITIZED:
            if len(payload) < 5:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            payload = payload[5:]
        self._check_block(len(payload))
        if flags & frames.END_HEADERS:
            self._on_block(stream_id, payload, ends=bool(flags & frames.END_STREAM))
        else:
            self._block = [payload]
            self._block_stream = stream_id
            self._block_flags = flags
            self._block_bytes = len(payload)

    def _on_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None or self._block_stream != stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION without HEADERS before it")
        self._block_bytes += len(payload)
        self._check_block(self._block_bytes)
        block.append(payload)
        most = self._limits.max_continuations
        if len(block) > most + 1:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"header block of more than {most} CONTINUATION frames")
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(stream_id, b"".join(block), ends=bool(self._block_flags & frames.END_STREAM))

    def _check_block(self, size: int) -> None:
        limit = self._limits.max_header_bytes
        if size > limit:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"header block over max_header_bytes = {limit}")

    def _on_block(self, stream_id: int, block: bytes, *, ends: bool) -> None:
        target = self._frames
        if stream_id > target.last_id:
            target.open(stream_id, self._decoder.head(block), ends=ends)
        else:
            target.trailers(stream_id, self._decoder.trailers(block), ends=ends)

    def _on_data(self, stream_id: int, flags: int, length: int, data: bytes, at: int, end: int) -> int:
        """Begin a DATA frame whose payload starts at ``at``; return where reading goes on."""
        if self._block is not None or self._state < 2 or stream_id == 0 or stream_id > self._frames.last_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"unexpected DATA on stream {stream_id}")
        size, padding = length, 0
        if flags & frames.PADDED:
            if length == 0:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "padded DATA without the length of the padding")
            padding = data[at]
            if padding >= length:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "padding larger than its frame")
            at += 1
            size = length - 1 - padding
        ends = flags & 1 == 1
        self._frames.admit(stream_id, length, size, ends=ends)
        if not padding and end - at >= size:
            if size:
                self._frames.data(stream_id, data, at, at + size)
            self._frames.data_end(stream_id, ends=ends)
            return at + size
        self._data_stream = stream_id
        self._data_left = size
        self._data_padding = padding
        self._data_ends = ends
        return self._data_piece(data, at, end)

    def _data_piece(self, data: bytes, at: int, end: int) -> int:
        """Hand on what is there of the frame under way; return where reading goes on."""
        size = min(end - at, self._data_left)
        if size:
            self._data_left -= size
            self._frames.data(self._data_stream, data, at, at + size)
            at += size
        if not self._data_left:
            skipped = min(end - at, self._data_padding)
            self._data_padding -= skipped
            at += skipped
            if not self._data_padding:
                stream_id, self._data_stream = self._data_stream, 0
                self._frames.data_end(stream_id, ends=self._data_ends)
        return at
