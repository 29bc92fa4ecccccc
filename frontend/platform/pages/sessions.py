"""Who is signed in: from a cookie to a principal, and back.

Theory of operation
    A cookie names a key; the key decides. Each use asks for its row, remembered for ``REMEMBER_S`` as the API does, so
    that a revoked key ends its sessions within 5 s too. Signing out leaves a mark by the session's id, an empty file
    next to the secret, which every process of the host sees at its next request: a copied cookie is worth nothing then.

    The secret lies in the state directory, made by whichever process comes first. Processes on several machines with
    one store need the same one: ``gateway.pages.secret_env``; without it people sign in per machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from engines.errors import ServingError, Unavailable
from frontend.batches.store.rows import KeyRow, WorkspaceRow
from frontend.httpd.exchange import Exchange
from frontend.openai.principal import Principal, Role
from frontend.platform.callers import Session
from frontend.platform.pages import session_state
from frontend.platform.pages.guard import cookie_of
from frontend.platform.pages.session_state import Token

SECRET_FILE: Final = "pages.secret"
ENDED_DIR: Final = "pages-ended"
REMEMBER_S: Final = 4.0
ASK_TIMEOUT_S: Final = 3.0
MAX_REMEMBERED: Final = 4096
MAX_ENDED: Final = 20_000
"""Marks of sessions that ended by signing out; beyond that the oldest ones go, long before they would matter."""
MIN_GIVEN_SECRET_CHARS: Final = 32


class SecretUnusable(ServingError):
    """The secret of the sessions cannot be read or made; the text names the file and says why."""


class KeySource(Protocol):
    """Where keys and workspaces are looked up by id; raises ``Unavailable`` while there is no store."""

    async def key(self, key_id: str) -> KeyRow | None: ...

    async def workspace(self, id_or_name: str) -> WorkspaceRow | None: ...


@dataclass(frozen=True, slots=True)
class SignedIn:
    """Somebody with a session.

    Attributes:
        form_token: for the forms of their pages.
        renewed: a new cookie value to send along, or None.
    """

    principal: Principal
    key_name: str
    workspace_name: str
    token: Token
    form_token: str
    renewed: str | None = None


@dataclass(frozen=True, slots=True)
class _Holder:
    """A key as last seen: None of a principal means unknown or revoked."""

    until_s: float
    principal: Principal | None
    key_name: str = ""
    workspace_name: str = ""


class Sessions:
    """All sessions of an installation, as one process sees them."""

    def __init__(
        self,
        keys: KeySource,
        state_dir: Path,
        life_s: int,
        given_secret: str = "",
        secret_name: str = "",
        clock_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            life_s: from signing in to having to do it again, whatever happens in between.
            given_secret: shared by several machines.
            secret_name: the environment variable that should hold it; empty for a secret in the state directory.
        """
        self._keys = keys
        self._state_dir = state_dir
        self._life_s = life_s
        self._given_secret = given_secret
        self._secret_name = secret_name
        self._clock_s = clock_s
        self._monotonic_s = monotonic_s
        self._secret = b""
        self._known: dict[str, _Holder] = {}

    def start(self) -> None:
        """Read the secret, or make it.

        Raises:
            SecretUnusable: not readable by us alone, or the one given is too short.
        """
        if self._secret_name:
            if len(self._given_secret) < MIN_GIVEN_SECRET_CHARS:
                raise SecretUnusable(
                    f"gateway.pages.secret_env: expected at least {MIN_GIVEN_SECRET_CHARS} characters in "
                    f"{self._secret_name}, got {len(self._given_secret)}"
                )
            self._secret = self._given_secret.encode()
        else:
            self._secret = _installation_secret(self._state_dir)
        try:
            (self._state_dir / ENDED_DIR).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SecretUnusable(f"{self._state_dir / ENDED_DIR}: {error.strerror}") from error

    def begin(self, principal: Principal) -> tuple[str, Token]:
        """Return the cookie value of a new session, and what it says."""
        now_s = int(self._clock_s())
        token = Token(secrets.token_hex(session_state.ID_CHARS // 2), principal.key_id, now_s, now_s)
        return session_state.seal(token, self._secret), token

    async def find(self, exchange: Exchange) -> Session | None:
        """See ``frontend.platform.callers.Sessions``: the API accepts a session too."""
        signed_in = await self.signed_in(cookie_of(exchange.headers))
        return None if signed_in is None else Session(signed_in.principal, signed_in.form_token)

    async def signed_in(self, cookie: str) -> SignedIn | None:
        """Return who a cookie stands for; None if it stands for nobody (any more).

        Raises:
            Unavailable: the store cannot be asked; nobody is let in on an old answer.
        """
        token = session_state.unseal(cookie, self._secret)
        if token is None or token.ended(int(self._clock_s()), self._life_s) or self._mark(token.session_id).exists():
            return None
        holder = await self._holder(token.key_id)
        if holder.principal is None:
            return None
        form_token = session_state.form_token(token.session_id, self._secret)
        return SignedIn(holder.principal, holder.key_name, holder.workspace_name, token, form_token)

    def renew(self, signed_in: SignedIn) -> SignedIn:
        """Note a use, for which a new cookie may be due.

        Not for what a page fetches by itself: an open page must not keep a session alive for ever.
        """
        now_s = int(self._clock_s())
        if not signed_in.token.wants_renewal(now_s):
            return signed_in
        token = signed_in.token.used(now_s)
        return replace(signed_in, token=token, renewed=session_state.seal(token, self._secret))

    def is_form_token(self, text: str, signed_in: SignedIn) -> bool:
        """Return whether a form came from a page of this session."""
        return session_state.is_form_token(text, signed_in.token.session_id, self._secret)

    def end(self, signed_in: SignedIn) -> None:
        """Sign out: every copy of the cookie is worthless from now on, on every process of this host."""
        self._prune()
        mark, now_s = self._mark(signed_in.token.session_id), self._clock_s()
        mark.touch(mode=0o600)
        os.utime(mark, (now_s, now_s))

    def left_s(self, token: Token) -> int:
        """Return for how long a browser should keep a cookie with this token."""
        return token.left_s(int(self._clock_s()), self._life_s)

    def _mark(self, session_id: str) -> Path:
        return self._state_dir / ENDED_DIR / session_id

    def _prune(self) -> None:
        """Forget marks of sessions that are over anyway; the oldest beyond the limit too."""
        gone_before = self._clock_s() - self._life_s
        marks = []
        for mark in (self._state_dir / ENDED_DIR).iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process prunes too
                marks.append((mark.stat().st_mtime, mark))
        marks.sort()
        for index, (made, mark) in enumerate(marks):
            if made < gone_before or len(marks) - index >= MAX_ENDED:
                mark.unlink(missing_ok=True)

    async def _holder(self, key_id: str) -> _Holder:
        found = self._known.get(key_id)
        if found is not None and found.until_s > self._monotonic_s():
            return found
        # Counted from before the question: the answer may be as old as that.
        until_s = self._monotonic_s() + REMEMBER_S
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                row = await self._keys.key(key_id)
                workspace = None if row is None else await self._keys.workspace(row.workspace_id)
        except TimeoutError as error:
            raise Unavailable("the gateway's store does not answer") from error
        if row is None or row.revoked_at is not None:
            holder = _Holder(until_s, None)
        else:
            principal = Principal(row.workspace_id, row.id, Role(row.role))
            name = row.workspace_id if workspace is None else workspace.name
            holder = _Holder(until_s, principal, row.name, name)
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[key_id] = holder
        return holder


def _installation_secret(state_dir: Path) -> bytes:
    """Return the secret in the state directory, made now if there is none."""
    path = state_dir / SECRET_FILE
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_secret(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise SecretUnusable(f"{path}: expected a file of this user with mode 0600; delete it for a new one")
            secret = file.read(session_state.SECRET_BYTES + 1)
    except OSError as error:
        raise SecretUnusable(f"{path}: {error.strerror}") from error
    if len(secret) != session_state.SECRET_BYTES:
        raise SecretUnusable(f"{path}: expected {session_state.SECRET_BYTES} bytes; delete it for a new one")
    return secret


def _write_secret(path: Path) -> None:
    """Make the file whole or not at all; another process may be first, then its secret stands."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(session_state.SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()
