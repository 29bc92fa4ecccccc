"""Drives a node in a process of its own: waits on its log lines, its sockets and its processes, never on the clock."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

import msgspec

from frontend.node.link import Call, call_node
from frontend.node.status import Answer, NodeStatus

LIMIT_S = 30.0
ROOT = Path(__file__).parents[2]
FAKE_NODE = Path(__file__).with_name("fake_node.py")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


class NodeProcess:
    """A node with fake children, on free ports, in its own run directory."""

    def __init__(self, directory: Path, behaviours: str = "", *arguments: str) -> None:
        self.run_dir = directory / "run"
        models = directory / "models"
        models.mkdir(exist_ok=True)
        ports = [] if "--http-port" in arguments else ["--http-port", "0"]
        self.arguments = [
            "--models", str(models), "--run-dir", str(self.run_dir), "--grpc-port", "0", "--metrics-port", "0",
            "--frontends", "1", *ports, *arguments,
        ]  # fmt: skip
        self.behaviours = behaviours
        self.lines: list[str] = []
        self._rest = b""
        self._seen = 0

    def __enter__(self) -> NodeProcess:
        command = [sys.executable, str(FAKE_NODE), self.behaviours, *self.arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment()
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self.pidfd)
        if error is not None:
            sys.stderr.write("\n".join(line[:300] for line in self.lines[-60:]) + "\n")

    def wait_line(self, pattern: str) -> re.Match[str]:
        """Return the match of the next log line that fits; earlier lines are not looked at again."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            while self._seen < len(self.lines):
                self._seen += 1
                if found := re.search(pattern, self.lines[self._seen - 1]):
                    return found
            assert self._read(deadline), f"no line {pattern!r}; see the node's lines below"

    def _read(self, deadline: float) -> bool:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(self.process.stdout.fileno(), 65536) if readable else b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode() for line in lines]
        return bool(data)

    def wait_ready(self) -> None:
        """Return once the node has announced itself, which may be before or after any line of its log."""
        deadline = time.monotonic() + LIMIT_S
        while (at := next((i for i, line in enumerate(self.lines) if "ringserve is ready" in line), None)) is None:
            assert self._read(deadline), "the node did not get ready; see its lines below"
        self._seen = max(self._seen, at)

    def wait_exit(self) -> int:
        """Return the exit status, after reading everything the node wrote."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def answer(self) -> Answer:
        sock, line = call_node(str(self.run_dir), Call(ask="status"), LIMIT_S)
        sock.close()
        return msgspec.json.decode(line, type=Answer)

    def status(self) -> NodeStatus:
        return self.answer().status

    def pid(self, name: str) -> int:
        return next(process.pid for process in self.status().processes if process.name == name)

    def get(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers of a page on the metrics port."""
        url = f"http://127.0.0.1:{self.status().metrics_port}{path}"
        request = urllib.request.Request(url, headers=headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
                return response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), dict(error.headers)


class Watched:
    """A process that is not our child, watched until it ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def ended_within(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._pidfd)
