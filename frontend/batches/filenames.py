"""Names that clients give their files: a label for people, never a path. Pure."""

from __future__ import annotations

import unicodedata
from typing import Final
from urllib.parse import quote

MAX_FILENAME_BYTES: Final = 255
MAX_SUFFIX_BYTES: Final = 16
NAMELESS: Final = "file"
_REMOVED: Final = frozenset({"Cc", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Controls, halves of surrogate pairs, private and unassigned code points, line and paragraph separators."""
_BIDI: Final = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
"""They let a name be shown as another one (``exe.lnosj`` for ``json.exe``)."""


def clean_filename(given: str) -> str:
    """Return the last path segment without characters that mislead, at most 255 bytes; ``file`` if nothing is left."""
    name = given.replace("\\", "/").rpartition("/")[2]
    name = "".join(c for c in name if c not in _BIDI and unicodedata.category(c) not in _REMOVED).strip()
    if name in ("", ".", ".."):
        return NAMELESS
    if len(name.encode()) <= MAX_FILENAME_BYTES:
        return name
    stem, dot, suffix = name.rpartition(".")
    end = f".{suffix}" if dot and stem and len(suffix.encode()) < MAX_SUFFIX_BYTES else ""
    kept = (stem if end else name).encode()[: MAX_FILENAME_BYTES - len(end.encode())].decode("utf-8", "ignore")
    return kept + end


def attachment(filename: str) -> bytes:
    """Return the Content-Disposition value that offers a download under this name (RFC 6266)."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in '"\\%' else "_" for c in filename)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}".encode()
