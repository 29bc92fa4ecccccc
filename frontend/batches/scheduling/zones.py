"""Offsets of named time zones. The zone files are the system's, or the ones of the ``tzdata`` package.

Which names exist is decided by the package alone: what a system has besides (``localtime``, ``posix/...``) means
something else on the next machine.
"""

from __future__ import annotations

import difflib
from datetime import datetime
from functools import cache, lru_cache
from importlib import resources
from typing import Final
from zoneinfo import ZoneInfo

SECOND_US: Final = 1_000_000
_CACHED_ZONES: Final = 64


class UnknownZone(ValueError):
    """No IANA zone has this name; the text names the nearest one."""


@lru_cache(_CACHED_ZONES)
def zone(name: str) -> ZoneInfo:
    """Return a zone.

    Raises:
        UnknownZone: there is none of this name.
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        raise UnknownZone(f"no IANA time zone is called {name[:64]!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return ZoneInfo(name)


@cache
def names() -> frozenset[str]:
    """Return the names of all IANA zones."""
    listed = resources.files("tzdata").joinpath("zones").read_text("utf-8")
    return frozenset(listed.split())


def offset_us(name: str, at_us: int) -> int:
    """Return local time minus UTC at an instant, in microseconds; east is positive.

    Raises:
        UnknownZone: there is no such zone.
    """
    offset = datetime.fromtimestamp(at_us // SECOND_US, zone(name)).utcoffset()
    assert offset is not None, "a zone has an offset at every instant"
    return (offset.days * 86_400 + offset.seconds) * SECOND_US
