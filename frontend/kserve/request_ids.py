"""Texts that differ in a request's id only: what stands around the id, and how it is found. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_KEY: Final = b'{"id":'
_FIRST: Final = re.compile(rb'\{"id": ?"([A-Za-z0-9._:-]{1,128})"')
"""How real clients write it: first of all keys. Others, and ids that JSON may spell in several ways, are not found."""
_PLAIN: Final = re.compile(rb"[A-Za-z0-9._:-]+")


@dataclass(frozen=True, slots=True)
class AroundId:
    """The beginning of a text: ``before`` the id of ``id_bytes``, and ``after`` it; without an id all is before."""

    before: bytes
    id_bytes: int = 0
    after: bytes = b""

    def __len__(self) -> int:
        return len(self.before) + self.id_bytes + len(self.after)

    def begins(self, text: bytes) -> bool:
        """Return whether ``text`` begins so, with any id of the same length."""
        if not text.startswith(self.before):
            return False
        if not self.id_bytes:
            return True
        at = len(self.before)
        end = at + self.id_bytes
        return text.startswith(self.after, end) and _PLAIN.fullmatch(text, at, end) is not None

    def up_to(self, end: int) -> AroundId:
        """Return the same cut off at byte ``end`` of what comes last."""
        return AroundId(self.before, self.id_bytes, self.after[:end]) if self.id_bytes else AroundId(self.before[:end])

    def id_in(self, text: bytes | bytearray | memoryview) -> bytes:
        """Return the id in a text that begins so."""
        at = len(self.before)
        return bytes(text[at : at + self.id_bytes])

    def with_id(self, request_id: bytes) -> bytes:
        """Return the beginning with this id."""
        return b"".join((self.before, request_id, self.after)) if self.id_bytes else self.before


def split_asked(text: bytes) -> AroundId:
    """Return a request's JSON around its id, if that comes first."""
    found = _FIRST.match(text) if text.startswith(_KEY) else None
    if found is None:
        return AroundId(text)
    start, end = found.span(1)
    return AroundId(text[:start], end - start, text[end:])


def split_answer(text: bytes, request_id: bytes) -> AroundId | None:
    """Return an answer's JSON around the id that it repeats; None if it is not there, or there is another like it."""
    if not request_id:
        return AroundId(text)
    told = b'"id":"%b"' % request_id
    if text.count(told) != 1:
        return None
    start = text.index(told) + len(told) - 1 - len(request_id)
    return AroundId(text[:start], len(request_id), text[start + len(request_id) :])
