"""Heads that are recognised instead of parsed say exactly what parsing them would say."""

from __future__ import annotations

from collections.abc import Callable

import httptools
import pytest
from http_double import TEXT, Running, Told
from hypothesis import given
from hypothesis import strategies as st

from frontend.httpd.exchange import Exchange
from frontend.httpd.heads import MAX_KEPT_BYTES, MAX_KNOWN_BODY_BYTES, Head, known_head
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


def message(body: bytes, *lines: bytes, length: bytes | None = None, name: bytes = b"Content-Length") -> bytes:
    told = b"%d" % len(body) if length is None else length
    head = b"\r\n".join((b"POST /v2/models/m/infer?a=b HTTP/1.1", b"Host: h", *lines, name + b": " + told))
    return head + b"\r\n\r\n" + body


def facts(head: Head) -> tuple[object, ...]:
    return head.method, head.target, head.raw_path, head.query, head.headers, head.http10, head.keep_alive


def test_the_same_bytes_give_the_same_head() -> None:
    first = message(b"abc", b"Content-Type: x/y")
    head = parsed(first)
    known = known_head(first, head)
    assert known is not None
    again = message(b"xyz", b"Content-Type: x/y")
    assert known.match(again) == (head, len(again) - 3)


@given(st.binary(max_size=300), st.binary(max_size=300), st.sampled_from([b"Content-Length", b"content-length"]))
def test_another_length_gives_what_parsing_gives(one: bytes, two: bytes, name: bytes) -> None:
    first, second = message(one, b"X-A: 1", name=name), message(two, b"X-A: 1", name=name)
    known = known_head(first, parsed(first))
    assert known is not None
    found = known.match(second)
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
    known = known_head(first, parsed(first))
    assert known is not None
    end = first.index(b"\r\n\r\n")
    changed = first[: min(at, end)] + change + first[min(at, end) :]
    found = known.match(changed)
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
    known = known_head(first, parsed(first))
    assert known is not None
    assert known.match(second) is None


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
    assert known_head(first, parsed(first)) is None


def test_a_message_without_a_body_is_known_by_all_its_bytes() -> None:
    first = b"GET /v2/health/ready HTTP/1.1\r\nHost: h\r\n\r\n"
    head = parsed(first)
    known = known_head(first, head)
    assert known is not None
    assert known.match(first) == (head, len(first))
    assert known.match(first + first) is None


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
