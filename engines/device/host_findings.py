"""Broken rules of the host device, kept until it is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from engines.device.errors import DeviceLost
from engines.device.host_arrays import running
from engines.device.host_order import DeviceMisuse

Result = TypeVar("Result")


class Findings:
    """What went wrong so far; something between our code and a test may catch exceptions, this forgets none."""

    def __init__(self) -> None:
        self.lost = ""
        """Why every call fails, once the device is lost."""
        self._misuses: list[DeviceMisuse] = []

    def misuse(self, message: str) -> DeviceMisuse:
        """Return the error for a broken rule, to be raised."""
        error = DeviceMisuse(message)
        self._misuses.append(error)
        return error

    def check(self, checked: Callable[[], Result]) -> Result:
        """Return what the call returns; a DeviceMisuse that it raises is kept."""
        try:
            return checked()
        except DeviceMisuse as error:
            self._misuses.append(error)
            raise

    def enter(self, what: str) -> None:
        """Raise unless the host may call the device now."""
        if self.lost:
            raise DeviceLost(f"{what}: the device is lost: {self.lost}")
        if running.title:
            raise self.misuse(f"'{running.title}' calls the device's '{what}' from inside its work")

    def require_none(self) -> None:
        """Raise the first broken rule again."""
        if self._misuses:
            raise self._misuses[0]
