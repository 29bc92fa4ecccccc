"""Sessions: what a cookie is worth, for how long, and who can end it."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import Unavailable
from frontend.batches.keys import make_key
from frontend.batches.store.rows import KeyRow, WorkspaceRow
from frontend.openai.principal import Principal, Role
from frontend.platform.pages import session_state
from frontend.platform.pages.session_state import IDLE_S, MAX_AHEAD_S, Token, seal, unseal
from frontend.platform.pages.sessions import MAX_ENDED, REMEMBER_S, SecretUnusable, Sessions

SECRET = b"s" * 32
HOUR_S = 3600
TOKENS = st.builds(
    Token,
    st.text("0123456789abcdef", min_size=32, max_size=32),
    st.from_regex(r"\A[A-Za-z0-9_-]{1,80}\Z"),
    st.integers(0, 10**11),
    st.integers(0, 10**11),
)


class KnownKeys:
    """Keys by id; counts questions."""

    def __init__(self) -> None:
        made = make_key()
        self.row = KeyRow(made.id, "ws_a", "member", "laptop", made.prefix, made.key_hash, 0, None)
        self.asked = 0
        self.broken = False

    async def key(self, key_id: str) -> KeyRow | None:
        self.asked += 1
        if self.broken:
            raise Unavailable("no store")
        return self.row if key_id == self.row.id else None

    async def workspace(self, id_or_name: str) -> WorkspaceRow | None:
        return WorkspaceRow(id_or_name, "alpha", "team", 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


class SessionsWorld:
    def __init__(self, state_dir: Path, **settings: str) -> None:
        self.keys = KnownKeys()
        self.clock = Clock()
        self.state_dir = state_dir
        self.settings = settings
        self.sessions = self.process()
        self.principal = Principal("ws_a", self.keys.row.id, Role.MEMBER)

    def process(self) -> Sessions:
        """Return another process of the same host."""
        sessions = Sessions(
            self.keys, self.state_dir, 12 * HOUR_S, **self.settings, clock_s=self.clock, monotonic_s=self.clock
        )
        sessions.start()
        return sessions

    def who(self, cookie: str, sessions: Sessions | None = None) -> str | None:
        found = asyncio.run((sessions or self.sessions).signed_in(cookie))
        return None if found is None else found.key_name


@pytest.fixture
def made(tmp_path: Path) -> SessionsWorld:
    return SessionsWorld(tmp_path)


@settings(deadline=None, max_examples=100)
@given(TOKENS)
def test_a_token_says_what_was_sealed_in_it(token: Token) -> None:
    assert unseal(seal(token, SECRET), SECRET) == token


@settings(deadline=None, max_examples=100)
@given(TOKENS, st.data())
def test_a_token_with_any_other_byte_is_nobodys(token: Token, data: st.DataObject) -> None:
    text = seal(token, SECRET)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(min_codepoint=1, max_codepoint=300).filter(lambda char: char != text[at]))
    assert unseal(text[:at] + other + text[at + 1 :], SECRET) is None
    assert unseal(text, b"t" * 32) is None
    assert unseal(text[:-1], SECRET) is None


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=600))
def test_junk_is_nobodys(text: str) -> None:
    assert unseal(text, SECRET) is None


def test_a_forms_token_is_no_cookies_and_belongs_to_one_session() -> None:
    token = session_state.form_token("a" * 32, SECRET)
    assert session_state.is_form_token(token, "a" * 32, SECRET)
    assert not session_state.is_form_token(token, "b" * 32, SECRET)
    assert not session_state.is_form_token(token, "a" * 32, b"t" * 32)
    assert not session_state.is_form_token("", "a" * 32, SECRET)
    assert not session_state.is_form_token("\udcff\N{SNOWMAN}", "a" * 32, SECRET)


def test_a_session_ends_when_it_is_not_used(made: SessionsWorld) -> None:
    cookie, _ = made.sessions.begin(made.principal)
    made.clock.now_s += IDLE_S - 1
    assert made.who(cookie) == "laptop"
    made.clock.now_s += 1
    assert made.who(cookie) is None


def test_using_it_moves_its_end_up_to_the_longest_life(made: SessionsWorld) -> None:
    cookie, _ = made.sessions.begin(made.principal)
    for _ in range(11):
        made.clock.now_s += HOUR_S
        found = asyncio.run(made.sessions.signed_in(cookie))
        assert found is not None
        renewed = made.sessions.renew(found)
        assert renewed.renewed is not None
        assert made.sessions.left_s(renewed.token) <= IDLE_S
        cookie = renewed.renewed
    made.clock.now_s += HOUR_S - 1
    assert made.who(cookie) == "laptop"
    made.clock.now_s += 1
    assert made.who(cookie) is None


def test_a_cookie_is_not_written_for_every_page(made: SessionsWorld) -> None:
    cookie, _ = made.sessions.begin(made.principal)
    made.clock.now_s += session_state.RENEW_S - 1
    found = asyncio.run(made.sessions.signed_in(cookie))
    assert found is not None
    assert made.sessions.renew(found).renewed is None


def test_a_token_from_the_future_is_nobodys(made: SessionsWorld) -> None:
    cookie, _ = made.sessions.begin(made.principal)
    made.clock.now_s -= MAX_AHEAD_S
    assert made.who(cookie) == "laptop"
    made.clock.now_s -= 1
    assert made.who(cookie) is None


def test_signing_out_ends_every_copy_on_every_process(made: SessionsWorld) -> None:
    cookie, _ = made.sessions.begin(made.principal)
    other = made.process()
    assert made.who(cookie, other) == "laptop"
    found = asyncio.run(made.sessions.signed_in(cookie))
    assert found is not None
    made.sessions.end(found)
    assert made.who(cookie) is None
    assert made.who(cookie, other) is None
    assert made.who(made.sessions.begin(made.principal)[0], other) == "laptop"


def test_marks_of_ended_sessions_do_not_pile_up(made: SessionsWorld) -> None:
    for _ in range(5):
        found = asyncio.run(made.sessions.signed_in(made.sessions.begin(made.principal)[0]))
        assert found is not None
        made.sessions.end(found)
    folder = made.state_dir / "pages-ended"
    assert len(list(folder.iterdir())) == 5 < MAX_ENDED
    for mark in folder.iterdir():
        os.utime(mark, (made.clock.now_s - 13 * HOUR_S,) * 2)
    found = asyncio.run(made.sessions.signed_in(made.sessions.begin(made.principal)[0]))
    assert found is not None
    made.sessions.end(found)
    assert len(list(folder.iterdir())) == 1


def test_a_revoked_key_ends_its_sessions_within_five_seconds(made: SessionsWorld) -> None:
    cookie, _ = made.sessions.begin(made.principal)
    assert made.who(cookie) == "laptop"
    made.keys.row = replace(made.keys.row, revoked_at=1)
    made.clock.now_s += REMEMBER_S
    assert REMEMBER_S < 5
    assert made.who(cookie) is None


def test_the_store_is_asked_rarely_and_nobody_is_let_in_without_it(made: SessionsWorld) -> None:
    cookie, _ = made.sessions.begin(made.principal)
    assert [made.who(cookie) for _ in range(3)] == ["laptop"] * 3
    assert made.keys.asked == 1
    made.keys.broken = True
    made.clock.now_s += REMEMBER_S
    with pytest.raises(Unavailable):
        made.who(cookie)


def test_the_secret_is_made_once_for_this_user_only(made: SessionsWorld) -> None:
    path = made.state_dir / "pages.secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    made.process()
    assert path.read_bytes() == before
    path.chmod(0o640)
    with pytest.raises(SecretUnusable, match="mode 0600"):
        made.process()


def test_a_damaged_secret_is_refused(made: SessionsWorld) -> None:
    (made.state_dir / "pages.secret").write_bytes(b"short")
    with pytest.raises(SecretUnusable, match="expected 32 bytes"):
        made.process()


def test_machines_with_the_same_given_secret_know_each_others_sessions(tmp_path: Path) -> None:
    one = SessionsWorld(tmp_path / "one", given_secret="x" * 40, secret_name="PAGES_SECRET")
    two = SessionsWorld(tmp_path / "two", given_secret="x" * 40, secret_name="PAGES_SECRET")
    two.keys.row = one.keys.row
    assert two.who(one.sessions.begin(one.principal)[0]) == "laptop"
    assert not (tmp_path / "one" / "pages.secret").exists()


@pytest.mark.parametrize("given", ["", "x" * 31])
def test_a_given_secret_must_be_long(tmp_path: Path, given: str) -> None:
    with pytest.raises(SecretUnusable, match=r"gateway\.pages\.secret_env: expected at least 32"):
        SessionsWorld(tmp_path, given_secret=given, secret_name="PAGES_SECRET")
