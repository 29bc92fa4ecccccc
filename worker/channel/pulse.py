"""A page on which the worker shows that it is alive, and the node looks: no message, no system call, no lock.

    word 0   executing_since_ns   when the current device execution started; 0 while none runs
    word 1   heartbeat_ns         when the loop last came round; 0 means: do not judge

Both are CLOCK_MONOTONIC. The worker beats at least every ``BEAT_INTERVAL_S``, also when idle, so it never sleeps
longer. It stores 0 while it does something that may rightly take long outside an execution, such as loading a model.
"""

from __future__ import annotations

import mmap
import os

PULSE_BYTES = 4096
BEAT_INTERVAL_S = 1.0


def create_pulse() -> int:
    """Return the descriptor of a fresh zeroed page; the caller closes it."""
    descriptor = os.memfd_create("ringserve-pulse", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, PULSE_BYTES)
    return descriptor


class Pulse:
    """One side's mapping of the page. Words are stored by the worker only. The descriptor stays the caller's."""

    def __init__(self, pulse_fd: int) -> None:
        self._map = mmap.mmap(pulse_fd, PULSE_BYTES)
        self._words = memoryview(self._map).cast("Q")

    @property
    def executing_since_ns(self) -> int:
        return self._words[0]

    @property
    def heartbeat_ns(self) -> int:
        return self._words[1]

    def executing(self, since_ns: int) -> None:
        """Say that a device execution starts; 0 says that it ended."""
        self._words[0] = since_ns

    def beat(self, now_ns: int) -> None:
        """Say that the loop came round; 0 says that it should not be judged for now."""
        self._words[1] = now_ns

    def close(self) -> None:
        self._words.release()
        self._map.close()
