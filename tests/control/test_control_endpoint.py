"""Where the control service may listen, and what is said of anything else."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.control.endpoint import BadEndpoint, TcpEndpoint, UnixEndpoint, parse_endpoint


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("none", None),
        ("unix:control.sock", UnixEndpoint("control.sock")),
        ("unix:a-B_9.sock", UnixEndpoint("a-B_9.sock")),
        ("127.0.0.1:8003", TcpEndpoint("127.0.0.1", 8003)),
        ("127.8.9.1:0", TcpEndpoint("127.8.9.1", 0)),
        ("localhost:65535", TcpEndpoint("127.0.0.1", 65535)),
        ("[::1]:8003", TcpEndpoint("::1", 8003)),
    ],
)
def test_what_only_this_machine_reaches_is_taken(text: str, endpoint: object) -> None:
    assert parse_endpoint(text, allow_remote=False, workers=("worker0",)) == endpoint


@pytest.mark.parametrize(
    "text", ["0.0.0.0:8003", "[::]:8003", "10.0.0.7:8003", "control.example:8003", "[2001:db8::1]:1"]
)
def test_what_others_reach_needs_to_be_asked_for_twice(text: str) -> None:
    with pytest.raises(BadEndpoint, match=r"other machines.*global\.control\.allow_remote"):
        parse_endpoint(text, allow_remote=False, workers=())
    host, _, port = text.rpartition(":")
    assert parse_endpoint(text, allow_remote=True, workers=()) == TcpEndpoint(host.strip("[]"), int(port))


@pytest.mark.parametrize(
    "text",
    ["", "unix:", "unix:/tmp/x.sock", "unix:../x.sock", "unix:a/b.sock", "unix:x", "unix:x.sock\n", "8003", ":8003",
     "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:+1", "127.0.0.1:1_0", "127.0.0.1:٣",
     "::1:8003", "http://127.0.0.1:8003", "NONE", "off"],
)  # fmt: skip
def test_anything_else_is_told_what_was_expected(text: str) -> None:
    with pytest.raises(BadEndpoint, match=r"expected unix:NAME\.sock"):
        parse_endpoint(text, allow_remote=True, workers=())


@pytest.mark.parametrize("name", ["node.sock", "rpc.sock", "worker0.sock", "gpu1.sock"])
def test_the_nodes_own_sockets_are_not_given_away(name: str) -> None:
    with pytest.raises(BadEndpoint, match="the node itself makes"):
        parse_endpoint(f"unix:{name}", allow_remote=False, workers=("worker0", "gpu1"))


@given(st.text(max_size=40))
def test_no_text_opens_a_port_to_others_by_accident(text: str) -> None:
    try:
        endpoint = parse_endpoint(text, allow_remote=False, workers=())
    except BadEndpoint:
        return
    if isinstance(endpoint, TcpEndpoint):
        assert ipaddress.ip_address(endpoint.host).is_loopback
    elif isinstance(endpoint, UnixEndpoint):
        assert "/" not in endpoint.name
