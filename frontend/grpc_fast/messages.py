"""Messages out of the body of a call: five bytes that tell length and compression, then the message (gRPC over HTTP/2).

A message that comes in pieces is put together in memory of its announced size, once the size is known to be allowed;
what is announced but never sent costs no memory, since untouched pages are not there.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from frontend.grpc_fast import replies
from frontend.kserve.compression import decompress
from frontend.kserve.shapes import refuse_large
from frontend.settings import EndpointSettings

PREFIX_BYTES: Final = 5
BUDGET_MESSAGES: Final = 16
"""Messages that are not complete, or wait to be read, may together reach this many times ``max_request_bytes``."""

Message = bytes | memoryview


class CallFailure(Exception):
    """A call ends with a status that no ``ServingError`` stands for."""

    def __init__(self, status: int, text: str, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.told: replies.Told = (status, text, retry_after_s)


class Room:
    """Bytes of messages that all calls of a server hold before they can be started."""

    __slots__ = ("_limit", "used")

    def __init__(self, limits: EndpointSettings) -> None:
        self._limit = BUDGET_MESSAGES * limits.max_request_bytes
        self.used = 0

    def claim(self, size: int) -> None:
        """Take room for a message; given back by ``free``.

        Raises:
            CallFailure: there is none.
        """
        if self.used + size > self._limit:
            text = f"request messages of {self.used} bytes are being received, the limit is {self._limit}; retry later"
            raise CallFailure(replies.RESOURCE_EXHAUSTED, text, 1)
        self.used += size

    def free(self, size: int) -> None:
        """Give room back."""
        self.used -= size


class MessageReader:
    """Puts together the messages of one call. ``close`` gives back what an unfinished one holds."""

    __slots__ = ("_buffer", "_compressed", "_encoding", "_filled", "_limits", "_prefix", "_room", "size")

    def __init__(self, limits: EndpointSettings, room: Room, encoding: str) -> None:
        self._limits = limits
        self._room = room
        self._encoding = encoding
        self._prefix = b""
        self._compressed = False
        self._buffer: memoryview | None = None
        self._filled = 0
        self.size = 0

    @property
    def under_way(self) -> bool:
        """Whether a message has begun and is not complete."""
        return self._buffer is not None or bool(self._prefix)

    @property
    def missing(self) -> int:
        """Bytes that complete the message under way; 0 if its size is not known yet."""
        return 0 if self._buffer is None else self.size - self._filled

    def feed(self, data: bytes, at: int, stop: int) -> list[Message]:
        """Take ``data[at:stop]``; return the messages it completes.

        Raises:
            ServingError: a message is too large, or its compression is damaged.
            CallFailure: it is no gRPC message, or there is no room.
        """
        messages: list[Message] = []
        while at < stop:
            if self._buffer is None:
                taken = min(PREFIX_BYTES - len(self._prefix), stop - at)
                self._prefix += data[at : at + taken]
                at += taken
                if len(self._prefix) < PREFIX_BYTES:
                    break
                self._begin()
                if self.size == 0:
                    messages.append(self._complete(b""))
                elif stop - at >= self.size:
                    messages.append(self._complete(data[at : at + self.size]))
                    at += self.size
                else:
                    self._room.claim(self.size)
                    self._buffer = np.empty(self.size, dtype=np.uint8).data
                    self._filled = 0
                continue
            taken = min(self.size - self._filled, stop - at)
            self._buffer[self._filled : self._filled + taken] = memoryview(data)[at : at + taken]
            self._filled += taken
            at += taken
            if self._filled == self.size:
                buffer = self._buffer
                self.close()
                messages.append(self._complete(buffer))
        return messages

    def close(self) -> None:
        """Forget the message under way. Idempotent."""
        if self._buffer is not None:
            self._buffer = None
            self._room.free(self.size)

    def _begin(self) -> None:
        prefix = self._prefix
        self._compressed = check_flag(prefix[0], self._encoding)
        self.size = int.from_bytes(prefix[1:], "big")
        refuse_large(self.size, self._limits)

    def _complete(self, message: Message) -> Message:
        self._prefix = b""
        if not self._compressed:
            return message
        return memoryview(decompress(message, self._encoding, self._limits.max_request_bytes))


def check_flag(flag: int, encoding: str) -> bool:
    """Return whether a message is compressed.

    Raises:
        CallFailure: the flag is none, or the call named no compression.
    """
    if flag == 0:
        return False
    if flag != 1:
        raise CallFailure(replies.INTERNAL, f"malformed message: compression flag is {flag}, expected 0 or 1")
    if encoding == "identity":
        raise CallFailure(replies.INTERNAL, "malformed message: compressed, but grpc-encoding names no compression")
    return True
