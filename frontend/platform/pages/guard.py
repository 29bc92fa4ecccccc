"""What every answer forbids a browser, and which requests are believed to come from our own pages.

A change is believed only if its ``Origin`` names this host, and, once somebody is signed in, if it carries the
session's form token. Either would do against a foreign site; together they hold when one is misconfigured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from frontend.httpd.exchange import Exchange
from frontend.openai.auth import Forbidden
from frontend.openai.errors import ApiError
from frontend.platform.callers import check_same_site

COOKIE: Final = "ringserve_session"
SECURE_COOKIE: Final = "__Host-" + COOKIE
"""Over TLS: browsers accept this name only from this very host, and only over TLS."""
ROOT: Final = "/ui"
"""Where the pages live."""
_CSP: Final = "; ".join(
    (
        "default-src 'none'",
        "style-src 'self'",
        "script-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final = (
    (b"Content-Security-Policy", _CSP.encode()),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"X-Frame-Options", b"DENY"),
    # Not no-referrer: browsers then send forms with "Origin: null".
    (b"Referrer-Policy", b"same-origin"),
    (b"Cross-Origin-Opener-Policy", b"same-origin"),
    (b"Cross-Origin-Resource-Policy", b"same-origin"),
    (b"Permissions-Policy", b"camera=(), geolocation=(), microphone=()"),
)
_PAIR: Final = re.compile(rb"(?:^|;) *((?:__Host-)?" + COOKIE.encode() + rb")=([!-~]*?)(?=;|$)")


def cookie_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the session cookie's value, empty if there is none, or more than one."""
    found = _PAIR.findall(headers.get(b"cookie", b""))
    # Two of them: one may have been planted by a neighbouring host. Neither is believed.
    return found[0][1].decode("ascii") if len(found) == 1 else ""


def set_cookie(value: str, seconds: int, *, secure: bool) -> tuple[bytes, bytes]:
    """Return the header that keeps a session; ``seconds`` 0 ends it.

    Lax, not Strict: with Strict, a link to a batch in a chat message would always lead to the sign-in page. The whole
    host, not only the pages: the platform API accepts sessions too.
    """
    name, more = (SECURE_COOKIE, "; Secure") if secure else (COOKIE, "")
    return b"Set-Cookie", f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Lax{more}".encode()


def require_own_origin(exchange: Exchange, public_url: str = "") -> None:
    """Accept a change only from a page of ours; browsers send ``Origin`` with every form.

    Args:
        public_url: the origin that people see where a proxy changes ``Host``.

    Raises:
        ApiError: 403.
    """
    try:
        check_same_site(exchange, public_url)
    except Forbidden:
        raise ApiError(
            403, "This form was not sent from a page of this server, so nothing was changed. Open the page again here.",
            code="foreign_origin",
        ) from None  # fmt: skip


def is_secure(exchange: Exchange) -> bool:
    """Return whether the browser speaks TLS with whatever stands before us: its own word, or that of its cookie."""
    if exchange.headers.get(b"origin", b"").startswith(b"https://"):
        return True
    return SECURE_COOKIE.encode() + b"=" in exchange.headers.get(b"cookie", b"")
