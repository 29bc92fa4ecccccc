"""What a client must not do, and what it may not do too often: every fault has its code, every flood its end."""

from __future__ import annotations

import pytest
from h2_wire import SECOND, frames_in, goaway_in, made, resets_in

from frontend.http2 import frames
from frontend.http2.connection import MAX_DROPPED
from frontend.http2.frames import Code

WHOLE = frames.END_HEADERS | frames.END_STREAM


FAULTS: list[tuple[str, list[tuple[int, int, int, bytes]], Code]] = [
    ("even stream", [(frames.HEADERS, WHOLE, 2, b"BLOCK")], Code.PROTOCOL_ERROR),
    ("HEADERS on stream 0", [(frames.HEADERS, WHOLE, 0, b"BLOCK")], Code.PROTOCOL_ERROR),
    ("DATA on an idle stream", [(frames.DATA, 0, 9, b"x")], Code.PROTOCOL_ERROR),
    ("DATA on stream 0", [(frames.DATA, 0, 0, b"x")], Code.PROTOCOL_ERROR),
    ("RST_STREAM on an idle stream", [(frames.RST_STREAM, 0, 9, bytes(4))], Code.PROTOCOL_ERROR),
    ("RST_STREAM of 3 bytes", [(frames.RST_STREAM, 0, 9, bytes(3))], Code.FRAME_SIZE_ERROR),
    ("WINDOW_UPDATE on an idle stream", [(frames.WINDOW_UPDATE, 0, 9, bytes(3) + b"1")], Code.PROTOCOL_ERROR),
    ("WINDOW_UPDATE by 0", [(frames.WINDOW_UPDATE, 0, 0, bytes(4))], Code.PROTOCOL_ERROR),
    ("WINDOW_UPDATE of 5 bytes", [(frames.WINDOW_UPDATE, 0, 0, bytes(5))], Code.FRAME_SIZE_ERROR),
    ("too wide a window", [(frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff")], Code.FLOW_CONTROL_ERROR),
    ("SETTINGS on a stream", [(frames.SETTINGS, 0, 1, b"")], Code.PROTOCOL_ERROR),
    ("SETTINGS of 5 bytes", [(frames.SETTINGS, 0, 0, bytes(5))], Code.FRAME_SIZE_ERROR),
    ("acknowledged SETTINGS with values", [(frames.SETTINGS, frames.ACK, 0, bytes(6))], Code.FRAME_SIZE_ERROR),
    ("ENABLE_PUSH 2", [(frames.SETTINGS, 0, 0, frames.SETTING.pack(2, 2))], Code.PROTOCOL_ERROR),
    ("INITIAL_WINDOW_SIZE 2^31", [(frames.SETTINGS, 0, 0, frames.SETTING.pack(4, 2**31))], Code.FLOW_CONTROL_ERROR),
    ("MAX_FRAME_SIZE 100", [(frames.SETTINGS, 0, 0, frames.SETTING.pack(5, 100))], Code.PROTOCOL_ERROR),
    ("PING of 7 bytes", [(frames.PING, 0, 0, bytes(7))], Code.FRAME_SIZE_ERROR),
    ("PING on a stream", [(frames.PING, 0, 1, bytes(8))], Code.PROTOCOL_ERROR),
    ("PRIORITY of 4 bytes", [(frames.PRIORITY, 0, 1, bytes(4))], Code.FRAME_SIZE_ERROR),
    ("PRIORITY on stream 0", [(frames.PRIORITY, 0, 0, bytes(5))], Code.PROTOCOL_ERROR),
    ("GOAWAY on a stream", [(frames.GOAWAY, 0, 1, bytes(8))], Code.PROTOCOL_ERROR),
    ("PUSH_PROMISE", [(frames.PUSH_PROMISE, frames.END_HEADERS, 1, bytes(8))], Code.PROTOCOL_ERROR),
    ("CONTINUATION alone", [(frames.CONTINUATION, frames.END_HEADERS, 1, b"")], Code.PROTOCOL_ERROR),
    ("PING within a block", [(frames.HEADERS, 0, 1, b""), (frames.PING, 0, 0, bytes(8))], Code.PROTOCOL_ERROR),
    ("DATA within a block", [(frames.HEADERS, 0, 1, b""), (frames.DATA, 0, 1, b"x")], Code.PROTOCOL_ERROR),
    (
        "CONTINUATION of another stream",
        [(frames.HEADERS, 0, 1, b""), (frames.CONTINUATION, 0, 3, b"")],
        Code.PROTOCOL_ERROR,
    ),
    ("padding over the frame", [(frames.HEADERS, WHOLE | frames.PADDED, 1, b"\x05ab")], Code.PROTOCOL_ERROR),
    ("padded HEADERS of 0 bytes", [(frames.HEADERS, WHOLE | frames.PADDED, 1, b"")], Code.FRAME_SIZE_ERROR),
    (
        "HEADERS too short for a priority",
        [(frames.HEADERS, WHOLE | frames.PRIORITIZED, 1, b"abc")],
        Code.FRAME_SIZE_ERROR,
    ),
    ("no header block", [(frames.HEADERS, WHOLE, 1, b"\xff\xff\xff\xff\xff\xff")], Code.COMPRESSION_ERROR),
    ("index of nothing", [(frames.HEADERS, WHOLE, 1, b"\xfe")], Code.COMPRESSION_ERROR),
    (
        "a stream again",
        [(frames.HEADERS, WHOLE, 5, b"BLOCK"), (frames.HEADERS, WHOLE, 3, b"BLOCK")],
        Code.STREAM_CLOSED,
    ),
]


@pytest.mark.parametrize(("sent", "code"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_faults_end_the_connection_with_their_code(sent: list[tuple[int, int, int, bytes]], code: Code) -> None:
    server, client = made()
    client.request(1_001, "/held") if sent[0][2] == 1_001 else None
    for kind, flags, stream_id, payload in sent:
        assert not server.connection.over
        out = client.send(kind, flags, stream_id, client.block() if payload == b"BLOCK" else payload)
    assert server.connection.over
    assert goaway_in(out)[1] is code
    assert client.send(frames.PING, payload=bytes(8)) == b""


def test_a_frame_over_the_limit_ends_the_connection_before_it_is_read() -> None:
    server, _client = made()
    out = server.receive(frames.HEADER.pack(1 << 10, 1, frames.DATA, 0, 1))
    assert goaway_in(out)[1] is Code.FRAME_SIZE_ERROR


def test_a_fault_withdraws_what_runs() -> None:
    server, client = made()
    client.request(1, "/held", ends=True)
    last, code, _ = goaway_in(client.send(frames.PING, payload=b""))
    assert (last, code) == (1, Code.FRAME_SIZE_ERROR)
    assert server.app.requests[0].cancelled


STREAM_FAULTS: list[tuple[str, list[tuple[int, int, bytes]], Code]] = [
    ("DATA after the end", [(frames.HEADERS, WHOLE, b"HELD"), (frames.DATA, 0, b"x")], Code.STREAM_CLOSED),
    ("HEADERS after the end", [(frames.HEADERS, WHOLE, b"HELD"), (frames.HEADERS, WHOLE, b"HELD")], Code.STREAM_CLOSED),
    ("DATA after the answer", [(frames.HEADERS, WHOLE, b"BLOCK"), (frames.DATA, 0, b"x")], Code.STREAM_CLOSED),
    ("WINDOW_UPDATE by 0", [(frames.HEADERS, 4, b"HELD"), (frames.WINDOW_UPDATE, 0, bytes(4))], Code.PROTOCOL_ERROR),
    (
        "too wide a window",
        [(frames.HEADERS, 4, b"HELD"), (frames.WINDOW_UPDATE, 0, b"\x7f\xff\xff\xff")],
        Code.FLOW_CONTROL_ERROR,
    ),
]


@pytest.mark.parametrize(("sent", "code"), [f[1:] for f in STREAM_FAULTS], ids=[f[0] for f in STREAM_FAULTS])
def test_faults_of_a_stream_reset_it_alone(sent: list[tuple[int, int, bytes]], code: Code) -> None:
    server, client = made()
    held = [(":method", "POST"), (":scheme", "http"), (":path", "/held")]
    for kind, flags, payload in sent:
        block = {b"HELD": held, b"BLOCK": None}
        out = client.send(kind, flags, 1, client.block(block[payload]) if payload in block else payload)
    assert resets_in(out) == {1: code}
    assert not server.connection.over
    assert frames.HEADERS in [kind for kind, *_ in frames_in(client.request(3, ends=True))]


MALFORMED = {
    "no path": [(":method", "POST"), (":scheme", "http")],
    "empty path": [(":method", "POST"), (":scheme", "http"), (":path", "")],
    "unknown pseudo-header": [*[(":method", "POST"), (":scheme", "http"), (":path", "/")], (":status", "200")],
    "pseudo-header twice": [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":path", "/")],
    "pseudo-header late": [(":method", "POST"), (":scheme", "http"), ("a", "b"), (":path", "/")],
    "upper case": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("Upper", "b")],
    "space in a name": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("a b", "b")],
    "line break": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("a", "b\r\nc")],
    "connection": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("connection", "close")],
    "transfer-encoding": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("transfer-encoding", "chunked")],
    "te": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("te", "gzip")],
    "content-length": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("content-length", "-1")],
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_requests_are_reset_every_time(fields: list[tuple[str, str]]) -> None:
    server, client = made()
    for stream_id in (1, 3, 5):
        out = client.send(frames.HEADERS, WHOLE, stream_id, client.block(fields))
        assert resets_in(out) == {stream_id: Code.PROTOCOL_ERROR}
    assert not server.app.requests
    assert client.data(5, b"late") == b""


