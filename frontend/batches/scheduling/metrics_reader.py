"""Reads the load of model servers: pinned addresses, nothing followed, one attempt, 2 seconds, 1 MiB.

One fetch per URL at a time; whoever asks meanwhile shares it, and its result, good or bad, holds for 5 seconds. URLs
are checked again at every fetch: settings may be older than the node file that approved their server.

Source: batches.md 1.6, rules 25 to 27.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

import aiohttp
from yarl import URL

from frontend.batches.scheduling.exposition import Load, read_load
from frontend.batches.scheduling.load_limits import ReadError, Reading
from frontend.gateway_settings import GatewaySettings
from frontend.openai.addresses import MAX_URL_CHARS, Endpoint, metrics_url
from frontend.openai.routes import endpoint_of
from frontend.openai.upstream import PinnedResolver
from frontend.version import own_version

DEADLINE_S: Final = 2.0
"""From the start of the connection to the last byte."""
HELD_S: Final = 5.0
MAX_PAGE_BYTES: Final = 1024 * 1024
_LARGE_BYTES: Final = 64 * 1024
"""Pages above this are parsed on a thread: a millisecond is the most that they may take of the event loop."""
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
_CODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})


class _Unreadable(Exception):
    def __init__(self, error: ReadError) -> None:
        super().__init__(error.value)
        self.error = error


@dataclass(slots=True)
class _Page:
    """What is known of one URL."""

    latest: Reading | None = None
    fetch: asyncio.Task[Reading] | None = None


def approved_endpoints(settings: GatewaySettings) -> tuple[Endpoint, ...]:
    """Return the endpoints whose metrics may be read: those of the node file with pinned addresses."""
    found = [
        endpoint_of(route, development=settings.development)
        for model in settings.models
        for route in model.routes
        if route.kind != "local"
    ]
    # A name that is looked up at each call leads anywhere; what lies behind it publishes no load for us either.
    return tuple(endpoint for endpoint in found if endpoint.addresses)


def approved_urls(endpoints: Iterable[Endpoint]) -> Mapping[str, Endpoint]:
    """Return every URL at which metrics may be read, with the endpoint it belongs to."""
    urls = ((metrics_url(endpoint.url), endpoint) for endpoint in endpoints)
    return {url: endpoint for url, endpoint in urls if len(url) <= MAX_URL_CHARS}


class MetricsReader:
    """Readings of all servers, for one process. Belongs to one event loop.

    Args:
        on_reading: called with the URL after each fetch, so that whoever waits for room need not wait for its next
            look.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        *,
        on_reading: Callable[[str], None] = lambda url: None,
        held_s: float = HELD_S,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._approved = approved_urls(endpoints)
        self._on_reading = on_reading
        self._held_ns = int(held_s * 1e9)
        self._clock_ns = clock_ns
        self._clock_us = clock_us
        self._pages: dict[str, _Page] = {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        resolver = PinnedResolver()
        for endpoint in self._approved.values():
            resolver.pin(endpoint)
        # aiohttp sends a GET again when the server hangs up without an answer, and has no switch for that. So each
        # fetch has a connection of its own, and is refused a second one.
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(_once)
        self._session = aiohttp.ClientSession(
            trace_configs=[trace],
            connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            headers={
                "User-Agent": f"ringserve/{own_version()}",
                "Accept": "text/plain",
                "Accept-Encoding": "identity",
            },
        )

    async def close(self) -> None:
        """End what is being read; idempotent."""
        session, self._session = self._session, None
        fetches = [page.fetch for page in self._pages.values() if page.fetch is not None]
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
        if session is not None:
            await session.close()

    def reading(self, url: str) -> Reading | None:
        """Return the latest reading, without waiting; None if there is none that may be used.

        If none holds any more a fetch is started. While it runs the one before is returned, since closing a gate for
        the time of every fetch would make it flap; but not one that nobody asked to renew in time, which may be old.
        """
        if url not in self._approved:
            return self._failed(ReadError.NOT_APPROVED)
        page = self._pages.setdefault(url, _Page())
        if page.latest is not None and self._age_ns(page.latest) < self._held_ns:
            return page.latest
        self._fetching(url, page)
        if page.latest is not None and self._age_ns(page.latest) < self._held_ns + int(DEADLINE_S * 1e9):
            return page.latest
        return None

    async def read(self, url: str) -> Reading:
        """Return a reading that holds, fetched if there is none. Never raises for what the server does."""
        if url not in self._approved:
            return self._failed(ReadError.NOT_APPROVED)
        page = self._pages.setdefault(url, _Page())
        if page.latest is not None and self._age_ns(page.latest) < self._held_ns:
            return page.latest
        # Shielded: one asker that gives up must not take the answer from the others.
        return await asyncio.shield(self._fetching(url, page))

    def _age_ns(self, reading: Reading) -> int:
        return self._clock_ns() - reading.read_ns

    def _fetching(self, url: str, page: _Page) -> asyncio.Task[Reading]:
        if page.fetch is None:
            page.fetch = asyncio.get_running_loop().create_task(self._fetch(url, page))
        return page.fetch

    async def _fetch(self, url: str, page: _Page) -> Reading:
        try:
            async with asyncio.timeout(DEADLINE_S):
                load = await self._load(url)
        except TimeoutError:
            reading = self._failed(ReadError.TIMEOUT)
        except _Unreadable as failure:
            reading = self._failed(failure.error)
        else:
            reading = self._made(None, load)
        finally:
            page.fetch = None
        page.latest = reading
        self._on_reading(url)
        return reading

    async def _load(self, url: str) -> Load:
        """Fetch and parse.

        Raises:
            _Unreadable: says why there is no load.
            TimeoutError: from the caller's deadline.
        """
        assert self._session is not None, "not started"
        try:
            async with self._session.get(
                URL(url, encoded=True), allow_redirects=False, timeout=aiohttp.ClientTimeout(total=None)
            ) as response:
                if response.status != 200:
                    raise _Unreadable(ReadError.HTTP_STATUS)
                body = await _read_body(response)
        except TimeoutError:
            raise
        except aiohttp.ClientResponseError:
            # Nothing that is HTTP.
            raise _Unreadable(ReadError.INVALID_BODY) from None
        except (aiohttp.ClientError, OSError):
            raise _Unreadable(ReadError.UNREACHABLE) from None
        if len(body) <= _LARGE_BYTES:
            return _parsed(body)
        return await asyncio.to_thread(_parsed, body)

    def _failed(self, error: ReadError) -> Reading:
        return self._made(error, Load())

    def _made(self, error: ReadError | None, load: Load) -> Reading:
        return Reading(self._clock_us(), self._clock_ns(), error, load.waiting, load.running, load.kv_cache_permille)


async def _once(
    session: aiohttp.ClientSession, request: SimpleNamespace, _: aiohttp.TraceConnectionCreateStartParams
) -> None:
    if hasattr(request, "connected"):
        raise aiohttp.ClientConnectionError("one attempt only")
    request.connected = True


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the page as it was before it was compressed, if it was.

    Raises:
        _Unreadable: too large, or compressed in a way that was not asked for and is not understood.
    """
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity") and coding not in _CODINGS:
        raise _Unreadable(ReadError.INVALID_BODY)
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB) if coding in _CODINGS else None
    body = bytearray()
    received_bytes = 0
    while piece := await response.content.readany():
        received_bytes += len(piece)
        if received_bytes > MAX_PAGE_BYTES:
            raise _Unreadable(ReadError.TOO_LARGE)
        if inflater is not None:
            try:
                # Never more than is allowed: a few bytes may stand for gigabytes.
                piece = inflater.decompress(piece, MAX_PAGE_BYTES + 1 - len(body))
            except zlib.error:
                raise _Unreadable(ReadError.INVALID_BODY) from None
        body += piece
        if len(body) > MAX_PAGE_BYTES:
            raise _Unreadable(ReadError.TOO_LARGE)
    if inflater is not None and not inflater.eof:
        raise _Unreadable(ReadError.INVALID_BODY)
    return bytes(body)


def _parsed(body: bytes) -> Load:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise _Unreadable(ReadError.INVALID_BODY) from None
    return read_load(text)
