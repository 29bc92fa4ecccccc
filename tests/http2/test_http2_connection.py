"""The connection in memory: what RFC 9113 demands of a server, and where our limits are."""

from __future__ import annotations

import pytest
from h2_wire import SECOND, H2Client, Server, frames_in, goaway_in, limits, made, resets_in

from frontend.http2 import frames
from frontend.http2.connection import DRAIN_PING
from frontend.http2.frames import Code

WHOLE = frames.END_HEADERS | frames.END_STREAM


def test_requests_are_answered_with_trailers() -> None:
    server = Server()
    client = H2Client(server)
    for stream_id in (1, 3, 5):
        client.request(stream_id, b"body %d" % stream_id)
    assert client.bodies == {1: b"body 1", 3: b"body 3", 5: b"body 5"}
    assert client.trailers[5] == {"grpc-status": "0"}
    assert client.ended == {1, 3, 5}
    assert not server.connection.streams
    assert (server.app.lent, server.app.open_count) == (0, 0)


@pytest.mark.parametrize("padding", [None, 0, 1, 255])
def test_large_bodies_pass_both_windows(padding: int | None) -> None:
    server = Server(limits(stream_window_bytes=70_000, connection_window_bytes=100_000))
    server.app.room = 70_000
    client = H2Client(server)
    body = bytes(range(256)) * 4096
    client.request(1, body, padding=padding)
    assert client.bodies[1] == body
    assert server.app.lent == 0


def test_answers_of_several_streams_take_turns_and_small_ones_pass_large_ones() -> None:
    server = Server()
    client = H2Client(server)
    client.acknowledge = False
    client.request(1, bytes(300_000))
    client.request(3, b"")
    assert len(client.bodies[1]) == 65_535
    # The window of the connection is used up: an answer with data waits, one without does not.
    assert 3 in client.ended
    client.h2.acknowledge_received_data(65_535, 1)
    client.exchange()
    assert len(client.bodies[1]) > 65_535
    client.acknowledge = True
    client.h2.acknowledge_received_data(len(client.bodies[1]) - 65_535, 1)
    client.exchange()
    assert len(client.bodies[1]) == 300_000
    assert server.app.lent == 0


def test_a_smaller_initial_window_makes_windows_negative_and_later_ones_resume() -> None:
    server, client = made()
    client.request(1, "/held")
    client.data(1, b"", ends=True)
    first = client.send(frames.SETTINGS, payload=frames.SETTING.pack(frames.SETTINGS_INITIAL_WINDOW_SIZE, 100_000))
    assert [kind for kind, *_ in frames_in(first)] == [frames.SETTINGS]
    server.app.requests[0].give(bytes(200_000))
    sent = _data_bytes(server.flush(), 1)
    assert sent == 65_535  # the connection's
    client.send(frames.WINDOW_UPDATE, payload=(1_000_000).to_bytes(4, "big"))
    client.send(frames.SETTINGS, payload=frames.SETTING.pack(frames.SETTINGS_INITIAL_WINDOW_SIZE, 10))
    before = _data_bytes(bytes(server.output), 1)
    assert before == 100_000
    # 99,990 below zero: this update does not bring it above.
    assert _data_bytes(client.send(frames.WINDOW_UPDATE, 0, 1, (99_990).to_bytes(4, "big")), 1) == 0
    assert _data_bytes(client.send(frames.WINDOW_UPDATE, 0, 1, (5).to_bytes(4, "big")), 1) == 5
    client.send(frames.WINDOW_UPDATE, 0, 1, (200_000).to_bytes(4, "big"))
    assert _data_bytes(bytes(server.output), 1) == 200_000
    assert server.app.lent == 0


def _data_bytes(data: bytes, stream_id: int) -> int:
    return sum(len(p) for kind, _, s, p in frames_in(data) if kind == frames.DATA and s == stream_id)


def test_data_frames_follow_the_clients_max_frame_size() -> None:
    _server, client = made()
    client.send(frames.SETTINGS, payload=frames.SETTING.pack(frames.SETTINGS_MAX_FRAME_SIZE, 30_000))
    client.request(1)
    out = client.data(1, bytes(60_000), ends=True)
    assert [len(p) for kind, _, _, p in frames_in(out) if kind == frames.DATA] == [30_000, 30_000]


