"""API keys: making them, naming them, recognising them. A key is shown once; the store holds only its hash.

A key carries 256 random bits, so a plain SHA-256 cannot be searched backwards and a slow password hash would only cost
every request time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Final

KEY_START: Final = "sk-ring-"
KEY_BYTES: Final = 32
PREFIX_CHARS: Final = len(KEY_START) + 4
"""How much of a key is stored and shown: tells keys apart, leaves over 230 secret bits."""
MAX_KEY_CHARS: Final = 256

_KEY = re.compile(re.escape(KEY_START) + r"[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class NewKey:
    """A fresh key; ``secret`` is for its owner's eyes only and must not be logged."""

    id: str
    secret: str
    prefix: str
    key_hash: str

    def __repr__(self) -> str:
        return f"NewKey(id={self.id!r}, prefix={self.prefix!r})"


def make_key() -> NewKey:
    """Return a new random key."""
    secret = KEY_START + secrets.token_urlsafe(KEY_BYTES)
    return NewKey("key_" + secrets.token_hex(16), secret, secret[:PREFIX_CHARS], hash_key(secret))


def new_workspace_id() -> str:
    return "ws_" + secrets.token_hex(16)


def well_formed(secret: str) -> bool:
    """Return whether this could be one of our keys: saves a database question about junk."""
    return _KEY.fullmatch(secret) is not None


def hash_key(secret: str) -> str:
    """Return what the store holds of a key: SHA-256 in lower-case hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def matches(secret: str, key_hash: str) -> bool:
    """Return whether the key has this hash, in a time that does not depend on where they differ."""
    return hmac.compare_digest(hash_key(secret), key_hash)