@pytest.mark.parametrize(("length", "body", "good"), [(4, b"1234", True), (4, b"123", False), (4, b"12345", False)])
def test_content_length_is_compared(length: int, body: bytes, good: bool) -> None:
    server, client = made()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/echo"), ("content-length", str(length))]
    client.send(frames.HEADERS, frames.END_HEADERS, 1, client.block(fields))
    out = client.data(1, body, ends=True)
    assert resets_in(out) == ({} if good else {1: Code.PROTOCOL_ERROR})
    assert server.app.requests[0].cancelled is not good


def test_the_continuation_flood_ends_the_connection() -> None:
    """CVE-2024-27316 and its like: bounded in frames and in bytes, also of empty ones."""
    _, client = made(max_continuations=8)
    client.send(frames.HEADERS, 0, 1, b"")
    for _ in range(8):
        assert client.send(frames.CONTINUATION, 0, 1, b"") == b""
    assert goaway_in(client.send(frames.CONTINUATION, 0, 1, b""))[1] is Code.ENHANCE_YOUR_CALM
    _server, client = made(max_header_bytes=20_000)
    client.send(frames.HEADERS, 0, 1, bytes(15_000))
    assert goaway_in(client.send(frames.CONTINUATION, 0, 1, bytes(5_001)))[1] is Code.ENHANCE_YOUR_CALM


