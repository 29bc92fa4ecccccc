"""Heads that are recognised instead of parsed say exactly what parsing them would say."""

from __future__ import annotations

from collections.abc import Callable

import httptools
import pytest
from http_double import TEXT, Running, Told
from hypothesis import given
from hypothesis import strategies as st

from frontend.httpd.exchange import Exchange
from frontend.httpd.heads import (
    MAX_HOLES,
    MAX_KEPT_BYTES,
    MAX_KNOWN_BODY_BYTES,
    MAX_VALUE_BYTES,
    Head,
    KnownHead,
    known_head,
)
from frontend.httpd.intake import SLICE_BYTES
from frontend.settings import EndpointSettings


def parsed(raw: bytes) -> Head:
    """What llhttp makes of one whole message."""

    class Seen:
        target = b""
        headers: dict[bytes, bytes]

        def __init__(self) -> None:
            self.headers = {}

        def on_url(self, url: bytes) -> None:
            self.target += url

        def on_header(self, name: bytes, value: bytes) -> None:
            self.headers[name.lower()] = value

    seen = Seen()
    parser = httptools.HttpRequestParser(seen)
    parser.feed_data(raw)
    return Head(
        parser.get_method().decode(), seen.target, seen.headers,
        http10=parser.get_http_version() == "1.0", keep_alive=parser.should_keep_alive(),
    )  # fmt: skip


def known(raw: bytes) -> KnownHead | None:
    return known_head(raw, parsed(raw), MAX_KEPT_BYTES)


def message(body: bytes, *lines: bytes, length: bytes | None = None, name: bytes = b"Content-Length") -> bytes:
    told = b"%d" % len(body) if length is None else length
    head = b"\r\n".join((b"POST /v2/models/m/infer?a=b HTTP/1.1", b"Host: h", *lines, name + b": " + told))
    return head + b"\r\n\r\n" + body


def facts(head: Head) -> tuple[object, ...]:
    return head.method, head.target, head.raw_path, head.query, head.headers, head.http10, head.keep_alive


def test_the_same_bytes_give_the_same_head() -> None:
    first = message(b"abc", b"Content-Type: x/y")
    head = parsed(first)
    kept = known_head(first, head, MAX_KEPT_BYTES)
    assert kept is not None
    again = message(b"xyz", b"Content-Type: x/y")
    assert kept.match(again) == (head, len(again) - 3)


@given(st.binary(max_size=300), st.binary(max_size=300), st.sampled_from([b"Content-Length", b"content-length"]))
def test_another_length_gives_what_parsing_gives(one: bytes, two: bytes, name: bytes) -> None:
    first, second = message(one, b"X-A: 1", name=name), message(two, b"X-A: 1", name=name)
    kept = known(first)
    assert kept is not None
    found = kept.match(second)
    if not two and len(one) != len(two):
        assert found is None
        return
    assert found is not None
    head, at = found
    assert facts(head) == facts(parsed(second))
    assert second[at:] == two


@given(st.binary(min_size=1, max_size=40), st.integers(0, 120), st.binary(max_size=4))
def test_a_changed_head_is_recognised_only_if_parsing_says_the_same(body: bytes, at: int, change: bytes) -> None:
    first = message(body, b"X-A: 1")
    kept = known(first)
    assert kept is not None
    end = first.index(b"\r\n\r\n")
    changed = first[: min(at, end)] + change + first[min(at, end) :]
    found = kept.match(changed)
    if found is not None:
        head, start = found
        assert facts(head) == facts(parsed(changed))
        assert changed[start:] == changed[changed.index(b"\r\n\r\n") + 4 :]


@pytest.mark.parametrize(
    "second",
    [
        message(b"abc") + b"G",
        message(b"abc")[:-1],
        message(b"abc", length=b"+3"),
        message(b"abc", length=b" 3"),
        message(b"abc", length=b"3 "),
        message(b"abc", length=b""),
        message(b"abc", length=b"0000003"),
        message(b"abc", length=b"4"),
        message(b"abc", length=b"3\r\nContent-Length: 3"),
        message(b"abc", length=b"3\r\nTransfer-Encoding: chunked"),
        message(b"x" * (MAX_KNOWN_BODY_BYTES + 1)),
        b"",
    ],
)
def test_what_is_not_one_whole_plain_message_is_left_to_the_parser(second: bytes) -> None:
    first = message(b"wxyz")
    kept = known(first)
    assert kept is not None
    assert kept.match(second) is None


