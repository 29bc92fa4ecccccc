"""From an ``Authorization`` header to a principal: keys, their hashes, and a short memory of both.

A key is ``rs-<id>-<secret>``: the id is public (logs, lists, revocation), the secret has 256 bits, so that one SHA-256
of the whole key is a safe thing to store and cheap to check on every request.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from engines.errors import Kind, ServingError, Unavailable
from frontend.openai.principal import Principal

REMEMBER_S: Final = 4.0
"""How long an answer of the store is believed: below the 5 s within which a revocation must act."""
REMEMBER_UNKNOWN_S: Final = 1.0
"""How long a refusal is believed: a key just made works after this, and a flood of one bad key asks once a second."""
MAX_REMEMBERED: Final = 16_384
_KEY: Final = re.compile(r"rs-([0-9a-f]{16})-[A-Za-z0-9_-]{43}")


class Unauthorized(ServingError):
    """No key, or one that is unknown or revoked; the message never says which."""

    kind = Kind.INVALID_INPUT


@dataclass(frozen=True, slots=True)
class StoredKey:
    """What the store knows of a key: its hash and whose it is. Revoked and expired keys are not found."""

    key_hash: str
    principal: Principal


class KeySource(Protocol):
    """Where keys are looked up."""

    async def find_key(self, key_id: str) -> StoredKey | None:
        """Return an active key by its public id.

        Raises:
            Exception: the store cannot be asked now.
        """
        ...


def new_key() -> tuple[str, str, str]:
    """Return (key id, key, hash): the key is shown once, id and hash are stored."""
    key_id = secrets.token_hex(8)
    key = f"rs-{key_id}-{secrets.token_urlsafe(32)}"
    return key_id, key, key_hash(key)


def key_hash(key: str) -> str:
    """Return what is stored of a key: 64 hex digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_id_of(key: str) -> str | None:
    """Return the public id within a key, None if it is none of ours."""
    match = _KEY.fullmatch(key)
    return match[1] if match else None


class Authenticator:
    """Answers who calls, asking the store at most once per ``REMEMBER_S`` and key."""

    def __init__(self, source: KeySource, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock_s = clock_s
        self._known: dict[bytes, tuple[float, Principal | None]] = {}
        self._asking: dict[bytes, asyncio.Task[Principal | None]] = {}

    def remembered(self, authorization: bytes | None) -> Principal | None:
        """Return the principal if that needs no question to the store, None if it does.

        Raises:
            Unauthorized: no key of ours, or one that was just refused.
        """
        digest = hashlib.sha256(_bearer(authorization).encode()).digest()
        found = self._known.get(digest)
        if found is None or found[0] <= self._clock_s():
            return None
        if found[1] is None:
            raise _refused()
        return found[1]

    async def authenticate(self, authorization: bytes | None) -> Principal:
        """Return the principal of an ``Authorization`` header.

        Raises:
            Unauthorized: missing, malformed, unknown or revoked.
            Unavailable: the store cannot be asked; nobody is let in on an old answer.
        """
        principal = self.remembered(authorization)
        if principal is not None:
            return principal
        key = _bearer(authorization)
        digest = hashlib.sha256(key.encode()).digest()
        asking = self._asking.get(digest)
        if asking is None:
            asking = asyncio.get_running_loop().create_task(self._ask(key, digest))
            self._asking[digest] = asking
            asking.add_done_callback(lambda _: self._asking.pop(digest, None))
        try:
            principal = await asyncio.shield(asking)
        except ServingError:
            raise
        except Exception as error:
            raise Unavailable("keys cannot be checked now; retry later") from error
        if principal is None:
            raise _refused()
        return principal

    async def _ask(self, key: str, digest: bytes) -> Principal | None:
        key_id = key_id_of(key)
        assert key_id is not None
        asked_s = self._clock_s()
        found = await self._source.find_key(key_id)
        principal = found.principal if found and hmac.compare_digest(found.key_hash, key_hash(key)) else None
        if len(self._known) >= MAX_REMEMBERED:
            # Oldest first: what was learnt long ago is about to be forgotten anyway.
            for old in list(self._known)[: MAX_REMEMBERED // 8]:
                del self._known[old]
        # Counted from before the question: the answer may be as old as that.
        keep_s = REMEMBER_UNKNOWN_S if principal is None else REMEMBER_S
        self._known.pop(digest, None)
        self._known[digest] = (asked_s + keep_s, principal)
        return principal


def _bearer(authorization: bytes | None) -> str:
    if authorization is None:
        raise Unauthorized(
            "You didn't provide an API key. Send it in the Authorization header: Authorization: Bearer YOUR_KEY"
        )
    scheme, _, key = authorization.decode("latin-1").strip().partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise Unauthorized("expected an Authorization header of the form: Authorization: Bearer YOUR_KEY")
    if key_id_of(key) is None:
        raise _refused()
    return key


def _refused() -> Unauthorized:
    return Unauthorized("Incorrect API key provided, or it was revoked")
