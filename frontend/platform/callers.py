"""Who makes a request: the holder of a key, or a browser that signed in with one.

A browser sends its cookie with whatever any page on the web makes it send. So a request that changes something and
brings only a cookie must come from our own pages: its ``Origin`` must be this host, and it must repeat the session's
CSRF token, which other sites cannot read. A key in ``Authorization`` is never sent unasked and needs neither.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final, Protocol

from frontend.httpd.exchange import Exchange
from frontend.openai.auth import Authenticator, Forbidden
from frontend.openai.principal import Principal

SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
CSRF_HEADER: Final = b"x-csrf-token"
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that signed in."""

    principal: Principal
    csrf_token: str


class Sessions(Protocol):
    """Where sessions are kept; the pages own it."""

    async def find(self, exchange: Exchange) -> Session | None:
        """Return the session of a request's cookie, None if it has none that still counts.

        Raises:
            Unavailable: it cannot be looked up now.
        """
        ...


class Callers:
    """Answers who calls.

    Attributes:
        sessions: set by the pages; without it only keys count.
    """

    def __init__(self, authenticator: Authenticator, public_url: str = "") -> None:
        """``public_url``: the origin that browsers see where a proxy changes ``Host``."""
        self._authenticator = authenticator
        self._public_url = public_url
        self.sessions: Sessions | None = None

    async def principal_of(self, exchange: Exchange) -> Principal:
        """Return who makes a request.

        Raises:
            Unauthorized: neither a good key nor a session.
            Forbidden: a session's request that does not come from our own pages.
            Unavailable: the store cannot be asked.
        """
        authorization = exchange.headers.get(b"authorization")
        if authorization is None and self.sessions is not None:
            session = await self.sessions.find(exchange)
            if session is not None:
                if exchange.method not in SAFE_METHODS:
                    check_same_site(exchange, self._public_url)
                    check_csrf(session, exchange.headers.get(CSRF_HEADER, b"").decode("latin-1"))
                return session.principal
        remembered = self._authenticator.remembered(authorization)
        return remembered or await self._authenticator.authenticate(authorization)


def check_same_site(exchange: Exchange, public_url: str = "") -> None:
    """Raises: Forbidden: the request was made by another site's page, or does not say by whose."""
    origin = exchange.headers.get(b"origin", b"").decode("latin-1").lower()
    if origin and origin == public_url.rstrip("/").lower():
        return
    host = exchange.headers.get(b"host", b"").decode("latin-1").lower()
    scheme, separator, authority = origin.partition("://")
    default = _DEFAULT_PORTS.get(scheme)
    # Compared without the scheme: a proxy in front may speak TLS while we see plain HTTP.
    if not (separator and host and default) or authority.removesuffix(default) != host.removesuffix(default):
        raise Forbidden("the request does not come from this site's own pages")


def check_csrf(session: Session, token: str) -> None:
    """Raises: Forbidden: the token is not the session's."""
    if not hmac.compare_digest(session.csrf_token.encode(), token.encode()):
        raise Forbidden("the page is too old or belongs to another session; load it again")
