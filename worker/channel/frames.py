"""Length-prefixed frames with descriptors over a Unix stream socket, without ever blocking.

A frame is a u32 little-endian length and that many bytes of msgpack. Both directions are bounded: a peer that announces
too large a frame, or does not read what it is sent, is an error of the peer.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from engines.errors import InvalidInput, Unavailable
from worker.channel.messages import MAX_FRAME_BYTES

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 64 * 1024
MAX_READS: Final = 64
"""Reads per call, so that one talkative peer cannot keep a loop from the others."""
MAX_FDS: Final = 2
"""Descriptors a peer may have sent that nobody has taken yet."""
MAX_UNSENT_BYTES: Final = 2 * MAX_FRAME_BYTES
MAX_ASK_BYTES: Final = 1024 * 1024
"""The largest frame that a worker accepts."""

_encoder = msgspec.msgpack.Encoder()


class BadFrame(InvalidInput):
    """The peer sent something that is not a frame of this protocol."""


class NotReading(Unavailable):
    """The peer does not read what it is sent."""


def encode(message: object) -> bytes:
    """Return a message as the payload of a frame."""
    return _encoder.encode(message)


class FrameSocket:
    """A connected Unix stream socket that carries frames. Owns the socket and descriptors nobody has taken.

    Attributes:
        eof: the peer is gone or has closed its sending side.
    """

    def __init__(self, sock: socket.socket, max_frame_bytes: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.eof = False
        self._max_frame_bytes = max_frame_bytes
        self._incoming = bytearray()
        self._fds: list[int] = []
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_bytes = 0

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def unsent(self) -> bool:
        """Whether ``flush`` should be called when the socket can be written."""
        return bool(self._unsent)

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame, or keep what the socket does not take. ``fds`` must stay open until it was sent.

        Raises:
            NotReading: too much is unsent already.
            OSError: the connection is broken.
        """
        assert len(payload) <= MAX_FRAME_BYTES, f"frame of {len(payload)} bytes"
        if self._unsent_bytes + len(payload) > MAX_UNSENT_BYTES:
            raise NotReading(f"peer left {self._unsent_bytes} bytes unread, {MAX_UNSENT_BYTES} may wait")
        frame = memoryview(_LENGTH.pack(len(payload)) + payload)
        self._unsent.append((frame, fds))
        self._unsent_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send what is unsent, as far as the socket takes it.

        Raises:
            OSError: the connection is broken.
        """
        while self._unsent:
            frame, fds = self._unsent[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self.sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self._unsent_bytes -= sent
            if sent == len(frame):
                self._unsent.popleft()
            else:
                # The descriptors went with the first byte.
                self._unsent[0] = (frame[sent:], ())

    def read(self) -> list[bytes]:
        """Return the payloads of all frames that are complete by now; sets ``eof``.

        Raises:
            BadFrame: the peer broke the protocol.
        """
        for _ in range(MAX_READS):
            try:
                data, ancillary, flags, _ = self.sock.recvmsg(
                    _READ_BYTES, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except OSError:
                data, ancillary, flags = b"", [], 0
            self._keep_fds(ancillary)
            if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS:
                raise BadFrame(f"more than {MAX_FDS} descriptors were sent")
            if not data:
                self.eof = True
                break
            self._incoming += data
            if len(self._incoming) > self._max_frame_bytes + _READ_BYTES:
                break
        return self._complete()

    def discard(self) -> None:
        """Read and forget; sets ``eof``. For a peer whose words do not count any more."""
        self._incoming.clear()
        for _ in range(MAX_READS):
            try:
                data = self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.eof = True
                return

    def take_fds(self) -> list[int]:
        """Return the descriptors that arrived; the caller owns them."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        """Close the socket and every descriptor nobody took."""
        for fd in self.take_fds():
            os.close(fd)
        self._unsent.clear()
        self.sock.close()

    def shutdown(self) -> None:
        """Tell the peer that no more comes; what it sends can still be read."""
        self._unsent.clear()
        self._unsent_bytes = 0
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def _keep_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                self._fds.extend(received)

    def _complete(self) -> list[bytes]:
        payloads: list[bytes] = []
        start = 0
        while len(self._incoming) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            if length > self._max_frame_bytes:
                raise BadFrame(f"frame of {length} bytes, the limit is {self._max_frame_bytes}")
            end = start + _LENGTH.size + length
            if end > len(self._incoming):
                break
            payloads.append(bytes(self._incoming[start + _LENGTH.size : end]))
            start = end
        del self._incoming[:start]
        return payloads
