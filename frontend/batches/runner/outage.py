"""Waiting for a store or a storage that does not answer, instead of losing what was to be written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from frontend.batches.objects import StorageUnavailable
from frontend.batches.runner.figures import Figures
from frontend.batches.runner.timings import Timings
from frontend.batches.store.errors import StoreUnavailable

log = logging.getLogger("batches")

T = TypeVar("T")


class Persistence:
    """Repeats calls until they are answered."""

    def __init__(self, times: Timings, figures: Figures) -> None:
        self._times = times
        self._figures = figures

    async def insist(self, call: Callable[[], Awaitable[T]], give_up: Callable[[], bool] = lambda: False) -> T:
        """Return the answer of a call that may be repeated; waits out outages for as long as they last.

        Raises:
            StoreUnavailable, StorageUnavailable: still, and ``give_up`` says so.
        """
        wait_s = self._times.outage_first_s
        while True:
            try:
                return await call()
            except (StoreUnavailable, StorageUnavailable) as error:
                self._figures.outages += 1
                if give_up():
                    raise
                log.warning("batches.outage wait_s=%.2f error=%s", wait_s, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, self._times.outage_longest_s)
