"""What any HTTP/1 client may do, byte by byte: keep-alive, pipelining, framing, refusals."""

from __future__ import annotations

import pytest
from http_double import Client, Running, Told, chunked, get, post

from frontend.http import HttpServer
from frontend.settings import EndpointSettings


def test_keep_alive_answers_many_requests_on_one_connection(server: Running) -> None:
    with server.client() as client:
        for number in range(20):
            answer = client.ask(post(b"%d" % number))
            assert (answer.status, answer.body) == (200, b"%d" % number)
            assert "connection" not in answer.headers
            assert answer.headers["date"].endswith("GMT")
    assert server.server.counters.accepted == 1
    assert server.server.counters.requests == 20


@pytest.mark.parametrize(
    ("version", "header", "kept"),
    [
        ("1.1", None, True),
        ("1.1", "Connection: close", False),
        ("1.0", None, False),
        ("1.0", "Connection: keep-alive", True),
    ],
)
def test_connection_is_kept_or_closed_as_asked(server: Running, version: str, header: str | None, kept: bool) -> None:
    with server.client() as client:
        answer = client.ask(get("/x", *([header] if header else []), version=version))
        assert answer.body == b"GET /x"
        if kept:
            assert client.ask(get("/y")).body == b"GET /y"
        else:
            assert answer.headers["connection"] == "close"
            assert client.closed()
        assert (answer.headers.get("connection") == "keep-alive") == (kept and version == "1.0")


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    with server.client() as client:
        client.send(b"".join(post(b"%d" % number) for number in range(500)))
        assert [client.answer().body for _ in range(500)] == [b"%d" % number for number in range(500)]


def test_pipelined_answers_given_out_of_order_are_sent_in_order(server: Running, app: Told) -> None:
    with server.client() as client:
        client.send(b"".join(get(f"/held/{number}") for number in range(5)))
        app.wait(lambda: len(app.held) == 5)
        for number in (3, 1, 4, 0, 2):
            held = app.held[number]
            server.call(lambda held=held: held.respond(200, [], [held.raw_path]))
        assert [client.answer().body for _ in range(5)] == [b"/held/%d" % number for number in range(5)]
    assert server.server.counters.in_flight == 0


def test_requests_in_progress_of_one_connection_are_limited(server: Running, app: Told) -> None:
    with server.client() as client:
        client.send(b"".join(get(f"/held/{number}") for number in range(2000)) + get("/end"))
        app.wait(lambda: len(app.held) == 16)
        for done in range(2000):
            app.wait(lambda done=done: len(app.held) > done)
            assert len(app.held) <= done + 16
            held = app.held[done]
            server.call(lambda held=held: held.respond(200, [], [held.raw_path]))
            assert client.answer().body == b"/held/%d" % done
        assert client.answer().body == b"GET /end"


def test_head_is_answered_without_a_body(server: Running) -> None:
    with server.client() as client:
        answer = client.ask(get("/thing", method="HEAD"), head=True)
        assert answer.headers["content-length"] == str(len(b"HEAD /thing"))
        assert client.ask(get("/thing")).body == b"GET /thing"


def test_expect_100_continue_is_invited_then_answered(server: Running) -> None:
    with server.client() as client:
        assert client.ask(get("/echo", "Content-Length: 3", "Expect: 100-continue", method="POST")).status == 100
        assert client.ask(b"abc").body == b"abc"


def test_expect_100_continue_waits_for_its_turn(server: Running, app: Told) -> None:
    with server.client() as client:
        client.send(get("/held"), get("/echo", "Content-Length: 3", "Expect: 100-continue", method="POST"))
        app.wait(lambda: len(app.held) == 1)
        server.call(lambda: app.held[0].respond(200, [], [b"first"]))
        assert client.answer().body == b"first"
        assert client.answer().status == 100
        assert client.ask(b"abc").body == b"abc"


