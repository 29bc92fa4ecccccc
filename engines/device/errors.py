"""What can go wrong on a device, as classes: what a caller may do next differs."""

from __future__ import annotations

from engines.errors import EngineFailed, Kind, NotReady


class DeviceMissing(NotReady):
    """There is no device, driver or library to compute with; the message names the piece and how to get it."""


class DeviceFailed(EngineFailed):
    """The device refused an operation; later operations may work."""


class OutOfDeviceMemory(DeviceFailed):
    """An allocation did not fit; the message says how many bytes were asked for and how many are free."""


class CannotRegister(DeviceFailed):
    """The driver does not page-lock this memory; copy through pinned memory of its own instead."""


class CannotCapture(DeviceFailed):
    """The work cannot become a graph; launch it plainly instead. Nothing is left behind."""


class DeviceLost(DeviceFailed):
    """The device context is broken: every later call fails too, and only a new worker process helps."""

    kind = Kind.UNAVAILABLE
    retryable = True
