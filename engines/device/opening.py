"""Opening the device that the engines of one worker share, with the part of its memory that weights may have."""

from __future__ import annotations

import logging
import os
from typing import Final, Protocol

from engines.device.base import Device
from engines.device.cupy_device import open_device
from engines.device.shared import SharedDevice
from engines.errors import NotReady

log = logging.getLogger("engines.device")

LEAST_REST_BYTES: Final = 1 << 30
"""Device memory that weights leave to scratch, staging and libraries, if the device has twice as much."""
DRIVER_NODES: Final = ("/dev/nvidiactl", "/dev/dxg")
"""Files that a machine with an NVIDIA driver has: Linux, and Linux inside Windows."""


class MemorySettings(Protocol):
    """The part of the node's runtime settings that says how much memory weights may take."""

    @property
    def weight_cache_fraction(self) -> float: ...
    @property
    def weight_cache_wiggle_fraction(self) -> float: ...


def gpu_is_present() -> bool:
    """Return whether a driver is there; loads no library, so that a machine without a GPU pays nothing for asking."""
    return any(os.path.exists(node) for node in DRIVER_NODES)


def open_shared(index: int, settings: MemorySettings) -> SharedDevice:
    """Return GPU ``index``, started.

    Raises:
        DeviceMissing: there is none that works; says what is missing and how to get it.
        NotReady: its memory is taken.
    """
    device = open_device(index)
    return start_shared(device, settings)


def start_shared(device: Device, settings: MemorySettings) -> SharedDevice:
    """Return the device with an arena of the size that the settings and its free memory give."""
    memory = device.memory()
    shared = SharedDevice(device, arena_bytes(memory.free_bytes, settings))
    try:
        shared.start()
    except NotReady:
        raise
    except Exception as error:
        raise NotReady(f"{device.name}: {memory.free_bytes} of {memory.total_bytes} bytes are free: {error}") from error
    log.info(
        "device.opened name=%r free_bytes=%d total_bytes=%d arena_bytes=%d",
        device.name, memory.free_bytes, memory.total_bytes, shared.arena.memory().capacity_bytes,
    )  # fmt: skip
    return shared


def arena_bytes(free_bytes: int, settings: MemorySettings) -> int:
    """Return the part of a device's free memory that weights get."""
    wiggle = max(settings.weight_cache_wiggle_fraction * free_bytes, min(LEAST_REST_BYTES, free_bytes / 2))
    return max(0, int(settings.weight_cache_fraction * (free_bytes - wiggle)))
