"""The run directory: a node's sockets and lock. One node at a time; only its user may enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

LOCK_FILE = "node.lock"
CLIENT_MEMORY_FILE = "client_memory.json"
"""Which shared memory clients have registered: shared by the frontends of one node, forgotten with it."""
MAX_SOCKET_PATH_BYTES = 107
"""The kernel's 108 bytes for a Unix socket path, with its closing zero."""


class RunDirError(Exception):
    """The directory cannot be used; the text names it and says why."""


class RunDir:
    """A run directory that this process owns between ``open`` and ``close``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock_fd = -1

    def open(self, socket_names: tuple[str, ...]) -> None:
        """Create the directory, lock it and remove what an earlier node left.

        Args:
            socket_names: files that will be made in it; their paths must fit the kernel's limit.

        Raises:
            RunDirError: not ours, not private, too long, or another node runs there (its pid is named).
        """
        for name in socket_names:
            length = len(os.fsencode(self.socket_path(name)))
            if length > MAX_SOCKET_PATH_BYTES:
                raise RunDirError(
                    f"run_dir: the socket path {self.socket_path(name)} has {length} bytes,"
                    f" the system's limit is {MAX_SOCKET_PATH_BYTES}; choose a shorter one with --run-dir"
                )
        self._create()
        self._take_lock()
        # Nobody listens on these: whoever made them is gone, or we would not hold the lock.
        self._remove_sockets()
        Path(self.path, CLIENT_MEMORY_FILE).unlink(missing_ok=True)

    def socket_path(self, name: str) -> str:
        return os.path.join(self.path, name)

    def close(self) -> None:
        """Remove the sockets and give the lock back; the lock file stays: removing it races with a new node."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                self._remove_sockets()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove_sockets(self) -> None:
        for socket_file in Path(self.path).glob("*.sock"):
            if socket_file.is_socket():
                socket_file.unlink(missing_ok=True)

    def _create(self) -> None:
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            status = os.stat(self.path)
        except OSError as error:
            raise RunDirError(f"run_dir: cannot create {self.path}: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode):
            raise RunDirError(f"run_dir: {self.path} is not a directory")
        if status.st_uid != os.geteuid():
            raise RunDirError(f"run_dir: {self.path} belongs to user {status.st_uid}, this is user {os.geteuid()}")
        if status.st_mode & 0o022:
            raise RunDirError(f"run_dir: others may write to {self.path}; run chmod 700 {self.path}")

    def _take_lock(self) -> None:
        path = os.path.join(self.path, LOCK_FILE)
        try:
            lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RunDirError(f"run_dir: cannot open {path}: {error.strerror}") from None
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock_fd)
            raise RunDirError(
                f"run_dir: a node (pid {holder}) runs in {self.path} already; choose another with --run-dir"
            ) from None
        try:
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(lock_fd)
            raise RunDirError(f"run_dir: cannot write {path}: {error.strerror}") from None
        self._lock_fd = lock_fd
