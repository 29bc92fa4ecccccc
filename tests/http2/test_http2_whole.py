"""Requests that come whole: taken as such, or in their parts where they are not quite so, with the same outcome."""

from __future__ import annotations

import pytest
from h2_wire import REQUEST, BareClient, frames_in, limits, made, resets_in

from frontend.http2 import frames
from frontend.http2.frames import Code

pytestmark = pytest.mark.interpreted

HEADERS = frames.END_HEADERS
BODY = b"some body"


def known(client: BareClient, path: str = "/echo", *more: tuple[str, str]) -> bytes:
    """Return a header block that the server has seen; stream 1 is used for it."""
    fields = [(name, path if name == ":path" else value) for name, value in REQUEST] + list(more)
    client.send(frames.HEADERS, HEADERS | frames.END_STREAM, 1, client.block(fields))
    block = client.block(fields)
    client.send(frames.HEADERS, HEADERS | frames.END_STREAM, 3, block)
    return block


def whole(block: bytes, stream_id: int, body: bytes = BODY, *, between: bytes = b"", flags: int = 1) -> bytes:
    opening = frames.frame(frames.HEADERS, HEADERS, stream_id, block)
    return opening + between + frames.frame(frames.DATA, flags, stream_id, body)


def answered(out: bytes) -> dict[int, bytes]:
    return {stream_id: payload for kind, _, stream_id, payload in frames_in(out) if kind == frames.DATA}


def test_whole_requests_are_answered(takes_whole: bool) -> None:
    server, client = made()
    block = known(client)
    widened = frames.window_update(9, 5)
    out = server.receive(whole(block, 5) + whole(block, 7) + whole(block, 9, between=widened) + widened)
    assert answered(out) == {5: BODY, 7: BODY, 9: BODY}
    assert server.app.whole_count == (3 if takes_whole else 0)
    assert (server.app.open_count, server.app.lent, server.connection.streams) == (0, 0, {})


def test_a_window_that_was_widened_between_counts() -> None:
    server, client = made(stream_window_bytes=300_000)
    client.send(frames.SETTINGS, 0, 0, frames.SETTING.pack(frames.SETTINGS_INITIAL_WINDOW_SIZE, 4))
    block = known(client)
    out = server.receive(whole(block, 5) + whole(block, 7, between=frames.window_update(7, 3)))
    assert answered(out) == {5: BODY[:4], 7: BODY[:7]}
    out = server.receive(frames.window_update(5, 100) + frames.window_update(7, 100))
    assert answered(out) == {5: BODY[4:], 7: BODY[7:]}
    assert not server.connection.streams


@pytest.mark.parametrize(
    ("between", "code"),
    [(frames.window_update(5, 2**31 - 1), Code.FLOW_CONTROL_ERROR), (frames.window_update(5, 0), Code.PROTOCOL_ERROR)],
)
def test_a_wrong_window_update_between_is_a_fault(between: bytes, code: Code) -> None:
    server, client = made()
    block = known(client)
    out = server.receive(whole(block, 5, between=between) + whole(block, 7))
    assert resets_in(out) == {5: code}
    assert answered(out) == {7: BODY}


def test_what_is_almost_whole_is_taken_in_parts() -> None:
    server, client = made()
    block = known(client)
    data = whole(block, 5)
    assert server.receive(data[:-1]) == b""
    assert answered(server.receive(data[-1:])) == {5: BODY}
    assert server.receive(whole(block, 7, flags=0)) == b""
    assert answered(client.data(7, b"!", ends=True)) == {7: BODY + b"!"}
    padded = bytes((2,)) + BODY + bytes(2)
    assert answered(server.receive(whole(block, 9, padded, flags=9))) == {9: BODY}
    assert answered(server.receive(whole(block, 11, between=frames.ping(bytes(8), ack=False)))) == {11: BODY}
    assert server.app.whole_count == 0


def test_content_length_must_be_met(takes_whole: bool) -> None:
    server, client = made()
    block = known(client, "/echo", ("content-length", str(len(BODY))))
    out = server.receive(whole(block, 5) + whole(block, 7, BODY[1:]) + whole(block, 9, BODY + b"!"))
    assert answered(out) == {5: BODY}
    assert {stream_id: resets_in(out)[stream_id] for stream_id in (7, 9)} == dict.fromkeys((7, 9), Code.PROTOCOL_ERROR)
    assert server.app.whole_count == (1 if takes_whole else 0)


def test_whole_requests_keep_the_limits() -> None:
    server, client = made(max_streams=2, stream_window_bytes=20, connection_window_bytes=70_000)
    block = known(client, "/held")
    assert resets_in(server.receive(whole(block, 5))) == {5: Code.REFUSED_STREAM}
    for request in list(server.app.requests):
        request.give()
    server.flush()
    assert resets_in(server.receive(whole(block, 7, bytes(21)))) == {7: Code.FLOW_CONTROL_ERROR}
    out = server.receive(whole(block, 8))
    assert server.connection.over
    assert Code.PROTOCOL_ERROR in {Code(frames.word(payload, 4)) for kind, *_, payload in frames_in(out) if kind == 7}


def test_the_connections_window_is_given_back_for_whole_requests() -> None:
    size = 10_000
    server, client = made(connection_window_bytes=limits().connection_window_bytes // 16)
    block = known(client)
    given = 0
    for stream_id in range(5, 5 + 2 * 200, 2):
        out = server.receive(whole(block, stream_id, bytes(size)))
        for kind, _, of, payload in frames_in(out):
            given += frames.word(payload, 0) if (kind, of) == (frames.WINDOW_UPDATE, 0) else 0
        server.receive(frames.window_update(0, size))
    assert given >= 200 * size - limits().connection_window_bytes // 32
    assert not server.connection.over


def test_a_whole_request_can_be_cancelled_and_dies_with_its_connection() -> None:
    server, client = made()
    block = known(client, "/held")
    server.receive(whole(block, 5) + whole(block, 7))
    client.send(frames.RST_STREAM, 0, 5, frames.rst_stream(5, Code.CANCEL)[9:])
    assert [request.cancelled for request in server.app.requests] == [False, False, True, False]
    more = server.receive(frames.frame(frames.DATA, 0, 7, b"more"))
    assert resets_in(more) == {7: Code.STREAM_CLOSED}
    server.connection.lost()
    assert all(request.cancelled for request in server.app.requests)
    assert server.app.open_count == 0
