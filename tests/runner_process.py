"""Batch runners as processes of their own, started, stopped and killed as a test likes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from frontend.batches.settings import BatchesSettings
from frontend.node.child import child_environment, settings_descriptor
from real_node import until
from worker.channel.node_link import Lines, Order, Report, State, encode
from worker.channel.series import Series

SCRIPT = Path(__file__).resolve().parent / "quick_batches.py"
RECEIVE_BYTES = 65536


class RunnerProcess:
    """One runner process, its intervals a tenth as long; ``log`` collects what it writes.

    Attributes:
        state: what it said last; None before that and once it is gone.
    """

    def __init__(self, settings: BatchesSettings, log: Path) -> None:
        self._settings = settings
        self.log = log
        self._link: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._series: tuple[Series, ...] | None = None
        self.state: State | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, whatever has become of its last life; returns before it is ready."""
        self.kill()
        self._link, theirs = socket.socketpair()
        settings = settings_descriptor(self._settings)
        environment = child_environment()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(settings), str(theirs.fileno())],
                pass_fds=(settings, theirs.fileno()), stdout=log, stderr=log, env=environment,
            )  # fmt: skip
        os.close(settings)
        theirs.close()
        # Read to the end: a runner whose reports nobody takes would drop them.
        self._reader = threading.Thread(target=self._read, args=(self._link,), daemon=True)
        self._reader.start()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it where it stands; harmless if it does not run."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        if self._link is not None and self._reader is not None:
            self._reader.join(10)
            self._link.close()
            self._link = None
        self.state = None

    def wait_ready(self) -> None:
        """Wait until it runs batches, or until it has learned that another one does."""
        try:
            until("the runner has its store", lambda: self.state in (State.READY, State.DEGRADED), 60)
        except AssertionError as error:
            raise AssertionError(f"{error}; its log:\n{self.tail()}") from None

    def series(self) -> tuple[Series, ...]:
        """Return its figures now."""
        assert self._link is not None
        self._series = None
        self._link.sendall(encode(Order(do="series", id=1)))
        return until("it tells its figures", lambda: self._series, 30)

    def tail(self, characters: int = 4000) -> str:
        """Return the end of what it has written."""
        return self.log.read_text(errors="replace")[-characters:]

    def _read(self, link: socket.socket) -> None:
        lines = Lines(Report)
        with contextlib.suppress(ConnectionResetError):
            while data := link.recv(RECEIVE_BYTES):
                for report in lines.feed(data):
                    self.state = report.state or self.state
                    if report.id == 1:
                        self._series = tuple(report.series or ())
