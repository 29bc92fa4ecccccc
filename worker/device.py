"""The thread that runs executions too long to run on the loop.

A short execution runs inline, because handing it over costs more than it takes; a long one must not keep the loop from
expiring, cancelling and refusing requests (rules 21 to 23). One batch at a time, by construction: the loop hands over
the next only after it has taken the last.
"""

from __future__ import annotations

import os
import queue
import threading

from worker.dispatch import Batch, Dispatcher


class DeviceThread:
    """Runs one batch at a time; ``fileno()`` becomes readable when it has finished."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._finished = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def fileno(self) -> int:
        return self._event

    def start(self) -> None:
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Begin executing; the caller must not submit another before this one has finished."""
        self._inbox.put(batch)

    def acknowledge(self) -> bool:
        """Return, once, whether the batch submitted last has finished, and clear the descriptor.

        Cheap while it runs: the loop asks on every round, since it looks at descriptors only now and then under load.
        """
        if not self._finished:
            return False
        self._finished = False
        os.eventfd_read(self._event)
        return True

    def close(self) -> None:
        """End the thread after the batch it runs; does not wait."""
        self._inbox.put(None)

    def _run(self) -> None:
        while (batch := self._inbox.get()) is not None:
            Dispatcher.execute(batch)
            # The descriptor first: whoever sees the flag may read it at once.
            os.eventfd_write(self._event, 1)
            self._finished = True