def test_the_window_is_restored_only_as_the_receiver_has_room() -> None:
    server, client = made(stream_window_bytes=1000)
    server.app.room = 0
    client.request(1, "/held")
    assert not list(frames_in(client.data(1, bytes(1000))))
    server.app.room = 5000
    server.connection.refill(server.app.requests[0].stream)
    assert [(k, s, frames.word(p, 0)) for k, _, s, p in frames_in(server.flush())] == [(frames.WINDOW_UPDATE, 1, 5000)]
    out = client.data(1, bytes(5001))
    assert resets_in(out) == {1: Code.FLOW_CONTROL_ERROR}
    assert server.app.requests[0].cancelled


def test_more_than_the_connections_window_ends_it() -> None:
    _server, client = made(connection_window_bytes=100_000, frame_bytes=200_000)
    client.request(1, "/held")
    assert goaway_in(client.data(1, bytes(100_001)))[1] is Code.FLOW_CONTROL_ERROR


def test_settings_are_acknowledged_and_ping_is_echoed() -> None:
    _, client = made()
    out = client.send(frames.SETTINGS, payload=frames.SETTING.pack(0xAAAA, 7))
    assert list(frames_in(out)) == [(frames.SETTINGS, frames.ACK, 0, b"")]
    out = client.send(frames.PING, payload=b"12345678")
    assert list(frames_in(out)) == [(frames.PING, frames.ACK, 0, b"12345678")]
    assert client.send(frames.PING, frames.ACK, payload=b"12345678") == b""


def test_priority_and_unknown_frames_change_nothing() -> None:
    _server, client = made()
    assert client.send(frames.PRIORITY, 0, 1, bytes(5)) == b""
    assert client.send(0x77, 0xFF, 9, b"anything") == b""
    block = bytes(5) + client.block()
    out = client.send(frames.HEADERS, WHOLE | frames.PRIORITIZED, 1, block)
    assert frames.HEADERS in [kind for kind, *_ in frames_in(out)]


def test_padded_headers_and_continuation_make_one_block() -> None:
    server, client = made()
    block = client.block()
    client.send(frames.HEADERS, frames.PADDED | frames.END_STREAM, 1, b"\x03" + block[:4] + bytes(3))
    client.send(frames.CONTINUATION, 0, 1, block[4:6])
    client.send(frames.CONTINUATION, 0, 1, b"")
    out = client.send(frames.CONTINUATION, frames.END_HEADERS, 1, block[6:])
    assert server.app.requests[0].path == b"/echo"
    assert frames.HEADERS in [kind for kind, *_ in frames_in(out)]


def test_trailers_of_the_client_end_the_request() -> None:
    server, client = made()
    client.request(1)
    client.data(1, b"x")
    client.send(frames.HEADERS, WHOLE, 1, client.block([("checksum", "7")]))
    assert server.app.requests[0].complete
    client.request(3)
    out = client.send(frames.HEADERS, frames.END_HEADERS, 3, client.block([("checksum", "7")]))
    assert resets_in(out) == {3: Code.PROTOCOL_ERROR}
    client.request(5)
    out = client.send(frames.HEADERS, WHOLE, 5, client.block([(":path", "/x")]))
    assert resets_in(out) == {5: Code.PROTOCOL_ERROR}


def test_an_answer_before_the_end_of_the_request_stops_the_client() -> None:
    server, client = made()
    client.request(1, "/held")
    server.app.requests[0].give(b"no")
    assert resets_in(server.flush()) == {1: Code.NO_ERROR}
    # What was on its way is swallowed, and counts for the connection's window only.
    assert client.data(1, bytes(10_000)) == b""
    assert client.send(frames.HEADERS, WHOLE, 1, client.block([("a", "b")])) == b""
    assert not server.connection.over


def test_a_reset_withdraws_the_request() -> None:
    server, client = made()
    client.request(1, "/held", ends=True)
    client.send(frames.RST_STREAM, 0, 1, Code.CANCEL.to_bytes(4, "big"))
    assert server.app.requests[0].cancelled
    assert (server.app.open_count, len(server.connection.streams)) == (0, 0)


def test_a_reset_of_a_half_sent_answer_gives_its_memory_back() -> None:
    server, client = made()
    client.request(1, "/held", ends=True)
    server.app.requests[0].give(bytes(1_000_000))
    server.flush()
    assert server.app.lent == 1
    client.send(frames.RST_STREAM, 0, 1, Code.CANCEL.to_bytes(4, "big"))
    assert server.app.lent == 0
    assert server.app.requests[0].cancelled


