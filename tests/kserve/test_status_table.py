"""One table for both protocols: complete, consistent, and with texts that clients can carry."""

from __future__ import annotations

import json
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import Kind, ServingError, error_of
from frontend.kserve.status import MAX_ERROR_BYTES, STATUS, error_body, error_text, status_of

GROUPS = {
    400: {"INVALID_ARGUMENT", "ALREADY_EXISTS"},
    404: {"NOT_FOUND"},
    413: {"RESOURCE_EXHAUSTED"},
    429: {"RESOURCE_EXHAUSTED"},
    499: {"CANCELLED"},
    500: {"INTERNAL"},
    501: {"UNIMPLEMENTED"},
    503: {"UNAVAILABLE"},
    504: {"DEADLINE_EXCEEDED"},
}


def test_no_kind_is_missing() -> None:
    assert set(STATUS) == set(Kind)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.OK])
def test_both_protocols_agree(kind: Kind) -> None:
    status = STATUS[kind]
    assert status.grpc_name in GROUPS[status.http]
    code = next(code for code in grpc.StatusCode if code.value[0] == status.grpc)
    assert code.name == status.grpc_name
    assert status_of(error_of(kind, "x")) is status


def test_only_refusals_for_room_advise_when_to_retry() -> None:
    assert {kind for kind, status in STATUS.items() if status.retry_after_s} == {Kind.QUEUE_FULL, Kind.ARENA_FULL}


def test_ok_is_ok() -> None:
    assert (STATUS[Kind.OK].http, STATUS[Kind.OK].grpc) == (200, 0)


@given(st.text())
def test_error_texts_are_strings_that_every_client_can_carry(text: str) -> None:
    told = error_text(text)
    assert told
    assert len(told.encode()) <= MAX_ERROR_BYTES
    assert len(quote(told)) < 8192
    assert json.loads(error_body(text)) == {"error": told}


def test_a_long_text_is_cut_and_an_empty_one_is_named() -> None:
    assert error_text("ü" * 5000).endswith("...")
    assert error_text(ServingError("")) == "ServingError"
    assert error_text("a lone surrogate \ud800") == "a lone surrogate ?"
