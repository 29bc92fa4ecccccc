"""One visit of a page and its answer: what the handlers get and give, and the reading of queries and forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

from frontend.httpd.exchange import Exchange
from frontend.openai.errors import ApiError
from frontend.openai.principal import Role
from frontend.platform.pages.guard import ROOT
from frontend.platform.pages.sessions import SignedIn

MAX_FORM_BYTES: Final = 64 * 1024
MAX_FIELDS: Final = 100
MAX_PAGES: Final = 4000
HTML: Final = (b"Content-Type", b"text/html; charset=utf-8")
Fields = Mapping[str, tuple[str, ...]]
"""Values by name, in the order they came; a name that did not come is absent."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A request by somebody who is signed in.

    Attributes:
        segments: decoded path below the pages' root.
        form: of a POST whose origin and form token were checked.
    """

    exchange: Exchange
    signed_in: SignedIn
    segments: tuple[str, ...]
    query: Fields
    form: Fields

    @property
    def reads_platform(self) -> bool:
        return self.signed_in.principal.role in (Role.PLATFORM_ADMIN, Role.AUDITOR)

    @property
    def edits_platform(self) -> bool:
        return self.signed_in.principal.role is Role.PLATFORM_ADMIN

    @property
    def posts(self) -> bool:
        return self.exchange.method == "POST"


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer, without the headers that every page has."""

    body: bytes
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = (HTML,)


def redirect(location: str) -> Reply:
    """Return the answer that leads on, as a GET, to a place of ours."""
    return Reply(b"", 303, ((b"Location", location.encode("ascii")),))


def link(*segments: str, **query: str | int | None) -> str:
    """Return the address of a page below the root; a query value of None is left out."""
    path = "/".join((ROOT, *(quote(segment, safe="") for segment in segments)))
    wanted = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(wanted)}" if wanted else path


def first(fields: Fields, name: str, default: str = "") -> str:
    """Return the first value of a field, without spaces around it."""
    return fields[name][0].strip() if name in fields else default


def page_number(fields: Fields) -> int:
    """Return the page of a list that is asked for, from 1."""
    text = first(fields, "page", "1")
    return min(MAX_PAGES, max(1, int(text))) if text.isascii() and text.isdigit() and len(text) < 6 else 1


def read_fields(text: bytes) -> Fields:
    """Return a query or a form.

    Raises:
        ApiError: 400, not readable.
    """
    try:
        pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError:
        raise ApiError(400, "The form or address cannot be read: expected URL-encoded UTF-8.") from None
    found: dict[str, tuple[str, ...]] = {}
    for name, value in pairs:
        found[name] = (*found.get(name, ()), value)
    return found


def safe_next(text: str) -> str:
    """Return where to go after signing in: a page of ours, whatever the address asked for."""
    inside = text == ROOT or text.startswith((ROOT + "/", ROOT + "?"))
    plain = text.isascii() and text.isprintable() and "\\" not in text and len(text) <= 2048
    return text if inside and plain and not text.startswith(link("sign-")) else ROOT
