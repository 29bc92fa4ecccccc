"""System shared memory that clients register (protocols.md 1.10): the rules, without any I/O.

A region is a name for a part of a shared-memory object of a client. Requests then say where in a region a tensor lies
instead of carrying it. Every client may name every region, as the protocol has it; what keeps them from reaching
anything else is here: which objects may be named, how many, how large, and that no range leaves its region. Positions
are Python integers, so no sum can wrap. Texts name regions, which clients chose, and never keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engines.errors import AlreadyExists, InvalidInput, NotFound, ServingError, TooLarge, Unsupported
from frontend.inference import RegionRange
from frontend.settings import SystemSharedMemorySettings

SETTING: Final = "global.endpoints.system_shared_memory"
OFF_TEXT: Final = f"system shared memory is not offered by this server: {SETTING}.enabled is false"
CUDA_TEXT: Final = "CUDA shared memory is not offered by this server"
MAX_NAME_BYTES: Final = 1024
MAX_KEY_BYTES: Final = 255
"""The kernel's limit for a file name."""
_FOREIGN: Final = re.compile(r"ringserve-[0-9a-f]{16}|sem\..*", re.DOTALL)
"""Names that are never a client's region: a channel's segment in the moment before it is unlinked, and semaphores."""
_REGION: Final = "shared_memory_region"
_OFFSET: Final = "shared_memory_offset"
_BYTE_SIZE: Final = "shared_memory_byte_size"


class Region(msgspec.Struct, frozen=True):
    """A registered region.

    Attributes:
        key: name of the shared-memory object, without slashes.
        offset: first byte of the region in the object.
        device, inode: which object had that name when it was registered; another one of that name is another's.
        serial: number of the registration, so that a name registered anew is told from the old one.
    """

    name: str
    key: str
    offset: int
    size_bytes: int
    device: int
    inode: int
    serial: int = 0


class Table(msgspec.Struct, frozen=True):
    """All regions, and how many were ever registered. A change makes a new table."""

    regions: tuple[Region, ...] = ()
    serial: int = 0

    def find(self, name: str) -> Region:
        """Return a region.

        Raises:
            NotFound: no such region.
        """
        for region in self.regions:
            if region.name == name:
                return region
        raise unknown(name)

    def registered(self, region: Region, settings: SystemSharedMemorySettings) -> Table:
        """Return the table with one more region.

        Raises:
            AlreadyExists: the name is taken.
            TooLarge: one region, or their bytes, above the limits.
        """
        if any(other.name == region.name for other in self.regions):
            raise AlreadyExists(f"shared memory region '{region.name}' already in manager")
        if len(self.regions) >= settings.max_regions:
            raise TooLarge(f"{len(self.regions)} regions are registered, {SETTING}.max_regions is the limit")
        size_bytes = sum(other.size_bytes for other in self.regions) + region.size_bytes
        if size_bytes > settings.max_bytes:
            raise TooLarge(
                f"shared memory region '{region.name}' would make {size_bytes} bytes registered, "
                f"the limit {SETTING}.max_bytes is {settings.max_bytes}"
            )
        serial = self.serial + 1
        return Table((*self.regions, msgspec.structs.replace(region, serial=serial)), serial)

    def unregistered(self, name: str) -> Table:
        """Return the table without a region, or with an empty ``name`` without any. What is not there is no mistake."""
        return Table(tuple(region for region in self.regions if name and region.name != name), self.serial)


def checked_name(name: str) -> str:
    """Return a region's name.

    Raises:
        InvalidInput: empty or very long.
    """
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise InvalidInput(f"a shared memory region's name must have 1 to {MAX_NAME_BYTES} bytes")
    return name


def checked_key(name: str, key: str, settings: SystemSharedMemorySettings) -> str:
    """Return the object's name in a key as clients send it: with no, one or two slashes in front.

    Raises:
        InvalidInput: it could name anything but an object directly in the directory of shared memory, or is not
            allowed here.
    """
    stripped = key.lstrip("/")
    if not 0 < len(stripped.encode()) <= MAX_KEY_BYTES:
        raise InvalidInput(f"shared memory region '{name}': its key must have 1 to {MAX_KEY_BYTES} bytes")
    if "/" in stripped or "\0" in stripped or ".." in stripped or stripped == ".":
        raise InvalidInput(f"shared memory region '{name}': its key must be a plain name without '/' and '..'")
    if not stripped.startswith(settings.key_prefix) or _FOREIGN.fullmatch(stripped):
        raise InvalidInput(
            f"shared memory region '{name}': its key is not allowed on this server; keys must begin with what "
            f"{SETTING}.key_prefix says"
        )
    return stripped


def checked_extent(name: str, offset: object, size_bytes: object) -> tuple[int, int]:
    """Return where a region begins in its object, and its size.

    Raises:
        InvalidInput: not whole numbers, a negative offset, or an empty region.
    """
    for what, value, least in (("offset", offset, 0), ("byte_size", size_bytes, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidInput(f"shared memory region '{name}': {what} must be a whole number of at least {least}")
    assert isinstance(offset, int) and isinstance(size_bytes, int)
    return offset, size_bytes


def require_within(name: str, end: int, limit: int) -> None:
    """Raise InvalidInput if a part ends behind the memory it is a part of."""
    if end > limit:
        raise InvalidInput(f"Invalid offset + byte size for shared memory region: '{name}'")


def read_range(parameters: Mapping[str, Any], where: str, settings: SystemSharedMemorySettings) -> RegionRange | None:
    """Return where a tensor's parameters say it lies; None if they name no shared memory.

    Args:
        where: the tensor, for texts: ``input 'A'``.

    Raises:
        Unsupported: they do, and it is not offered.
        InvalidInput: a value is missing or no such value.
    """
    named = [key for key in parameters if key.startswith("shared_memory_")]
    if not named:
        return None
    if not settings.enabled:
        raise Unsupported(f"{where}: parameter '{named[0]}': {OFF_TEXT}")
    region = parameters.get(_REGION)
    if not isinstance(region, str) or not region:
        raise InvalidInput(f"{where}: parameter '{_REGION}' must be the name of a registered region")
    values = []
    for key, missing in ((_OFFSET, 0), (_BYTE_SIZE, None)):
        value = parameters.get(key, missing)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            got = "nothing" if value is None else repr(value)[:80]
            raise InvalidInput(f"{where}: parameter '{key}' must be a whole number of bytes, got {got}")
        values.append(value)
    return RegionRange(region, values[0], values[1])


def unknown(name: str) -> ServingError:
    """Return what to raise for a name that is not registered."""
    return NotFound(f"Unable to find shared memory region: '{name}'")
