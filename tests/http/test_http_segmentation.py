"""However the network cuts the bytes, the answers are the same."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from http_double import Recorder, Told, chunked, get, post
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.httpd.hangup import HangupWatch
from frontend.httpd.protocol import Connection
from frontend.httpd.state import ServerState
from frontend.settings import EndpointSettings

REQUESTS = [
    get("/a"),
    post(b"hello"),
    post(b"x" * 20_000),
    chunked([b"ab", b"cd" * 5000, b"e"]),
    get("/b", "Connection: keep-alive", version="1.0"),
    get("/c", method="HEAD"),
    post(b"up", "/echo", "Connection: upgrade", "Upgrade: h2c"),
    post(b"y" * 9000, "/echo", "Connection: upgrade", "Upgrade: h2c"),
    get("/echo", "Content-Length: 2", "Expect: 100-continue", method="POST") + b"ok",
    b"\r\n" + get("/d"),
    get("/raise"),
    get("/last", "Connection: close"),
    get("/echo", "Content-Length: 999999", method="POST"),
    get("/", "Content-Length: 1", "Transfer-Encoding: chunked", method="POST"),
    b"rubbish\r\n\r\n",
]


async def answers_to(pieces: list[bytes]) -> tuple[bytes, bool]:
    loop = asyncio.get_running_loop()
    limits = EndpointSettings(max_request_bytes=100_000)
    state = ServerState(Told(), limits, lambda: 1, HangupWatch(loop), 1 << 30, lambda: None)
    connection = Connection(state)
    transport = Recorder()
    connection.connection_made(transport)  # type: ignore[arg-type]
    for piece in pieces:
        if transport.closed:
            break
        connection.data_received(piece)
        while connection._backlog is not None and not transport.closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
    connection.connection_lost(None)
    assert state.counters.in_flight == 0
    assert state.buffered_bytes == 0
    return transport.written, transport.closed


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_segmentation_gives_the_same_answers(data: st.DataObject) -> None:
    requests = data.draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=12))
    stream = b"".join(requests)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=30))
    step = data.draw(st.sampled_from([0, 1, 7, 4096]))
    if step and len(stream) // step < 30_000:
        cuts += range(0, len(stream), step)
    edges = sorted({0, len(stream), *cuts})
    pieces = [stream[start:end] for start, end in pairwise(edges)]
    assert asyncio.run(answers_to(pieces)) == asyncio.run(answers_to([stream]))


def test_the_whole_stream_at_once_is_answered_in_full() -> None:
    good = REQUESTS[:12]
    written, closed = asyncio.run(answers_to([b"".join(good)]))
    assert written.count(b"HTTP/1.1 200 OK") == len(good) - 1
    assert written.count(b"HTTP/1.1 500 ") == 1
    assert written.count(b"HTTP/1.1 100 Continue") == 1
    assert closed


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(REQUESTS)), max_size=10))
def test_no_bytes_break_the_connection(pieces: list[bytes]) -> None:
    written, _ = asyncio.run(answers_to(pieces))
    assert written == b"" or written.startswith(b"HTTP/1.1 ")
