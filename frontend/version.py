"""Our version, as installed."""

from __future__ import annotations

from importlib import metadata


def own_version() -> str:
    """Return the installed version, or ``0+source`` when run from a checkout that is not installed."""
    try:
        return metadata.version("ringserve")
    except metadata.PackageNotFoundError:
        return "0+source"
