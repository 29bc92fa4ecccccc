"""Registered regions of one node, and the bytes in them.

Every frontend of a node must know a region, since a client's next connection may reach another one. The table is
therefore a file in the run directory, replaced whole under a lock; what a frontend answered to a registration, the
others see from that moment on, because each use looks whether the file is still the one it has read (the old one is
kept open, so that its inode cannot be given to a new one). It outlives every frontend and goes with the node.

Client memory is never mapped: a client may truncate it at any moment, and touching a page that is gone would kill the
process. Reading and writing by position tells it as a short count instead, for the same single copy. Objects are opened
by name without following links, once per registration; a request under way holds its object open, so unregistering,
unlinking or truncating it harms that request only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from engines.errors import Internal, InvalidInput, NotFound, Unavailable, Unsupported
from frontend.inference import RegionRange
from frontend.kserve.client_memory import (
    OFF_TEXT,
    Region,
    Table,
    checked_extent,
    checked_key,
    checked_name,
    require_within,
)
from frontend.settings import SystemSharedMemorySettings

LOCK_TIMEOUT_S: Final = 2.0
"""How long a change waits for the others: each takes well below a millisecond, unless its process is stopped."""
_LOCK_PAUSE_S: Final = 0.005
_OPEN_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DIRECTORY: Final = "/dev/shm"


class OpenRegion:
    """A registered object, open in this process; closed when nobody holds it any more."""

    __slots__ = ("_fd", "_holders", "region")

    def __init__(self, region: Region, fd: int) -> None:
        self.region = region
        self._fd = fd
        self._holders = 1

    @property
    def fd(self) -> int:
        assert self._fd >= 0, "the region was released"
        return self._fd

    def hold(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class BoundRange:
    """The bytes of one tensor of one request; ``release`` it once, when the request is over."""

    __slots__ = ("_position", "_source", "size_bytes")

    def __init__(self, source: OpenRegion, position: int, size_bytes: int) -> None:
        self._source = source
        self._position = position
        self.size_bytes = size_bytes

    @property
    def region(self) -> str:
        return self._source.region.name

    def read_into(self, room: memoryview) -> None:
        """Fill ``room``, as many bytes as the range has.

        Raises:
            InvalidInput: the client has made its memory smaller.
        """
        assert len(room) == self.size_bytes, f"{len(room)=} {self.size_bytes=}"
        done = 0
        while done < len(room):
            count = os.preadv(self._source.fd, [room[done:]], self._position + done)
            if count == 0:
                raise self._shrunk()
            done += count

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write ``data`` from the range's first byte on; it must fit.

        Raises:
            InvalidInput: the client has made its memory smaller, may not be written to, or the system has none left.
        """
        view = memoryview(data)
        assert len(view) <= self.size_bytes, f"{len(view)=} {self.size_bytes=}"
        fd = self._source.fd
        # Writing beyond the end would make the object larger again.
        if os.fstat(fd).st_size < self._position + len(view):
            raise self._shrunk()
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(fd, view[done:], self._position + done)
        except OSError as error:
            why = "this server may only read it" if error.errno == errno.EBADF else error.strerror
            raise InvalidInput(f"cannot write to shared memory region '{self.region}': {why}") from None

    def release(self) -> None:
        """Let go of the object."""
        self._source.release()

    def _shrunk(self) -> InvalidInput:
        return InvalidInput(f"shared memory region '{self.region}' was made smaller after it was registered")


