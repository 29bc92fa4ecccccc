"""Which endpoints and addresses are approved: batches.md items 24 and 25, acceptance test 12."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.openai.addresses import (
    NotApproved,
    is_approved_metrics_url,
    metrics_url,
    read_address,
    read_endpoint,
    refusal,
)

BASES = ("http://gpu.example:8000/v1", "https://proxy.example/vllm/v1")


@pytest.mark.parametrize("url", ["http://gpu.example:8000/metrics", "https://proxy.example/vllm/metrics"])
def test_acceptance_12_the_metrics_url_of_an_approved_endpoint(url: str) -> None:
    assert is_approved_metrics_url(url, BASES)


@pytest.mark.parametrize(
    "url",
    [
        "http://gpu.example:9000/metrics",
        "http://other.example:8000/metrics",
        "http://gpu.example:8000/v1/metrics",
        "http://gpu.example:8000/metrics?x=1",
        "http://gpu.example:8000/metrics#x",
        "http://u:p@gpu.example:8000/metrics",
        "http://gpu.example:8000/stats",
        "https://gpu.example:8000/metrics",
        "https://proxy.example/metrics",
        "http://GPU.example:8000/metrics",
        "http://gpu.example:8000/%6detrics",
        "http://gpu.example:8000/" + "m" * 2100,
    ],
)
def test_acceptance_12_other_metrics_urls_are_refused(url: str) -> None:
    assert not is_approved_metrics_url(url, BASES)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "0.0.0.0", "224.0.0.1", "fe80::1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
        "100.100.100.200", "fd00:ec2::254", "255.255.255.255", "240.0.0.1", "0.1.2.3", "::", "ff02::1",
        "::169.254.169.254", "::ffff:0.0.0.0", "::ffff:224.0.0.1", "2002:a9fe:a9fe::1", "64:ff9b:1::1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("development", [False, True])
def test_acceptance_12_addresses_that_no_upstream_may_have(address: str, development: bool) -> None:
    assert refusal(ipaddress.ip_address(address), development=development)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_acceptance_12_loopback_is_for_development_only(address: str) -> None:
    assert refusal(ipaddress.ip_address(address), development=False)
    assert not refusal(ipaddress.ip_address(address), development=True)


@pytest.mark.parametrize("address", ["10.0.0.5", "192.168.1.1", "172.16.0.1", "8.8.8.8", "fd12::1", "2606:4700::1"])
def test_item_24_ordinary_addresses_are_allowed(address: str) -> None:
    assert str(read_address(address, development=False)) == address


@pytest.mark.parametrize(
    "text", ["10.0.0.05", "10.5", "0x0a000005", "167772165", "fd12:0::1", "FD12::1", "", "h", "fe80::1%eth0"]
)
def test_item_24_odd_spellings_of_addresses_are_refused(text: str) -> None:
    with pytest.raises(NotApproved):
        read_address(text, development=True)


@pytest.mark.parametrize(
    ("url", "addresses", "port"),
    [
        ("http://gpu.example:8000/v1", ["10.0.0.5"], 8000),
        ("https://proxy.example/vllm/v1", ["93.184.215.14", "2606:4700::1"], 443),
        ("http://10.0.0.5:8000/v1", ["10.0.0.5"], 8000),
        ("http://10.0.0.5:8000/v1", [], 8000),
        ("http://[fd12::1]/v1", ["fd12::1"], 80),
        ("http://gpu/v1", ["fd12::1"], 80),
    ],
)
def test_item_24_endpoints_that_are_approved(url: str, addresses: list[str], port: int) -> None:
    endpoint = read_endpoint(url, addresses, development=False)
    assert endpoint.url == url
    assert endpoint.port == port
    assert endpoint.addresses == tuple(addresses or ["10.0.0.5"])
    assert metrics_url(url).endswith("/metrics")


@pytest.mark.parametrize(
    ("url", "addresses", "said"),
    [
        ("http://gpu.example:8000/v1", [], "addresses are missing"),
        ("http://gpu.example:8000/v1/", ["10.0.0.5"], "/v1"),
        ("http://gpu.example:8000/v2", ["10.0.0.5"], "/v1"),
        ("http://gpu.example:8000/x/../v1", ["10.0.0.5"], "dots"),
        ("http://gpu.example:8000/x//v1", ["10.0.0.5"], "empty"),
        ("http://gpu.example:8000/%76/v1", ["10.0.0.5"], "without"),
        ("http://u:p@gpu.example/v1", ["10.0.0.5"], "without"),
        ("http://gpu.example/v1?x=1", ["10.0.0.5"], "without"),
        ("http://gpu.example/v1#x", ["10.0.0.5"], "without"),
        ("http://GPU.example/v1", ["10.0.0.5"], "lower case"),
        ("ftp://gpu.example/v1", ["10.0.0.5"], "http(s)"),
        ("gpu.example/v1", ["10.0.0.5"], "http(s)"),
        ("http://gpu.example:80/v1", ["10.0.0.5"], "port"),
        ("http://gpu.example:0/v1", ["10.0.0.5"], "port"),
        ("http://gpu.example:70000/v1", ["10.0.0.5"], "port"),
        ("http://gpu.example.:8000/v1", ["10.0.0.5"], "host name"),
        ("http://-gpu:8000/v1", ["10.0.0.5"], "host name"),
        ("http://127.1:8000/v1", ["10.0.0.5"], "host name"),
        ("http://2130706433:8000/v1", ["10.0.0.5"], "host name"),
        ("http://0x7f000001:8000/v1", ["10.0.0.5"], "host name"),
        ("http://[fd12:0::1]/v1", ["fd12::1"], "IPv6"),
        ("http://[fe80::1%25eth0]/v1", [], "without"),
        ("http://10.0.0.5:8000/v1", ["10.0.0.6"], "exactly"),
        ("http://gpu.example/v1", ["8.8.8.8"], "plain http"),
        ("http://gpu.example/v1", ["10.0.0.5", "10.0.0.5"], "twice"),
        ("http://gpu.example/v1", [f"10.0.0.{i}" for i in range(17)], "at most 16"),
        ("http://gpu.example/v1", ["gpu.example"], "IP address"),
        ("http://169.254.169.254/v1", [], "link-local"),
        ("http://" + "a" * 2050 + "/v1", ["10.0.0.5"], "2048"),
    ],
)
def test_item_24_endpoints_that_are_refused(url: str, addresses: list[str], said: str) -> None:
    with pytest.raises(NotApproved, match=said.replace("(", r"\(").replace(")", r"\)")):
        read_endpoint(url, addresses, development=False)


def test_a_public_https_name_needs_no_addresses_where_that_is_allowed() -> None:
    assert read_endpoint("https://api.example/v1", [], development=False, public_name=True).addresses == ()
    with pytest.raises(NotApproved, match="missing"):
        read_endpoint("http://api.example/v1", [], development=False, public_name=True)


@given(st.ip_addresses(v=4))
def test_item_24_a_mapped_address_is_judged_as_what_it_stands_for(inner: ipaddress.IPv4Address) -> None:
    mapped = ipaddress.ip_address(f"::ffff:{inner}")
    assert bool(refusal(mapped, development=False)) == bool(refusal(inner, development=False))


@given(st.text(max_size=60))
def test_no_text_makes_the_reader_fail_otherwise(text: str) -> None:
    try:
        endpoint = read_endpoint("http://" + text + "/v1", ["10.0.0.5"], development=False)
    except NotApproved:
        return
    assert endpoint.host == endpoint.host.lower()
    assert 1 <= endpoint.port <= 65535
