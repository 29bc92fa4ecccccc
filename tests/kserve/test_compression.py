"""Compressed bodies: round trips, the cap on what they inflate to, and the choice of an encoding."""

from __future__ import annotations

import gzip
import zlib
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import InvalidInput, ServingError, TooLarge, Unsupported
from frontend.kserve.compression import MIN_COMPRESSED_BYTES, compress, decompress, read_accepted

LIMIT = 1 << 16


@given(st.lists(st.binary(max_size=300), max_size=4), st.sampled_from(["gzip", "deflate", "identity"]))
def test_what_is_compressed_comes_back(parts: list[bytes], encoding: Literal["gzip", "deflate", "identity"]) -> None:
    packed = b"".join(compress(parts, encoding))
    assert bytes(decompress(memoryview(packed), encoding, LIMIT)) == b"".join(parts)


@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate", "x-gzip", "GZIP", "br", ""]))
def test_arbitrary_bytes_raise_nothing_unforeseen(body: bytes, encoding: str) -> None:
    try:
        decompress(body, encoding, LIMIT)
    except ServingError:
        return


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_a_bomb_is_too_large_and_the_limit_itself_fits(pack: object, request: pytest.FixtureRequest) -> None:
    encoding = request.node.callspec.id
    assert callable(pack)
    assert len(decompress(pack(bytes(LIMIT)), encoding, LIMIT)) == LIMIT
    for size in (LIMIT + 1, 64 << 20):
        with pytest.raises(TooLarge, match="max_request_bytes is 65536"):
            decompress(pack(bytes(size)), encoding, LIMIT)


def test_members_of_a_gzip_body_add_up_under_one_limit() -> None:
    half = gzip.compress(bytes(LIMIT // 2))
    assert len(decompress(half * 2, "gzip", LIMIT)) == LIMIT
    with pytest.raises(TooLarge):
        decompress(half * 2 + gzip.compress(b"x"), "gzip", LIMIT)
    with pytest.raises(InvalidInput, match="more than 16 members"):
        decompress(gzip.compress(b"") * 1000, "gzip", LIMIT)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (zlib.compress(b"abc")[:-2], "ends too early"),
        (zlib.compress(b"abc") + b"rest", "4 bytes follow its end"),
        (b"plain", "failed to decompress"),
        (b"", "ends too early"),
    ],
)
def test_damaged_bodies_say_what_is_wrong(body: bytes, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        decompress(body, "deflate", LIMIT)


def test_an_unknown_encoding_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="Unsupported compression type 'br'"):
        decompress(b"", "br", LIMIT)


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        ("", "identity"),
        ("gzip, deflate, br", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.2, deflate;q=0.8", "deflate"),
        ("identity, gzip", "identity"),
        ("br, *", "identity"),
        ("gzip;q=0", "identity"),
        ("gzip;q=two", "identity"),
        ("GZIP ; Q=1.0", "gzip"),
        ("gzip;q=0.5, identity;q=0.9", "identity"),
    ],
)
def test_the_encoding_liked_best_is_chosen(header: str, chosen: str) -> None:
    assert read_accepted(header.encode()).for_size(MIN_COMPRESSED_BYTES) == chosen


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        (None, "identity"),
        (b"gzip", "identity"),
        (b"gzip, *;q=0.1", "identity"),
        (b"gzip, identity;q=0.1, *;q=0", "identity"),
        (b"gzip, identity;q=0", "gzip"),
        (b"deflate, IDENTITY ; Q=0.000", "deflate"),
        (b"gzip, *;q=0", "gzip"),
        (b"identity;q=0", "identity"),
        (b"\xff\xfe, gzip, identity;q=0", "gzip"),
    ],
)
def test_short_answers_go_as_they_are_unless_that_is_refused(header: bytes | None, chosen: str) -> None:
    accepted = read_accepted(header)
    assert accepted.for_size(MIN_COMPRESSED_BYTES - 1) == accepted.for_size(0) == chosen


@given(st.binary(max_size=60), st.integers(0, 1 << 40))
def test_any_header_is_read(header: bytes, size: int) -> None:
    assert read_accepted(header).for_size(size) in ("identity", "gzip", "deflate")
