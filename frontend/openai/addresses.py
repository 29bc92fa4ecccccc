"""Which endpoints and addresses an upstream may have. Pure; decides on text alone, a name is never resolved here.

An operator writes an endpoint and the addresses it may be reached at; connections go there and nowhere else. That takes
away what makes a gateway a tool against its own network: names that change their meaning after they were checked, links
to the cloud's metadata service, and spellings of an address that a check does not recognise.

Source: batches.md 1.6, items 24 and 25.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

Address = IPv4Address | IPv6Address

MAX_URL_CHARS: Final = 2048
MAX_ADDRESSES: Final = 16
_URL: Final = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(?::([0-9]{1,5}))?(/[A-Za-z0-9._~/-]*)")
_LABEL: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_PRIVATE: Final = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")))
_NEVER: Final = tuple(
    (ipaddress.ip_network(network), why)
    for network, why in (
        ("0.0.0.0/8", "this network"),
        ("169.254.0.0/16", "link-local, where clouds keep their metadata"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved or broadcast"),
        ("100.64.0.0/10", "shared by carriers"),
        ("::/128", "unspecified"),
        ("fe80::/10", "link-local"),
        ("ff00::/8", "multicast"),
        ("64:ff9b::/96", "a translation to IPv4"),
        ("64:ff9b:1::/48", "a translation to IPv4"),
        ("2002::/16", "a tunnel to IPv4"),
        ("2001::/32", "a tunnel to IPv4"),
        ("fd00:ec2::254/128", "a cloud's metadata service"),
    )
)


class NotApproved(ValueError):
    """The text says what was expected and what came."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL in its only accepted spelling, and where it leads.

    Attributes:
        host: as in URLs, without brackets.
        port: explicit or the scheme's.
        addresses: where connections may go; empty means: wherever the name leads, if that is a public address.
    """

    url: str
    scheme: str
    host: str
    port: int
    addresses: tuple[str, ...]


def read_address(text: str, *, development: bool) -> Address:
    """Return the address in ``text``.

    Raises:
        NotApproved: it is none, is not in its short form, or no upstream may have it.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise NotApproved(f"expected an IP address, got {text[:80]!r}") from None
    if str(address) != text:
        raise NotApproved(f"expected {str(address)!r}, got {text!r}: addresses are written in their short form")
    why = refusal(address, development=development)
    if why:
        raise NotApproved(f"{text} is not allowed: {why}")
    return address


def refusal(address: Address, *, development: bool) -> str:
    """Return why no upstream may have this address; empty if it may."""
    inner = unwrapped(address)
    for network, why in _NEVER:
        if any(one.version == network.version and one in network for one in (address, inner)):
            return why
    if inner.is_loopback or address == IPv6Address("::1"):
        return "" if development else "loopback is for development mode"
    return ""


def unwrapped(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 one stands for (mapped ``::ffff:a.b.c.d``, compatible ``::a.b.c.d``)."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        number = int(address)
        if 1 < number < 1 << 32:
            return IPv4Address(number)
    return address


def is_private(address: Address) -> bool:
    """Return whether plain HTTP may go there: a private IPv4 range, a unique local IPv6 address, or this machine."""
    inner = unwrapped(address)
    return inner.is_loopback or any(inner.version == net.version and inner in net for net in _PRIVATE)


def read_endpoint(url: str, addresses: Sequence[str], *, development: bool, public_name: bool = False) -> Endpoint:
    """Return an approved endpoint; a host that is an address needs none besides.

    Args:
        public_name: addresses may be left out for an https name.

    Raises:
        NotApproved: says which rule is broken.
    """
    scheme, host, port = _read_url(url)
    literal = _literal(host)
    if literal is not None and not addresses:
        addresses = (host,)
    if not addresses and not (public_name and scheme == "https"):
        raise NotApproved("addresses are missing: list the IP addresses that the host may be reached at")
    if len(addresses) > MAX_ADDRESSES:
        raise NotApproved(f"expected at most {MAX_ADDRESSES} addresses, got {len(addresses)}")
    if len(set(addresses)) != len(addresses):
        raise NotApproved("an address is given twice")
    found = [read_address(text, development=development) for text in addresses]
    if literal is not None and found != [literal]:
        raise NotApproved(f"the host is the address {host}, so addresses must be exactly that one")
    if scheme == "http":
        for address in found:
            if not is_private(address):
                raise NotApproved(f"plain http may go to private addresses only, and {address} is none; use https")
    return Endpoint(url, scheme, host, port, tuple(addresses))


def metrics_url(endpoint: str) -> str:
    """Return the only URL where the metrics of an approved endpoint may be read."""
    return endpoint.removesuffix("/v1") + "/metrics"


def is_approved_metrics_url(url: str, endpoints: Iterable[str]) -> bool:
    """Return whether ``url`` is exactly the metrics URL of one of these approved endpoints."""
    return len(url) <= MAX_URL_CHARS and url in {metrics_url(endpoint) for endpoint in endpoints}


def _read_url(url: str) -> tuple[str, str, int]:
    if len(url) > MAX_URL_CHARS:
        raise NotApproved(f"expected a URL of at most {MAX_URL_CHARS} characters, got {len(url)}")
    match = _URL.fullmatch(url)
    if match is None:
        raise NotApproved(
            f"expected http(s)://host[:port]/.../v1 in lower case without user, query, fragment or %, got {url[:120]!r}"
        )
    scheme, host, port_text, path = match[1], match[2], match[3], match[4]
    if not path.endswith("/v1") or any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise NotApproved(f"expected a path that ends in /v1, without empty parts and dots, got {path!r}")
    if host.startswith("["):
        host = host[1:-1]
        if _literal(host) is None:
            raise NotApproved(f"expected an IPv6 address in its short form between brackets, got {host!r}")
    elif _literal(host) is None and not _is_name(host):
        raise NotApproved(f"expected a host name or an IPv4 address, got {host!r}")
    port = int(port_text) if port_text else _DEFAULT_PORTS[scheme]
    if port_text and (port_text.startswith("0") or not 1 <= port <= 65535 or port == _DEFAULT_PORTS[scheme]):
        raise NotApproved(f"expected a port from 1 to 65535, left out when it is the scheme's own, got {port_text}")
    return scheme, host, port


def _literal(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return address if str(address) == host else None


def _is_name(host: str) -> bool:
    labels = host.split(".")
    # A last label of digits only, or 0x..., would be read as an address by some resolvers: 127.1, 0x7f000001.
    last = labels[-1]
    return len(host) <= 253 and all(map(_LABEL.fullmatch, labels)) and not last.isdigit() and last[:2] != "0x"
