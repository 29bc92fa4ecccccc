"""Waking the other side only when it sleeps, without ever losing a wake-up.

Theory
    The sleeper:  flag = 1; BARRIER; look at the ring again; sleep if it is still empty; afterwards flag = 0.
    The producer: store the tail; load the flag; ring if it is set.

    Without barriers both may miss each other: x86 lets a load overtake an earlier store, so the sleeper can look before
    its flag is visible while the producer reads the old flag before its tail is. One barrier on each side would cure
    it; ``membarrier(GLOBAL_EXPEDITED)``, called by the sleeper, makes every running thread of every registered process
    execute one, so that the producer, who runs far more often, pays nothing.

    Where the kernel refuses membarrier, the sleeper leaves its flag set for good, and a producer that could not
    register ignores the flag: the doorbell is then rung for every publication. A frontend's flag stays set as well, by
    choice (``Attachment.start``).

A doorbell is an eventfd: rings add up until it is answered, so a ring before the sleep is not lost either.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Final

from engines.errors import InvalidInput
from worker.channel.ring import Words

_SYS_MEMBARRIER: Final = 324
_QUERY: Final = 0
_GLOBAL_EXPEDITED: Final = 1 << 1
_REGISTER_GLOBAL_EXPEDITED: Final = 1 << 2


class Barrier:
    """This process's part in the barrier: registered at ``start`` where the kernel allows it.

    Attributes:
        available: whether others' barriers cover this process, and ``full`` covers others.
    """

    def __init__(self) -> None:
        self.available = False
        # PyDLL keeps the interpreter lock: giving it up would cost more than the call takes.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall

    def start(self) -> None:
        """Register the process; may be called again."""
        wanted = _GLOBAL_EXPEDITED | _REGISTER_GLOBAL_EXPEDITED
        offered = self._syscall(_SYS_MEMBARRIER, _QUERY, 0, 0)
        if offered < 0 or offered & wanted != wanted:
            return
        self.available = self._syscall(_SYS_MEMBARRIER, _REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0

    def full(self) -> None:
        """Make every earlier store of this thread visible, and everybody else's, before any later load."""
        result = self._syscall(_SYS_MEMBARRIER, _GLOBAL_EXPEDITED, 0, 0)
        assert result == 0, f"membarrier failed after it was registered: errno {ctypes.get_errno()}"


class Sleeper:
    """The side that may sleep: owns the flag word."""

    __slots__ = ("_barrier", "_flag")

    def __init__(self, flag: Words, barrier: Barrier) -> None:
        self._flag = flag
        self._barrier = barrier

    def start(self) -> None:
        """Set the flag to what a side that is awake shows."""
        self._flag[0] = 0 if self._barrier.available else 1

    def lie_down(self) -> None:
        """Announce sleep. The caller must look at its rings once more before it really sleeps."""
        if self._barrier.available:
            self._flag[0] = 1
            self._barrier.full()

    def get_up(self) -> None:
        """Say that no ring is needed for now."""
        if self._barrier.available:
            self._flag[0] = 0


class Bell:
    """The other side's doorbell, rung after a publication if that side sleeps. Does not own the descriptor."""

    __slots__ = ("_always", "_fd", "_flag")

    def __init__(self, fd: int, flag: Words, barrier: Barrier) -> None:
        self._fd = fd
        self._flag = flag
        self._always = not barrier.available

    @property
    def wanted(self) -> bool:
        """Whether what was just published needs a ring; one that follows later may find that it does not any more."""
        return self._always or self._flag[0] != 0

    def ring_if_asleep(self) -> None:
        """Call after the tail store."""
        if self._always or self._flag[0]:
            # A counter at its limit means that the doorbell rings already.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._fd, 1)


def open_doorbell() -> int:
    """Return a new eventfd, owned by the caller, non-blocking and not inherited."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def answer_doorbell(fd: int) -> None:
    """Take the rings so far; fine if there are none."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)


def require_doorbell(fd: int) -> None:
    """Return only if ``fd``, which a peer sent, is an eventfd that cannot block us.

    Raises:
        InvalidInput: it is something else.
    """
    kind = os.readlink(f"/proc/self/fd/{fd}")
    if kind != "anon_inode:[eventfd]":
        raise InvalidInput(f"doorbell: expected an eventfd, got {kind}")
    os.set_blocking(fd, False)
