"""Session tokens of the pages: what a cookie says, and whether it may be believed. Pure: secret and time come in.

Theory of operation
    A token is five fields and a MAC over them: format, session id, key id, when it was made, when it was last used. It
    carries no secret of its holder, and every process that knows the installation's secret can check it, so no store
    has to be asked about it. What a token cannot say, whether its key is still good and whether somebody signed out,
    is asked elsewhere (``sessions``).

    Two ends: ``IDLE_S`` after the last use, which moves, and ``life_s`` after the sign-in, which does not.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, replace
from typing import Final

IDLE_S: Final = 2 * 3600
MAX_AHEAD_S: Final = 300
"""Clocks of machines that share a secret may differ by this much."""
RENEW_S: Final = 60
"""A token is written anew when its last use is older than this: a cookie per minute, not per page."""
MAX_TOKEN_CHARS: Final = 512
ID_CHARS: Final = 32
"""Hex digits of a session id."""
SECRET_BYTES: Final = 32
_FORMAT: Final = "r1"
_ID: Final = re.compile(r"[0-9a-f]{32}")
_KEY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
_TIME: Final = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class Token:
    """What a cookie says. Times are Unix seconds."""

    session_id: str
    key_id: str
    made_s: int
    used_s: int

    def ended(self, now_s: int, life_s: int) -> bool:
        """Return whether it is over, or from a clock that runs ahead by more than ``MAX_AHEAD_S``."""
        return self.used_s - MAX_AHEAD_S > now_s or self.left_s(now_s, life_s) == 0

    def wants_renewal(self, now_s: int) -> bool:
        """Return whether a use now should be written down."""
        return now_s - self.used_s >= RENEW_S

    def used(self, now_s: int) -> Token:
        """Return the token of a session used now."""
        return replace(self, used_s=now_s)

    def left_s(self, now_s: int, life_s: int) -> int:
        """Return how long a cookie with this token is worth keeping."""
        return max(0, min(self.used_s + IDLE_S, self.made_s + life_s) - now_s)


def seal(token: Token, secret: bytes) -> str:
    """Return the token as a cookie's value."""
    payload = f"{_FORMAT}.{token.session_id}.{token.key_id}.{token.made_s}.{token.used_s}"
    return f"{payload}.{_mac(secret, b'session', payload)}"


def unseal(text: str, secret: bytes) -> Token | None:
    """Return what a cookie says if we wrote it, whether or not it has ended; None for anything else."""
    if len(text) > MAX_TOKEN_CHARS or not text.isascii():
        return None
    payload, _, mac = text.rpartition(".")
    if not hmac.compare_digest(mac, _mac(secret, b"session", payload)):
        return None
    fields = payload.split(".")
    if len(fields) != 5 or fields[0] != _FORMAT:
        return None
    _, session_id, key_id, made, used = fields
    if not (
        _ID.fullmatch(session_id) and _KEY_ID.fullmatch(key_id) and _TIME.fullmatch(made) and _TIME.fullmatch(used)
    ):
        return None
    return Token(session_id, key_id, int(made), int(used))


def form_token(session_id: str, secret: bytes) -> str:
    """Return what every form of a session carries, which another site cannot know."""
    return _mac(secret, b"form", session_id)


def is_form_token(text: str, session_id: str, secret: bytes) -> bool:
    """Return whether a form came from a page of this session."""
    return hmac.compare_digest(text.encode("utf-8", "replace"), form_token(session_id, secret).encode())


def _mac(secret: bytes, use: bytes, text: str) -> str:
    """The use is part of what is signed: a form's token is never a cookie's."""
    return hmac.new(secret, use + b"\0" + text.encode(), hashlib.sha256).hexdigest()
