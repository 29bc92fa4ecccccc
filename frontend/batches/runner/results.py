"""Lines of result files: one JSON value each, whatever the upstream sent.

``custom_id`` and bodies are spliced in as the bytes they were, so that numbers and key order survive; line breaks
between tokens are taken out, and the three characters within texts that some readers take for line breaks are escaped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from frontend.openai.calls import UpstreamAnswer
from frontend.openai.errors import error_body

UNREADABLE: Final = "input_unavailable"
MESSAGES: Final = {
    "batch_cancelled": "The batch was cancelled before this request was run.",
    "batch_expired": "The batch's completion window ended before this request was run.",
    "budget_exceeded": "The budget was used up before this request was run.",
    "batch_failed": "The batch failed before this request was run.",
    UNREADABLE: "The request could not be read from the batch's copy of its input, and was not run.",
    "result_unavailable": "The request may have been run, but its result was lost; it was not run again.",
}
"""Why a line has no response, by ``error.code``."""
_BREAKS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
NO_CUSTOM_ID: Final = b"null"


class InputLine(msgspec.Struct, frozen=True):
    """One line of the private copy; values stay bytes."""

    custom_id: Raw
    url: str
    body: Raw


_input: Final = msgspec.json.Decoder(InputLine)


@dataclass(frozen=True, slots=True)
class Result:
    """How a line ended, and its line of the output (``ok``) or error file, without a line break."""

    ok: bool
    status: int | None
    code: str | None
    record: bytes


def read_input(raw: bytes) -> InputLine | None:
    """Return a line's parts, None if it is not what validation has seen."""
    try:
        return _input.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def one_line(body: bytes | bytearray | memoryview) -> bytes | None:
    """Return a JSON value as one line of UTF-8, None if it is not JSON."""
    data = bytes(body)
    try:
        if not data.isascii():
            data.decode()
            for text, escaped in _BREAKS:
                if text in data:
                    data = data.replace(text, escaped)
        return msgspec.json.format(data, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def request_id(batch_id: str, line_no: int) -> str:
    """Return the id of a line's result: the same whenever it is written."""
    return "batch_req_" + hashlib.blake2b(f"{batch_id}:{line_no}".encode(), digest_size=16).hexdigest()


def answered(batch_id: str, line_no: int, custom_id: bytes | Raw, answer: UpstreamAnswer) -> Result:
    """Return the result of a line that was answered by an upstream, or by the gateway in its place."""
    body = one_line(answer.body)
    status, code = answer.status, answer.code
    if body is None:
        # A success that no client could read is a failure; a failure keeps its status.
        status = 502 if answer.ok else status
        code = "invalid_upstream_answer"
        body = error_body("the upstream's answer is not JSON", "server_error", None, code)
    record = b'{"id":"%b","custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}' % (
        request_id(batch_id, line_no).encode(),
        one_line(bytes(custom_id)) or NO_CUSTOM_ID,
        status,
        msgspec.json.encode(answer.request_id),
        body,
    )
    ok = 200 <= status < 300
    return Result(ok, status, None if ok else _stored_code(code, status), record)


def without_response(
    batch_id: str, line_no: int, custom_id: bytes | Raw, code: str, message: str | None = None
) -> Result:
    """Return the result of a line that has no response."""
    error: dict[str, Any] = {"code": code, "message": message or MESSAGES[code]}
    record = b'{"id":"%b","custom_id":%b,"response":null,"error":%b}' % (
        request_id(batch_id, line_no).encode(),
        one_line(bytes(custom_id)) or NO_CUSTOM_ID,
        msgspec.json.encode(error),
    )
    return Result(False, None, code, record)


def _stored_code(code: str | None, status: int) -> str:
    """Return a code that the store takes: lower-case letters and underscores, at most 64."""
    if code and len(code) <= 64 and code.isascii() and code.replace("_", "").isalpha() and code.islower():
        return code
    return "upstream_error" if status >= 500 else "request_failed"
