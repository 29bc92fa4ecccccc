"""On a connection that knows a head, the next message means what it means on a new connection, whatever its bytes."""

from __future__ import annotations

import asyncio

from http_double import Recorder, Told
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.httpd.exchange import Exchange
from frontend.httpd.hangup import HangupWatch
from frontend.httpd.protocol import Connection
from frontend.httpd.state import ServerState
from frontend.settings import EndpointSettings

NAMES = [
    b"traceparent", b"tracestate", b"X-Request-Id", b"x-request-id", b"B3", b"X-B3-TraceId", b"X-Other", b"Accept",
    b"x-ringserve-id", b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"Upgrade",
    b"Cookie",
]  # fmt: skip
PLAIN = st.text("abz019-_.:;=,/+!~", min_size=1, max_size=12).map(str.encode)
ODD = [
    b"", b"a b", b"a ", b" a", b"a\t", b"\ta", b"chunked", b"close", b"3", b"h2c", b"\xe9", b"a, b", b"a\nb", b"a\rb",
    b"a\0b", b"a\x7fb", b"a\n", b"a\r", b"\n", b"\r", b"a\r\n b", b"a\r\nX-Request-Id: b", b"a\r\nHost: a",
    b"a\r\nContent-Length: 0", b"a\r\nTransfer-Encoding: chunked", b"v" * 256, b"v" * 257, b"v" * 2048,
]  # fmt: skip
VALUES = st.one_of(PLAIN, PLAIN, PLAIN, st.sampled_from(ODD))
COLONS = st.sampled_from([b": ", b": ", b":", b":  ", b":\t", b" : "])
ENDS = st.sampled_from([b"", b"", b" ", b"\t", b"\r", b"\r\n more"])
PLAIN_LINE = st.tuples(st.sampled_from(NAMES[:9]), st.just(b": "), PLAIN, st.just(b""))
ODD_LINE = st.tuples(st.sampled_from(NAMES), COLONS, VALUES, ENDS)
LENGTH_LINES = st.sampled_from([b"Content-Length: %d", b"content-length: %d", b"Content-Length:%d", b"X-N: %d"])
SPLICES = [
    b"", b"a", b"0", b"-", b" ", b"\t", b",", b":", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b"\x7f", b"\x80",
    b"\r\nTransfer-Encoding: chunked", b"\r\nContent-Length: 3", b"\r\nX-Request-Id: z", b"\r\nConnection: close",
    b"\r\n folded", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
]  # fmt: skip
Line = tuple[bytes, bytes, bytes, bytes]


class Served:
    """One connection without a socket."""

    def __init__(self, max_header_bytes: int) -> None:
        limits = EndpointSettings(max_header_bytes=max_header_bytes)
        self.app = Told()
        state = ServerState(self.app, limits, lambda: 1, HangupWatch(asyncio.get_running_loop()), 1 << 30, lambda: None)
        self.connection = Connection(state)
        self.transport = Recorder()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    async def take(self, data: bytes) -> tuple[list[object], bytes, bool, bool]:
        """Return the requests that came with ``data``, what was answered, whether one is unfinished, and the end."""
        seen, written = len(self.app.seen), len(self.transport.written)
        self.connection.data_received(data)
        while self.connection._backlog is not None and not self.transport.closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        intake = self.connection._intake
        unfinished = intake.mid_message or intake.stopped
        requests = [facts(exchange) for exchange in self.app.seen[seen:]]
        return requests, self.transport.written[written:], unfinished, self.transport.closed


def facts(exchange: Exchange) -> object:
    head = exchange.head
    return (
        head.method, head.target, head.raw_path, head.query, list(head.headers.items()), head.http10, head.keep_alive,
        bytes(exchange.body),
    )  # fmt: skip


def rendered(lines: list[Line], length_line: bytes, at: int, body: bytes) -> bytes:
    out = [b"".join(line) for line in lines]
    out.insert(min(at, len(out)), length_line % len(body))
    return b"\r\n".join((b"POST /echo?q HTTP/1.1", b"Host: h", *out)) + b"\r\n\r\n" + body


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Messages of one client: nearly the same lines with other values and lengths, and now and then broken bytes."""
    lines = draw(st.lists(PLAIN_LINE, min_size=1, max_size=5))
    length_line, at = b"Content-Length: %d", draw(st.integers(0, 5))
    if draw(st.integers(0, 3)) == 0:
        lines.append(draw(ODD_LINE))
        length_line = draw(LENGTH_LINES)
    messages = [rendered(lines, length_line, at, draw(st.binary(max_size=12)))]
    for _ in range(draw(st.integers(1, 4))):
        for number in draw(st.sets(st.integers(0, 2), min_size=1)):
            if number < len(lines):
                name, colon, _, end = lines[number]
                lines[number] = name, colon, draw(VALUES), end
        message = rendered(lines, length_line, at, draw(st.binary(max_size=12)))
        if draw(st.integers(0, 4)) == 0:
            start = draw(st.integers(0, len(message)))
            message = message[:start] + draw(st.sampled_from(SPLICES)) + message[start + draw(st.integers(0, 3)) :]
        if message:
            messages.append(message)
    return messages


async def compare(messages: list[bytes], max_header_bytes: int) -> None:
    served = Served(max_header_bytes)
    for message in messages:
        new = Served(max_header_bytes)
        expected = await new.take(message)
        new.connection.connection_lost(None)
        assert await served.take(message) == expected
        if expected[2] or expected[3]:
            break
    served.connection.connection_lost(None)


@settings(max_examples=400, deadline=None)
@given(conversations())
def test_nearly_the_same_messages_mean_the_same(messages: list[bytes]) -> None:
    asyncio.run(compare(messages, 64 * 1024))


def test_any_odd_value_means_the_same() -> None:
    def told(one: bytes, two: bytes) -> bytes:
        lines = [(b"X-Request-Id", b": ", one, b""), (b"b3", b": ", two, b"")]
        return rendered(lines, b"Content-Length: %d", 1, b"abc")

    async def run() -> None:
        for value in ODD:
            await compare([told(b"one", b"two"), told(value, b"2")], 64 * 1024)
            await compare([told(b"one", b"two"), told(b"1", value)], 64 * 1024)

    asyncio.run(run())


def test_any_few_bytes_anywhere_mean_the_same() -> None:
    first = rendered([(b"b3", b": ", b"one", b"")], b"Content-Length: %d", 1, b"abc")

    async def run() -> None:
        for splice in SPLICES:
            for at in range(len(first)):
                await compare([first, first[:at] + splice + first[at:]], 64 * 1024)
                await compare([first, first[:at] + splice + first[at + 1 :]], 64 * 1024)

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=5), st.integers(1, 100))
def test_the_limit_of_a_head_is_the_same(sizes: list[int], body_bytes: int) -> None:
    # Around the smallest limit, of which the last bytes are filled by the value that differs.
    fill = (b"X-Fill", b": ", b"f" * 948, b"")
    messages = [
        rendered([fill, (b"X-Request-Id", b": ", b"i" * (1 + size), b"")], b"Content-Length: %d", 0, b"x" * body_bytes)
        for size in sizes
    ]
    asyncio.run(compare(messages, 1024))
