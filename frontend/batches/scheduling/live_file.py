"""The file of the table of live calls: made whole or not at all, and gone once nobody of its release is left.

Its header: a number that tells it from anything else, the version of its layout, how many slots it has, how many
entries each of them, and an id. The byte with a slot's number is locked by whoever owns the slot.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger("batches")

VERSION: Final = 2
FILE_NAME: Final = f"live-{VERSION}.table"
"""Another name for each layout: processes of two releases may run side by side."""
ATTEMPTS: Final = 3
_MAGIC: Final = 0x7269_6E67_6C69_7665
_HEAD: Final = struct.Struct("QQQQQ")
_FLOCK: Final = "hhqqi4x"
_ANY: Final = re.compile(r"live-[0-9]+\.table(\.[0-9a-f]{16})?")
"""Tables, and what is left where a process was killed while it made one."""


def open_table(path: Path, slots: int, entries: int, size_of: Callable[[int], int]) -> int:
    """Return a descriptor of the table, made if there is none.

    Args:
        entries: room that a new table has in each slot; one that is there keeps its own.
        size_of: bytes of a table with so many entries.

    Raises:
        OSError: it cannot be opened or made.
    """
    for _ in range(ATTEMPTS):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            _make(path, slots, entries, size_of(entries))
            continue
        if _is_whole(fd, slots, size_of):
            return fd
        # Not ours or cut short: nobody can have it open.
        os.close(fd)
        path.unlink(missing_ok=True)
    raise OSError(errno.EBUSY, "it is replaced again and again")


def remove_left_over(directory: Path) -> None:
    """Remove tables of other layouts that no process has a slot in, and what was left of making one."""
    for path in directory.glob("live-*.table*"):
        if path.name == FILE_NAME or _ANY.fullmatch(path.name) is None:
            continue
        # What cannot be removed is in nobody's way.
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                # Of all bytes at once: nobody can take a slot while it goes.
                if lock(fd, 0, 0):
                    path.unlink()
                    log.info("batches.live_table_removed file=%s", path.name)
            finally:
                os.close(fd)


def lock(fd: int, start: int, length: int = 1) -> bool:
    """Take a lock on bytes, or keep it; 0 is up to the end, wherever that is. False if somebody else holds one."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, asked)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_locked(fd: int, start: int) -> bool:
    """Whether somebody else holds a lock on a byte."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
    found: int = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return found != fcntl.F_UNLCK


def _make(path: Path, slots: int, entries: int, size_bytes: int) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Or somebody who tidies up would take it for left over.
        lock(fd, 0, 0)
        # Reserved now: a full disk is an error here, and a fatal signal at the first touch later.
        os.posix_fallocate(fd, 0, size_bytes)
        os.pwrite(fd, _HEAD.pack(_MAGIC, VERSION, slots, entries, secrets.randbits(63)), 0)
        # Another was faster, or took it for left over before it was locked: both are looked at again.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(temporary, path)
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


def _is_whole(fd: int, slots: int, size_of: Callable[[int], int]) -> bool:
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return False
    magic, version, has_slots, entries, _ = _HEAD.unpack(head)
    return (magic, version, has_slots) == (_MAGIC, VERSION, slots) and os.fstat(fd).st_size == size_of(entries)
