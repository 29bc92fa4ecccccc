"""The error table, and readings of upstreams' errors that need no upstream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import Kind, error_of
from frontend.openai import bodies, upstream_errors
from frontend.openai.auth import Forbidden, Unauthorized
from frontend.openai.errors import MAX_MESSAGE_BYTES, STATUS, ApiError, error_body, render

SDK_RETRIES = {408, 409, 429}


def test_no_kind_is_missing_from_the_table() -> None:
    assert set(STATUS) == set(Kind)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.OK])
def test_every_failure_has_all_four_keys_and_honest_retry_advice(kind: Kind) -> None:
    told = render(error_of(kind, "what happened"))
    error = json.loads(told.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == "what happened"
    headers = dict(told.headers)
    if kind in (Kind.UNSUPPORTED, Kind.ALREADY_EXISTS):
        assert told.status in SDK_RETRIES or told.status >= 500
        assert headers["x-should-retry"] == "false"
    if kind in (Kind.QUEUE_FULL, Kind.ARENA_FULL, Kind.NOT_READY, Kind.UNAVAILABLE):
        assert headers["Retry-After"] == "1"


def test_refusals_of_callers() -> None:
    assert render(Unauthorized("x")).status == 401
    assert render(Forbidden("x")).status == 403
    assert render(ApiError(409, "x")).headers == (("x-should-retry", "false"),)
    assert render(ApiError(409, "x", headers=(("X-Should-Retry", "true"),))).headers == (("X-Should-Retry", "true"),)


@given(st.text())
def test_messages_are_cut_to_their_limit_and_stay_json(message: str) -> None:
    text = json.loads(error_body(message, "t", None, None))["error"]["message"]
    assert len(text.encode()) <= MAX_MESSAGE_BYTES
    assert text


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "-4"}, 0.0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Thu, 01 Jan 1970 00:02:00 GMT"}, 20.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:00 GMT"}, 0.0),
        ({"retry-after": "999999999"}, 86400.0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "x", "retry-after": "9"}, 9.0),
    ],
)
def test_retry_after_in_every_form(headers: dict[str, str], expected: float | None) -> None:
    assert upstream_errors.retry_after_s(headers, now_s=100.0) == expected


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["error", "detail", "message", "type", "param", "code", "msg", "loc"]), inner, max_size=4
    ),
    max_leaves=12,
)  # fmt: skip


@given(
    st.integers(300, 599),
    JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60),
    st.text(max_size=9),
)
def test_no_error_of_an_upstream_breaks_the_shape(status: int, body: bytes, content_type: str) -> None:
    told = upstream_errors.normalise(
        status, content_type, body, model="m", upstream_model="inner", endpoint="/v1/embeddings"
    )
    error = json.loads(told.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert 400 <= told.status <= 599


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (b"null", None),
        (b"5", None),
        (b"{}", (0, 0, 0, 0)),
        (b'{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}', (3, 4, 2, 0)),
        (b'{"input_tokens":3,"output_tokens":4,"output_tokens_details":{"reasoning_tokens":1}}', (3, 4, 0, 1)),
        (b'{"prompt_tokens":3,"total_tokens":3,"new":{"x":1}}', (3, 0, 0, 0)),
    ],
)
def test_usage_in_every_naming(usage: bytes, expected: tuple[int, ...] | None) -> None:
    fields = bodies.answer_fields(b'{"usage":' + usage + b"}")
    assert fields is not None
    found = bodies.usage_of(fields)
    told = found and (found.input_tokens, found.output_tokens, found.cached_tokens, found.reasoning_tokens)
    assert told == expected


@given(st.lists(st.binary(max_size=40)))
def test_a_stream_without_renaming_is_untouched(pieces: list[bytes]) -> None:
    rename = bodies.event_renamer("m", "m")
    assert [rename(piece) for piece in pieces] == pieces


@given(st.lists(st.binary(max_size=40) | st.just(b'data: {"model":"up"}\n')))
def test_renaming_depends_on_bytes_and_not_on_pieces(pieces: list[bytes]) -> None:
    rename, whole = bodies.event_renamer("m", "up"), bodies.event_renamer("m", "up")
    joined = b"".join(pieces)
    found = b"".join(rename(piece) for piece in pieces if piece) + rename(b"")
    assert found == (whole(joined) if joined else b"") + whole(b"")
