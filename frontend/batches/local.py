"""Objects as files of a local directory: ``DIR/ab/file-...ab``, written as ``DIR/tmp/...`` and renamed when whole.

Disk calls run in threads of the storage's own, so that a slow disk delays files and nothing else of the process.
A commit is durable when it returns: data, then the name, are flushed to the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from frontend.batches.objects import READ_BYTES, ObjectMissing, StorageUnavailable, Written, check_path

log = logging.getLogger(__name__)

DISK_THREADS: Final = 4
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
STALE_SECONDS: Final = 24 * 3600.0
"""A temporary file not written to for this long belongs to nobody: uploads end or are cut long before."""

R = TypeVar("R")


class LocalObjects:
    """Provides ``Objects`` in a directory; several processes may share it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._temporary = directory / "tmp"
        self._pool: ThreadPoolExecutor | None = None

    async def start(self) -> None:
        self._pool = ThreadPoolExecutor(DISK_THREADS, "objects")
        await self.run(self._make_directories)
        await self.sweep_temporary(STALE_SECONDS)

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.shutdown)

    async def open_writer(self, path: str) -> LocalWriter:
        target = self._place(path)
        temporary = self._temporary / f"{secrets.token_hex(16)}.part"
        return LocalWriter(self, await self.run(lambda: _create(temporary)), temporary, target)

    async def open_reader(self, path: str, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        place = self._place(path)
        stream = await self.run(lambda: _open(place, offset))
        left = length
        try:
            while left is None or left > 0:
                ask = READ_BYTES if left is None else min(READ_BYTES, left)
                piece = await self.run(lambda: stream.read(ask))  # noqa: B023 - awaited in the same turn
                if not piece:
                    if left is None:
                        return
                    raise ObjectMissing("a stored file is shorter than its record says")
                if left is not None:
                    left -= len(piece)
                yield piece
        finally:
            stream.close()

    async def read(self, path: str, offset: int, length: int) -> bytes:
        place = self._place(path)
        return await self.run(lambda: _read(place, offset, length))

    async def size(self, path: str) -> int | None:
        place = self._place(path)
        return await self.run(lambda: _size(place))

    async def delete(self, path: str) -> None:
        place = self._place(path)
        await self.run(lambda: place.unlink(missing_ok=True))

    async def sweep_temporary(self, older_than_seconds: float) -> int:
        oldest = time.time() - older_than_seconds
        return await self.run(lambda: _sweep(self._temporary, oldest))

    async def run(self, call: Callable[[], R]) -> R:
        """Return ``call()``, made in a thread of the storage. Raises: StorageUnavailable for any OSError.

        A cancelled caller waits for the call: its buffers are in use until then.
        """
        assert self._pool is not None, "not started"
        future = asyncio.get_running_loop().run_in_executor(self._pool, call)
        try:
            return await _uncut(future)
        except OSError as error:
            what = "is full" if error.errno in FULL else "cannot be used now"
            log.error("objects.failed error=%s: %s", type(error).__name__, error)
            raise StorageUnavailable(f"the file storage {what}; nothing was stored") from error

    def _place(self, path: str) -> Path:
        return self._directory / check_path(path)

    def _make_directories(self) -> None:
        for directory in (self._directory, self._temporary):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)


class LocalWriter:
    """Provides ``ObjectWriter``: a temporary file, renamed when whole."""

    def __init__(self, objects: LocalObjects, stream: BinaryIO, temporary: Path, target: Path) -> None:
        self._objects = objects
        self._stream = stream
        self._temporary = temporary
        self._target = target
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._over = False

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        await self._objects.run(lambda: self._append(data))
        self._bytes += len(data)

    async def commit(self) -> Written:
        await self._objects.run(self._publish)
        self._over = True
        return Written(self._bytes, self._hash.hexdigest())

    async def abort(self) -> None:
        if self._over:
            return
        self._over = True
        with contextlib.suppress(StorageUnavailable):  # logged; swept later
            await self._objects.run(self._discard)

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._stream.write(view) :]
        self._hash.update(data)

    def _publish(self) -> None:
        os.fsync(self._stream.fileno())
        self._stream.close()
        folder = self._target.parent
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True, parents=True)
            _sync_directory(folder.parent)
        os.replace(self._temporary, self._target)
        _sync_directory(folder)

    def _discard(self) -> None:
        self._stream.close()
        self._temporary.unlink(missing_ok=True)
        # Also after a commit that failed behind its rename.
        self._target.unlink(missing_ok=True)


async def _uncut(future: asyncio.Future[R]) -> R:
    """Await a call in a thread to its end, whatever happens to this task meanwhile."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not future.done():
            await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # seen: nobody else will ask
        raise


def _create(temporary: Path) -> BinaryIO:
    # Unbuffered: an error belongs to the write that caused it, and nothing is left to flush when a writer gives up.
    # The directory may have come back since the start, or be on a volume that was mounted late.
    temporary.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb", buffering=0)


def _open(place: Path, offset: int) -> BinaryIO:
    try:
        stream = place.open("rb")
    except FileNotFoundError:
        raise ObjectMissing("a stored file is not there") from None
    stream.seek(offset)
    return stream


def _read(place: Path, offset: int, length: int) -> bytes:
    with _open(place, offset) as stream:
        data = stream.read(length)
    if len(data) != length:
        raise ObjectMissing("a stored file is shorter than its record says")
    return data


def _size(place: Path) -> int | None:
    try:
        return place.stat().st_size
    except FileNotFoundError:
        return None


def _sweep(directory: Path, oldest: float) -> int:
    removed = 0
    for path in directory.glob("*.part"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest:
                path.unlink()
                removed += 1
    return removed


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
