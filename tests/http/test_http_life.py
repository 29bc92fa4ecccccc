"""How connections live and end: disconnects, half-closes, slow clients, timeouts, drain, streams, sinks."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
from http_double import TEXT, Client, Running, Told, chunked, get, post

from frontend.httpd.exchange import ClientDisconnected, Exchange
from frontend.settings import EndpointSettings


def reset(client: Client) -> None:
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sock.close()


def hold(server: Running, app: Told, path: str = "/held") -> Client:
    """Return a client whose request is with the application."""
    before = len(app.held)
    client = server.client()
    client.send(get(path))
    app.wait(lambda: len(app.held) == before + 1)
    return client


def gone(server: Running) -> None:
    """Wait until the server has no connection."""
    server.until(lambda: server.server.counters.open == 0)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_disconnect_reaches_the_application_while_its_answer_is_due(server: Running, app: Told, how: str) -> None:
    client = hold(server, app)
    if how == "reset":
        reset(client)
    else:
        client.sock.close()
    app.wait(lambda: app.disconnected == 1)
    gone(server)
    assert server.server.counters.disconnects == 1
    assert server.server.counters.in_flight == 0
    # a late answer is harmless and gives back what it lent
    server.call(lambda: app.held[0].respond(200, [], [b"late"], app._free))
    assert app.released == 1
    with pytest.raises(RuntimeError, match="answered twice"):
        server.call(lambda: app.held[0].respond(200, [], []))


def test_a_disconnect_reaches_every_pipelined_request(server: Running, app: Told) -> None:
    client = server.client()
    client.send(get("/held/a") + get("/held/b") + get("/held/c"))
    app.wait(lambda: len(app.held) == 3)
    server.call(lambda: app.held[1].respond(200, [], [b"waits"], app._free))
    client.sock.close()
    app.wait(lambda: app.disconnected == 2 and app.released == 1)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_half_closed_client_is_still_answered(server: Running, app: Told, version: str) -> None:
    with server.client() as client:
        client.send(get("/held", version=version) + (get("/after") if version == "1.1" else b""))
        app.wait(lambda: len(app.held) == 1)
        client.sock.shutdown(socket.SHUT_WR)
        assert client.sock.recv(1, socket.MSG_PEEK) == b"H"  # the probe that tells it from a closed one
        server.call(lambda: app.held[0].respond(200, [], [b"x" * 200_000]))
        assert client.answer().body == b"x" * 200_000
        if version == "1.1":
            assert client.answer().body == b"GET /after"
        assert client.closed()
    assert app.disconnected == 0
    gone(server)
    assert server.server.counters.disconnects == 0


def test_a_half_closed_client_that_then_goes_is_noticed(server: Running, app: Told) -> None:
    client = hold(server, app)
    client.sock.shutdown(socket.SHUT_WR)
    assert client.sock.recv(1) == b"H"
    reset(client)
    app.wait(lambda: app.disconnected == 1)
    gone(server)


def test_many_disconnects_leave_no_descriptor(server: Running, app: Told) -> None:
    for number in range(100):
        hold(server, app).sock.close()
        app.wait(lambda number=number: app.disconnected == number + 1)
    gone(server)
    assert server.call(lambda: len(server.server._state.hangups._watched)) == 0


def test_a_request_cut_short_is_dropped_and_the_earlier_one_answered(server: Running, app: Told) -> None:
    with hold(server, app) as client:
        client.send(get("/echo", "Content-Length: 10", method="POST") + b"abc")
        client.sock.shutdown(socket.SHUT_WR)
        assert client.sock.recv(1, socket.MSG_PEEK) == b"H"
        server.call(lambda: app.held[0].respond(200, [], [b"first"]))
        assert client.answer().body == b"first"
        assert client.closed()
    assert [exchange.path for exchange in app.seen] == ["/held"]


def test_lent_memory_is_released_when_sent(server: Running, app: Told) -> None:
    app.big = memoryview(bytes(range(256)) * 80_000)
    with server.client(receive_buffer=4096) as client:
        client.send(get("/big"))
        app.wait(lambda: len(app.seen) == 1)
        assert app.released == 0
        assert client.answer().body == app.big
        app.wait(lambda: app.released == 1)
        assert client.ask(get("/next")).body == b"GET /next"


def test_lent_memory_is_released_when_the_client_goes(server: Running, app: Told) -> None:
    app.big = memoryview(bytes(20_000_000))
    client = server.client(receive_buffer=4096)
    client.send(get("/big"))
    app.wait(lambda: len(app.seen) == 1)
    reset(client)
    app.wait(lambda: app.released == 1)


def test_small_answers_release_at_once(server: Running, app: Told) -> None:
    app.big = memoryview(b"x" * 1000)
    with server.client() as client:
        assert client.ask(get("/big")).body == app.big
        app.wait(lambda: app.released == 1)


def test_a_client_that_does_not_read_is_not_read_from(server: Running, app: Told) -> None:
    app.big = memoryview(bytes(6_000_000))
    with server.client() as client:
        client.send(get("/big") * 20)
        app.wait(lambda: len(app.seen) >= 1)
        server.call(lambda: None)
        # the first answer filled the socket; the requests behind it wait
        assert server.call(lambda: len(app.seen)) == 1
        for _ in range(20):
            assert len(client.answer().body) == 6_000_000
    app.wait(lambda: app.released == 20)


def test_idle_connections_are_closed(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(idle_timeout_seconds=10))
    with server.client() as fresh, server.client() as used:
        used.ask(get("/x"))
        fresh.ask(get("/x"))
        server.pass_time(9)
        used.ask(get("/x"))
        server.pass_time(2)
        assert fresh.closed()
        assert used.ask(get("/still")).body == b"GET /still"
    assert server.server.counters.timeouts == 1


@pytest.mark.parametrize(
    "part", [b"GET /x HT", get("/echo", "Content-Length: 5", method="POST") + b"ab", chunked([b"ab"])[:-3]]
)
def test_a_slow_request_gets_408(serve: type, app: Told, part: bytes) -> None:
    server = serve(app, EndpointSettings(read_timeout_seconds=5))
    with server.client() as client:
        client.ask(get("/x"))
        client.send(part)
        mid_message(server)
        server.pass_time(4)
        client.send(b"")
        server.pass_time(2)
        answer = client.answer()
        assert (answer.status, b"read_timeout_seconds = 5 s" in answer.body) == (408, True)
        client.sock.shutdown(socket.SHUT_WR)
        assert client.closed()
    assert len(app.seen) == 1


def mid_message(server: Running) -> None:
    """Wait until a request has begun to arrive."""

    server.until(lambda: any(connection._intake.mid_message for connection in server.server._state.connections))


def test_a_slow_loris_is_bounded_by_the_whole_request_not_by_each_byte(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(read_timeout_seconds=5))
    with server.client() as client:
        client.send(b"GET / HTTP/1.1\r\n")
        mid_message(server)
        server.call(server.server.tick)
        for number in range(5):
            client.send(b"X-%d: y\r\n" % number)
            server.now_ns += 1_100_000_000
            server.call(server.server.tick)
        assert client.answer().status == 408


def test_an_answer_that_takes_long_is_not_a_timeout(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(read_timeout_seconds=5, idle_timeout_seconds=5, write_timeout_seconds=5))
    with hold(server, app) as client:
        server.pass_time(1000)
        server.call(lambda: app.held[0].respond(200, [], [b"at last"]))
        assert client.answer().body == b"at last"
    assert server.server.counters.timeouts == 0


def test_a_client_that_never_reads_its_answer_is_cut(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(write_timeout_seconds=5))
    app.big = memoryview(bytes(30_000_000))
    with server.client(receive_buffer=4096) as client:
        client.send(get("/big"))
        app.wait(lambda: len(app.seen) == 1)
        server.pass_time(4)
        server.pass_time(6)
        app.wait(lambda: app.released == 1)
        gone(server)


def test_lingering_after_a_refusal_ends(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(max_request_bytes=1024))
    with server.client() as client:
        assert client.ask(get("/echo", "Content-Length: 5000", method="POST")).status == 413
        server.pass_time(11)
        gone(server)


def test_drain_closes_idle_finishes_work_and_refuses_new(server: Running, app: Told) -> None:
    idle, partial = server.client(), server.client()
    idle.ask(get("/x"))
    busy = hold(server, app)
    partial.send(post(b"abcdef")[:-3])
    mid_message(server)
    draining = server.spawn(server.server.drain(10))
    assert idle.closed()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    partial.send(b"def")
    late = partial.answer()
    assert (late.body, late.headers["connection"]) == (b"abcdef", "close")
    server.call(lambda: app.held[0].respond(200, [], [b"done"]))
    answer = busy.answer()
    assert (answer.body, answer.headers["connection"]) == (b"done", "close")
    assert busy.closed()
    assert partial.closed()
    assert draining.result(10) == 0


def test_drain_lets_every_pipelined_request_finish(server: Running, app: Told) -> None:
    with server.client() as client:
        client.send(get("/held/a") + get("/held/b"))
        app.wait(lambda: len(app.held) == 2)
        draining = server.spawn(server.server.drain(10))
        server.until(lambda: server.server._state.draining)
        for held in app.held:
            server.call(lambda held=held: held.respond(200, [], [held.raw_path]))
        first, second = client.answer(), client.answer()
        assert ("connection" in first.headers, second.headers["connection"]) == (False, "close")
        assert client.closed()
        assert draining.result(10) == 0


def test_a_connection_accepted_while_draining_is_closed_too(server: Running) -> None:
    with server.client() as client:
        server.until(lambda: server.server.counters.open == 1)
        server.server._state.draining = True
        server.call(server.server.tick)
        assert client.closed()


def test_drain_is_bounded(server: Running, app: Told) -> None:
    client = hold(server, app)
    assert server.wait(server.server.drain(0.05)) == 1
    app.wait(lambda: app.disconnected == 1)
    with pytest.raises((EOFError, ConnectionResetError)):
        client.answer()


def test_streamed_answers(server: Running, app: Told) -> None:
    async def stream(exchange: Exchange) -> None:
        exchange.start(200, TEXT)
        for number in range(3):
            await exchange.send(b"part %d;" % number)
        await exchange.send(b"")
        await exchange.end()

    app.task = stream
    with server.client() as client:
        client.send(get("/task") + get("/task", method="HEAD") + get("/next"))
        assert client.answer().body == b"part 0;part 1;part 2;"
        assert client.answer(head=True).headers["transfer-encoding"] == "chunked"
        assert client.answer().body == b"GET /next"
        old = client.ask(get("/task", "Connection: keep-alive", version="1.0"))
        assert old.body == b"part 0;part 1;part 2;"
        assert old.headers["connection"] == "close"
    assert app.failures == []


def test_a_stream_behind_a_slow_answer_waits_its_turn(server: Running, app: Told) -> None:
    async def stream(exchange: Exchange) -> None:
        exchange.start(200, TEXT)
        await exchange.send(b"streamed")
        await exchange.end()

    app.task = stream
    with server.client() as client:
        client.send(get("/held") + get("/task") + get("/next"))
        app.wait(lambda: len(app.seen) == 3)
        server.call(lambda: app.held[0].respond(200, [], [b"first"]))
        assert [client.answer().body for _ in range(3)] == [b"first", b"streamed", b"GET /next"]


def test_a_stream_waits_for_a_slow_reader_and_learns_of_its_end(server: Running, app: Told) -> None:
    sent = [0]

    async def stream(exchange: Exchange) -> None:
        exchange.start(200, TEXT)
        while True:
            await exchange.send(bytes(100_000))
            sent[0] += 1

    app.task = stream
    client = server.client(receive_buffer=4096)
    client.send(get("/task"))
    status, _ = client.head()
    assert status == 200
    server.call(lambda: None)
    assert sent[0] < 200, "send must wait for the client"
    reset(client)
    app.wait(lambda: len(app.failures) == 1)
    assert isinstance(app.failures[0], ClientDisconnected)


def test_an_aborted_stream_is_visibly_cut(server: Running, app: Told) -> None:
    async def stream(exchange: Exchange) -> None:
        exchange.start(200, TEXT)
        await exchange.send(b"half")
        exchange.abort()

    app.task = stream
    with server.client() as client:
        client.send(get("/task"))
        with pytest.raises((EOFError, ConnectionResetError)):
            client.answer()


class Sink:
    """A sink that remembers; ``refuse_after`` bytes it answers 400, or raises."""

    limit_name = "max_file_bytes"

    def __init__(self, exchange: Exchange, max_bytes: int = 1 << 40) -> None:
        self.exchange = exchange
        self.max_bytes = max_bytes
        self.pieces: list[bytes] = []
        self.events: list[str] = []
        self.changed = threading.Event()
        self.answer_after = -1
        self.raises = False

    def write(self, chunk: bytes | memoryview) -> None:
        if self.raises:
            raise OSError("disk full")
        self.pieces.append(bytes(chunk))
        if 0 <= self.answer_after <= sum(map(len, self.pieces)):
            self.exchange.respond(400, [], [b"not this"])

    def close(self) -> None:
        self.events.append("close")
        self.changed.set()

    def abort(self) -> None:
        self.events.append("abort")
        self.changed.set()


def test_a_sink_takes_the_body_and_has_its_own_limit_bf_14(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(max_request_bytes=1_000_000))
    sinks: list[Sink] = []

    def choose(exchange: Exchange) -> Sink | None:
        if exchange.path != "/file":
            return None
        sinks.append(Sink(exchange, 100_000_000))
        return sinks[-1]

    app.sink = choose
    body = bytes(40_000_000)
    with server.client() as client:
        assert client.ask(post(body, "/file")).status == 200
        assert client.ask(chunked([b"a", b"bc"], "/file")).status == 200
        assert client.ask(chunked([bytes(1_000_000)] * 90, "/file")).status == 200
        answer = client.ask(get("/file", "Content-Length: 100000001", method="POST"))
        assert (answer.status, b"max_file_bytes = 100000000 bytes" in answer.body) == (413, True)
    with server.client() as client:
        assert client.ask(chunked([bytes(1_000_000)] * 101, "/file")).status == 413
    with server.client() as client:
        assert client.ask(get("/infer", "Content-Length: 40000000", method="POST")).status == 413
    assert sum(map(len, sinks[0].pieces)) == 40_000_000
    assert b"".join(sinks[1].pieces) == b"abc"
    assert [sink.events for sink in sinks] == [["close"], ["close"], ["close"], ["abort"], ["abort"]]
    assert app.seen[0].body == b""


def test_a_sink_may_answer_early_raise_or_lose_its_client(server: Running, app: Told) -> None:
    made: list[Sink] = []

    def choose(exchange: Exchange) -> Sink:
        sink = Sink(exchange)
        sink.answer_after = 10_000 if exchange.path == "/early" else -1
        sink.raises = exchange.path == "/raising"
        made.append(sink)
        return sink

    app.sink = choose
    with server.client() as client:
        assert client.ask(post(bytes(1_000_000), "/early")).body == b"not this"
        assert made[-1].events == ["abort"]
    with server.client() as client:
        assert client.ask(post(bytes(1_000_000), "/raising")).status == 500
        assert made[-1].events == ["abort"]
    client = server.client()
    client.send(post(bytes(1_000_000), "/lost")[:500_000])
    mid_message(server)
    client.sock.close()
    gone(server)
    assert made[-1].events == ["abort"]
    assert app.seen == []


def test_begin_may_refuse_unread(server: Running, app: Told) -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.respond(429, [], [b"full"])

    app.sink = refuse  # type: ignore[assignment]
    with server.client() as client:
        answer = client.ask(post(bytes(5_000_000)))
        assert (answer.status, answer.body, answer.headers["connection"]) == (429, b"full", "close")


def test_a_held_sink_stops_reading(server: Running, app: Told) -> None:
    made: list[Sink] = []

    def choose(exchange: Exchange) -> Sink:
        made.append(Sink(exchange))
        exchange.hold_body(held=True)
        return made[-1]

    app.sink = choose
    body = bytes(30_000_000)
    with server.client() as client:
        sender = threading.Thread(target=client.send, args=(post(body, "/file"),))
        sender.start()
        mid_message(server)
        for _ in range(10):
            server.call(lambda: None)
        assert sum(map(len, made[0].pieces)) < 1_000_000
        server.pass_time(1000)  # our own pause is not the client's fault
        server.call(lambda: made[0].exchange.hold_body(held=False))
        sender.join()
        assert client.answer().status == 200
    assert sum(map(len, made[0].pieces)) == 30_000_000
