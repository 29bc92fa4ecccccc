"""Tells a receiver of the operator's choice about incidents: signed, to pinned addresses, one attempt per call.

The message
    ``POST`` of a JSON object. ``Ringserve-Timestamp`` is Unix seconds; ``Ringserve-Signature`` is ``v1=`` and the
    HMAC-SHA256, in hex, of the timestamp, a dot and the body, under the secret. ``Ringserve-Event`` names incident and
    event: a message may come twice, and the second one has the same name.

Nothing is followed: no redirect, no proxy, no cookie. Neither secret nor path of the URL is ever logged or shown.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import ssl
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
from yarl import URL

from frontend.batches.store.route_rows import IncidentEvent, IncidentRow
from frontend.batches.store.rows import SECOND_US
from frontend.gateway_settings import WebhookSettings
from frontend.openai.addresses import Endpoint, NotApproved, is_private, read_address
from frontend.openai.upstream import PinnedResolver
from frontend.version import own_version

DEADLINE_S: Final = 10.0
"""Connect to the end of the answer's head."""


class NotTold(Exception):
    """The receiver did not take the message; the text names no path and no secret.

    Attributes:
        reached: it answered, so that others may be told still.
    """

    def __init__(self, why: str, *, reached: bool) -> None:
        super().__init__(why)
        self.reached = reached


def read_target(settings: WebhookSettings, *, development: bool) -> Endpoint:
    """Return where messages go.

    Raises:
        NotApproved: the URL leads, or may lead, where no message may go.
    """
    url = URL(settings.url)
    host, port = url.raw_host, url.port
    if url.scheme not in ("http", "https") or not host or not port or url.raw_user is not None:
        raise NotApproved("the webhook's url must be http(s)://HOST[:PORT]/PATH")
    addresses = settings.addresses
    if _is_address(host):
        # Connections to an address ask no resolver: it is checked here or nowhere.
        if addresses and addresses != (host,):
            raise NotApproved(f"the webhook's host is the address {host}, so addresses must be exactly that one")
        addresses = (host,)
    for text in addresses:
        address = read_address(text, development=development)
        if url.scheme == "http" and not is_private(address):
            raise NotApproved(f"plain http may go to private addresses only, and {address} is none; use https")
    if url.scheme == "http" and not addresses:
        raise NotApproved("plain http goes to listed addresses only")
    return Endpoint(settings.url, url.scheme, host, port, addresses)


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


def signature(secret: bytes, timestamp_s: int, body: bytes) -> str:
    """Return what a receiver compares ``Ringserve-Signature`` with, in constant time."""
    return "v1=" + hmac.new(secret, str(timestamp_s).encode() + b"." + body, hashlib.sha256).hexdigest()


def message(incident: IncidentRow, event: IncidentEvent) -> bytes:
    """Return the body that tells of an incident's opening or end; times in Unix seconds."""
    details: dict[str, Any] = json.loads(incident.details)
    document = {
        "id": incident.id,
        "event": event,
        "rule": incident.rule,
        "kind": details.get("kind"),
        "batch": incident.subject,
        "workspace": incident.workspace_id,
        "summary": incident.summary,
        "details": details,
        "opened_at": incident.opened_at // SECOND_US,
        "resolved_at": None if incident.resolved_at is None else incident.resolved_at // SECOND_US,
    }
    return json.dumps(document, separators=(",", ":")).encode()


class Webhook:
    """A receiver, between ``start`` and ``close``; belongs to one event loop."""

    def __init__(self, target: Endpoint, secret: str) -> None:
        self._target = target
        self._secret = secret.encode()
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        resolver = PinnedResolver()
        resolver.pin(self._target)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=resolver,
                use_dns_cache=False,
                force_close=True,
                # Read now, not when aiohttp was imported: an operator's SSL_CERT_FILE names the authorities to trust.
                ssl=ssl.create_default_context(),
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        """Drop what is under way; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def tell(self, incident: IncidentRow, event: IncidentEvent, now_s: int) -> None:
        """Tell of one event, once.

        Raises:
            NotTold: anything but an answer 2xx in time.
        """
        assert self._session is not None, "not started"
        body = message(incident, event)
        headers: Mapping[str, str] = {
            "User-Agent": f"ringserve/{own_version()}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Ringserve-Timestamp": str(now_s),
            "Ringserve-Signature": signature(self._secret, now_s, body),
            "Ringserve-Event": f"{incident.id}.{event}",
        }
        try:
            async with (
                asyncio.timeout(DEADLINE_S),
                self._session.post(
                    URL(self._target.url, encoded=True), data=body, headers=headers, allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as response,
            ):  # fmt: skip
                status = response.status
        except TimeoutError:
            raise NotTold(f"no answer within {DEADLINE_S:g} s", reached=False) from None
        except (aiohttp.ClientError, OSError) as error:
            raise NotTold(f"cannot be reached ({type(error).__name__})", reached=False) from None
        if not 200 <= status < 300:
            # A receiver that is broken or busy will be so for the next message, too.
            raise NotTold(f"answered {status}", reached=status < 500 and status not in (408, 429))


def open_webhook(settings: WebhookSettings, environ: Mapping[str, str], *, development: bool) -> Webhook | None:
    """Return the receiver, not started; None if none is configured.

    Raises:
        NotApproved: see ``read_target``; or the secret is missing.
    """
    if not settings.url:
        return None
    target = read_target(settings, development=development)
    secret = environ.get(settings.secret_env, "") if settings.secret_env else ""
    if not secret:
        raise NotApproved(f"the webhook's secret is missing: set {settings.secret_env or 'secret_env'}")
    return Webhook(target, secret)
