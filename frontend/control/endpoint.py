"""Where the control service listens: a socket in the run directory, a loopback port, or (asked for twice) elsewhere."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

OFF: Final = "none"
INNER_SOCKET: Final = "rpc.sock"
"""Where the gRPC library listens, behind the endpoint."""
_NODE_SOCKETS: Final = ("node.sock", INNER_SOCKET)
_SOCKET_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}\.sock")
_FORMS: Final = "unix:NAME.sock (in the run directory), HOST:PORT or none"


class BadEndpoint(ValueError):
    """The text says what was expected and what came."""


@dataclass(frozen=True, slots=True)
class UnixEndpoint:
    """A socket file in the run directory; only the node's user may connect."""

    name: str


@dataclass(frozen=True, slots=True)
class TcpEndpoint:
    """An address; port 0 lets the system choose one."""

    host: str
    port: int


Endpoint = UnixEndpoint | TcpEndpoint


def parse_endpoint(text: str, *, allow_remote: bool, workers: Sequence[str]) -> Endpoint | None:
    """Return where to listen, None for ``none``.

    Args:
        workers: names of the node's workers, whose sockets are in the run directory too.

    Raises:
        BadEndpoint: it is none of the forms, or other machines could reach it and ``allow_remote`` is false.
    """
    if text == OFF:
        return None
    scheme, colon, name = text.partition(":")
    if colon and scheme == "unix":
        if not _SOCKET_NAME.fullmatch(name):
            raise BadEndpoint(f"expected {_FORMS}, got {text[:200]!r}: no directories, and a name that ends in .sock")
        if name in (*_NODE_SOCKETS, *(f"{worker}.sock" for worker in workers)):
            raise BadEndpoint(f"{name} is a socket that the node itself makes; choose another name")
        return UnixEndpoint(name)
    host, colon, port_text = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise BadEndpoint(f"expected {_FORMS}, got {text[:200]!r}: an IPv6 address stands in brackets")
    # Digits as ASCII: int() would also take other scripts' digits, signs and underscores.
    if not host or not re.fullmatch(r"[0-9]{1,5}", port_text) or int(port_text) > 65535:
        raise BadEndpoint(f"expected {_FORMS}, got {text[:200]!r}")
    if host == "localhost":
        # One address, and never one that a hosts file chose.
        host = "127.0.0.1"
    if not allow_remote and not _is_loopback(host):
        raise BadEndpoint(
            f"{text[:200]!r} may be reached from other machines, and whoever reaches it can change this node; "
            "use unix: or a loopback address, or set global.control.allow_remote"
        )
    return TcpEndpoint(host, int(port_text))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
