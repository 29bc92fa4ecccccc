"""The handshake's checks: who may attach, with what, and what each side answers."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from typing import Final

import msgspec

from engines.errors import AlreadyExists, InvalidInput, Unavailable
from worker.channel import layout as at
from worker.channel.doorbell import require_doorbell
from worker.channel.layout import SegmentLayout
from worker.channel.messages import LAYOUT_VERSION, MAX_FRAME_BYTES, Hello
from worker.channel.segment import Segment

_CREDENTIALS: Final = struct.Struct("3i")
_MAX_PATH_BYTES: Final = 107
_BACKLOG: Final = 128


class AttachRefused(Unavailable):
    """The worker does not take this frontend; the message is the worker's reason.

    Attributes:
        wait_may_help: whether trying again later can succeed; a mismatch of versions or sizes does not heal.
    """

    def __init__(self, reason: str, wait_may_help: bool) -> None:
        super().__init__(f"the worker refused to attach: {reason}")
        self.wait_may_help = wait_may_help


class ForeignUser(InvalidInput):
    """The peer on the Unix socket belongs to another user."""


def peer_pid(sock: socket.socket) -> int:
    """Return the pid of the process at the other end of a Unix socket.

    Raises:
        ForeignUser: it is another user's.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise ForeignUser(f"peer runs as uid {uid}, this process as uid {os.geteuid()}")
    return int(pid)


def connect(socket_path: str) -> socket.socket:
    """Return a non-blocking socket connected to a worker of our own user; the caller owns it.

    Raises:
        OSError: nobody listens there, or its queue of connections is full.
        ForeignUser: another user listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        sock.connect(socket_path)
        peer_pid(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def listen(socket_path: str) -> socket.socket:
    """Return a listening non-blocking socket that only our own user can reach.

    Raises:
        AlreadyExists: somebody listens there. A file that nobody listens on is replaced.
        InvalidInput: the path is too long for a socket address.
    """
    if len(os.fsencode(socket_path)) > _MAX_PATH_BYTES:
        raise InvalidInput(
            f"socket path {socket_path!r} has more than {_MAX_PATH_BYTES} bytes: choose a shorter run_dir"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setblocking(False)
        # Before bind, so that the file never exists with a wider mode.
        os.fchmod(listener.fileno(), 0o600)
        try:
            listener.bind(socket_path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_stale(socket_path)
            listener.bind(socket_path)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def stop_listening(listener: socket.socket, socket_path: str) -> None:
    """Close the listener and remove its file, unless another worker has replaced it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        listener.close()
        probe.setblocking(False)
        try:
            probe.connect(socket_path)
        except ConnectionRefusedError:
            os.unlink(socket_path)
        except OSError:
            return


def _remove_stale(socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(socket_path)
        except ConnectionRefusedError:
            os.unlink(socket_path)
            return
        except BlockingIOError:
            # Its queue of connections is full: somebody listens.
            pass
    raise AlreadyExists(f"another worker listens on {socket_path!r}")


def open_segment(hello: Hello, fds: list[int]) -> Segment:
    """Return the worker's view of the segment that a Hello announces; ``fds`` stay the caller's.

    Raises:
        InvalidInput: what is announced and what came differ; the message names both.
        NoSharedMemory: this process cannot map it.
    """
    if len(fds) != 2:
        raise InvalidInput(f"Hello must carry two descriptors (segment, doorbell), got {len(fds)}")
    layout = SegmentLayout.of(hello.records, hello.arena_bytes)
    if hello.segment_bytes != layout.segment_bytes:
        raise InvalidInput(
            f"segment of {hello.segment_bytes} bytes announced, "
            f"{hello.records} records and {hello.arena_bytes} arena bytes make {layout.segment_bytes}"
        )
    status = os.fstat(fds[0])
    if not stat.S_ISREG(status.st_mode) or status.st_size < layout.segment_bytes:
        raise InvalidInput(f"segment has {status.st_size} bytes, {layout.segment_bytes} were announced")
    require_doorbell(fds[1])
    segment = Segment(fds[0], layout)
    segment.check(hello.records)
    heads = (segment.words[at.REQUEST_HEAD_WORD], segment.words[at.REPLY_TAIL_WORD])
    if heads != (0, 0):
        raise InvalidInput(f"segment was used before: request head and reply tail are {heads}")
    return segment


def refusal_of_version(payload: bytes) -> str | None:
    """Return why a Hello of another version is refused, naming both numbers; None if the version is ours.

    Looks at nothing else, since another version may have other fields.
    """
    try:
        fields = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(fields, dict) or fields.get("type") != Hello.__name__:
        return None
    theirs = fields.get("layout_version")
    if theirs == LAYOUT_VERSION:
        return None
    return version_mismatch(theirs)


def version_mismatch(theirs: object) -> str:
    """Return the reason that names both versions."""
    return f"the frontend has layout version {theirs}, this worker has {LAYOUT_VERSION}"


def check_payload_bytes(payload: bytes, what: str, limit_bytes: int = MAX_FRAME_BYTES) -> None:
    """Raise InvalidInput if a message is larger than the receiver accepts."""
    if len(payload) > limit_bytes:
        raise InvalidInput(f"{what} has {len(payload)} bytes, the limit is {limit_bytes}")
