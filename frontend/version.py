"""Our version, as installed, and how its hot path runs."""

from __future__ import annotations

from importlib import metadata, util


def own_version() -> str:
    """Return the installed version, or ``0+source`` when run from a checkout that is not installed."""
    try:
        return metadata.version("ringserve")
    except metadata.PackageNotFoundError:
        return "0+source"


def hot_path() -> str:
    """Return ``compiled`` if the modules that every request passes through are extension modules, else ``interpreted``.

    Source: scripts/compile.py lists them; all are compiled or none.
    """
    spec = util.find_spec("worker.channel.ring")
    origin = "" if spec is None or spec.origin is None else spec.origin
    return "interpreted" if origin.endswith(".py") else "compiled"
