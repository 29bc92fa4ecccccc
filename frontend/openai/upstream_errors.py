"""Errors of upstreams, whatever their dialect, as OpenAI's error object. Pure.

Met in the field: vLLM (``code`` is an int, ``type`` a class name), FastAPI (``{"detail": text | list}``), llama.cpp
(``unavailable_error``), KServe (``{"error": text}``), proxies (HTML, plain text, nothing at all).

Nothing of the gateway's own secrets goes out: an upstream that refuses the gateway's key is the operator's problem,
told as 502, since 401 would make a caller doubt its own key, and the text may quote ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from frontend.openai.errors import INVALID, error_body, type_of

MAX_RETRY_AFTER_S: Final = 24 * 3600.0
_TEXT_CHARS: Final = 300
_WORD: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_PASSED: Final = re.compile(r"retry-after|retry-after-ms|x-should-retry|x-ratelimit-[a-z-]{1,40}|openai-processing-ms")
_VALUE: Final = re.compile(r"[\x20-\x7e]{1,256}")
_CODES: Final = {429: "rate_limit_exceeded", 503: "upstream_busy", 502: "upstream_error", 504: "timeout"}


@dataclass(frozen=True, slots=True)
class UpstreamError:
    """An upstream's error, as a client of ours gets it."""

    status: int
    body: bytes
    code: str | None


def normalise(
    status: int, content_type: str, body: bytes, *, model: str, upstream_model: str, endpoint: str
) -> UpstreamError:
    """Return what a client gets for an upstream's answer that is no success.

    Args:
        status: any but 2xx; other than 4xx and 5xx makes no sense from an API and becomes 502.
    """
    if status in (401, 407):
        return fault("the upstream refused the gateway's own key; tell the operator", "upstream_refused_gateway")
    if not 400 <= status <= 599:
        return fault(f"the upstream answered with status {status}, which is no answer of an API", "upstream_error")
    told = _read(body)
    if told is None:
        told = _Told(_plain(status, content_type, body))
    if status == 404 and told.unknown_route:
        message = f"the upstream of model '{model}' does not offer {endpoint}"
        return UpstreamError(404, error_body(message, INVALID, None, "unsupported_endpoint"), "unsupported_endpoint")
    message = told.message
    if upstream_model != model and upstream_model:
        message = message.replace(upstream_model, model)
    code = told.code or _CODES.get(status)
    if status == 404 and code is None and (told.param == "model" or "model" in message.lower()):
        code = "model_not_found"
    body = error_body(message, told.type or type_of(status), told.param, code)
    return UpstreamError(status, body, code)


def error_in_success(body: Mapping[str, Any]) -> bool:
    """Return whether the fields of a 200 are an error in disguise: an ``error`` and nothing that was asked for."""
    error = body.get("error")
    return error is not None and bytes(error) != b"null" and not {"choices", "data", "output"} & body.keys()


def passed_headers(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the headers of an upstream that a client may see; everything else stays inside."""
    return tuple(
        (name.lower(), value)
        for name, value in headers.items()
        if _PASSED.fullmatch(name.lower()) and _VALUE.fullmatch(value)
    )


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Return the pause an upstream asks for in ``retry-after-ms`` or ``retry-after``; None without a readable one.

    Args:
        now_s: Unix time, for the date form.
    """
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) * scale
        except ValueError:
            try:
                seconds = parsedate_to_datetime(text).timestamp() - now_s
            except (ValueError, OverflowError):
                continue
        if math.isfinite(seconds):
            return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
    return None


@dataclass(frozen=True, slots=True)
class _Told:
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    unknown_route: bool = False


def _read(body: bytes) -> _Told | None:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    if "detail" in document and "error" not in document:
        detail = document["detail"]
        return _Told(_detail_text(detail), unknown_route=detail == "Not Found")
    error = document.get("error", document)
    if isinstance(error, str):
        return _Told(error, unknown_route=error == "Not Found")
    if not isinstance(error, dict):
        return None
    message = error.get("message")
    if not isinstance(message, str) or not message:
        return None
    return _Told(
        message,
        _word(error.get("type")),
        error["param"] if isinstance(error.get("param"), str) else None,
        _word(error.get("code")),
        # llama.cpp answers an unknown path with this text and type.
        unknown_route=message == "File Not Found",
    )


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else None


def _detail_text(detail: object) -> str:
    if isinstance(detail, str):
        return detail
    if not isinstance(detail, list):
        return "the upstream refused the request"
    parts = []
    for item in detail[:8]:
        if isinstance(item, dict) and isinstance(item.get("msg"), str):
            place = item.get("loc")
            where = ".".join(map(str, place)) if isinstance(place, list) else ""
            parts.append(f"{where}: {item['msg']}" if where else item["msg"])
    return "; ".join(parts) or "the upstream refused the request"


def _plain(status: int, content_type: str, body: bytes) -> str:
    text = body[: 4 * _TEXT_CHARS].decode("utf-8", "replace").strip()
    if content_type.partition(";")[0].strip() == "text/plain" and text and text.isprintable():
        return text[:_TEXT_CHARS]
    what = content_type.partition(";")[0].strip()[:80] or "no content type"
    return f"the upstream answered {status} without an error object ({what if body else 'empty'})"


def fault(message: str, code: str) -> UpstreamError:
    """Return the answer for an upstream that gave none of any use; sending again cannot help."""
    return UpstreamError(502, error_body(message, type_of(502), None, code), code)
