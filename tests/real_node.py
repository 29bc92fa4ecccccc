"""A real node for tests: its own ports and run directory, its log as lines to wait for, stopped at the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0
POLL_S = 0.02


def until(what: str, probe: Callable[[], T | None], timeout_s: float = 60.0) -> T:
    """Return the first true value of ``probe``; fail with ``what`` after ``timeout_s``.

    For conditions of other processes that announce nothing; where there is an event, wait for that instead.
    """
    pause = threading.Event()
    give_up = time.monotonic() + timeout_s
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > give_up:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        pause.wait(POLL_S)


class Node:
    """``ringserve serve`` as a child process. Use as a context manager; entering waits until the node is ready."""

    def __init__(
        self,
        models: Path,
        run_dir: Path,
        *,
        frontends: int = 2,
        node_file: Path | None = None,
        wait_ready: bool = True,
        env: dict[str, str] | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.models = models
        self.run_dir = run_dir
        self._frontends = frontends
        self._node_file = node_file
        self._wait_ready = wait_ready
        self._env = env or {}
        self._arguments = arguments
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader: threading.Thread | None = None
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Node:
        command = [
            sys.executable, "-m", "frontend.cli", "serve", "--models", str(self.models), "--run-dir", str(self.run_dir),
            "--frontends", str(self._frontends), "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0",
            *(["--node", str(self._node_file)] if self._node_file else []), *self._arguments,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | self._env
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if self._wait_ready:
            try:
                self.wait_state("ready", READY_TIMEOUT_S)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the node did not stop within {STOP_TIMEOUT_S} s:\n{self.log()}") from None
        assert self._reader is not None
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> int:
        """Drain and return the node's exit status."""
        self.__exit__()
        assert self.process is not None
        return self.process.returncode

    def log(self) -> str:
        """Return everything the node has printed."""
        with self._changed:
            return "\n".join(self._lines)

    def wait_line(self, pattern: str, timeout_s: float = 20.0, start: int = 0) -> str:
        """Return the first log line, from line ``start``, that ``pattern`` is found in."""
        at = start
        with self._changed:
            give_up = time.monotonic() + timeout_s
            while True:
                while at < len(self._lines):
                    if re.search(pattern, self._lines[at]):
                        return self._lines[at]
                    at += 1
                if not self._changed.wait(give_up - time.monotonic()):
                    raise AssertionError(f"no line {pattern!r} within {timeout_s} s in:\n" + "\n".join(self._lines))

    def line_count(self) -> int:
        with self._changed:
            return len(self._lines)

    def status(self) -> dict[str, Any] | None:
        """Return ``ringserve status --json``, None while there is no node."""
        command = [sys.executable, "-m", "frontend.cli", "status", "--run-dir", str(self.run_dir), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 2:
            return None
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def wait_state(self, state: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """Return the status once the node is in ``state``; fail early if the node has ended."""

        def probe() -> dict[str, Any] | None:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the node ended with {self.process.returncode}:\n{self.log()}")
            status = self.status()
            return status if status and status["state"] == state else None

        try:
            return until(f"state {state}", probe, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def full_strength(self) -> dict[str, Any] | None:
        """Return the status if every process is ready and every channel attached."""
        status = self.status()
        if status is None or status["state"] != "ready":
            return None
        frontends = [process for process in status["processes"] if process["role"] == "frontend"]
        ready = all(process["state"] == "ready" for process in status["processes"])
        whole = len(frontends) >= self._frontends and len(status["channels"]) >= self._frontends
        return status if ready and whole else None

    def wait_full_strength(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Return the status once every process is ready and every channel attached; the node is ready before that."""
        return until("full strength", self.full_strength, timeout_s)

    def pids(self, role: str) -> list[int]:
        """Return the process ids of a role, without those that wait to be started again.

        Such a one has the number 0, and a signal to that goes to the whole process group of the test.
        """
        status = self.status()
        assert status is not None, self.log()
        return [process["pid"] for process in status["processes"] if process["role"] == role and process["pid"]]

    @property
    def ports(self) -> dict[str, int]:
        status = self.status()
        assert status is not None, self.log()
        return {name: status[name] for name in ("http_port", "grpc_port", "metrics_port")}

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()


def migrate(node_file: Path, models: Path) -> None:
    """Prepare the database that a node file names, as an operator does; a node never does that to PostgreSQL."""
    command = [sys.executable, "-m", "frontend.cli", "migrate", "--node", str(node_file), "--models", str(models)]
    subprocess.run(command, check=True, timeout=READY_TIMEOUT_S)


def raw_output(body: bytes, columns: int) -> np.ndarray:
    """Return the one FP32 output that follows the JSON of a binary answer, as rows."""
    _, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    return np.frombuffer(body[end:], np.float32).reshape(-1, columns)


@contextlib.contextmanager
def shared_memory_unchanged() -> Iterator[None]:
    """Fail if /dev/shm has entries of ours afterwards that it did not have before; others may come and go beside us."""
    before = set(os.listdir("/dev/shm"))
    yield
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("ringserve-")}
    assert not left, f"left in /dev/shm: {sorted(left)}"