@pytest.mark.parametrize(
    "line",
    [
        b"Connection: close",
        b"Connection: keep-alive",
        b"Expect: 100-continue",
        b"Upgrade: h2c",
        b"X: " + b"a" * MAX_KEPT_BYTES,
    ],
)
def test_heads_that_mean_more_than_a_request_are_parsed_each_time(line: bytes) -> None:
    first = message(b"abc", line)
    assert known(first) is None


def test_a_message_without_a_body_is_known_by_all_its_bytes() -> None:
    first = b"GET /v2/health/ready HTTP/1.1\r\nHost: h\r\n\r\n"
    head = parsed(first)
    kept = known_head(first, head, MAX_KEPT_BYTES)
    assert kept is not None
    assert kept.match(first) == (head, len(first))
    assert kept.match(first + first) is None


# Headers whose values are new with each request

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = b"00-ffffffffffffffffffffffffffffffff-eeeeeeeeeeeeeeee-00"


@pytest.mark.parametrize("name", [b"traceparent", b"X-Request-Id", b"B3", b"x-amzn-TRACE-id", b"X-B3-SpanId"])
@pytest.mark.parametrize("value", [OTHER, b"a", b"Root=1-5759;Parent=5399,Sampled=1!~", b"v" * MAX_VALUE_BYTES])
@pytest.mark.parametrize("body", [b"abc", b"wxyz", b"x" * 1000])
def test_a_head_with_another_trace_is_recognised(name: bytes, value: bytes, body: bytes) -> None:
    first = message(b"abc", b"A: b", name + b": " + PARENT, b"C: d")
    kept = known(first)
    assert kept is not None
    for told in (value, PARENT, value, value):
        second = message(body, b"A: b", name + b": " + told, b"C: d")
        found = kept.match(second)
        assert found is not None
        assert facts(found[0]) == facts(parsed(second))
        assert list(found[0].headers) == list(parsed(second).headers)
        assert second[found[1] :] == body


def test_several_values_differ_at_once_and_their_head_keeps_its_handler() -> None:
    names = [b"x-%d-id" % number for number in range(MAX_HOLES)]
    head = b"\r\n".join((b"GET / HTTP/1.1", b"Host: h", *(name + b": %d" for name in names))) + b"\r\n\r\n"
    first = head % (*range(MAX_HOLES),)
    kept = known(first)
    assert kept is not None
    found = kept.match(first)
    assert found is not None
    found[0].handler = handler = lambda exchange: None
    second = head % (*range(10, 10 + MAX_HOLES),)
    again = kept.match(second)
    assert again is not None
    assert facts(again[0]) == facts(parsed(second))
    assert facts(found[0]) == facts(parsed(first))
    assert again[0].handler is handler
    assert kept.match(second) == again


@pytest.mark.parametrize(
    "value",
    [
        b"", b" a", b"a ", b"a b", b"\ta", b"a\t", b"a\0b", b"a\x7fb", b"a\xffb", b"a\rb", b"a\nb", b"a\r\n b",
        b"a\r\nx", b"a\r\nTransfer-Encoding: chunked", b"a\r\nContent-Length: 3", b"a\r\nX-Request-Id: b", b"a\r\n",
        b"a\r\n\r\n",         b"v" * (MAX_VALUE_BYTES + 1),
    ],
)  # fmt: skip
def test_a_value_that_is_not_plain_is_left_to_the_parser(value: bytes) -> None:
    kept = known(message(b"abc", b"X-Request-Id: one", b"C: d"))
    assert kept is not None
    assert kept.match(message(b"abc", b"X-Request-Id: " + value, b"C: d")) is None


