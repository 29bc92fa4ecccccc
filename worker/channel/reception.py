"""Peers on the worker's socket: who may attach, who is gone, what is asked.

Theory
    A channel ends in two steps. *Detached*: its socket ended, or it broke the protocol and was cut off; it is reported
    once, takes nothing more and sends nothing more. *Released*: the loop has nothing of it running any more.

    A peer that is cut off keeps its connection, half closed, until it closes its own side or dies; see ``table``.
    No peer can make anything here block or raise.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from dataclasses import dataclass, field
from typing import Final

import msgspec

from engines.errors import ServingError
from worker.channel import attach, frames
from worker.channel.channel import Channel
from worker.channel.doorbell import Barrier, Bell
from worker.channel.frames import FrameSocket
from worker.channel.messages import LAYOUT_VERSION, Ask, Hello, ModelEntry, Refused, ToWorker, Welcome
from worker.channel.ring import Consumer
from worker.channel.segment import WorkerPage
from worker.channel.table import ChannelTable
from worker.config import ChannelSettings

log = logging.getLogger(__name__)

MAX_CONTROL_CONNECTIONS: Final = 64
"""Connections beyond the channels: supervisors and command lines."""
MAX_SILENT_NS: Final = 10_000_000_000
"""How long a connection may say nothing before it gives way to a new one."""
MAX_ACCEPTS: Final = 16
"""Connections accepted per turn."""

_decoder: msgspec.msgpack.Decoder[Hello | Ask] = msgspec.msgpack.Decoder(ToWorker)


@dataclass(slots=True, eq=False)
class Connection:
    """One peer on the socket: a frontend once it said Hello, else a control client."""

    frames: FrameSocket
    pid: int
    opened_ns: int
    channel: Channel | None = None
    spoke: bool = False
    cut_off: bool = False
    closed: bool = False


@dataclass(slots=True)
class Events:
    """What happened. A channel in both lists attached and went at once.

    Attributes:
        fds: watched descriptors that are readable.
    """

    attached: list[Channel] = field(default_factory=list)
    detached: list[Channel] = field(default_factory=list)
    asks: list[tuple[Connection, Ask]] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)


class Reception:
    """All connections of one worker. Owns the listener.

    Attributes:
        models: the table that a new frontend is welcomed with.
        is_draining: new frontends are refused.
        has_news: something waits in ``take_news``.
    """

    def __init__(
        self,
        listener: socket.socket,
        epoll: select.epoll,
        table: ChannelTable,
        page: WorkerPage,
        welcome_fds: tuple[int, int],
        settings: ChannelSettings,
        generation: int,
        barrier: Barrier,
    ) -> None:
        self.listener = listener
        self.models: list[ModelEntry] = []
        self.is_draining = False
        self.has_news = False
        self._news = Events()
        self._epoll = epoll
        self._table = table
        self._page = page
        self._welcome_fds = welcome_fds
        self._settings = settings
        self._generation = generation
        self._barrier = barrier
        self._connections: dict[int, Connection] = {}
        epoll.register(listener, select.EPOLLIN)

    def take_news(self, fds: list[int]) -> Events:
        """Return what happened since the last time, with the watched descriptors that are readable."""
        news, self._news = self._news, Events()
        news.fds = fds
        self.has_news = False
        return news

    def handle(self, fd: int, mask: int, now_ns: int) -> None:
        """Deal with a descriptor that epoll named."""
        if fd == self.listener.fileno():
            self._accept(now_ns)
            return
        connection = self._connections.get(fd)
        if connection is None:
            return
        try:
            if mask & select.EPOLLOUT:
                connection.frames.flush()
                self._watch_writing(connection)
            if mask & ~select.EPOLLOUT:
                self._read(connection)
        except OSError:
            self._end(connection)
        except frames.BadFrame as error:
            self.cut_off(connection, str(error))

    def send(self, connection: Connection, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a frame; what a peer does not read in time cuts it off."""
        if connection.closed or connection.cut_off:
            return
        try:
            connection.frames.send(payload, fds)
            self._watch_writing(connection)
        except frames.NotReading as error:
            self.cut_off(connection, str(error))
        except OSError:
            self._end(connection)

    def tell_channels(self, payload: bytes) -> None:
        """Send a frame to every attached frontend."""
        for connection in list(self._connections.values()):
            if connection.channel is not None:
                self.send(connection, payload)

    def cut_off(self, connection: Connection, reason: str) -> None:
        """Stop talking to a peer that broke the protocol."""
        log.warning("channel.cut_off pid=%d reason=%r", connection.pid, reason)
        if connection.channel is None:
            self._end(connection)
            return
        self._detach(connection.channel)
        connection.cut_off = True
        connection.frames.shutdown()
        self._watch_writing(connection)

    def close(self) -> None:
        """End every connection."""
        for connection in list(self._connections.values()):
            self._end(connection)

    def _accept(self, now_ns: int) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                sock, _ = self.listener.accept()
            except OSError:
                # Nobody waits any more, or no descriptor is left: whoever waits is still there next time.
                return
            self._admit(sock, now_ns)

    def _admit(self, sock: socket.socket, now_ns: int) -> None:
        limit = self._settings.max_channels + MAX_CONTROL_CONNECTIONS
        if len(self._connections) >= limit:
            for connection in list(self._connections.values()):
                if not connection.spoke and now_ns - connection.opened_ns > MAX_SILENT_NS:
                    self._end(connection)
        try:
            pid = attach.peer_pid(sock)
        except (attach.ForeignUser, OSError) as error:
            log.warning("channel.foreign_peer %s", error)
            sock.close()
            return
        if len(self._connections) >= limit:
            log.warning("channel.too_many_connections limit=%d", limit)
            sock.close()
            return
        connection = Connection(FrameSocket(sock, frames.MAX_ASK_BYTES), pid, now_ns)
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock, select.EPOLLIN)

    def _read(self, connection: Connection) -> None:
        if connection.cut_off:
            connection.frames.discard()
        else:
            for payload in connection.frames.read():
                self._understand(connection, payload)
                if connection.closed or connection.cut_off:
                    break
        if connection.frames.eof and not connection.closed:
            self._end(connection)

    def _understand(self, connection: Connection, payload: bytes) -> None:
        try:
            message = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            mismatch = attach.refusal_of_version(payload)
            if mismatch is not None:
                self._refuse(connection, mismatch)
            else:
                self.cut_off(connection, f"frame is no message: {error}")
            return
        if isinstance(message, Ask):
            connection.spoke = True
            self._news.asks.append((connection, message))
            self.has_news = True
        elif connection.spoke:
            self.cut_off(connection, "Hello must come first and once")
        else:
            connection.spoke = True
            self._welcome(connection, message)

    def _welcome(self, connection: Connection, hello: Hello) -> None:
        if hello.layout_version != LAYOUT_VERSION:
            self._refuse(connection, attach.version_mismatch(hello.layout_version))
            return
        if self.is_draining:
            self._refuse(connection, "the worker is draining", retryable=True)
            return
        fds = connection.frames.take_fds()
        try:
            segment = attach.open_segment(hello, fds)
        except (ServingError, OSError) as error:
            _close_all(fds)
            self._refuse(connection, str(error))
            return
        channel_id = self._table.claim()
        if channel_id is None:
            _close_all(fds)
            limit = self._settings.max_channels
            self._refuse(connection, f"all {limit} channels are taken (global.channel.max_channels)", retryable=True)
            return
        segment_fd, bell_fd = fds
        os.close(segment_fd)
        channel = Channel(
            channel_id,
            hello.name,
            connection.pid,
            hello.records,
            segment,
            Consumer(segment.request_ring(self._page.request_tail(channel_id))),
            Bell(bell_fd, segment.frontend_sleeping, self._barrier),
            bell_fd,
            self._table.read_up_to,
            on_corrupt=lambda _, reason: self.cut_off(connection, reason),
            on_release=self._table.released,
        )
        connection.channel = channel
        self._table.put(channel)
        self._news.attached.append(channel)
        self.has_news = True
        log.debug("channel.attached id=%d name=%r pid=%d", channel_id, hello.name, connection.pid)
        welcome = Welcome(
            layout_version=LAYOUT_VERSION, generation=self._generation, channel_id=channel_id, models=self.models
        )
        self.send(connection, frames.encode(welcome), self._welcome_fds)

    def _refuse(self, connection: Connection, reason: str, retryable: bool = False) -> None:
        log.warning("channel.refused pid=%d reason=%r", connection.pid, reason)
        self.send(connection, frames.encode(Refused(reason=reason, retryable=retryable)))
        if not connection.closed:
            self._end(connection)

    def _detach(self, channel: Channel) -> None:
        if channel.closed:
            return
        channel.close()
        log.debug("channel.detached id=%d name=%r pid=%d", channel.id, channel.name, channel.pid)
        self._news.detached.append(channel)
        self.has_news = True

    def _end(self, connection: Connection) -> None:
        """Close a connection; its channel is detached, and its id is no longer in anybody's use."""
        if connection.closed:
            return
        connection.closed = True
        del self._connections[connection.frames.fileno()]
        self._epoll.unregister(connection.frames)
        connection.frames.close()
        if connection.channel is not None:
            self._detach(connection.channel)
            self._table.disconnected(connection.channel.id)

    def _watch_writing(self, connection: Connection) -> None:
        mask = select.EPOLLIN | (select.EPOLLOUT if connection.frames.unsent else 0)
        self._epoll.modify(connection.frames, mask)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