class ClientMemory:
    """The regions of a node, seen from one frontend. ``bind`` belongs to the event loop's thread.

    Args:
        registry: path of the node's table.
        directory: where shared-memory objects are.
    """

    def __init__(self, settings: SystemSharedMemorySettings, registry: str, directory: str = _DIRECTORY) -> None:
        self._settings = settings
        self._registry = registry
        self._directory = directory
        self._table = Table()
        self._table_fd = -1
        self._table_id = (0, 0)
        self._open: dict[str, OpenRegion] = {}

    @property
    def enabled(self) -> bool:
        return self._settings.enabled

    def close(self) -> None:
        """Let go of every object and of the table; harmless twice."""
        self._adopt(Table())
        if self._table_fd >= 0:
            os.close(self._table_fd)
            self._table_fd = -1
        self._table_id = (0, 0)

    def bind(self, part: RegionRange) -> BoundRange:
        """Return the bytes a tensor lies in; the caller releases them.

        Raises:
            NotFound: no such region, or its object is gone.
            InvalidInput: the range leaves the region, or the object has become smaller.
        """
        self._refresh()
        region = self._table.find(part.region)
        require_within(region.name, part.offset + part.size_bytes, region.size_bytes)
        source = self._open.get(region.name)
        if source is None:
            source = self._open[region.name] = OpenRegion(region, self._open_same(region))
        status = os.fstat(source.fd)
        # A frontend that opens it only now could not find an unlinked object: told alike by all.
        if status.st_nlink == 0:
            raise _gone(region)
        if region.offset + region.size_bytes > status.st_size:
            raise InvalidInput(f"shared memory region '{region.name}' was made smaller after it was registered")
        source.hold()
        return BoundRange(source, region.offset + part.offset, part.size_bytes)

    def status(self, name: str = "") -> list[dict[str, str | int]]:
        """Return the protocol's description of one region, or of all.

        Raises:
            NotFound: no such region.
        """
        if self.enabled:
            self._refresh()
        regions = (self._table.find(name),) if name else self._table.regions
        return [
            {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.size_bytes}
            for region in regions
        ]

    async def register(self, name: str, key: str, offset: object, size_bytes: object) -> None:
        """Give a name to a part of a client's shared-memory object, on every frontend of the node.

        Raises:
            Unsupported: not offered here.
            InvalidInput: a rule is broken, or the object is not there or not that large.
            AlreadyExists, TooLarge: see ``Table.registered``.
        """
        settings = self._settings
        if not settings.enabled:
            raise Unsupported(OFF_TEXT)
        checked_name(name)
        key = checked_key(name, key, settings)
        start, size = checked_extent(name, offset, size_bytes)
        fd = self._open_key(name, key)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        require_within(name, start + size, status.st_size)
        region = Region(name, key, start, size, status.st_dev, status.st_ino)
        await self._change(lambda table: table.registered(region, settings))

    async def unregister(self, name: str = "") -> None:
        """Forget one region, or all; requests under way still use it. One that is not there is forgotten already."""
        if self._settings.enabled:
            await self._change(lambda table: table.unregistered(name))

    # Objects

    def _open_key(self, name: str, key: str) -> int:
        path = f"{self._directory}/{key}"
        try:
            try:
                fd = os.open(path, os.O_RDWR | _OPEN_FLAGS)
            except PermissionError:
                fd = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
        except OSError:
            # One text for all causes: it must not tell what else lies there.
            raise InvalidInput(
                f"Unable to open shared memory region: '{name}': there is no such object, or this server may not use it"
            ) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InvalidInput(
                f"Unable to open shared memory region: '{name}': there is no such object, or this server may not use it"
            )
        return fd

    def _open_same(self, region: Region) -> int:
        """Open the object that was registered, not another that has its name by now."""
        try:
            fd = self._open_key(region.name, region.key)
        except InvalidInput:
            raise _gone(region) from None
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (region.device, region.inode):
            os.close(fd)
            raise _gone(region)
        return fd

    # The table

    def _refresh(self) -> None:
        """Read the table if it is not the one that was read last."""
        try:
            status = os.stat(self._registry)
        except FileNotFoundError:
            if self._table_fd >= 0:
                self.close()
            return
        if (status.st_dev, status.st_ino) == self._table_id:
            return
        fd = os.open(self._registry, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            table = _read(fd)
            status = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        if self._table_fd >= 0:
            os.close(self._table_fd)
        self._table_fd = fd
        self._table_id = (status.st_dev, status.st_ino)
        self._adopt(table)

    def _adopt(self, table: Table) -> None:
        self._table = table
        known = set(table.regions)
        for name in [name for name, source in self._open.items() if source.region not in known]:
            self._open.pop(name).release()

    async def _change(self, change: Callable[[Table], Table]) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._change_file, change)

    def _change_file(self, change: Callable[[Table], Table]) -> None:
        """Replace the table on disk. Runs on a thread and touches nothing that the event loop uses."""
        with self._locked():
            try:
                fd = os.open(self._registry, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                table = Table()
            else:
                try:
                    table = _read(fd)
                finally:
                    os.close(fd)
            changed = change(table)
            if changed == table:
                return
            new = f"{self._registry}.new"
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(changed))
            os.rename(new, self._registry)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(f"{self._registry}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            give_up = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise Unavailable(
                            f"the table of shared memory regions is in use, nothing changed within {LOCK_TIMEOUT_S} s"
                        ) from None
                    time.sleep(_LOCK_PAUSE_S)
            yield
        finally:
            os.close(fd)


def _read(fd: int) -> Table:
    with open(fd, "rb", closefd=False) as file:
        text = file.read()
    try:
        return msgspec.json.decode(text, type=Table)
    except msgspec.DecodeError as error:
        raise Internal(f"the table of shared memory regions cannot be read: {error}") from error


def _gone(region: Region) -> NotFound:
    return NotFound(
        f"shared memory region '{region.name}' is gone: its object was removed after it was registered; "
        "keep it until it is unregistered"
    )
