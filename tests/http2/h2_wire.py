"""Both ends of an HTTP/2 connection in memory: ours with an echoing application; h2 or bare frames as the client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import h2.config
import h2.connection
import h2.events
from hpack import Encoder

from frontend.http2 import frames
from frontend.http2.connection import Connection
from frontend.http2.fields import Head, encode_fields
from frontend.http2.frames import Block
from frontend.http2.limits import Limits
from frontend.http2.stream import Receiver, Stream, WholeStream

SECOND = 1_000_000_000
REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/echo"), (":authority", "here")]
HEAD = Block(encode_fields(((":status", "200"),)))
TAIL = Block(encode_fields((("grpc-status", "0"),)))


def limits(**changes: Any) -> Limits:
    """Return limits as in production, but for the changes."""
    values: dict[str, Any] = {
        "max_header_bytes": 65_536,
        "idle_ns": 120 * SECOND,
        "read_ns": 60 * SECOND,
        "write_ns": 60 * SECOND,
    }
    return Limits(**{**values, **changes})


class Echo:
    """A request that is answered with its body when it ends, or when ``give`` is called for a held one."""

    def __init__(self, app: EchoApp, connection: Connection, stream: Stream, path: bytes) -> None:
        self.app = app
        self.connection = connection
        self.stream = stream
        self.path = path
        self.body = bytearray()
        self.cancelled = False
        self.complete = False
        self.ticks = 0

    def data(self, data: bytes, at: int, stop: int) -> None:
        assert stop > at
        self.body += data[at:stop]

    def end(self) -> None:
        assert not self.complete
        self.complete = True
        if self.path == b"/echo":
            self.give()

    def give(self, body: bytes | None = None) -> None:
        data = bytes(self.body) if body is None else body
        self.app.lent += 1
        self.connection.sender.answer(self.stream, HEAD, [data], len(data), TAIL, self.app.release)

    def cancel(self) -> None:
        assert not self.cancelled
        self.cancelled = True

    def writable(self) -> None:
        pass

    def room(self) -> int:
        return self.app.room

    def tick(self, now_ns: int) -> None:
        self.ticks += 1


class WholeEcho(WholeStream):
    """The same for a request that was there in full."""

    def __init__(self, app: EchoApp, stream_id: int, path: bytes, body: bytes) -> None:
        super().__init__(stream_id)
        self._of = app, path, body

    def begin(self, connection: Connection) -> None:
        app, path, body = self._of
        self._echo = Echo(app, connection, self, path)
        app.requests.append(self._echo)
        self._echo.body += body
        self._echo.end()

    def cancel(self) -> None:
        self._echo.cancel()


@dataclass
class EchoApp:
    """``lent``: answers whose memory was not given back. ``takes_whole``: requests that are there in full."""

    takes_whole: ClassVar[bool] = False
    requests: list[Echo] = field(default_factory=list)
    whole_count: int = 0
    lent: int = 0
    open_count: int = 0
    room: int = 1 << 20

    def interpret(self, head: Head) -> Head:
        return head

    def open(self, connection: Connection, stream: Stream, value: Head) -> Receiver:
        self.open_count += 1
        echo = Echo(self, connection, stream, value.path)
        self.requests.append(echo)
        return echo

    def whole(self, stream_id: int, value: Head, data: bytes, at: int, stop: int) -> WholeStream | None:
        if not self.takes_whole:
            return None
        self.open_count += 1
        self.whole_count += 1
        return WholeEcho(self, stream_id, value.path, data[at:stop])

    def closed(self) -> None:
        self.open_count -= 1

    def release(self) -> None:
        self.lent -= 1
        assert self.lent >= 0


class Server:
    """Our end; ``output`` is everything it has sent."""

    def __init__(self, limit: Limits | None = None) -> None:
        self.app = EchoApp()
        self.wakes = 0
        self.connection = Connection(self.app, limit or limits(), self._wake, 0)
        self.connection.start()
        self.output = bytearray()

    def _wake(self) -> None:
        self.wakes += 1

    def receive(self, data: bytes) -> bytes:
        """Give bytes to the server; return what it sends."""
        self.connection.receive(data)
        return self.flush()

    def flush(self) -> bytes:
        """Return what the server has to send."""
        out = bytearray()
        while True:
            parts, releases = self.connection.sender.take()
            out += b"".join(parts)
            for release in releases:
                release()
            if not self.connection.sender.more():
                break
        self.output += out
        return bytes(out)


def frames_in(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield kind, flags, stream and payload of every frame."""
    at = 0
    while at < len(data):
        high, low, kind, flags, stream_id = frames.HEADER.unpack_from(data, at)
        length = high << 8 | low
        payload = data[at + 9 : at + 9 + length]
        assert len(payload) == length, "a frame was cut"
        yield kind, flags, stream_id, payload
        at += 9 + length


