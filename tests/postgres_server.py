"""A PostgreSQL server of the test session's own: a temporary directory, a free port, an unprivileged user.

Fixture ``postgres_server`` starts it once; ``postgres_url`` is a fresh empty database per test. Import both by name.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

DEBIAN_BINARIES = Path("/usr/lib/postgresql")
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "100",
    "shared_buffers": "32MB",
    # Tests restart the server, never the machine: what it wrote is in the kernel's hands.
    "fsync": "off",
    "deadlock_timeout": "100ms",
}


class PostgresServer:
    """A running server; ``stop_hard`` and ``start`` model a crash."""

    def __init__(self, binaries: Path, directory: Path, user: str | None) -> None:
        self._binaries = binaries
        self._directory = directory
        self._data = directory / "data"
        self._user = user
        self.port = free_port()

    def create(self) -> None:
        self._run(
            "initdb", "-D", str(self._data), "-U", "tester", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"
        )
        with (self._data / "postgresql.conf").open("a") as file:
            lines = SETTINGS | {"port": str(self.port), "unix_socket_directories": str(self._directory)}
            file.writelines(f"{name} = '{value}'\n" for name, value in lines.items())

    def start(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-l", str(self._directory / "log"), "-w", "-t", "60", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-m", "fast", "-w", "stop")

    def stop_hard(self) -> None:
        """Stop as a crash would: no checkpoint, clients cut off."""
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://tester@127.0.0.1:{self.port}/{database}"

    def sql(self, statement: str, database: str = "postgres") -> str:
        done = self._run(
            "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "tester", "-d", database, "-v", "ON_ERROR_STOP=1",
            "-At", "-c", statement,
        )  # fmt: skip
        return done.strip()

    def log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")

    def _run(self, program: str, *arguments: str) -> str:
        command = [str(self._binaries / program), *arguments]
        if self._user is not None:
            # Not subprocess's user=: that forks in full instead of vfork, and a process that has used gRPC crashes in
            # its library's fork handlers.
            group = pwd.getpwnam(self._user).pw_gid
            command = ["setpriv", f"--reuid={self._user}", f"--regid={group}", "--clear-groups", *command]
        done = subprocess.run(
            command,
            # The server inherits them: a pipe would stay open until it ends.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if program == "pg_ctl" else subprocess.PIPE,
            stderr=subprocess.DEVNULL if program == "pg_ctl" else subprocess.STDOUT,
            cwd=self._directory,
            timeout=120,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{program} {arguments[0]}: exit status {done.returncode}: {done.stdout or self.log()}")
        return done.stdout or ""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def find_binaries() -> Path | None:
    """Return the newest installed server's programs."""
    on_path = shutil.which("pg_ctl")
    found = sorted(DEBIAN_BINARIES.glob("*/bin/pg_ctl"), key=lambda path: int(path.parent.parent.name))
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


def install() -> None:
    """Install Debian's server without starting one of its own."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-y", "-q", "--no-install-recommends", "postgresql"],
    ):
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)


def unprivileged_user() -> str | None:
    """Return whom to run the server as; None = ourselves (initdb refuses root)."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise RuntimeError("no unprivileged user to run PostgreSQL as")


@contextlib.contextmanager
def running_server() -> Iterator[PostgresServer]:
    """Start a server, and stop and remove it at the end."""
    binaries = find_binaries()
    if binaries is None and os.geteuid() == 0 and shutil.which("apt-get"):
        install()
        binaries = find_binaries()
    if binaries is None:
        message = (
            "PostgreSQL is not installed (as root: apt-get install postgresql): its half of the store is not tested"
        )
        print(f"\n{message}", file=sys.stderr)
        pytest.skip(message)
    user = unprivileged_user()
    directory = Path(tempfile.mkdtemp(prefix="ringserve-pg-"))
    try:
        if user is not None:
            os.chown(directory, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
        server = PostgresServer(binaries, directory, user)
        server.create()
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(RuntimeError):
                server.stop_hard()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server for the whole session; restart it only through a ``running_server`` of your own."""
    with running_server() as server:
        yield server


@contextlib.contextmanager
def fresh_database(server: PostgresServer | None) -> Iterator[str]:
    """Yield the URL of a new database, empty: migrate it first. Without a server, for SQLite, it is empty."""
    if server is None:
        yield ""
        return
    name = "t" + uuid.uuid4().hex
    server.sql(f"CREATE DATABASE {name}")
    try:
        yield server.url(name)
    finally:
        server.sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A database of this test's own, empty: migrate it first."""
    with fresh_database(postgres_server) as url:
        yield url