def test_a_block_that_inflates_beyond_all_bounds_ends_the_connection() -> None:
    _server, client = made(max_header_bytes=4096)
    client.send(frames.HEADERS, frames.END_HEADERS, 1, client.block())
    block = client.block([("bomb", "v" * 3000)])
    client.send(frames.HEADERS, WHOLE, 3, block)
    bomb = client.block([("bomb", "v" * 3000)] * 50)
    assert len(bomb) < 100
    assert goaway_in(client.send(frames.HEADERS, WHOLE, 5, bomb))[1] is Code.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    ("kind", "flags", "stream_id", "payload"),
    [
        (frames.PING, 0, 0, bytes(8)),
        (frames.SETTINGS, 0, 0, b""),
        (frames.PRIORITY, 0, 1, bytes(5)),
        (frames.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
        (frames.GOAWAY, 0, 0, bytes(8)),
        (0x99, 0, 0, b""),
        (frames.DATA, 0, 1, b""),
        (frames.DATA, frames.PADDED, 1, b"\x01\0"),
    ],
    ids=["ping", "settings", "priority", "window update", "goaway", "unknown", "empty data", "padding"],
)
def test_floods_of_useless_frames_end_the_connection(kind: int, flags: int, stream_id: int, payload: bytes) -> None:
    server, client = made(idle_frames=50, idle_frames_per_s=10)
    client.request(1, "/held")
    sent = 0
    while not server.connection.over:
        client.send(kind, flags, stream_id, payload)
        sent += 1
        assert sent <= 50
    assert goaway_in(bytes(server.output))[1] is Code.ENHANCE_YOUR_CALM
    assert server.app.requests[0].cancelled


def test_useless_frames_within_the_allowance_go_on_for_ever() -> None:
    server, client = made(idle_frames=50, idle_frames_per_s=10)
    for second in range(1, 50):
        for _ in range(10):
            client.send(frames.PING, payload=bytes(8))
        server.connection.tick(second * SECOND)
    assert not server.connection.over


def test_frames_that_answers_call_forth_do_not_count() -> None:
    server, client = made(idle_frames=50, idle_frames_per_s=10)
    for number in range(200):
        client.request(2 * number + 1, ends=False)
        client.data(2 * number + 1, b"x" * 100, ends=True)
        client.send(frames.WINDOW_UPDATE, payload=(100).to_bytes(4, "big"))
        client.send(frames.PING, payload=bytes(8))
    assert not server.connection.over


def test_the_rapid_reset_flood_ends_the_connection() -> None:
    """CVE-2023-44487."""
    server, client = made(resets=100, resets_per_s=10)
    stream_id = 1
    while not server.connection.over:
        client.request(stream_id, "/held", ends=True)
        client.send(frames.RST_STREAM, 0, stream_id, Code.CANCEL.to_bytes(4, "big"))
        stream_id += 2
        assert stream_id < 500
    assert goaway_in(bytes(server.output))[1] is Code.ENHANCE_YOUR_CALM
    assert server.app.open_count == 0


def test_refused_and_malformed_streams_count_as_resets() -> None:
    server, client = made(resets=20, resets_per_s=10, max_streams=1)
    client.request(1, "/held")
    stream_id = 3
    while not server.connection.over:
        client.request(stream_id, "/held")
        stream_id += 2
        assert stream_id < 100
    assert goaway_in(bytes(server.output))[1] is Code.ENHANCE_YOUR_CALM


def test_streams_that_were_dropped_are_forgotten_in_the_end() -> None:
    server, client = made()
    count = MAX_DROPPED + 50
    for number in range(count):
        client.request(2 * number + 1, "/held")
        server.connection.reset(server.app.requests[-1].stream, Code.CANCEL)
    server.flush()
    assert resets_in(client.data(1, b"x")) == {1: Code.STREAM_CLOSED}
    assert client.data(2 * count - 1, b"x") == b""


def test_a_long_frame_that_cannot_be_right_is_not_collected() -> None:
    server, _ = made(max_header_bytes=20_000)
    out = server.receive(frames.HEADER.pack(100_000 >> 8, 100_000 & 0xFF, 0x99, 0, 0) + bytes(10))
    assert goaway_in(out)[1] is Code.ENHANCE_YOUR_CALM