def goaway_in(data: bytes) -> tuple[int, frames.Code, str]:
    """Return last stream, code and text of the last GOAWAY."""
    payload = [payload for kind, _, _, payload in frames_in(data) if kind == frames.GOAWAY][-1]
    return frames.word(payload, 0), frames.Code(frames.word(payload, 4)), payload[8:].decode()


def resets_in(data: bytes) -> dict[int, frames.Code]:
    """Return the codes of RST_STREAM by stream."""
    return {
        stream_id: frames.Code(frames.word(payload, 0))
        for kind, _, stream_id, payload in frames_in(data)
        if kind == frames.RST_STREAM
    }


class BareClient:
    """Writes frames as it is told, right or wrong."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.encoder = Encoder()
        server.receive(frames.PREFACE + frames.settings({}))

    def block(self, fields: list[tuple[str, str]] | None = None) -> bytes:
        return bytes(self.encoder.encode(fields or REQUEST))

    def send(self, kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
        return self.server.receive(frames.frame(kind, flags, stream_id, payload))

    def request(self, stream_id: int, path: str = "/echo", *, ends: bool = False) -> bytes:
        fields = [(name, path if name == ":path" else value) for name, value in REQUEST]
        flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
        return self.send(frames.HEADERS, flags, stream_id, self.block(fields))

    def data(self, stream_id: int, data: bytes, *, ends: bool = False) -> bytes:
        return self.send(frames.DATA, frames.END_STREAM if ends else 0, stream_id, data)


def made(**changes: int) -> tuple[Server, BareClient]:
    """Return a server with these limits, and a client of bare frames."""
    server = Server(limits(**changes))
    return server, BareClient(server)


class H2Client:
    """The client of an independent library; checks everything that the server sends."""

    def __init__(self, server: Server, cut: Callable[[bytes], list[bytes]] = lambda data: [data]) -> None:
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.server = server
        self.bodies: dict[int, bytearray] = {}
        self.trailers: dict[int, dict[str, str]] = {}
        self.resets: dict[int, int] = {}
        self.ended: set[int] = set()
        self.events: list[Any] = []
        self.acknowledge = True
        self._cut = cut
        self.h2.initiate_connection()
        self.take(server.flush())
        self.exchange()

    def exchange(self) -> None:
        """Carry bytes between the two until both are silent."""
        while out := self.h2.data_to_send():
            for piece in self._cut(out):
                self.server.connection.receive(piece)
            self.take(self.server.flush())

    def take(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self.events.append(event)
            match event:
                case h2.events.DataReceived():
                    self.bodies.setdefault(event.stream_id, bytearray()).extend(event.data)
                    if self.acknowledge and event.flow_controlled_length:
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.TrailersReceived():
                    self.trailers[event.stream_id] = dict(event.headers)
                case h2.events.StreamEnded():
                    self.ended.add(event.stream_id)
                case h2.events.StreamReset():
                    self.resets[event.stream_id] = event.error_code

    def request(self, stream_id: int, body: bytes, path: str = "/echo", *, padding: int | None = None) -> None:
        """Send a whole request, as far as the windows allow at once; ``upload`` sends more."""
        fields = [(name, path if name == ":path" else value) for name, value in REQUEST]
        self.h2.send_headers(stream_id, fields, end_stream=False)
        self.upload(stream_id, body, padding=padding)

    def upload(self, stream_id: int, body: bytes, *, padding: int | None = None) -> None:
        view = memoryview(body)
        while len(view):
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            room -= 0 if padding is None else padding + 1
            if room <= 0:
                before = self.h2.local_flow_control_window(stream_id)
                self.exchange()
                assert self.h2.local_flow_control_window(stream_id) > before, "the server opens no window"
                continue
            self.h2.send_data(stream_id, bytes(view[:room]), pad_length=padding)
            view = view[room:]
        self.h2.end_stream(stream_id)
        self.exchange()
