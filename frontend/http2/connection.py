"""The protocol of one HTTP/2 connection (RFC 9113), for a server: bytes in, calls to the application; no I/O, no clock.

Theory of operation
    ``Intake`` finds the frames; here is what those of a request mean, in ``Controls`` what the others do. What is to
    be sent lies in ``sender``.
    A request that came whole can be begun as such: one call and one object instead of one per frame and layer.
    A stream leaves ``streams`` when its answer was sent in full, or when either side resets it. If the client had
    still something to send, it is told to stop (RST_STREAM NO_ERROR) and what is on its way is swallowed: the last
    ``MAX_DROPPED`` such streams are remembered for that.
    The end comes in one of two ways. A fault of the client: GOAWAY with the reason, and ``over``. A drain, in two
    steps, as a client may have sent requests before it hears of it: GOAWAY that names no last stream, with a PING;
    when that was answered, or a tick later, GOAWAY with the last stream; ``over`` when no stream is left.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final

from frontend.http2 import frames
from frontend.http2.controls import DRAIN_PING, Controls
from frontend.http2.fields import Head, HeadDecoder
from frontend.http2.frames import Code, ConnectionFault
from frontend.http2.intake import Intake
from frontend.http2.limits import Limits
from frontend.http2.peer import Budget
from frontend.http2.sender import Sender
from frontend.http2.stream import Application, Stream, WholeStream

MAX_DROPPED: Final = 1024


class Phase(IntEnum):
    """How far a drain is."""

    SERVING = 0
    TOLD = 1
    """The client knows; what it sends is still served."""
    LAST_NAMED = 2
    """Nothing new is served."""


_LAST_NAMED: Final = Phase.LAST_NAMED


class Connection:
    """One client's connection.

    Attributes:
        streams: requests that are not answered in full, by id.
        last_id: highest stream that the client has used.
        over: nothing more is received; close when all was written.
    """

    def __init__(self, application: Application, limits: Limits, wake: Callable[[], None], now_ns: int) -> None:
        self._application = application
        self._limits = limits
        self._intake = Intake(self, HeadDecoder(limits, application.interpret), limits)
        self.sender = Sender(wake, self._finished)
        self.streams: dict[int, Stream] = {}
        self.last_id = 0
        self.over = False
        self._since_ns = now_ns
        self._seen_id = 0
        self._phase = Phase.SERVING
        self._told_ticks = 0
        self._dropped: dict[int, None] = {}
        self._window = limits.connection_window_bytes
        self._half_window = limits.connection_window_bytes // 2
        self._max_streams = limits.max_streams
        self._stream_window = limits.stream_window_bytes
        self._budget = Budget(limits)
        self._controls = Controls(self, self.sender, self._budget)
        self.window_update = self._controls.window_update

    # What the transport's side calls

    def start(self) -> None:
        """Send the server's preface."""
        limits = self._limits
        told = frames.settings(
            {
                frames.SETTINGS_MAX_CONCURRENT_STREAMS: limits.max_streams,
                frames.SETTINGS_INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                frames.SETTINGS_MAX_FRAME_SIZE: limits.frame_bytes,
                frames.SETTINGS_MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
            }
        )
        self.sender.control(
            told + frames.window_update(0, limits.connection_window_bytes - frames.DEFAULT_WINDOW_BYTES)
        )

    def receive(self, data: bytes) -> None:
        """Take bytes from the client, in any pieces. They are dropped once the connection is ``over``."""
        if self.over:
            return
        try:
            self._intake.receive(data)
        except ConnectionFault as fault:
            self.fail(fault.code, str(fault))
            return
        if self._window <= self._half_window:
            self.sender.control(frames.window_update(0, self._limits.connection_window_bytes - self._window))
            self._window = self._limits.connection_window_bytes

    def lost(self) -> None:
        """The client is gone: every request is withdrawn, everything lent is due for release."""
        self.over = True
        self._withdraw_all()

    def fail(self, code: Code, text: str) -> None:
        """Tell the client why the connection ends, withdraw its requests, and be ``over``."""
        if not self.over:
            self.over = True
            self._withdraw_all()
            self.sender.control(frames.goaway(self.last_id, code, text))

    def drain(self, text: str) -> None:
        """Finish what is under way and what the client has sent meanwhile, then be ``over``."""
        if self.over or self._phase is not Phase.SERVING:
            return
        if not self._intake.greeted:
            self.fail(Code.NO_ERROR, text)
            return
        self._phase = Phase.TOLD
        told = frames.goaway(frames.MOST_STREAM_ID, Code.NO_ERROR, text)
        self.sender.control(told + frames.ping(DRAIN_PING, ack=False))

    def tick(self, now_ns: int) -> None:
        """Look at the time; called about once a second."""
        limits = self._limits
        self._budget.renew()
        if self.over:
            return
        if not self._intake.greeted:
            if now_ns - self._since_ns > limits.read_ns:
                self.fail(Code.SETTINGS_TIMEOUT, f"no HTTP/2 preface and SETTINGS within {limits.read_ns / 1e9:g} s")
            return
        if self._phase is Phase.TOLD:
            self._told_ticks += 1
            if self._told_ticks > 1:
                self._name_last()
        for stream in list(self.streams.values()):
            if stream.open and stream.receiver is not None:
                stream.receiver.tick(now_ns)
            if stream.open and stream.queue:
                self._tick_stalled(stream, now_ns)
        if self.streams or self.last_id != self._seen_id:
            self._seen_id = self.last_id
            self._since_ns = now_ns
        elif now_ns - self._since_ns > limits.idle_ns:
            self.drain("idle")

    # What the application calls

    def reset(self, stream: Stream, code: Code) -> None:
        """End a stream without an answer; its receiver is not called any more."""
        if stream.open:
            self._drop(stream)
            self.sender.control(frames.rst_stream(stream.id, code))

    def refill(self, stream: Stream) -> None:
        """Let the client send as much as the receiver has room for."""
        if stream.ended or not stream.open or stream.receiver is None:
            return
        room = min(stream.receiver.room(), frames.MOST_WINDOW_BYTES)
        if room - stream.receive_window >= self._limits.stream_window_bytes // 2:
            self.sender.control(frames.window_update(stream.id, room - stream.receive_window))
            stream.receive_window = room

    def exchange(self, stream: Stream, whole: WholeStream) -> None:
        """Let another take the place of a stream whose request is complete, and begin it."""
        whole.send_window = stream.send_window
        whole.receiver = whole
        self.streams[stream.id] = whole
        stream.open = False
        stream.receiver = None
        whole.begin(self)

    # What the intake finds

    def open(self, stream_id: int, head: Head, *, ends: bool) -> None:
        if not stream_id & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"client opened stream {stream_id}: its streams are odd")
        self.last_id = stream_id
        if self._phase is _LAST_NAMED:
            self._remember(stream_id)
            return
        if head.malformed or len(self.streams) >= self._max_streams:
            self._budget.reset()
            self._remember(stream_id)
            code = Code.PROTOCOL_ERROR if head.malformed else Code.REFUSED_STREAM
            self.sender.control(frames.rst_stream(stream_id, code))
            return
        stream = Stream(stream_id)
        stream.receive_window = self._stream_window
        stream.send_window = self.sender.initial_window
        stream.body_left = head.content_length
        stream.ended = ends
        self.streams[stream_id] = stream
        receiver = self._application.open(self, stream, head.value)
        if stream.open:
            stream.receiver = receiver
            if ends:
                self._end(stream)

    def whole(self, stream_id: int, head: Head, widened: int, data: bytes, at: int, stop: int) -> bool:
        size = stop - at
        streams = self.streams
        send_window = self.sender.initial_window + widened
        if (
            size > self._window
            or len(streams) >= self._max_streams
            or (head.content_length != size and head.content_length >= 0)
            or self._phase is _LAST_NAMED
            or head.malformed
            or not stream_id & 1
            or send_window > frames.MOST_WINDOW_BYTES
        ):
            return False
        stream = self._application.whole(stream_id, head.value, data, at, stop)
        if stream is None:
            return False
        self.last_id = stream_id
        self._window -= size
        stream.send_window = send_window
        stream.receiver = stream
        streams[stream_id] = stream
        if widened:
            self._controls.spend("WINDOW_UPDATE frames")
        stream.begin(self)
        return True

    def trailers(self, stream_id: int, malformed: str, *, ends: bool) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id not in self._dropped:
                raise ConnectionFault(Code.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which is over")
        elif stream.ended:
            self.fault(stream, Code.STREAM_CLOSED)
        elif malformed or not ends:
            self.fault(stream, Code.PROTOCOL_ERROR)
        else:
            stream.ended = True
            self._end(stream)

    def admit(self, stream_id: int, frame_bytes: int, data_bytes: int, *, ends: bool) -> None:
        self._window -= frame_bytes
        if self._window < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        if not data_bytes and not ends:
            self._budget.idle("DATA frames without data")
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id not in self._dropped:
                self._budget.reset()
                self._remember(stream_id)
                self.sender.control(frames.rst_stream(stream_id, Code.STREAM_CLOSED))
            return
        stream.receive_window -= frame_bytes
        if stream.ended:
            self.fault(stream, Code.STREAM_CLOSED)
        elif stream.receive_window < 0:
            self.fault(stream, Code.FLOW_CONTROL_ERROR)
        elif stream.body_left >= 0:
            stream.body_left -= data_bytes
            if stream.body_left < 0:
                self.fault(stream, Code.PROTOCOL_ERROR)

    def data(self, stream_id: int, data: bytes, at: int, stop: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None and stream.receiver is not None:
            stream.receiver.data(data, at, stop)

    def data_end(self, stream_id: int, *, ends: bool) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if ends:
            stream.ended = True
            self._end(stream)
        elif stream.receive_window <= self._limits.stream_window_bytes // 2:
            self.refill(stream)

    def control(self, stream_id: int, kind: int, flags: int, payload: bytes) -> None:
        self._controls.take(stream_id, kind, flags, payload)

    # What control frames bring about

    def heard_of_drain(self) -> None:
        if self._phase is Phase.TOLD:
            self._name_last()

    def abandon(self, stream: Stream) -> None:
        """The client does not wait any more."""
        receiver = stream.receiver
        self._drop(stream)
        if receiver is not None:
            receiver.cancel()

    def fault(self, stream: Stream, code: Code) -> None:
        """The client broke the protocol on a stream."""
        self._budget.reset()
        self.abandon(stream)
        self._remember(stream.id)
        self.sender.control(frames.rst_stream(stream.id, code))

    # Ends

    def _name_last(self) -> None:
        self._phase = Phase.LAST_NAMED
        self.sender.control(frames.goaway(self.last_id, Code.NO_ERROR, "draining"))
        self.over = self.over or not self.streams

    def _end(self, stream: Stream) -> None:
        if stream.body_left > 0:
            self.fault(stream, Code.PROTOCOL_ERROR)
        elif stream.receiver is not None:
            stream.receiver.end()

    def _finished(self, stream: Stream) -> None:
        """The answer was sent in full."""
        self._drop(stream)
        if not stream.ended:
            self.sender.control(frames.rst_stream(stream.id, Code.NO_ERROR))

    def _drop(self, stream: Stream) -> None:
        stream.open = False
        # A stream may be its own receiver: left so, every request would wait for the garbage collector.
        stream.receiver = None
        del self.streams[stream.id]
        if not stream.ended:
            self._remember(stream.id)
        if stream.queue:
            self.sender.drop(stream)
        self._application.closed()
        if self._phase is _LAST_NAMED and not self.streams:
            self.over = True

    def _withdraw_all(self) -> None:
        for stream in list(self.streams.values()):
            if stream.open:
                self.abandon(stream)

    def _remember(self, stream_id: int) -> None:
        dropped = self._dropped
        dropped[stream_id] = None
        if len(dropped) > MAX_DROPPED:
            del dropped[next(iter(dropped))]

    def _tick_stalled(self, stream: Stream, now_ns: int) -> None:
        if stream.sent_bytes != stream.stalled_at_bytes or not stream.stalled_ns:
            stream.stalled_at_bytes = stream.sent_bytes
            stream.stalled_ns = now_ns
        elif now_ns - stream.stalled_ns > self._limits.write_ns:
            self.abandon(stream)
            self.sender.control(frames.rst_stream(stream.id, Code.CANCEL))
