"""From an ``Authorization`` header to a principal, with a short memory so that a request rarely asks the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from engines.errors import Kind, ServingError, Unavailable
from frontend.batches.keys import hash_key, matches, well_formed
from frontend.batches.store.rows import KeyRow
from frontend.openai.principal import Principal, Role

REMEMBER_S: Final = 4.0
"""How long an answer of the store is believed: below the 5 s within which a revocation must act."""
REMEMBER_UNKNOWN_S: Final = 1.0
"""How long a refusal is believed: a key just made works after this, and a flood of one bad key asks once a second."""
ASK_TIMEOUT_S: Final = 3.0
MAX_REMEMBERED: Final = 16_384
MAX_ASKING: Final = 1024
"""Questions to the store at once; random keys, sent in masses, must not take all of its time."""


class Unauthorized(ServingError):
    """No key, or one that is unknown or revoked; the message never says which."""

    kind = Kind.INVALID_INPUT


class Forbidden(ServingError):
    """The key is good, its role does not allow this."""

    kind = Kind.INVALID_INPUT


class KeySource(Protocol):
    """Where keys are looked up: ``Store.keys``."""

    async def find_key(self, key_hash: str) -> KeyRow | None:
        """Return the key with this hash, revoked or not."""
        ...


class Authenticator:
    """Answers who calls, asking the store at most once per ``REMEMBER_S`` and key.

    The memory is by hash, so that no key stays in it; the hash found is compared once more in constant time, since how
    the store compares is not known here.
    """

    def __init__(self, source: KeySource, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock_s = clock_s
        self._known: dict[str, tuple[float, Principal | None]] = {}
        self._asking: dict[str, asyncio.Task[Principal | None]] = {}

    def remembered(self, authorization: bytes | None) -> Principal | None:
        """Return the principal if that needs no question to the store, None if it does.

        Raises:
            Unauthorized: no key of ours, or one that was just refused.
        """
        return self._recall(hash_key(_bearer(authorization)))

    async def authenticate(self, authorization: bytes | None) -> Principal:
        """Return the principal of an ``Authorization`` header.

        Raises:
            Unauthorized: missing, malformed, unknown or revoked.
            Unavailable: the store cannot be asked; nobody is let in on an old answer.
        """
        key = _bearer(authorization)
        digest = hash_key(key)
        principal = self._recall(digest)
        if principal is not None:
            return principal
        asking = self._asking.get(digest)
        if asking is None:
            if len(self._asking) >= MAX_ASKING:
                raise Unavailable("too many keys are being checked; retry later")
            asking = asyncio.get_running_loop().create_task(self._ask(key, digest))
            self._asking[digest] = asking
            asking.add_done_callback(lambda _: self._asking.pop(digest, None))
        try:
            # Shielded: others may wait for the same answer.
            principal = await asyncio.shield(asking)
        except (ServingError, TimeoutError, OSError) as error:
            raise Unavailable("keys cannot be checked now; retry later") from error
        if principal is None:
            raise _refused()
        return principal

    def _recall(self, digest: str) -> Principal | None:
        found = self._known.get(digest)
        if found is None or found[0] <= self._clock_s():
            return None
        if found[1] is None:
            raise _refused()
        return found[1]

    async def _ask(self, key: str, digest: str) -> Principal | None:
        asked_s = self._clock_s()
        async with asyncio.timeout(ASK_TIMEOUT_S):
            row = await self._source.find_key(digest)
        principal = None
        if row is not None and matches(key, row.key_hash) and row.revoked_at is None:
            principal = Principal(row.workspace_id, row.id, Role(row.role))
        # Counted from before the question: the answer may be as old as that.
        self._remember(digest, asked_s + (REMEMBER_UNKNOWN_S if principal is None else REMEMBER_S), principal)
        return principal

    def _remember(self, digest: str, until_s: float, principal: Principal | None) -> None:
        if len(self._known) >= MAX_REMEMBERED:
            # Oldest first: what was learnt long ago is about to be forgotten anyway.
            for old in list(self._known)[: MAX_REMEMBERED // 8]:
                del self._known[old]
        self._known.pop(digest, None)
        self._known[digest] = (until_s, principal)


def _bearer(authorization: bytes | None) -> str:
    if authorization is None:
        raise Unauthorized("No API key was sent. Expected a header such as: Authorization: Bearer YOUR_KEY")
    scheme, _, key = authorization.decode("latin-1").strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized("The Authorization header has another form than expected: Authorization: Bearer YOUR_KEY")
    if not well_formed(key.strip()):
        raise _refused()
    return key.strip()


def _refused() -> Unauthorized:
    return Unauthorized("The API key is not known here, or was revoked.")