def test_a_large_body_with_expect_is_refused_uninvited(server: Running) -> None:
    with server.client() as client:
        answer = client.ask(get("/echo", f"Content-Length: {1 << 40}", "Expect: 100-continue", method="POST"))
        assert answer.status == 413
        assert client.closed()


def test_other_expectations_are_refused(server: Running) -> None:
    with server.client() as client:
        assert client.ask(get("/echo", "Expect: coffee", method="POST")).status == 417
        assert client.closed()


def test_chunked_bodies_are_joined_and_trailers_ignored(server: Running) -> None:
    with server.client() as client:
        assert client.ask(chunked([b"ab", b"c", b"defg"])).body == b"abcdefg"
        extended = get("/echo", "Transfer-Encoding: chunked", method="POST") + b"2;x=y\r\nhi\r\n0\r\nTrailer: t\r\n\r\n"
        assert client.ask(extended).body == b"hi"
        assert client.ask(chunked([])).body == b""


def test_65536_chunks_of_one_byte(server: Running) -> None:
    body = bytes(range(256)) * 256
    with server.client() as client:
        assert client.ask(chunked([body[i : i + 1] for i in range(len(body))])).body == body
        assert client.ask(get("/next")).body == b"GET /next"


def test_chunk_extensions_and_trailers_without_end_are_refused(server: Running) -> None:
    for endless in (b"1;" + b"x" * 400_000, b"0\r\nT: " + b"x" * 400_000):
        with server.client() as client:
            client.send(get("/echo", "Transfer-Encoding: chunked", method="POST"), endless)
            assert client.answer().status == 400
            assert client.closed()


