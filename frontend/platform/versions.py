"""Versions of a route's settings, and what a request demands of them in ``If-Match``. Pure.

A version stands for the settings alone: the status beside them changes all the time. It is not kept anywhere; it is the
time of the last save, which the store lets rise with every one.
"""

from __future__ import annotations

import re
from typing import Final

from frontend.batches.store.rows import SchedulingRow
from frontend.openai.errors import ApiError

HEADER: Final = b"if-match"
NEVER_SAVED: Final = "0"
MAX_TAGS: Final = 32
_TAG: Final = re.compile(r'(W/)?"([!#-~]*)"')
Versions = frozenset[str] | None
"""Those that may be replaced; None: whatever is there."""


def version_of(row: SchedulingRow | None) -> str:
    """Return the version of stored settings; of none stored, that of the defaults."""
    return NEVER_SAVED if row is None else f"{row.updated_at:x}"


def etag(version: str) -> str:
    """Return a version as a header has it."""
    return f'"{version}"'


def read_if_match(header: bytes | None) -> Versions:
    """Return which versions a header allows. Raises: ApiError 400."""
    text = "*" if header is None else header.decode("latin-1").strip()
    if text == "*":
        return None
    tags = [part.strip() for part in text.split(",")]
    found = [_TAG.fullmatch(tag) for tag in tags]
    if len(tags) > MAX_TAGS or not all(found):
        raise ApiError(400, "expected the ETag of an earlier answer, in its quotes, or *", param="If-Match")
    # A weak one promises too little to overwrite anything by it (RFC 9110, 13.1.1).
    return frozenset(match[2] for match in found if match is not None and not match[1])
