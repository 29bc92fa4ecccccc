"""Which host memory is page-locked, so that the device copies from and to it where it lies."""

from __future__ import annotations

import logging
from bisect import bisect_right, insort

from engines.device.base import Device, Registration
from engines.device.errors import CannotRegister
from engines.staging import address_of
from engines.tensor import NDArray

log = logging.getLogger("engines.tensorrt")


class LockedMemory:
    """Registered stretches of host memory. They never overlap: the device refuses to register memory twice."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stretches: list[tuple[int, int]] = []

    def register(self, memory: NDArray) -> Registration | None:
        """Page-lock contiguous memory; None, with a log line, if the driver refuses."""
        try:
            registration = self._device.register(memory, "memory shared with a frontend")
        except CannotRegister as error:
            log.warning("device.not_registered bytes=%d reason=%s: rows are copied once more", memory.nbytes, error)
            return None
        start = address_of(memory)
        stretch = (start, start + memory.nbytes)
        insort(self._stretches, stretch)
        return _Stretch(self._stretches, stretch, registration)

    def holds(self, array: NDArray) -> bool:
        """Return whether all of a contiguous array lies in one registered stretch."""
        start = address_of(array)
        index = bisect_right(self._stretches, (start, 1 << 64)) - 1
        return index >= 0 and start + array.nbytes <= self._stretches[index][1]


class _Stretch:
    """A registration that is also forgotten here."""

    def __init__(self, stretches: list[tuple[int, int]], stretch: tuple[int, int], registration: Registration) -> None:
        self._stretches = stretches
        self._stretch = stretch
        self._registration = registration

    def release(self) -> None:
        if self._stretch in self._stretches:
            self._stretches.remove(self._stretch)
        self._registration.release()
