"""Style and script files of the pages, named by their content so that a browser may keep them for ever.

They are served as they lie in ``static/``: no build step. A new version has a new name, so a page never meets the
script of another version.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

_TYPES: Final = {
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
HASH_CHARS: Final = 12


@dataclass(frozen=True, slots=True)
class Asset:
    """A file to serve; it never changes."""

    name: str
    content: bytes
    content_type: bytes


class Assets:
    """All files, by the name they are served under."""

    def __init__(self) -> None:
        self._by_name: dict[str, Asset] = {}
        self._served: dict[str, str] = {}

    def start(self) -> None:
        """Read them; they are few and small."""
        for file in files("frontend.platform.pages").joinpath("static").iterdir():
            stem, _, ending = file.name.rpartition(".")
            if ending not in _TYPES:
                continue
            content = file.read_bytes()
            name = f"{stem}.{hashlib.sha256(content).hexdigest()[:HASH_CHARS]}.{ending}"
            self._by_name[name] = Asset(name, content, _TYPES[ending])
            self._served[file.name] = name

    def get(self, name: str) -> Asset | None:
        """Return the file of a served name."""
        return self._by_name.get(name)

    def served_name(self, file: str) -> str:
        """Return the name under which ``static/FILE`` is served; KeyError if there is no such file."""
        return self._served[file]
