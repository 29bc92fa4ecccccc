"""The bare address of the HTTP port: browsers are led to the pages, programs are told that nothing is there.

Only what asks for HTML is led on. A program that follows redirects would otherwise take a sign-in page for an answer.
"""

from __future__ import annotations

from frontend.httpd.body import BodySink
from frontend.httpd.exchange import Exchange
from frontend.kserve.status import JSON_TYPE, error_body
from frontend.platform.pages.guard import ROOT


class FrontDoor:
    """Provides ``Application`` for the path ``/``, and what is spelled so oddly that its first segment is empty."""

    def begin(self, exchange: Exchange) -> BodySink | None:
        """See ``Application``."""
        return None

    def handle(self, exchange: Exchange) -> None:
        """Lead a browser on."""
        if exchange.raw_path == b"/" and exchange.method in ("GET", "HEAD") and wants_page(exchange):
            headers = [(b"Location", ROOT.encode()), (b"Vary", b"Accept"), (b"Cache-Control", b"no-store")]
            exchange.respond(303, headers)
            return
        kind, body = self.error_body(exchange, 404, "Not Found")
        exchange.respond(404, [(b"Content-Type", kind), (b"Vary", b"Accept")], [body])

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        """Return the error as it is where there are no pages."""
        return JSON_TYPE.encode(), error_body(message)


def wants_page(exchange: Exchange) -> bool:
    """Return whether a browser asks: nothing else names HTML among what it takes."""
    kinds = exchange.headers.get(b"accept", b"").lower().split(b",")
    return any(kind.partition(b";")[0].strip() == b"text/html" for kind in kinds)
