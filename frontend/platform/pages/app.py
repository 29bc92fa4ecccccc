"""The pages over HTTP: an ``Application`` for everything under ``/ui``.

Every request but the sign-in and the assets needs a session; every POST needs our own ``Origin`` and, once signed in,
the session's form token. What a handler raises becomes a page that says so; the headers of ``guard`` are on everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol
from urllib.parse import unquote

from engines.errors import ServingError, Unavailable
from frontend.httpd.body import BodySink
from frontend.httpd.exchange import ClientDisconnected, Exchange
from frontend.openai.auth import Authenticator, Unauthorized
from frontend.openai.errors import ApiError, render
from frontend.platform.pages import guard
from frontend.platform.pages.assets import Assets
from frontend.platform.pages.rendering import Renderer
from frontend.platform.pages.sessions import Sessions, SignedIn
from frontend.platform.pages.visits import (
    HTML,
    MAX_FORM_BYTES,
    Reply,
    Visit,
    first,
    link,
    read_fields,
    redirect,
    safe_next,
)  # fmt: skip

log = logging.getLogger(__name__)

FORM_TOKEN: Final = "form_token"
"""The hidden field of every form."""
FORMS: Final = b"application/x-www-form-urlencoded"
_NO_STORE: Final = (b"Cache-Control", b"no-store")
_FOR_EVER: Final = (b"Cache-Control", b"public, max-age=31536000, immutable")
_TITLES: Final = {
    400: "That did not work",
    403: "Not allowed",
    404: "Nothing here",
    405: "Nothing here",
    409: "Not possible now",
    413: "Too large",
    503: "Not available now",
}
_PASSED_ON: Final = ("Allow", "Retry-After")
"""Headers of a failure that mean something to browsers."""
_UNKNOWN_KEY: Final = "This key is not known here, or was revoked."


class Section(Protocol):
    """Pages below one path segment."""

    async def answer(self, visit: Visit) -> Reply | None:
        """Return the answer; None if the section answered the exchange by itself.

        Raises:
            ServingError: becomes an error page.
        """
        ...


class PagesApp:
    """Answers everything under ``/ui``.

    Attributes:
        out_of_order: set where nobody can sign in; the log says why.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        sessions: Sessions,
        assets: Assets,
        renderer: Renderer,
        sections: Mapping[str, Section],
        public_url: str = "",
    ) -> None:
        self._authenticator = authenticator
        self._sessions = sessions
        self._assets = assets
        self._renderer = renderer
        self._sections = dict(sections)
        self._public_url = public_url
        self._tasks: set[asyncio.Task[None]] = set()
        self.out_of_order = False

    def begin(self, exchange: Exchange) -> BodySink | None:
        """Refuse what is no form of ours before its body is read."""
        if int(exchange.headers.get(b"content-length", b"0")) > MAX_FORM_BYTES:
            self._send(exchange, self._failure(413, f"A form may have {MAX_FORM_BYTES} bytes.", None))
        return None

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        segments = tuple(unquote(part.decode("latin-1")) for part in exchange.raw_path.split(b"/")[2:] if part)
        if segments[:1] == ("assets",):
            self._send_asset(exchange, segments[1] if len(segments) == 2 else "")
            return
        task = asyncio.get_running_loop().create_task(self._guarded(exchange, segments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = partial(_cancel, task)

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        """Return an error page, for what the server itself refuses."""
        return HTML[1], self._failure(status, message, None).body

    async def close(self) -> None:
        """Give up every request under way; idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Inside

    async def _guarded(self, exchange: Exchange, segments: tuple[str, ...]) -> None:
        signed_in: SignedIn | None = None
        with contextlib.suppress(ClientDisconnected):
            try:
                if self.out_of_order:
                    raise Unavailable("Nobody can sign in now; the log of the server says why.")
                _allow(exchange, "GET", "HEAD", "POST")
                if segments[:1] == ("sign-in",):
                    reply: Reply | None = await self._sign_in(exchange)
                else:
                    signed_in = await self._sessions.signed_in(guard.cookie_of(exchange.headers))
                    if signed_in is None:
                        reply = self._stranger(exchange)
                    else:
                        signed_in, reply = await self._visit(exchange, segments, signed_in)
            except ServingError as error:
                told = render(error)
                reply = self._failure(told.status, str(error), signed_in, told.headers)
            except ClientDisconnected:
                raise
            except Exception:
                log.exception("pages.handler_failed path=%r", exchange.path)
                reply = self._failure(500, "Something went wrong here; the log of the server says what.", signed_in)
            if reply is not None:
                self._send(exchange, reply, signed_in)

    async def _visit(
        self, exchange: Exchange, segments: tuple[str, ...], signed_in: SignedIn
    ) -> tuple[SignedIn, Reply | None]:
        form = read_fields(b"")
        if exchange.method == "POST":
            form = self._form(exchange)
            if not self._sessions.is_form_token(first(form, FORM_TOKEN), signed_in):
                raise ApiError(403, "This page is too old, so nothing was changed. Reload it and try again.")
        query = read_fields(exchange.query)
        if b"x-live" not in exchange.headers:
            signed_in = self._sessions.renew(signed_in)
        visit = Visit(exchange, signed_in, segments, query, form)
        if segments == ("sign-out",):
            return signed_in, self._sign_out(visit)
        if not segments:
            return signed_in, redirect(link("routes" if visit.reads_platform else "batches"))
        section = self._sections.get(segments[0])
        if section is None:
            raise ApiError(404, "There is no page at this address.")
        return signed_in, await section.answer(visit)

    def _stranger(self, exchange: Exchange) -> Reply:
        """Lead to the sign-in, and back; a page that refreshes itself is told so by the status."""
        if b"x-live" in exchange.headers:
            return Reply(b"signed out", 401, ((b"Content-Type", b"text/plain"),))
        wanted = exchange.target.decode("latin-1") if exchange.method == "GET" else ""
        after = safe_next(wanted)
        return redirect(link("sign-in", next=None if after == guard.ROOT else after))

    async def _sign_in(self, exchange: Exchange) -> Reply:
        query = read_fields(exchange.query)
        if exchange.method != "POST":
            return self._sign_in_page(safe_next(first(query, "next")), "", 200, ended="out" in query)
        form = self._form(exchange)
        after = safe_next(first(form, "next"))
        try:
            principal = await self._authenticator.authenticate(b"Bearer " + first(form, "key").encode())
        except Unauthorized:
            message = _UNKNOWN_KEY if first(form, "key") else "Enter a key."
            return self._sign_in_page(after, message, 401)
        value, token = self._sessions.begin(principal)
        log.info("pages.signed_in key=%s role=%s", principal.key_id, principal.role.value)
        cookie = guard.set_cookie(value, self._sessions.left_s(token), secure=guard.is_secure(exchange))
        return Reply(b"", 303, ((b"Location", after.encode("ascii")), cookie))

    def _sign_in_page(self, after: str, message: str, status: int, *, ended: bool = False) -> Reply:
        return self._renderer.page("sign_in.html", None, http_status=status, after=after, message=message, ended=ended)

    def _sign_out(self, visit: Visit) -> Reply:
        _allow(visit.exchange, "POST")
        self._sessions.end(visit.signed_in)
        log.info("pages.signed_out key=%s", visit.signed_in.principal.key_id)
        cookie = guard.set_cookie("", 0, secure=guard.is_secure(visit.exchange))
        return Reply(b"", 303, ((b"Location", link("sign-in", out=1).encode("ascii")), cookie))

    def _form(self, exchange: Exchange) -> Mapping[str, tuple[str, ...]]:
        guard.require_own_origin(exchange, self._public_url)
        if len(exchange.body) > MAX_FORM_BYTES:
            raise ApiError(413, f"A form may have {MAX_FORM_BYTES} bytes.")
        kind = exchange.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != FORMS:
            raise ApiError(400, "This address takes forms only.")
        return read_fields(bytes(exchange.body))

    def _failure(
        self, status: int, message: str, signed_in: SignedIn | None, more: tuple[tuple[str, str], ...] = ()
    ) -> Reply:
        title = _TITLES.get(status, "Something went wrong")
        return Reply(
            self._renderer.render(
                "error.html", visit=None, signed_in=signed_in, title=title, message=message, code=status
            ),
            status,
            (HTML, *((name.encode(), value.encode()) for name, value in more if name in _PASSED_ON)),
        )

    def _send(self, exchange: Exchange, reply: Reply, signed_in: SignedIn | None = None) -> None:
        if exchange.answered:
            exchange.abort()  # a download that failed on its way
            return
        headers = [*reply.headers, *guard.HEADERS, _NO_STORE]
        if signed_in is not None and signed_in.renewed and not any(name == b"Set-Cookie" for name, _ in headers):
            seconds = self._sessions.left_s(signed_in.token)
            headers.append(guard.set_cookie(signed_in.renewed, seconds, secure=guard.is_secure(exchange)))
        exchange.respond(reply.status, headers, [reply.body])

    def _send_asset(self, exchange: Exchange, name: str) -> None:
        asset = self._assets.get(name)
        if asset is None or exchange.method not in ("GET", "HEAD"):
            self._send(exchange, self._failure(404, "There is no file of this name.", None))
            return
        exchange.respond(200, [(b"Content-Type", asset.content_type), _FOR_EVER, *guard.HEADERS], [asset.content])


def _allow(exchange: Exchange, *methods: str) -> None:
    if exchange.method not in methods:
        raise ApiError(405, f"{exchange.method} is not allowed here.", headers=(("Allow", ", ".join(methods)),))


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
