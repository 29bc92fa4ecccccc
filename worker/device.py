"""The thread that runs executions too long to run on the loop.

A short execution runs inline, because handing it over costs more than it takes; a long one must not keep the loop from
expiring, cancelling and refusing requests (rules 21 to 23). One batch at a time, by construction: one thread runs them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading

from worker.dispatch import Batch, Dispatcher


class DeviceThread:
    """Runs one batch at a time; ``fileno()`` becomes readable when it has finished."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        # Counters with one writer each: this thread's and the loop's.
        self._finished = 0
        self._acknowledged = 0
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def fileno(self) -> int:
        return self._event

    def start(self) -> None:
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Begin executing, after what was submitted before; the caller keeps it to two."""
        self._inbox.put(batch)

    def acknowledge(self) -> bool:
        """Return, once for each batch in the order of submission, whether the next one has finished.

        Cheap while it runs: the loop asks on every round, since it looks at descriptors only now and then under load.
        """
        if self._finished == self._acknowledged:
            return False
        self._acknowledged += 1
        return True

    def clear(self) -> None:
        """Make the descriptor unreadable again; whoever was woken by it calls this, then ``acknowledge``."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        """End the thread after the batch it runs; does not wait."""
        self._inbox.put(None)

    def _run(self) -> None:
        while (batch := self._inbox.get()) is not None:
            Dispatcher.execute(batch)
            # The flag first: after the write this thread may wait for the interpreter's lock for as long as the loop,
            # woken by a descriptor that says nothing yet, comes round again and again.
            self._finished += 1
            os.eventfd_write(self._event, 1)
