"""This process's resident memory, and handing freed memory back to the operating system."""

from __future__ import annotations

import ctypes
import gc
import os

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES


def release_freed() -> None:
    """Collect garbage and give freed heap back; glibc keeps 60 to 85 % of a dropped model otherwise."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
