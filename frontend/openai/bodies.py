"""JSON of calls and answers, changed as little as possible.

Top-level fields are taken apart, their values stay the bytes they were: unknown fields, number formats and key order
pass, and a large body is not built into objects. A body in which nothing must change is sent as it came.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Raw

from frontend.openai.calls import Usage
from frontend.openai.errors import ApiError

Fields = dict[str, Raw]

STREAM_FIELDS: Final = ("stream", "stream_options")
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""Longest line of an event stream that is held back in order to be rewritten."""
_fields: Final = msgspec.json.Decoder(Fields)
_NAMED: Final = re.compile(rb'("model"\s*:\s*)"(?:[^"\\]|\\.)*"')
_NULL: Final = b"null"


def read_fields(body: bytes) -> Fields:
    """Return the top-level fields of a request body.

    Raises:
        ApiError: it is no JSON object; says where.
    """
    try:
        if not _is_utf8(body):
            raise _invalid("the text is not UTF-8")
        return _fields.decode(body)
    except RecursionError:
        raise _invalid("it is nested too deeply") from None
    except msgspec.ValidationError:
        raise _invalid("expected an object") from None
    except msgspec.DecodeError as error:
        raise _invalid(str(error)) from None


def read_text(fields: Fields, name: str) -> str:
    """Return a field that must hold text.

    Raises:
        ApiError: it is missing or holds something else.
    """
    raw = fields.get(name)
    if raw is None or bytes(raw) == _NULL:
        raise ApiError(400, f"you must provide a {name} parameter", code="missing_required_parameter", param=name)
    try:
        text = msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeError):
        raise ApiError(400, f"expected {name} to be text", code="invalid_type", param=name) from None
    if not text:
        raise ApiError(400, f"{name} is empty", code="invalid_value", param=name)
    return text


def read_flag(fields: Fields, name: str) -> bool:
    """Return a field that may hold true or false; false without one.

    Raises:
        ApiError: it holds something else.
    """
    raw = bytes(fields.get(name, b"false"))
    if raw in (b"true", b"false", _NULL):
        return raw == b"true"
    raise ApiError(400, f"expected {name} to be true or false", code="invalid_type", param=name)


def request_body(
    body: bytes,
    fields: Fields,
    *,
    model: str,
    upstream_model: str,
    priority: int | None,
    keep_priority: bool,
    streams: bool,
) -> bytes:
    """Return the body for an upstream.

    Args:
        priority: to be set; None for none.
        keep_priority: the client's own may stay if none is set.
        streams: False takes out what asks for a stream.
    """
    changed: dict[str, Any] = {}
    if upstream_model != model:
        changed["model"] = upstream_model
    if priority is not None:
        changed["priority"] = priority
    dropped = set() if streams else set(STREAM_FIELDS)
    if priority is None and not keep_priority:
        dropped.add("priority")
    dropped &= fields.keys()
    if not changed and not dropped:
        return body
    kept = {name: value for name, value in fields.items() if name not in dropped}
    return msgspec.json.encode({**kept, **changed})


def answer_fields(body: bytes) -> Fields | None:
    """Return the top-level fields of an answer, None if it is no JSON object."""
    try:
        return _fields.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


def answer_body(body: bytes, fields: Fields, *, model: str, upstream_model: str) -> bytes:
    """Return an answer's body with the public name of its model."""
    if upstream_model == model or "model" not in fields:
        return body
    return msgspec.json.encode({**fields, "model": model})


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


def usage_of(fields: Fields) -> Usage | None:
    """Return what an answer says it used, in either naming; None if it says nothing that can be read."""
    raw = fields.get("usage")
    if raw is None or bytes(raw) == _NULL:
        return None
    try:
        told = msgspec.json.decode(raw, type=_Usage)
    except (msgspec.DecodeError, UnicodeError):
        return None
    given = told.prompt_tokens_details or told.input_tokens_details or _Details()
    made = told.completion_tokens_details or told.output_tokens_details or _Details()
    return Usage(
        told.prompt_tokens or told.input_tokens or 0,
        told.completion_tokens or told.output_tokens or 0,
        given.cached_tokens or 0,
        made.reasoning_tokens or 0,
    )


def event_renamer(model: str, upstream_model: str) -> Callable[[bytes], bytes]:
    """Return a function that gives pieces of an event stream the public name of the model.

    Only complete lines pass; what begins a line waits for its end. The pattern cannot match inside a text, where quotes
    are escaped, and the first match of an event is its own ``model`` (or its response's), whatever it is called there.

    Raises:
        ApiError: (the function) a line is longer than ``MAX_EVENT_BYTES``.
    """
    if model == upstream_model:
        return lambda piece: piece
    public = msgspec.json.encode(model)
    held = bytearray()

    def rename(piece: bytes) -> bytes:
        """Pass an empty piece at the end to get what was held back."""
        nonlocal held
        end = piece.rfind(b"\n") + 1 if piece else 0
        if piece and not end:
            held += piece
            if len(held) > MAX_EVENT_BYTES:
                raise ApiError(502, "the upstream sent an event that is too long", code="upstream_error")
            return b""
        lines = bytes(held) + piece[:end]
        held = bytearray(piece[end:])
        return b"\n".join(_NAMED.sub(lambda m: m[1] + public, line, count=1) for line in lines.split(b"\n"))

    return rename


def _is_utf8(body: bytes) -> bool:
    if body.isascii():
        return True
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"could not read the body of your request as JSON: {why}", code="invalid_json")