@pytest.mark.parametrize("size", [0, 1, 8_000, 9_000, 70_000, 3_000_000])
def test_bodies_of_every_size_come_back(server: Running, size: int) -> None:
    body = (bytes(range(251)) * (size // 251 + 1))[:size]
    with server.client() as client:
        for _ in range(2):
            assert client.ask(post(body)).body == body
        client.send(post(body) + post(body) + get("/next"))
        assert [client.answer().body for _ in range(3)] == [body, body, b"GET /next"]
    assert server.server.counters.in_flight == 0


def test_body_size_limit_is_named_and_enforced_before_reading(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(max_request_bytes=100_000))
    with server.client() as client:
        assert client.ask(post(b"x" * 100_000)).status == 200
        answer = client.ask(get("/echo", "Content-Length: 100001", method="POST"))
        assert answer.status == 413
        assert b"100001" in answer.body
        assert b"max_request_bytes = 100000 bytes" in answer.body
        assert answer.headers["connection"] == "close"
        assert client.closed()
    assert len(app.seen) == 1


def test_a_client_that_sends_its_refused_body_anyway_reads_the_answer(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(max_request_bytes=1024))
    with server.client() as client:
        answer = client.ask(post(b"x" * 30_000_000))
        assert answer.status == 413
        client.sock.shutdown(1)
        assert client.closed()


def test_chunked_body_over_the_limit_is_refused(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(max_request_bytes=1024))
    with server.client() as client:
        assert client.ask(chunked([b"x" * 512, b"y" * 512])).status == 200
        answer = client.ask(chunked([b"x" * 512] * 1000))
        assert answer.status == 413
        assert b"max_request_bytes = 1024 bytes" in answer.body


def test_bodies_in_memory_have_a_budget_over_all_connections(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(max_request_bytes=1 << 20))
    clients = [server.client() for _ in range(17)]
    start = get("/echo", f"Content-Length: {1 << 20}", "Expect: 100-continue", method="POST")
    assert [client.ask(start).status for client in clients] == [100] * 16 + [503]
    assert clients[0].ask(b"x" * (1 << 20)).status == 200
    with server.client() as client:
        assert client.ask(start).status == 100
        big_chunks = chunked([b"x" * 300_000])
        with server.client() as other:
            assert other.ask(big_chunks).status == 503
    for client in clients:
        client.sock.close()


def test_header_limits(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(max_header_bytes=4096))
    cases = [
        get("/echo", "X-Fits: " + "x" * 3900),
        get("/echo", "X-Long: " + "x" * 4096),
        get("/echo" + "x" * 4096),
        get("/echo", "X-Endless: " + "x" * 100_000),
        get("/echo", *[f"X-{number}: y" for number in range(200)]),
    ]
    for case, status in zip(cases, [200, 431, 431, 431, 431], strict=True):
        with server.client() as client:
            assert client.ask(case).status == status
    with server.client() as client:
        # never ends its header: refused all the same, and what it sends after that is not kept
        client.send(b"GET / HTTP/1.1\r\nX: ", b"x" * 1_000_000)
        answer = client.answer()
        assert (answer.status, b"max_header_bytes = 4096 bytes" in answer.body) == (431, True)


MALFORMED = {
    "length and chunked": get("/", "Content-Length: 3", "Transfer-Encoding: chunked", method="POST") + b"0\r\n\r\n",
    "chunked and length": get("/", "Transfer-Encoding: chunked", "Content-Length: 3", method="POST") + b"0\r\n\r\n",
    "two lengths": get("/", "Content-Length: 3", "Content-Length: 4", method="POST") + b"abcd",
    "length list": get("/", "Content-Length: 3, 3", method="POST") + b"abc",
    "signed length": get("/", "Content-Length: +3", method="POST") + b"abc",
    "huge length": get("/", "Content-Length: 99999999999999999999", method="POST"),
    "chunked twice": get("/", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked", method="POST") + b"0\r\n\r\n",
    "chunked not last": get("/", "Transfer-Encoding: chunked, gzip", method="POST") + b"0\r\n\r\n",
    "chunked in 1.0": get("/", "Transfer-Encoding: chunked", method="POST", version="1.0") + b"0\r\n\r\n",
    "hex prefix": get("/", "Transfer-Encoding: chunked", method="POST") + b"0x1\r\na\r\n0\r\n\r\n",
    "negative chunk": get("/", "Transfer-Encoding: chunked", method="POST") + b"-1\r\na\r\n0\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: a\n\n",
    "space before colon": b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n",
    "nul in header": b"GET / HTTP/1.1\r\nHost: a\r\nX: b\0c\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "control in target": b"GET /a\x01b HTTP/1.1\r\nHost: a\r\n\r\n",
    "unknown method": b"FOO / HTTP/1.1\r\nHost: a\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_requests_get_400_and_the_connection_ends(server: Running, app: Told, case: str) -> None:
    with server.client() as client:
        answer = client.ask(MALFORMED[case] + get("/smuggled"))
        assert answer.status == 400
        assert b"malformed HTTP request: " in answer.body
        assert answer.headers["connection"] == "close"
        assert client.closed()
    assert app.seen == []


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (get("/", "Transfer-Encoding: gzip, chunked", method="POST") + b"0\r\n\r\n", 501),
        (get("a:443", method="CONNECT"), 501),
        (get("/", "Connection: upgrade", "Upgrade: h2c", "Transfer-Encoding: chunked", method="POST"), 501),
    ],
)
def test_what_is_not_offered_is_said(server: Running, request_bytes: bytes, status: int) -> None:
    with server.client() as client:
        assert client.ask(request_bytes).status == status
        assert client.closed()


def test_errors_come_after_the_answers_of_earlier_requests(server: Running, app: Told) -> None:
    with server.client() as client:
        client.send(get("/held") + b"nonsense\r\n\r\n")
        app.wait(lambda: len(app.held) == 1)
        server.call(lambda: app.held[0].respond(200, [], [b"good"]))
        assert client.answer().body == b"good"
        assert client.answer().status == 400
        assert client.closed()


@pytest.mark.parametrize("size", [0, 3, 20_000])
def test_an_upgrade_is_ignored_and_its_body_read(server: Running, size: int) -> None:
    body = b"G" * size
    asked = post(body, "/echo", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    with server.client() as client:
        client.send(asked + get("/next"))
        assert client.answer().body == body
        assert client.answer().body == b"GET /next"


def test_nothing_after_a_closing_request_is_answered(server: Running, app: Told) -> None:
    with server.client() as client:
        client.send(get("/one", "Connection: close") + get("/two"))
        assert client.answer().body == b"GET /one"
        assert client.closed()
    assert [exchange.path for exchange in app.seen] == ["/one"]


def test_targets(server: Running, app: Told) -> None:
    with server.client() as client:
        assert client.ask(get("http://elsewhere:1/abs/path?q=1")).body == b"GET /abs/path"
        assert app.seen[-1].query == b"q=1"
        assert client.ask(get("http://elsewhere")).body == b"GET /"
        assert client.ask(get("/a%2Fb%20c?x")).body == b"GET /a/b c"
        assert app.seen[-1].raw_path == b"/a%2Fb%20c"
        assert client.ask(get("*", method="OPTIONS")).body == b"OPTIONS *"


def test_headers_are_lower_case_and_repeated_ones_joined(server: Running, app: Told) -> None:
    with server.client() as client:
        client.ask(get("/x", "X-A: 1", "x-a: 2", "Cookie: a=1", "Cookie: b=2", "Empty:"))
    headers = app.seen[-1].headers
    assert (headers[b"x-a"], headers[b"cookie"], headers[b"empty"]) == (b"1, 2", b"a=1; b=2", b"")


def test_empty_lines_between_requests_are_allowed(server: Running) -> None:
    with server.client() as client:
        assert client.ask(b"\r\n\r\n" + get("/a")).body == b"GET /a"
        assert client.ask(b"\r\n" + get("/b")).body == b"GET /b"


def test_a_handler_that_raises_gives_500_and_keeps_the_connection(server: Running) -> None:
    with server.client() as client:
        answer = client.ask(get("/raise"))
        assert (answer.status, answer.body) == (500, b'{"error": "internal error"}')
        assert client.ask(get("/fine")).body == b"GET /fine"


def test_a_response_header_cannot_be_forged(server: Running, app: Told) -> None:
    with server.client() as client:
        client.send(get("/held"))
        app.wait(lambda: len(app.held) == 1)
        with pytest.raises(ValueError, match="line break"):
            server.call(lambda: app.held[0].respond(200, [(b"X", b"a\r\nSet-Cookie: b")], []))
        server.call(lambda: app.held[0].respond(200, [], [b"clean"]))
        assert client.answer().body == b"clean"
        with pytest.raises(RuntimeError, match="answered twice"):
            server.call(lambda: app.held[0].respond(200, [], []))


def test_connections_have_nodelay_and_share_the_port(serve: type, app: Told, server: Running) -> None:
    twin = HttpServer(app, "127.0.0.1", server.port, EndpointSettings())
    assert server.wait(twin.start()) == server.port
    server.wait(twin.close())
    with server.client() as client:
        client.ask(get("/x"))

        def nodelay() -> int:
            (connection,) = server.server._state.connections  # type: ignore[union-attr]
            return int(connection._transport.get_extra_info("socket").getsockopt(6, 1))

        assert server.call(nodelay) == 1


def test_connection_limit_is_answered_with_503(serve: type, app: Told) -> None:
    server = serve(app, EndpointSettings(max_connections=2))
    first, second = server.client(), server.client()
    assert [first.ask(get("/a")).status, second.ask(get("/a")).status] == [200, 200]
    with server.client() as third:
        third.send(get("/a"))
        answer = third.answer()
        assert answer.status == 503
        assert b"max_connections = 2" in answer.body
        assert answer.headers["retry-after"] == "1"
        assert third.closed()
    assert server.server.counters.refused == 1
    first.sock.close()
    second.sock.close()
    server.until(lambda: server.server.counters.open == 0)
    with server.client() as fourth:
        assert fourth.ask(get("/a")).status == 200


def test_segmented_client_helper_reads_what_was_sent(server: Running) -> None:
    client = Client(server.port)
    for byte in post(b"slow"):
        client.send(bytes([byte]))
    assert client.answer().body == b"slow"
    client.sock.close()
