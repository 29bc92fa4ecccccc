"""The line between the node and one of its processes: states and figures go up, orders come down.

Each process is started as ``python -m worker|frontend --settings-fd N --link-fd M``; a worker also gets
``--pulse-fd P``. The link is one end of an inherited Unix stream socket and carries JSON values, one a line:

    process -> node   {"state": "ready", "detail": "", "ports": {"http_port": 8000}}
                      {"series": [...]}              as an answer to an order; the node asks every SERIES_INTERVAL_S
                      {"status": {...}, "id": 7}     as an answer to an order
    node -> process   {"do": "drain"}    {"do": "series", "id": 6}    {"do": "status", "id": 7}

End of file means that the node is gone: a frontend drains for at most ``NODE_GONE_GRACE_S`` and a worker exits at once,
so no process outlives its node. Two backstops make that true for a process whose loop is busy: ``die_with_node`` for
the worker (the kernel kills it) and ``Leash`` for frontends (a thread ends it after the grace).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
import time
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

import msgspec

from worker.channel.series import Series

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_PENDING_BYTES = 2 * MAX_LINE_BYTES
"""Bytes one side keeps for a peer that does not read; further messages are dropped until it does."""
MAX_SETTINGS_BYTES = 4 * 1024 * 1024
SERIES_INTERVAL_S = 1.0
NODE_GONE_GRACE_S = 3.0

EXIT_CONFIG = 78
"""Exit status of a process that can never start with these settings; the node stops with its message, no restart."""
EXIT_NODE_GONE = 75
"""Exit status of a process that ended because its node is gone."""

_PR_SET_PDEATHSIG = 1
_RECEIVE_BYTES = 65536


class State(Enum):
    """What a process says of itself.

    STARTING: loading or attaching. READY: does its whole duty. DEGRADED: works, but something required is missing
    (a frontend without its worker, a worker with a failed model); the detail says what. DRAINING: finishes what it has
    and takes nothing new.
    """

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model version as ``ringserve status`` shows it; told by the worker."""

    name: str
    version: str
    state: str
    reason: str = ""
    batch_sizes: tuple[int, ...] = ()
    queue_depth: int = 0


class ChannelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One frontend's channel to one worker; told by the frontend, which owns the arena."""

    frontend: str
    worker: str
    in_flight: int
    arena_bytes_used: int
    arena_bytes: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``{"do": "status"}``: a worker fills ``models``, a frontend ``channels``."""

    models: tuple[ModelStatus, ...] = ()
    channels: tuple[ChannelStatus, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Process -> node. Only the fields that are set mean anything.

    Attributes:
        ports: ports the process listens on, by setting name (``http_port``, ``grpc_port``); with ``state`` only.
        id: of the order this answers; 0 for an unasked report.
    """

    state: State | None = None
    detail: str = ""
    ports: dict[str, int] = {}
    series: tuple[Series, ...] | None = None
    status: Status | None = None
    id: int = 0


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Node -> process."""

    do: Literal["drain", "series", "status"]
    id: int = 0


class LinkError(Exception):
    """The peer sent something that is not a message, or one above ``MAX_LINE_BYTES``; the link is to be closed."""


def encode(message: Any) -> bytes:
    """Return a message (a msgspec struct) as one line."""
    line = msgspec.json.encode(message)
    if len(line) >= MAX_LINE_BYTES:
        raise LinkError(f"message of {len(line)} bytes is above the limit of {MAX_LINE_BYTES}")
    return line + b"\n"


T = TypeVar("T")


class Lines(Generic[T]):
    """Turns received bytes into messages of one type; keeps an unfinished line, within ``MAX_LINE_BYTES``."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._kind = kind
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Return the messages that ``data`` completes.

        Raises:
            LinkError: a line is too long or is not such a message.
        """
        self._rest += data
        # Only new bytes can hold a line's end; splitting the whole rest each time would cost its square.
        if b"\n" not in data:
            if len(self._rest) > MAX_LINE_BYTES:
                raise LinkError(f"line of more than {MAX_LINE_BYTES} bytes")
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        messages = []
        for line in lines:
            try:
                messages.append(self._decoder.decode(line))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise LinkError(f"expected {self._kind.__name__}, got {line[:200]!r}: {error}") from None
        return messages


class SyncLink:
    """A process's end of the link for a loop that polls descriptors; nothing here blocks.

    Watch ``fileno()`` for reading, and for writing while ``wants_write``. ``gone`` is True once the node is.
    """

    def __init__(self, link_fd: int) -> None:
        self._socket = socket.socket(fileno=link_fd)
        self._socket.setblocking(False)
        self._lines = Lines(Order)
        self._pending = bytearray()
        self.gone = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether bytes wait for the node to read; call ``flush`` when the descriptor is writable."""
        return bool(self._pending) and not self.gone

    def receive(self) -> list[Order]:
        """Return the orders that have arrived, perhaps none; sets ``gone`` at end of file.

        Raises:
            LinkError: the node sent something else, which only another version of it would.
        """
        orders: list[Order] = []
        while not self.gone:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.gone = True
                break
            orders += self._lines.feed(data)
        return orders

    def send(self, report: Report) -> bool:
        """Queue a report and write what the socket takes; False if dropped: the node is gone or does not read."""
        line = encode(report)
        if self.gone or len(self._pending) + len(line) > MAX_PENDING_BYTES:
            return False
        self._pending += line
        self.flush()
        return not self.gone

    def flush(self) -> None:
        """Write as much as the socket takes now."""
        while self._pending and not self.gone:
            try:
                sent = self._socket.send(self._pending)
            except BlockingIOError:
                return
            except OSError:
                self.gone = True
                return
            del self._pending[:sent]

    def close(self) -> None:
        self._socket.close()


def read_settings(settings_fd: int, kind: type[T]) -> T:
    """Return the settings the node wrote to an inherited descriptor, and close it.

    Raises:
        msgspec.ValidationError: they do not fit ``kind``.
    """
    with open(settings_fd, "rb") as file:
        data = file.read(MAX_SETTINGS_BYTES + 1)
    assert len(data) <= MAX_SETTINGS_BYTES, "settings above MAX_SETTINGS_BYTES"
    return msgspec.json.decode(data, type=kind)


def die_with_node(link_fd: int) -> None:
    """Have the kernel kill this process when the node, its parent, dies; call it first of all, from the main thread.

    For the worker: a model that loads for minutes must not outlive the node, and holds the thread that would see the
    end of the link.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The node may have died before the call above; then the link already shows it.
    if _hung_up(link_fd, timeout_ms=0):
        os._exit(EXIT_NODE_GONE)


class Leash:
    """Ends this process ``grace_s`` after the node is gone, whatever its event loop is doing by then."""

    def __init__(self, link_fd: int, grace_s: float = NODE_GONE_GRACE_S) -> None:
        self._link_fd = os.dup(link_fd)
        self._grace_s = grace_s

    def start(self) -> None:
        threading.Thread(target=self._watch, name="leash", daemon=True).start()

    def _watch(self) -> None:
        while not _hung_up(self._link_fd, timeout_ms=60_000):
            pass
        time.sleep(self._grace_s)
        os._exit(EXIT_NODE_GONE)


def _hung_up(descriptor: int, timeout_ms: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
    with contextlib.suppress(InterruptedError):
        return any(events & gone for _, events in poll.poll(timeout_ms))
    return False
