"""Whatever comes in, in whatever pieces: no crash, no hang, nothing leaked, and the same answers."""

from __future__ import annotations

from typing import Any

from h2_wire import SECOND, BareClient, H2Client, Server, frames_in, limits
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.http2 import frames

SMALL = {
    "max_header_bytes": 2048,
    "frame_bytes": 16_384,
    "stream_window_bytes": 5000,
    "connection_window_bytes": 70_000,
}

blocks = st.sampled_from(
    [
        bytes(Encoder().encode([(":method", "POST"), (":scheme", "http"), (":path", path)]))
        for path in ("/echo", "/held")
    ]
)
payloads = st.one_of(
    st.binary(max_size=40),
    blocks,
    blocks.map(lambda block: b"\x02" + block + bytes(2)),
    st.integers(0, 3000).map(bytes),
    st.integers(0, 2**32 - 1).map(lambda number: number.to_bytes(4, "big")),
    st.tuples(st.integers(0, 7), st.integers(0, 2**32 - 1)).map(lambda pair: frames.SETTING.pack(*pair)),
)
flags = st.sampled_from([0, 1, 4, 5, 8, 9, 0xC, 0xD, 0x20, 0x24, 0x2D, 0xFF])
any_frame = st.builds(frames.frame, st.integers(0, 11), flags, st.integers(0, 12), payloads)
right_frame = st.one_of(
    st.builds(frames.frame, st.just(1), st.sampled_from([4, 5]), st.sampled_from([1, 3, 5, 7, 9, 11]), blocks),
    st.builds(frames.frame, st.just(0), st.sampled_from([0, 1]), st.sampled_from([1, 3, 5]), st.binary(max_size=300)),
    st.builds(frames.window_update, st.sampled_from([0, 1, 3]), st.integers(1, 5000)),
    st.builds(frames.rst_stream, st.sampled_from([1, 3, 5]), st.just(frames.Code.CANCEL)),
)


def check_ends_clean(server: Server) -> None:
    """After the client has gone nothing of it is left."""
    server.connection.tick(SECOND)
    server.connection.lost()
    server.flush()
    app = server.app
    assert (app.lent, app.open_count, len(server.connection.streams)) == (0, 0, 0)
    for request in app.requests:
        assert request.complete or request.cancelled or not request.stream.open
    list(frames_in(bytes(server.output)))


@given(st.lists(st.binary(max_size=300), max_size=8), st.booleans())
def test_arbitrary_bytes(pieces: list[bytes], greeted: bool) -> None:
    server = Server(limits(**SMALL))
    if greeted:
        BareClient(server)
    for piece in pieces:
        server.receive(piece)
    check_ends_clean(server)


@settings(max_examples=300)
@given(st.lists(st.one_of(right_frame, any_frame), max_size=30))
def test_arbitrary_frames(sequence: list[bytes]) -> None:
    server = Server(limits(**SMALL))
    BareClient(server)
    for one in sequence:
        server.receive(one)
    check_ends_clean(server)


bodies = st.integers(0, 500).map(lambda count: bytes(range(256)) * count)


@st.composite
def exchanges(draw: st.DrawFn) -> list[tuple[int, bytes, str, int | None]]:
    count = draw(st.integers(1, 5))
    return [
        (
            2 * number + 1,
            draw(st.one_of(st.binary(max_size=50), bodies)),
            draw(st.sampled_from(["/echo", "/held"])),
            draw(st.sampled_from([None, None, 0, 7, 255])),
        )
        for number in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(exchanges(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_segmentation_changes_nothing(requests: list[tuple[int, bytes, str, int | None]], most: int, draw: Any) -> None:
    """The same requests, sent whole and in pieces of any size, down to single bytes, get the same answers."""

    def cut(data: bytes) -> list[bytes]:
        pieces, at = [], 0
        while at < len(data):
            # A few long pieces among short ones, so that boundaries fall everywhere.
            size = draw.randint(1, most) if len(pieces) < 400 else 1000
            pieces.append(data[at : at + size])
            at += size
        return pieces

    found = []
    for way in (lambda data: [data], cut):
        server = Server(limits(stream_window_bytes=5000, connection_window_bytes=70_000))
        server.app.room = 5000
        client = H2Client(server, way)
        for stream_id, body, path, padding in requests:
            client.request(stream_id, body, path, padding=padding)
        for held in server.app.requests:
            if held.path == b"/held":
                held.give()
        client.take(server.flush())
        client.exchange()
        found.append((client.bodies, client.trailers, client.ended, client.resets))
        check_ends_clean(server)
    assert found[0] == found[1]
    assert found[0][2] == {stream_id for stream_id, *_ in requests}
    assert not found[0][3]


@settings(max_examples=100)
@given(st.lists(right_frame, max_size=20), st.integers(1, 9))
def test_segmentation_of_any_frames_changes_nothing(sequence: list[bytes], size: int) -> None:
    data = b"".join(sequence)
    whole, cut = Server(limits()), Server(limits())
    for server in (whole, cut):
        BareClient(server)
    whole.receive(data)
    for at in range(0, len(data), size):
        cut.receive(data[at : at + size])
    answers = [
        [(one.path, bytes(one.body), one.complete, one.cancelled) for one in server.app.requests]
        for server in (whole, cut)
    ]
    assert answers[0] == answers[1]
    assert whole.connection.over == cut.connection.over
