"""Header blocks: the memo never knows better than hpack, and what we send leaves no trace in the peer's table."""

from __future__ import annotations

import pytest
from h2_wire import limits
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from frontend.http2.fields import HARD_FACTOR, Head, HeadDecoder, encode_fields, head_of
from frontend.http2.frames import Code, ConnectionFault

BASE = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), (b"te", b"trailers")]

field_names = st.sampled_from([b"grpc-timeout", b"x-a", b"x-b", b"user-agent"])
extra = st.lists(st.tuples(field_names, st.binary(max_size=6).map(lambda value: value.hex().encode())), max_size=3)
table_sizes = st.sampled_from([None, None, None, 0, 64, 200, 4096])
step = st.tuples(extra, st.booleans(), table_sizes, st.sampled_from(["head", "trailers"]))
steps = st.lists(step, min_size=1, max_size=25)


def decoder_of(interpreted: list[Head] | None = None) -> HeadDecoder:
    def interpret(head: Head) -> int:
        if interpreted is not None:
            interpreted.append(head)
        return 7

    return HeadDecoder(limits(), interpret)


@given(steps)
def test_a_remembered_block_is_what_decoding_would_give(
    sequence: list[tuple[list[tuple[bytes, bytes]], bool, int | None, str]],
) -> None:
    """Whatever a client's encoder does to the dynamic table, also by resizing it."""
    encoder, reference, decoder = Encoder(), Decoder(), decoder_of()
    for fields, huffman, table_size, kind in sequence:
        if table_size is not None:
            encoder.header_table_size = table_size
        sent = [*(BASE if kind == "head" else ()), *fields]
        block = bytes(encoder.encode(sent, huffman=huffman))
        expected = head_of(list(reference.decode(block, raw=True)))
        if kind == "trailers":
            assert decoder.trailers(block) == ""
            continue
        head = decoder.head(block)
        assert (head.method, head.path, head.fields) == (expected.method, expected.path, expected.fields)
        assert head.value == 7
        # The next one may come from the memo.
        again = bytes(Encoder().encode(BASE, huffman=huffman)) if not fields else block
        if again in decoder.memo:
            assert decoder.head(again) is decoder.memo[again]


def test_the_block_of_a_grpc_client_is_decoded_once() -> None:
    interpreted: list[Head] = []
    decoder, encoder = decoder_of(interpreted), Encoder()
    blocks = [bytes(encoder.encode(BASE)) for _ in range(5)]
    heads = [decoder.head(block) for block in blocks]
    assert len(set(blocks[1:])) == 1
    # Once when it fills the table, once when it is fully indexed.
    assert len(interpreted) == 2
    assert heads[1] is heads[4]


def test_the_memo_is_bounded() -> None:
    decoder = HeadDecoder(limits(max_memo=4), lambda head: None)
    for number in range(50):
        block = encode_fields([*((n.decode(), v.decode()) for n, v in BASE), ("x-n", str(number))])
        assert decoder.head(block).fields[b"x-n"] == str(number).encode()
        assert len(decoder.memo) <= 4
    decoder.head(encode_fields([*((n.decode(), v.decode()) for n, v in BASE), ("x-n", "v" * 2000)]))
    assert all(len(block) <= 1024 for block in decoder.memo)


names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=200)
values = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=400)


@given(st.lists(st.tuples(names, values), max_size=5), st.sampled_from(["200", "415", "503"]))
def test_what_is_sent_decodes_to_itself_and_leaves_the_table_alone(fields: list[tuple[str, str]], status: str) -> None:
    sent = [(":status", status), ("content-type", "application/grpc"), *fields]
    decoder = Decoder()
    assert [tuple(field) for field in decoder.decode(encode_fields(sent))] == sent
    assert not decoder.header_table.dynamic_entries


def test_repeated_fields_are_joined() -> None:
    head = head_of([*BASE, (b"x", b"1"), (b"x", b"2"), (b"content-length", b"5"), (b"content-length", b"5")])
    assert (head.fields[b"x"], head.content_length, head.malformed) == (b"1,2", 5, "")
    assert head_of([*BASE, (b"content-length", b"5"), (b"content-length", b"6")]).malformed


def test_fields_are_counted_as_http2_counts_them() -> None:
    assert head_of(BASE).size_bytes == sum(len(name) + len(value) + 32 for name, value in BASE)


def test_a_block_beyond_the_hard_limit_is_not_decoded_to_its_end() -> None:
    limit = limits(max_header_bytes=1024)
    decoder = HeadDecoder(limit, lambda head: None)
    assert decoder.head(bytes(Encoder().encode([*BASE, (b"x", b"v" * 2000)]))).size_bytes > 1024
    with pytest.raises(ConnectionFault) as caught:
        decoder.head(bytes(Encoder().encode([*BASE, (b"x", b"v" * 1024 * HARD_FACTOR)])))
    assert caught.value.code is Code.ENHANCE_YOUR_CALM


@given(st.binary(max_size=200))
def test_arbitrary_blocks_are_decoded_or_refused(block: bytes) -> None:
    decoder = decoder_of()
    for decode in (decoder.head, decoder.trailers):
        try:
            decode(block)
        except ConnectionFault as fault:
            code = fault.code
        else:
            continue
        assert code in (Code.COMPRESSION_ERROR, Code.ENHANCE_YOUR_CALM)
        return
