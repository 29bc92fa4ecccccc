"""One HTTP port, several applications: chosen by the first segment of the path.

Each renders its own errors, also those the server finds (400, 404, 405, 413, 500): clients of ``/v1`` read an object
under ``error``, clients of ``/v2`` a text, and either breaks on the other's.
"""

from __future__ import annotations

from collections.abc import Mapping

from frontend.httpd.body import BodySink
from frontend.httpd.exchange import Application, Exchange


class Dispatcher:
    """An application made of others.

    A segment is compared byte by byte, still encoded: an odd spelling (``/V1``, ``//v1``, ``/%761``) is none of the
    names and goes to ``rest``, which does not know it either.
    """

    def __init__(self, by_segment: Mapping[bytes, Application], rest: Application) -> None:
        self._by_segment = dict(by_segment)
        self._rest = rest

    def begin(self, exchange: Exchange) -> BodySink | None:
        """See ``Application``."""
        return self._of(exchange).begin(exchange)

    def handle(self, exchange: Exchange) -> None:
        """See ``Application``."""
        self._of(exchange).handle(exchange)

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        """See ``Application``."""
        return self._of(exchange).error_body(exchange, status, message)

    def _of(self, exchange: Exchange) -> Application:
        segment = exchange.raw_path[1:].partition(b"/")[0]
        return self._by_segment.get(segment, self._rest)
