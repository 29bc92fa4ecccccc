"""Log lines of all processes on one stream, each with the name of the process that wrote it."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

MAX_LINE_BYTES = 16 * 1024
"""Longer lines are cut into pieces of this size, each with its name."""
MAX_WAITING_LINES = 10_000
"""Lines kept while the reader of our output does not read; later ones are dropped and counted."""


class Prefixer:
    """Cuts a byte stream into lines and puts a name before each; keeps an unfinished line until its end arrives."""

    def __init__(self, name: str) -> None:
        self._prefix = f"{name} | ".encode()
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the prefixed lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        pieces = [piece for line in lines for piece in _cut(line)]
        while len(self._rest) > MAX_LINE_BYTES:
            pieces.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        return [self._prefix + piece + b"\n" for piece in pieces]

    def finish(self) -> list[bytes]:
        """Return the unfinished line, if any: the stream has ended."""
        rest, self._rest = self._rest, b""
        return [self._prefix + rest + b"\n"] if rest else []


def _cut(line: bytes) -> list[bytes]:
    line = line.removesuffix(b"\r")
    return [line[at : at + MAX_LINE_BYTES] for at in range(0, len(line), MAX_LINE_BYTES)] or [b""]


class Output:
    """Writes lines on a thread of its own.

    A terminal that is paused or a pipe nobody reads would otherwise block the node, then its children's pipes, and in
    the end the worker.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def write(self, lines: list[bytes]) -> None:
        """Queue complete lines; never blocks."""
        with self._changed:
            for line in lines:
                if len(self._waiting) < MAX_WAITING_LINES:
                    self._waiting.append(line)
                else:
                    self._dropped += 1
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most ``timeout_s``."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                data = b"".join(self._waiting)
                self._waiting.clear()
                if self._dropped:
                    data += b"node | output.dropped lines=%d\n" % self._dropped
                    self._dropped = 0
            self._write_all(data)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                threading.Event().wait(0.05)
            except OSError:
                return


class OutputHandler(logging.Handler):
    """Sends the node's own records through the same stream as its children's lines."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output
        self._prefixer = Prefixer("node")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._output.write(self._prefixer.feed(self.format(record).encode("utf-8", "replace") + b"\n"))
        except Exception:
            self.handleError(record)
