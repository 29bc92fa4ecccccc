"""Forms arrive in any segmentation and mean the same; hostile ones end in a refusal, never in anything else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.multipart import (
    MAX_FIELD_BYTES,
    MAX_PART_HEADER_BYTES,
    MAX_PART_HEADERS,
    MAX_PARTS,
    Event,
    Field,
    FileEnd,
    FileStart,
    FormReader,
)
from frontend.openai.errors import ApiError

BOUNDARY = b"--d74496d66958873e"
CONTENT_TYPE = "multipart/form-data; boundary=" + BOUNDARY.decode()
TRICKY = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b"--", b"\r\n--" + BOUNDARY[:7], BOUNDARY, b"\r\n--" + BOUNDARY[:-1] + b"x"]
)
CONTENT = st.lists(TRICKY | st.binary(max_size=12), max_size=12).map(b"".join).filter(
    lambda data: b"\r\n--" + BOUNDARY not in b"\r\n" + data
)  # fmt: skip


def part(name: str, data: bytes, filename: str | None = None, headers: bytes = b"") -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'Content-Disposition: form-data; name="{name}"{named}\r\n'.encode()
    return b"--" + BOUNDARY + b"\r\n" + head + headers + b"\r\n" + data + b"\r\n"


END = b"--" + BOUNDARY + b"--\r\n"


def read(body: bytes, sizes: list[int]) -> list[Any]:
    reader = FormReader(CONTENT_TYPE)
    events: list[Event] = []
    position = 0
    for size in [*sizes, len(body)]:
        events += reader.feed(body[position : position + size])
        position += size
    reader.finish()
    joined: list[Any] = []
    for event in events:
        if isinstance(event, bytes) and joined and isinstance(joined[-1], bytes):
            joined[-1] += event
        else:
            joined.append(event)
    return joined


@settings(deadline=None, max_examples=400)
@given(
    content=CONTENT,
    sizes=st.lists(st.integers(1, 60), max_size=40),
    file_first=st.booleans(),
    name=st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\'), max_size=10),
)
def test_segmentation_changes_nothing(content: bytes, sizes: list[int], file_first: bool, name: str) -> None:
    file = part("file", content, name, b"Content-Type: application/octet-stream\r\n")
    field = part("purpose", b"batch")
    body = (file + field if file_first else field + file) + END
    expected: list[Any] = [FileStart(name), *([content] if content else []), FileEnd()]
    purpose = [Field("purpose", "batch")]
    assert read(body, sizes) == (expected + purpose if file_first else purpose + expected)


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(
        TRICKY
        | st.binary(max_size=20)
        | st.sampled_from([part("file", b"x", "n"), part("purpose", b"batch"), END, b"Content-Disposition: form-data"]),
        max_size=10,
    ),
    sizes=st.lists(st.integers(1, 30), max_size=20),
)
def test_junk_is_read_or_refused(pieces: list[bytes], sizes: list[int]) -> None:
    body = b"".join(pieces)

    def outcome(cuts: list[int]) -> Any:
        try:
            return read(body, cuts)
        except ApiError as error:
            return 400 <= error.status < 500

    whole = outcome([])
    assert whole is not False
    assert outcome(sizes) == whole


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\r",
        b"\r\n-",
        b"--" + BOUNDARY,
        b"preamble\r\n" + part("purpose", b"batch") + END,
        b"\r\n\r\n" + part("purpose", b"batch") + END,
        part("file", b"x", "n"),
        part("file", b"x", "n") + END[:-4],
        part("file", b"x", "n") + part("file", b"y", "n") + END,
        b"".join(part(f"p{number}", b"") for number in range(MAX_PARTS + 1)) + END,
        part("file", b"x", "n", b"X: y\r\n" * MAX_PART_HEADERS) + END,
        part("file", b"x", "n", b"X: " + b"y" * MAX_PART_HEADER_BYTES + b"\r\n") + END,
        part("purpose", b"x" * (MAX_FIELD_BYTES + 1)) + END,
        part("purpose", b"\xff") + END,
        part("file", b"x", "n", b'Content-Disposition: form-data; name="file"; filename="other"\r\n') + END,
        part("file", b"eA==", "n", b"Content-Transfer-Encoding: base64\r\n") + END,
        b"--" + BOUNDARY + b"\r\n\r\nx\r\n" + END,
        b"--" + BOUNDARY + b'\r\nContent-Disposition: attachment; name="file"; filename="n"\r\n\r\nx\r\n' + END,
        b"--" + BOUNDARY + b'\r\nContent-Disposition: form-data; name="fi\xffle"\r\n\r\nx\r\n' + END,
    ],
)
def test_forms_that_are_refused(body: bytes) -> None:
    for sizes in ([], [1] * len(body)):
        with pytest.raises(ApiError) as caught:
            read(body, sizes)
        assert caught.value.status == 400


@pytest.mark.parametrize("cut", range(8))
def test_one_line_break_may_come_first(cut: int) -> None:
    assert read(b"\r\n" + part("purpose", b"batch") + END, [cut]) == [Field("purpose", "batch")]


def test_what_follows_the_form_is_ignored() -> None:
    assert read(part("purpose", b"batch") + END + b"epilogue", []) == [Field("purpose", "batch")]
