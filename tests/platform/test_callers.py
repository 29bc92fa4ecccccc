"""Who makes a request: a key, or a browser's session that a foreign page cannot borrow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from frontend.batches.keys import make_key
from frontend.batches.store.rows import KeyRow
from frontend.httpd.exchange import Exchange, Line
from frontend.httpd.heads import Head
from frontend.openai.auth import Authenticator, Forbidden, Unauthorized
from frontend.openai.principal import Principal, Role
from frontend.platform.callers import Callers, Session

PERSON = Principal("ws_a", "key_person", Role.PLATFORM_ADMIN)
TOKEN = "t0ken"


class OneSession:
    """Whoever brings the cookie ``good`` is signed in."""

    async def find(self, exchange: Exchange) -> Session | None:
        return Session(PERSON, TOKEN) if exchange.headers.get(b"cookie") == b"session=good" else None


class OneKey:
    def __init__(self) -> None:
        self.key = make_key()

    async def find_key(self, key_hash: str) -> KeyRow | None:
        if key_hash != self.key.key_hash:
            return None
        return KeyRow("key_1", "ws_b", "member", "k", self.key.prefix, key_hash, 0, None)


def ask(method: str, headers: Mapping[str, str], *, public_url: str = "", source: OneKey | None = None) -> Principal:
    callers = Callers(Authenticator(source or OneKey()), public_url)
    callers.sessions = OneSession()
    encoded = {name.lower().encode(): value.encode("latin-1") for name, value in headers.items()}
    exchange = Exchange(cast("Line", None), Head(method, b"/api/v1/me", encoded, http10=False, keep_alive=True), 0)
    return asyncio.run(callers.principal_of(exchange))


GOOD = {"Cookie": "session=good", "Host": "gw.example:8000", "Origin": "http://gw.example:8000", "X-CSRF-Token": TOKEN}


def without(*names: str, **more: str) -> dict[str, str]:
    return {name: value for name, value in GOOD.items() if name not in names} | more


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_rule_80_a_session_reads_with_its_cookie_alone(method: str) -> None:
    assert ask(method, {"Cookie": "session=good"}) is PERSON


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize(
    "headers",
    [
        without("Origin"),
        without("X-CSRF-Token"),
        without("Host"),
        without(Origin="null"),
        without(Origin="http://evil.example"),
        without(Origin="http://gw.example"),
        without(Origin="http://gw.example:8000.evil.example"),
        without(Origin="http://gw.example:8000@evil.example"),
        without(Origin="ftp://gw.example:8000"),
        without(Origin="gw.example:8000"),
        without(Origin="http://gw.example:8000/"),
        without(**{"X-CSRF-Token": ""}),
        without(**{"X-CSRF-Token": "t0ken2"}),
        without(**{"X-CSRF-Token": "tökén"}),
    ],
)
def test_rule_80_a_session_changes_nothing_for_another_sites_page(method: str, headers: dict[str, str]) -> None:
    with pytest.raises(Forbidden):
        ask(method, headers)


@pytest.mark.parametrize(
    ("host", "origin", "public_url"),
    [
        ("gw.example:8000", "http://gw.example:8000", ""),
        ("gw.example", "https://gw.example", ""),
        ("gw.example:443", "https://gw.example", ""),
        ("GW.example", "http://gw.example:80", ""),
        ("[::1]:8000", "http://[::1]:8000", ""),
        ("10.0.0.7:8000", "https://batches.example", "https://batches.example/"),
    ],
)
def test_rule_80_a_session_changes_things_from_our_own_pages(host: str, origin: str, public_url: str) -> None:
    assert ask("PUT", without(Host=host, Origin=origin), public_url=public_url) is PERSON


def test_a_key_needs_neither_origin_nor_token_and_goes_before_a_cookie() -> None:
    source = OneKey()
    headers = {
        "Authorization": f"Bearer {source.key.secret}",
        "Cookie": "session=good",
        "Origin": "http://evil.example",
    }
    found = ask("PUT", headers, source=source)
    assert (found.key_id, found.role) == ("key_1", Role.MEMBER)


def test_a_bad_key_is_not_saved_by_a_good_cookie() -> None:
    with pytest.raises(Unauthorized):
        ask("GET", {"Authorization": f"Bearer {make_key().secret}", "Cookie": "session=good"})


@pytest.mark.parametrize("cookie", ["session=bad", ""])
def test_a_cookie_that_is_none_is_nobody(cookie: str) -> None:
    with pytest.raises(Unauthorized):
        ask("GET", {"Cookie": cookie})


def test_without_sessions_a_cookie_says_nothing() -> None:
    callers = Callers(Authenticator(OneKey()))
    headers: dict[bytes, bytes] = {b"cookie": b"session=good"}
    exchange = Exchange(cast("Line", None), Head("GET", b"/", headers, http10=False, keep_alive=True), 0)
    work: Any = callers.principal_of(exchange)
    with pytest.raises(Unauthorized):
        asyncio.run(work)
