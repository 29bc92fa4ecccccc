"""The frames of a client that carry no request: windows, settings, pings, resets; what they mean and how many may come.

Each is checked here; what it brings about is the connection's or its sender's.
"""

from __future__ import annotations

from typing import Final, Protocol

from frontend.http2 import frames
from frontend.http2.frames import Code, ConnectionFault
from frontend.http2.peer import Budget, read_settings
from frontend.http2.sender import Sender
from frontend.http2.stream import Stream

DRAIN_PING: Final = b"draining"
"""Sent with the news of a drain; its acknowledgement says that the client has read it."""


class Owner(Protocol):
    """What control frames act on."""

    streams: dict[int, Stream]
    last_id: int

    def fault(self, stream: Stream, code: Code) -> None:
        """The client broke the protocol on a stream."""
        ...

    def abandon(self, stream: Stream) -> None:
        """The client does not wait any more."""
        ...

    def heard_of_drain(self) -> None:
        """The client has read that the connection drains."""
        ...


class Controls:
    """Takes the control frames of one connection. Any method may raise ConnectionFault."""

    __slots__ = ("_budget", "_connection", "_sender")

    def __init__(self, connection: Owner, sender: Sender, budget: Budget) -> None:
        self._connection = connection
        self._sender = sender
        self._budget = budget

    def take(self, stream_id: int, kind: int, flags: int, payload: bytes) -> None:
        """Do what one frame asks for, or count it."""
        match kind:
            case frames.WINDOW_UPDATE:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE must be of 4 bytes")
            case frames.SETTINGS:
                self._on_settings(stream_id, flags, payload)
            case frames.PING:
                self._on_ping(stream_id, flags, payload)
            case frames.RST_STREAM:
                self._on_reset(stream_id, payload)
            case frames.GOAWAY:
                if stream_id:
                    raise ConnectionFault(Code.PROTOCOL_ERROR, "GOAWAY on a stream")
                self._budget.idle("GOAWAY frames")
            case frames.PRIORITY:
                if not stream_id:
                    raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY on stream 0")
                if len(payload) != 5:
                    raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PRIORITY must be of 5 bytes")
                self._budget.idle("PRIORITY frames")
            case frames.PUSH_PROMISE:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
            case _:
                self._budget.idle("unknown frames")

    def window_update(self, stream_id: int, increment: int) -> None:
        """Let more be sent on a stream, or on all of them."""
        self.spend("WINDOW_UPDATE frames")
        if stream_id == 0:
            if not increment:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            if not self._sender.widen_all(increment):
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "the connection's window exceeds 2^31 - 1")
            return
        if stream_id > self._connection.last_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"WINDOW_UPDATE on stream {stream_id}, which is idle")
        stream = self._connection.streams.get(stream_id)
        if stream is None:
            return
        if not increment:
            self._connection.fault(stream, Code.PROTOCOL_ERROR)
        elif not self._sender.widen(stream, increment):
            self._connection.fault(stream, Code.FLOW_CONTROL_ERROR)

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._budget.idle("SETTINGS frames")
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "acknowledged SETTINGS with values")
            return
        wanted = read_settings(payload)
        self._sender.frame_bytes = wanted.get(frames.SETTINGS_MAX_FRAME_SIZE, self._sender.frame_bytes)
        window = wanted.get(frames.SETTINGS_INITIAL_WINDOW_SIZE, self._sender.initial_window)
        change = window - self._sender.initial_window
        self._sender.initial_window = window
        for stream in list(self._connection.streams.values()) if change else ():
            if not self._sender.widen(stream, change):
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a stream's window exceeds 2^31 - 1")
        self._sender.control(frames.SETTINGS_ACK)

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING must be of 8 bytes")
        self.spend("PING frames")
        if not flags & frames.ACK:
            self._sender.control(frames.ping(payload, ack=True))
        elif payload == DRAIN_PING:
            self._connection.heard_of_drain()

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "RST_STREAM must be of 4 bytes")
        if stream_id == 0 or stream_id > self._connection.last_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"RST_STREAM on stream {stream_id}, which is idle")
        self._budget.reset()
        stream = self._connection.streams.get(stream_id)
        if stream is not None:
            self._connection.abandon(stream)

    def spend(self, what: str) -> None:
        """Count a frame that a client also sends because of what it received."""
        if self._sender.credit > 0:
            self._sender.credit -= 1
        else:
            self._budget.idle(what)
