"""Ports of a node: found to be free, then kept, so that frontends may come and go on them.

The node binds each port with SO_REUSEPORT and never listens: the kernel gives such a socket no connections, but no
other user and no ordinary server can take the port while all frontends are away.
"""

from __future__ import annotations

import errno
import socket

from frontend.options import BY_PATH


class PortError(Exception):
    """A port cannot be had; the text names the port, the setting and what to do."""


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise PortError(f"global.endpoints.host: {host!r} is no address of this machine ({error.strerror})") from None
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def _bound(host: str, port: int, setting: str, *, share: bool) -> socket.socket:
    path = f"global.endpoints.{setting}"
    family, address = _address(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if share else socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            flag = "--" + setting.replace("_", "-")
            raise PortError(
                f"{path}: {host}:{port} is already in use; choose another with {flag} or {BY_PATH[path].environment},"
                " 0 picks a free one"
            ) from None
        raise PortError(f"{path}: cannot bind {host}:{port}: {error.strerror}") from None
    return sock


def reserve(host: str, port: int, setting: str) -> socket.socket:
    """Return a bound socket that keeps ``port`` for this node's processes; port 0 takes a free one.

    Raises:
        PortError: someone else, also another node of the same user, has it.
    """
    if port:
        # SO_REUSEPORT alone would let two nodes of one user share a port, each getting half of the other's requests.
        _bound(host, port, setting, share=False).close()
    return _bound(host, port, setting, share=True)


def shared(host: str, port: int, setting: str) -> socket.socket:
    """Return another bound socket of a reserved port, to listen on.

    Raises:
        PortError: someone who does not share it has it.
    """
    return _bound(host, port, setting, share=True)
