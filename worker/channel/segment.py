"""Shared memory of a channel: reserved so that it cannot fail later, nameless so that nothing can leak."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from pathlib import Path

import numpy as np
import posix_ipc

from engines.errors import InvalidInput, Unavailable
from engines.tensor import NDArray
from worker.channel import layout as at
from worker.channel.layout import SegmentLayout
from worker.channel.messages import LAYOUT_VERSION
from worker.channel.ring import RingMemory

_SHM_DIR = "/dev/shm"
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class NoSharedMemory(Unavailable):
    """The machine cannot hold the segment; the message names needed and available bytes."""

    retryable = False


def reserve(size_bytes: int) -> int:
    """Return a descriptor of nameless shared memory whose pages are all reserved; the caller owns it.

    POSIX shared memory if /dev/shm has room, else a memfd, which the size of /dev/shm does not bind. Reserving now
    turns what would be a SIGBUS at first touch into an error here.

    Raises:
        NoSharedMemory: neither can hold it.
    """
    memory_bytes = _available_memory_bytes()
    shm_bytes = min(_available_shm_bytes(), memory_bytes)
    if size_bytes <= shm_bytes:
        fd = _reserved(_open_posix(), size_bytes)
        if fd is not None:
            return fd
    if size_bytes <= memory_bytes:
        fd = _reserved(os.memfd_create("ringserve", os.MFD_CLOEXEC), size_bytes)
        if fd is not None:
            return fd
    raise NoSharedMemory(
        f"a channel needs {size_bytes} bytes of shared memory; {_SHM_DIR} has {shm_bytes} available, "
        f"the machine {memory_bytes}: lower global.channel.arena_bytes or make room"
    )


def map_shared(fd: int, size_bytes: int) -> mmap.mmap:
    """Return a shared mapping; it lives as long as anything views it.

    Raises:
        NoSharedMemory: the address space cannot hold it.
    """
    try:
        return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise NoSharedMemory(f"cannot map {size_bytes} bytes of shared memory: {error}") from error


class WorkerPage:
    """The page of words that all frontends share with the worker."""

    def __init__(self, fd: int) -> None:
        mapping = map_shared(fd, at.WORKER_PAGE_BYTES)
        self.words = memoryview(mapping).cast("Q")
        first = at.REQUEST_TAILS_WORD
        self.request_tails: NDArray = np.frombuffer(mapping, dtype=np.uint64)[first :: at.LINE_WORDS]
        """One word per channel, viewed in place."""

    def initialise(self, generation: int) -> None:
        """Write the worker's line; the worker does it once, before anybody maps the page."""
        self.words[at.MAGIC_WORD] = at.WORKER_MAGIC
        self.words[at.VERSION_WORD] = LAYOUT_VERSION
        self.words[at.GENERATION_WORD] = generation

    def check(self, generation: int) -> None:
        """Raise InvalidInput unless the page is what the Welcome said; the frontend does it once."""
        expected = (at.WORKER_MAGIC, LAYOUT_VERSION, generation)
        _compare("worker page", ("magic", "layout version", "generation"), expected, self.words)

    def request_tail(self, channel_id: int) -> memoryview:
        word = at.request_tail_word(channel_id)
        return self.words[word : word + 1]

    @property
    def worker_sleeping(self) -> memoryview:
        return self.words[at.WORKER_SLEEPING_WORD : at.WORKER_SLEEPING_WORD + 1]


