"""Keys: who is let in, for how long an answer is believed, and that nothing tells more than it should."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from gateway_world import GatewayWorld, model, route

import openai
from engines.errors import Unavailable
from frontend.batches.keys import hash_key, make_key
from frontend.batches.store.rows import KeyRow
from frontend.openai import auth
from frontend.openai.auth import Authenticator, Unauthorized
from frontend.openai.development import DevelopmentKeyError, development_key, read_development_key
from frontend.openai.principal import Principal, Role
from stub_upstream import StubUpstream


class Keys:
    """Keys in memory; counts questions, and can be held or broken."""

    def __init__(self) -> None:
        self.rows: dict[str, KeyRow] = {}
        self.asked = 0
        self.broken = False
        self.free = asyncio.Event()
        self.free.set()
        self.reached = asyncio.Event()

    def add(self, revoked_at: int | None = None) -> str:
        made = make_key()
        row = KeyRow(made.id, "ws_a", "member", "n", made.prefix, made.key_hash, 0, revoked_at)
        self.rows[made.key_hash] = row
        return made.secret

    async def find_key(self, key_hash: str) -> KeyRow | None:
        self.asked += 1
        self.reached.set()
        await self.free.wait()
        if self.broken:
            raise Unavailable("the database at db.internal is away")
        return self.rows.get(key_hash)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


@pytest.mark.parametrize(
    "header",
    [None, b"", b"Bearer", b"Bearer ", b"Basic abc", b"Bearer sk-other", b"\xff\xfe", b"Bearer " + b"x" * 9999],
)
def test_headers_without_a_key_of_ours_never_reach_the_store(header: bytes | None) -> None:
    keys = Keys()
    with pytest.raises(Unauthorized):
        asyncio.run(Authenticator(keys).authenticate(header))
    assert keys.asked == 0


def test_a_key_is_looked_up_once_and_again_before_five_seconds() -> None:
    async def story() -> None:
        keys, clock = Keys(), Clock()
        key = keys.add()
        door = Authenticator(keys, clock)
        assert door.remembered(bearer(key)) is None
        principal = await door.authenticate(bearer(key))
        assert principal == Principal("ws_a", keys.rows[hash_key(key)].id, Role.MEMBER)
        assert door.remembered(b"bearer  " + key.encode() + b" ") == principal
        await door.authenticate(bearer(key))
        assert keys.asked == 1
        clock.now_s = auth.REMEMBER_S
        await door.authenticate(bearer(key))
        assert keys.asked == 2

    assert auth.REMEMBER_S + auth.ASK_TIMEOUT_S > 5 > auth.REMEMBER_S
    asyncio.run(story())


def test_an_answer_is_as_old_as_its_question() -> None:
    async def story() -> None:
        keys, clock = Keys(), Clock()
        key = keys.add()
        door = Authenticator(keys, clock)
        keys.free.clear()
        asking = asyncio.create_task(door.authenticate(bearer(key)))
        await keys.reached.wait()
        clock.now_s = auth.REMEMBER_S - 0.5
        keys.free.set()
        await asking
        clock.now_s = auth.REMEMBER_S
        assert door.remembered(bearer(key)) is None

    asyncio.run(story())


def test_revoked_and_unknown_keys_get_the_same_answer() -> None:
    async def story() -> None:
        keys = Keys()
        texts = set()
        for key in (keys.add(revoked_at=5), make_key().secret):
            door = Authenticator(keys, Clock())
            for _ in range(2):
                with pytest.raises(Unauthorized) as caught:
                    await door.authenticate(bearer(key))
                texts.add(str(caught.value))
                assert key not in str(caught.value)
        assert len(texts) == 1
        assert keys.asked == 2  # a refusal is remembered, too

    asyncio.run(story())


def test_many_callers_ask_once_and_one_that_leaves_takes_nobody_along() -> None:
    async def story() -> None:
        keys = Keys()
        key = keys.add()
        door = Authenticator(keys, Clock())
        keys.free.clear()
        callers = [asyncio.create_task(door.authenticate(bearer(key))) for _ in range(10)]
        await keys.reached.wait()
        callers[0].cancel()
        keys.free.set()
        found = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert len(set(found[1:])) == 1
        assert keys.asked == 1

    asyncio.run(story())


def test_nobody_is_let_in_while_the_store_is_away() -> None:
    async def story() -> None:
        keys, clock = Keys(), Clock()
        key = keys.add()
        door = Authenticator(keys, clock)
        await door.authenticate(bearer(key))
        keys.broken = True
        clock.now_s = 5.0
        with pytest.raises(Unavailable) as caught:
            await door.authenticate(bearer(key))
        assert "db.internal" not in str(caught.value)
        keys.broken = False
        await door.authenticate(bearer(key))

    asyncio.run(story())


def test_the_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_REMEMBERED", 16)

    async def story() -> None:
        door = Authenticator(Keys(), Clock())
        for _ in range(100):
            with pytest.raises(Unauthorized):
                await door.authenticate(bearer(make_key().secret))
        assert len(door._known) <= 16

    asyncio.run(story())


def test_st_07_keys_come_and_go_without_a_restart(
    tmp_path: Path, stub: StubUpstream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with GatewayWorld(tmp_path, model("m", route("r", stub.url))) as world:
        key_id, key = world.new_key()
        with world.client(key=key) as client:
            assert client.models.list().data
            clock = world.service.authenticator
            world.run(world.service.door.store.keys.revoke_key(key_id))
            later = clock._clock_s() + auth.REMEMBER_S
            monkeypatch.setattr(clock, "_clock_s", lambda: later)
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
        assert caught.value.code == "invalid_api_key"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        with world.client() as other:
            assert other.models.list().data
    assert key not in caplog.text


def test_an_auditor_uses_no_models(tmp_path: Path, stub: StubUpstream) -> None:
    with GatewayWorld(tmp_path, model("m", route("r", stub.url))) as world:
        _, key = world.new_key(role="auditor")
        with world.client(key=key) as client:
            assert client.models.list().data
            with pytest.raises(openai.PermissionDeniedError) as caught:
                client.embeddings.create(model="m", input="a")
    assert caught.value.code == "insufficient_permissions"
    assert not stub.calls


# Development mode


def test_the_development_key_works_and_stays(tmp_path: Path, stub: StubUpstream) -> None:
    seen = set()
    for _ in range(2):
        with GatewayWorld(tmp_path, model("m", route("r", stub.url))) as world:
            seen.add(world.development_key)
            with world.client(key=world.development_key) as client:
                assert client.models.list().data
            world.run(world.service.door.store.keys.workspace("ws_development"))
            (tmp_path / "store.sqlite3").rename(tmp_path / f"old{len(seen)}")
            for leftover in tmp_path.glob("store.sqlite3-*"):
                leftover.unlink()
    assert len(seen) == 1


def test_the_file_of_the_development_key(tmp_path: Path) -> None:
    state = tmp_path / "new" / "state"
    key = development_key(state)
    assert development_key(state) == read_development_key(state) == key
    file = state / "development.key"
    assert file.stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o077 == 0
    assert [one.name for one in state.iterdir()] == ["development.key"]
    file.chmod(0o644)
    with pytest.raises(DevelopmentKeyError, match="0600"):
        development_key(state)
    file.chmod(0o600)
    file.write_text("something\n")
    with pytest.raises(DevelopmentKeyError, match="no key"):
        development_key(state)
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(DevelopmentKeyError):
        development_key(state)
