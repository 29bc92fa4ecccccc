"""Starts one process with its settings, link, pulse and log pipe, and tells when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from frontend.node.output import Output, Prefixer
from worker.channel.pulse import create_pulse

_READ_BYTES = 65536
_STAT_BYTES = 4096
Command = Callable[[str], list[str]]


def python_command(role: str) -> list[str]:
    """Return how a role is started; ``-P`` keeps a directory of the same name in the current one out of the way."""
    return [sys.executable, "-P", "-m", "frontend.batches" if role == "batches" else role]


def child_environment() -> dict[str, str]:
    """Return the environment of children: logs unbuffered, and our packages found when they are not installed."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    root = Path(__file__).resolve().parents[2]
    if "site-packages" not in root.parts:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    return environment


def is_stopped(pid: int) -> bool:
    """Return whether a debugger or a job-control signal holds a process."""
    try:
        # Four times a second and process, for ever: a file object would be most of what an idle node does.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.read(descriptor, _STAT_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])


@dataclass(slots=True, eq=False)
class Child:
    """A running process of ours.

    Attributes:
        link: our end of its link, not started yet.
        pulse_fd: of the page it beats on, -1 for a frontend; ours to close.
        exited: its exit status once it has ended and its output has been written.
    """

    process: subprocess.Popen[bytes]
    link: socket.socket
    pulse_fd: int
    pidfd: int
    exited: asyncio.Future[int]

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal unless it has ended; by pidfd, so that it can never hit another process."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)


def start_child(
    role: str, name: str, command: list[str], settings: msgspec.Struct, output: Output, *, with_pulse: bool
) -> Child:
    """Start a process and return it; must be called on the event loop, in the main thread (see ``die_with_node``).

    Raises:
        OSError: the system could not start it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    inherited = [theirs.fileno()]
    pulse_fd = -1
    try:
        settings_fd = settings_descriptor(settings)
        inherited.append(settings_fd)
        arguments = ["--settings-fd", str(settings_fd), "--link-fd", str(theirs.fileno())]
        if with_pulse:
            pulse_fd = create_pulse()
            inherited.append(pulse_fd)
            arguments += ["--pulse-fd", str(pulse_fd)]
        process = subprocess.Popen(
            command + arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            env=child_environment(),
            # A group of its own: Ctrl-C must reach the node alone, which then drains in order.
            process_group=0,
        )
    except BaseException:
        ours.close()
        if pulse_fd >= 0:
            os.close(pulse_fd)
        raise
    finally:
        theirs.close()
        if len(inherited) > 1:
            os.close(inherited[1])
    pidfd = os.pidfd_open(process.pid)
    child = Child(process, ours, pulse_fd, pidfd, asyncio.get_running_loop().create_future())
    _watch(child, name, output)
    return child


def settings_descriptor(settings: msgspec.Struct) -> int:
    """Return a descriptor from which a process reads its settings (``read_settings``); the caller closes it."""
    descriptor = os.memfd_create("ringserve-settings", os.MFD_CLOEXEC)
    view = memoryview(msgspec.json.encode(settings))
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _watch(child: Child, name: str, output: Output) -> None:
    """Forward the child's output line by line, and complete ``exited`` when it has ended."""
    loop = asyncio.get_running_loop()
    assert child.process.stdout is not None
    pipe = child.process.stdout
    os.set_blocking(pipe.fileno(), False)
    prefixer = Prefixer(name)

    def read() -> bool:
        """Forward one piece; False at the end or when nothing is there now."""
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            loop.remove_reader(pipe.fileno())
            return False
        output.write(prefixer.feed(data))
        return True

    def ended() -> None:
        loop.remove_reader(child.pidfd)
        status = child.process.wait()
        # A grandchild may hold the pipe open; what it writes after this is nobody's log.
        for _ in range(1024):
            if not read():
                break
        loop.remove_reader(pipe.fileno())
        output.write(prefixer.finish())
        pipe.close()
        os.close(child.pidfd)
        child.exited.set_result(status)

    loop.add_reader(pipe.fileno(), read)
    loop.add_reader(child.pidfd, ended)