class Segment:
    """One end's view of a channel's segment.

    Attributes:
        arena: (arena_bytes,) uint8, shared with the other end.
    """

    def __init__(self, fd: int, layout: SegmentLayout) -> None:
        self.layout = layout
        mapping = map_shared(fd, layout.segment_bytes)
        self._bytes = memoryview(mapping)
        self.words = self._bytes.cast("Q")
        start = layout.arena_offset
        self.arena: NDArray = np.frombuffer(mapping, dtype=np.uint8)[start : start + layout.arena_bytes]

    def initialise(self, generation: int, pid: int, records: int) -> None:
        """Write the frontend's line; the frontend does it once, before it sends the segment."""
        header = (at.SEGMENT_MAGIC, LAYOUT_VERSION, generation, pid, records, self.layout.arena_bytes)
        for word, value in enumerate(header):
            self.words[word] = value

    def check(self, records: int) -> None:
        """Raise InvalidInput unless the header is what the Hello said; the worker does it once."""
        _compare("segment", ("magic", "layout version"), (at.SEGMENT_MAGIC, LAYOUT_VERSION), self.words)
        sizes = (records, self.layout.arena_bytes)
        _compare("segment", ("records", "arena bytes"), sizes, self.words[at.RECORDS_WORD :])

    def request_ring(self, tail: memoryview) -> RingMemory:
        """Return the request ring; its tail lies in the worker's page."""
        return self._ring(self.layout.request_ring_offset, tail, self._word(at.REQUEST_HEAD_WORD))

    def reply_ring(self) -> RingMemory:
        return self._ring(self.layout.reply_ring_offset, self._word(at.REPLY_TAIL_WORD), self._word(at.REPLY_HEAD_WORD))

    @property
    def frontend_sleeping(self) -> memoryview:
        return self._word(at.FRONTEND_SLEEPING_WORD)

    def write_text(self, slot: int, request_id: int, text: bytes) -> int:
        """Store an error's text, cut to what a slot holds; return the bytes stored."""
        start = self.layout.text_offset + slot * at.TEXT_SLOT_BYTES
        owner = start // at.WORD_BYTES
        text = text[: at.MAX_TEXT_BYTES]
        # A reader of the slot's last text must not take half of this one for it.
        self.words[owner] = 0
        self._bytes[start + at.WORD_BYTES : start + at.WORD_BYTES + len(text)] = text
        self.words[owner] = request_id
        return len(text)

    def read_text(self, slot: int, request_id: int, text_bytes: int) -> str | None:
        """Return the text stored for a request; None if another one has taken the slot since."""
        if not (0 <= slot < at.TEXT_SLOTS and 0 <= text_bytes <= at.MAX_TEXT_BYTES):
            return None
        start = self.layout.text_offset + slot * at.TEXT_SLOT_BYTES
        owner = start // at.WORD_BYTES
        if self.words[owner] != request_id:
            return None
        text = bytes(self._bytes[start + at.WORD_BYTES : start + at.WORD_BYTES + text_bytes])
        if self.words[owner] != request_id:
            return None
        return text.decode("utf-8", errors="ignore")

    def _word(self, word: int) -> memoryview:
        return self.words[word : word + 1]

    def _ring(self, offset: int, tail: memoryview, head: memoryview) -> RingMemory:
        size_bytes = self.layout.reply_ring_offset - self.layout.request_ring_offset
        return RingMemory.over(self._bytes[offset : offset + size_bytes], tail, head)


def _compare(what: str, names: tuple[str, ...], expected: tuple[int, ...], words: memoryview) -> None:
    for name, value, word in zip(names, expected, words, strict=False):
        if value != word:
            raise InvalidInput(f"{what}: {name} is {word}, expected {value}")


def _open_posix() -> int | None:
    """Return a descriptor of empty, already unlinked POSIX shared memory; None if this machine has none."""
    name = f"/ringserve-{secrets.token_hex(8)}"
    try:
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, 0o600)
    except (OSError, posix_ipc.Error):
        return None
    posix_ipc.unlink_shared_memory(name)
    return int(memory.fd)


def _reserved(fd: int | None, size_bytes: int) -> int | None:
    if fd is None:
        return None
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        os.close(fd)
        return None
    return fd


def _available_shm_bytes() -> int:
    try:
        usage = os.statvfs(_SHM_DIR)
    except OSError:
        return 0
    return usage.f_bavail * usage.f_frsize


def _available_memory_bytes() -> int:
    """Return what can be reserved before somebody is killed for memory: the machine's and the control group's rest."""
    rest = at.MAX_ARENA_BYTES * 2
    with contextlib.suppress(OSError, ValueError, IndexError):
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        rest = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        rest = min(rest, max(limit - int((_CGROUP / "memory.current").read_text()), 0))
    return rest