@pytest.mark.parametrize(
    "lines",
    [
        (b"X-Request-Id: %b", b"X-Request-Id: fixed"),
        (b"X-Request-Id: fixed", b"x-request-id: %b"),
        (b"X-Request-Id:", b"X-Request-Id: %b"),
        (b"X-Request-Id:%b",),
        (b"X-Request-Id:  %b",),
        (b"X-Request-Id: %b ",),
        (b"X-Request-Id: of %b",),
        (b"X-Other: %b",),
    ],
)
def test_a_value_in_another_form_may_not_differ(lines: tuple[bytes, ...]) -> None:
    first, second = (message(b"abc", b"\r\n".join(lines) % value) for value in (b"one", b"two"))
    kept = known(first)
    assert kept is not None
    assert kept.match(first) is not None
    assert kept.match(second) is None


def test_a_head_that_grows_is_parsed_for_the_limit() -> None:
    first = message(b"abc", b"X-Request-Id: 1")
    limit = len(first) - 3 + 9
    kept = known_head(first, parsed(first), limit)
    assert kept is not None
    assert kept.match(message(b"abc", b"X-Request-Id: " + b"1" * 11)) is None
    assert kept.match(message(b"abc", b"X-Request-Id: " + b"1" * 10)) is not None


@pytest.mark.parametrize(
    "name",
    [
        "accept", "accept-encoding", "authorization", "connection", "content-encoding", "content-type", "cookie",
        "expect", "host", "inference-header-content-length", "keep-alive", "origin", "proxy-connection", "range", "te",
        "trailer", "upgrade", "x-csrf-token", "x-request-timeout-ms", "x-ringserve-explain",
        "x-ringserve-id", "x-ringserve-trace",
    ],
)  # fmt: skip
def test_headers_from_which_something_follows_may_not_differ(name: str) -> None:
    host = b"Host: h\r\nhost"
    first = message(b"abc", name.encode() + b": 1").replace(host, b"Host")
    kept = known(first)
    assert kept is None or kept.match(first) is not None
    assert kept is None or kept.match(first.replace(b": 1\r\n", b": 2\r\n")) is None


def test_a_connection_whose_heads_are_never_known_so_is_searched_now_and_then() -> None:
    known_ones = []
    kept: KnownHead | None = None
    for number in range(100):
        first, second = (message(b"abc", b"X-Other: %d" % number, b"b3: " + value) for value in (b"one", b"two"))
        kept = known_head(first, parsed(first), MAX_KEPT_BYTES, kept)
        assert kept is not None
        assert kept.match(first) is not None
        if number in (40, 48, 70, 99) and kept.match(second) is not None:
            known_ones.append(number)
    # From the one found at 48 on, each is searched again for a while, then one of 16.
    assert known_ones == [48]


class Remembering(Told):
    """Handles all but the first request of a connection by the handler that it set at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.handled: list[int] = []

    def handle(self, exchange: Exchange) -> None:
        exchange.head.handler = self._again
        super().handle(exchange)

    def _again(self, exchange: Exchange) -> None:
        self.handled.append(len(exchange.body))
        exchange.respond(200, TEXT, [exchange.body])


def test_a_known_head_announces_no_more_than_the_limit(serve: Callable[..., Running]) -> None:
    app = Remembering()
    server = serve(app, EndpointSettings(max_request_bytes=1024))
    with server.client() as client:
        for length, status in ((10, 200), (1024, 200), (10, 200), (1025, 413)):
            asked = message(b"x" * length).replace(b"/v2/models/m/infer?a=b", b"/echo")
            assert client.ask(asked).status == status
    assert app.handled == [1024, 10]


@pytest.mark.parametrize("length", [SLICE_BYTES, 4 * SLICE_BYTES + 1])
def test_the_head_of_a_message_longer_than_a_slice_is_known_too(serve: Callable[..., Running], length: int) -> None:
    app = Remembering()
    server = serve(app, EndpointSettings())
    asked = message(b"x" * length).replace(b"/v2/models/m/infer?a=b", b"/echo")
    with server.client() as client:
        for _ in range(20):  # one that comes in pieces teaches nothing
            answer = client.ask(asked)
            assert (answer.status, answer.body) == (200, b"x" * length)
    assert set(app.handled) == {length}
