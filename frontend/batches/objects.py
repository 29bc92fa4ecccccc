"""Where the bytes of files live: the seam, what can go wrong with it, and ``open_objects``.

An object is written once, under a path that no other writer uses, and is either whole or not there: readers see
nothing before ``commit`` has returned. Its row in the store is committed afterwards, so that a crash in between leaves
an object that nobody refers to (the sweeper removes it), never a row without bytes.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote, urlsplit

from engines.errors import Internal, InvalidInput, Unavailable

if TYPE_CHECKING:
    from frontend.gateway_settings import GatewaySettings

READ_BYTES: Final = 256 * 1024
"""Longest piece that ``open_reader`` yields: what one slow client holds in memory."""
_PATH: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}){0,7}")


class StorageUnavailable(Unavailable):
    """The storage cannot be written or read now (disk full, no permission, bucket away); nothing was kept.

    ``file_storage_unavailable``; the operator's log has the cause, which may name paths or buckets.
    """


class ObjectMissing(Internal):
    """A committed object is not there, or is shorter than its row says: something outside removed or cut it."""


class ObjectCorrupt(Internal):
    """The bytes of an object do not have the checksum that they had when it was written."""


class BadObjectPath(InvalidInput):
    """A path that could leave the storage's room, or name something hidden; never a client's doing."""


@dataclass(frozen=True, slots=True)
class Written:
    """A complete, durable object: its size and its SHA-256 in lower-case hex."""

    bytes: int
    sha256: str


class ObjectWriter(Protocol):
    """One object being written; exactly one of ``commit`` and ``abort`` ends it. Not for two tasks at once."""

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append and hash; returns when ``data`` may be reused. Raises: StorageUnavailable; then only ``abort``."""

    async def commit(self) -> Written:
        """Make the object durable and visible. Raises: StorageUnavailable; then nothing is visible."""

    async def abort(self) -> None:
        """Remove what was written; harmless after a failure, after ``commit`` and twice."""


class Objects(Protocol):
    """A storage, usable between ``start`` and ``close``. Any call may raise ``StorageUnavailable``."""

    async def start(self) -> None:
        """Make sure that the storage can be used; temporary bytes of dead writers are removed."""

    async def close(self) -> None: ...

    async def open_writer(self, path: str) -> ObjectWriter:
        """Return a writer of a new object. Raises: BadObjectPath."""

    def open_reader(self, path: str, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield an object's bytes from ``offset`` on in pieces of at most ``READ_BYTES``; ``length`` None = to the end.

        Close it (``contextlib.aclosing``) unless it is read to its end.

        Raises:
            ObjectMissing: no such object, or it ends before ``offset + length``.
        """

    async def read(self, path: str, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes. Raises: ObjectMissing."""

    async def size(self, path: str) -> int | None:
        """Return an object's size, None if there is none."""

    async def delete(self, path: str) -> None:
        """Remove an object; one that is not there is fine."""

    async def sweep_temporary(self, older_than_seconds: float) -> int:
        """Remove what writers left that died; return how many. 0 where the storage does that by itself."""


def object_path(file_id: str) -> str:
    """Return where a file's bytes go: by its id alone, nothing of a client's choosing; 256 folders keep each short."""
    return f"{file_id[-2:]}/{file_id}"


def check_path(path: str) -> str:
    """Return ``path``. Raises: BadObjectPath unless it is a plain relative path below the storage's root."""
    if not _PATH.fullmatch(path):
        raise BadObjectPath(
            "an object path is up to 8 names of letters, digits, '.', '_' and '-', not starting with '.'"
        )
    return path


def open_objects(settings: GatewaySettings, state_dir: Path) -> Objects:
    """Return the storage that ``gateway.files.url`` names, not started: a directory, or an S3-compatible bucket.

    Raises:
        ValueError: the URL names nothing that is supported.
    """
    url = settings.files.url
    if not url:
        return _local(state_dir / "files")
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return _local(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc and not (parts.query or parts.fragment or "@" in parts.netloc):
        from frontend.batches.s3 import BucketObjects

        return BucketObjects(parts.netloc, parts.path.strip("/"))
    raise ValueError(f"gateway.files.url is {url!r}, expected file:///DIRECTORY or s3://BUCKET/PREFIX")


def _local(directory: Path) -> Objects:
    from frontend.batches.local import LocalObjects

    return LocalObjects(directory)