def test_losing_the_connection_withdraws_everything() -> None:
    server, client = made()
    for stream_id in (1, 3):
        client.request(stream_id, "/held", ends=True)
    server.app.requests[0].give(bytes(1_000_000))
    server.connection.lost()
    server.flush()
    assert [one.cancelled for one in server.app.requests] == [True, True]
    assert (server.app.lent, server.app.open_count) == (0, 0)


def test_streams_over_the_limit_are_refused() -> None:
    _server, client = made(max_streams=2)
    client.request(1, "/held")
    client.request(3, "/held")
    assert resets_in(client.request(5, "/held")) == {5: Code.REFUSED_STREAM}
    client.send(frames.RST_STREAM, 0, 1, Code.CANCEL.to_bytes(4, "big"))
    assert client.request(7, "/held") == b""


def test_a_drain_is_told_in_two_steps_and_finishes_what_runs() -> None:
    server, client = made()
    client.request(1, "/held", ends=True)
    server.connection.drain("draining")
    out = server.flush()
    assert goaway_in(out)[:2] == (frames.MOST_STREAM_ID, Code.NO_ERROR)
    assert (frames.PING, 0, 0, DRAIN_PING) in list(frames_in(out))
    # Sent before the client heard of it: still served.
    client.request(3, "/held", ends=True)
    assert goaway_in(client.send(frames.PING, frames.ACK, payload=DRAIN_PING))[0] == 3
    # Sent later, against the rules: ignored, with its body.
    assert client.request(5, "/held") + client.data(5, b"x", ends=True) == b""
    assert len(server.app.requests) == 2
    for request in server.app.requests:
        assert not server.connection.over
        request.give(b"done")
    assert server.connection.over
    assert _data_bytes(server.flush(), 3) == 4


def test_a_client_that_does_not_answer_the_drain_is_not_awaited() -> None:
    server, _client = made()
    server.connection.drain("draining")
    server.connection.tick(SECOND)
    assert not server.connection.over
    server.connection.tick(2 * SECOND)
    assert server.connection.over


def test_an_idle_connection_is_drained_and_a_used_one_is_not() -> None:
    server, client = made(idle_ns=10 * SECOND)
    client.request(1, "/held", ends=True)
    for second in range(0, 60, 5):
        server.connection.tick(second * SECOND)
    server.app.requests[0].give(b"x")
    server.flush()
    server.connection.tick(64 * SECOND)
    assert server.flush() == b""
    # Pings keep it from nothing: they are no requests.
    client.send(frames.PING, payload=bytes(8))
    server.connection.tick(66 * SECOND)
    assert goaway_in(server.flush())[1:] == (Code.NO_ERROR, "idle")


@pytest.mark.parametrize("sent", [b"", frames.PREFACE[:10], frames.PREFACE])
def test_a_client_that_does_not_begin_is_told_and_dropped(sent: bytes) -> None:
    server = Server(limits(read_ns=5 * SECOND))
    server.receive(sent)
    server.connection.tick(4 * SECOND)
    assert not server.connection.over
    server.connection.tick(6 * SECOND)
    assert goaway_in(server.flush())[1] is Code.SETTINGS_TIMEOUT


def test_an_answer_that_nobody_takes_is_dropped_after_its_time() -> None:
    server, client = made(write_ns=10 * SECOND)
    client.request(1, "/held", ends=True)
    server.app.requests[0].give(bytes(200_000))
    server.flush()
    for second in (1, 5, 9):
        server.connection.tick(second * SECOND)
    client.send(frames.WINDOW_UPDATE, payload=(1000).to_bytes(4, "big"))
    client.send(frames.WINDOW_UPDATE, 0, 1, (1000).to_bytes(4, "big"))
    for second in (12, 21):
        server.connection.tick(second * SECOND)
        assert not server.app.requests[0].cancelled
    server.connection.tick(23 * SECOND)
    assert resets_in(server.flush()) == {1: Code.CANCEL}
    assert server.app.requests[0].cancelled
    assert server.app.lent == 0


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX", b"\x16\x03\x01"])
def test_other_protocols_are_told_what_this_port_speaks(sent: bytes) -> None:
    server = Server()
    _, code, text = goaway_in(server.receive(sent))
    assert code is Code.PROTOCOL_ERROR
    assert "HTTP/2" in text


def test_settings_must_come_first() -> None:
    server = Server()
    out = server.receive(frames.PREFACE + frames.ping(bytes(8), ack=False))
    assert goaway_in(out)[1] is Code.PROTOCOL_ERROR
