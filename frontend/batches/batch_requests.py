"""What a client may ask for when it creates a batch, and how a batch is shown. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
from msgspec import Raw

from frontend.batches.files import ANCHOR, expiry_seconds
from frontend.batches.line_contracts import ENDPOINTS, Contract, contract_of
from frontend.batches.store.rows import SECOND_US, BatchRow, WindowHours
from frontend.batches.validation import LineFault
from frontend.openai.errors import ApiError

WINDOWS: Final[dict[str, WindowHours]] = {"24h": 24, "48h": 48, "72h": 72, "168h": 168}
KNOWN_ENDPOINTS: Final = frozenset({"/v1/messages", "/v1/images/generations", "/v1/images/edits", "/v1/moderations"})
"""Endpoints that batches of others run, and ours do not."""
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_BYTES: Final = 64
MAX_METADATA_VALUE_BYTES: Final = 512
RETRY_KEYS: Final = ("batch_retries", "omg_retries", "x_retries")
MODE_KEYS: Final = ("batch_mode", "omg_mode")
"""Own names first; the others are understood, too."""
MAX_RETRIES: Final = 2
MAX_IDEMPOTENCY_KEY_BYTES: Final = 255
_FIELDS: Final = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A create request that is in order; its input file is not looked at yet.

    Attributes:
        metadata: JSON object text as it is stored, None if none was given.
        body_sha256: of all that an ``Idempotency-Key`` must repeat.
    """

    input_file_id: str
    contract: Contract
    window_hours: WindowHours
    metadata: str | None
    retry_limit: int
    output_expires_after_seconds: int | None
    body_sha256: str


def read_request(body: bytes | bytearray | memoryview) -> BatchRequest:
    """Return what a body asks for. Raises: ApiError, naming the field."""
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ApiError(400, f"expected a JSON object: {error}", code="invalid_json") from None
    unknown = next((name for name in given if name not in _FIELDS), None)
    if unknown is not None:
        known = ", ".join(_FIELDS)
        raise ApiError(
            400, f"unknown parameter, expected only {known}", code="unknown_parameter", param=unknown[:64] or None
        )
    metadata = _metadata(given.get("metadata"))
    return BatchRequest(
        input_file_id=_text(given, "input_file_id"),
        contract=_contract(_text(given, "endpoint")),
        window_hours=_window(_text(given, "completion_window")),
        metadata=None if metadata is None else msgspec.json.encode(metadata).decode(),
        retry_limit=_retries(metadata or {}),
        output_expires_after_seconds=_expiry(given.get("output_expires_after")),
        body_sha256=hashlib.sha256(msgspec.json.encode(given, order="deterministic")).hexdigest(),
    )


def read_idempotency_key(value: bytes | None) -> str | None:
    """Return the ``Idempotency-Key``, None without one. Raises: ApiError."""
    if value is None:
        return None
    key = value.decode("latin-1").strip()
    if not key or len(value) > MAX_IDEMPOTENCY_KEY_BYTES or not (key.isascii() and key.isprintable()):
        raise ApiError(
            400, f"expected 1 to {MAX_IDEMPOTENCY_KEY_BYTES} printable ASCII characters", code="invalid_value",
            param="Idempotency-Key",
        )  # fmt: skip
    return key


def batch_object(row: BatchRow, forecast: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the API's batch object; only the terminal time that applies is set.

    ``forecast`` is a field beside OpenAI's, there only when there is one.
    """

    def ended(state: str) -> int | None:
        return _seconds(row.completed_at) if row.state == state else None

    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "model": row.public_model or None,
        "errors": None if row.errors is None else Raw(row.errors.encode()),
        "input_file_id": row.input_file_id,
        "completion_window": f"{row.completion_window_hours}h",
        "status": row.status_detail,
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "created_at": _seconds(row.created_at),
        "in_progress_at": _seconds(row.in_progress_at),
        "expires_at": _seconds(row.expires_at),
        "finalizing_at": _seconds(row.finalizing_at),
        "completed_at": ended("completed"),
        "failed_at": ended("failed"),
        "expired_at": ended("expired"),
        "cancelling_at": _seconds(row.cancel_requested_at),
        "cancelled_at": ended("cancelled"),
        "request_counts": {
            "total": row.request_total,
            "completed": row.request_completed,
            "failed": row.request_failed,
        },
        "metadata": None if row.metadata is None else Raw(row.metadata.encode()),
    } | ({} if forecast is None else {"forecast": forecast})


def report_document(faults: tuple[LineFault, ...]) -> dict[str, Any]:
    """Return a validation report as the API shows it: ``errors`` of a refusal, and of a failed batch."""
    return {
        "object": "list",
        "data": [{"code": fault.code, "message": fault.message, "line": fault.line, "param": None} for fault in faults],
    }


def _seconds(time_us: int | None) -> int | None:
    return None if time_us is None else time_us // SECOND_US


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if value is None:
        raise ApiError(400, f"'{name}' is required", code="missing_required_parameter", param=name)
    if not isinstance(value, str):
        raise ApiError(400, f"'{name}' must be a string", code="invalid_type", param=name)
    return value


def _contract(endpoint: str) -> Contract:
    contract = contract_of(endpoint)
    if contract is not None:
        return contract
    known = ", ".join((*ENDPOINTS, "/v2/models/MODEL/infer"))
    code = "unsupported_capability" if endpoint in KNOWN_ENDPOINTS else "invalid_value"
    raise ApiError(400, f"batches do not run this endpoint, expected one of {known}", code=code, param="endpoint")


def _window(window: str) -> WindowHours:
    hours = WINDOWS.get(window)
    if hours is None:
        known = ", ".join(WINDOWS)
        raise ApiError(400, f"expected one of {known}", code="invalid_value", param="completion_window")
    return hours


def _expiry(given: Any) -> int | None:
    if given is None:
        return None
    param = "output_expires_after"
    if not isinstance(given, dict) or set(given) != {"anchor", "seconds"}:
        raise ApiError(400, 'expected {"anchor", "seconds"}', code="invalid_value", param=param)
    if given["anchor"] != ANCHOR:
        raise ApiError(400, f"expected '{ANCHOR}'", code="invalid_value", param=f"{param}.anchor")
    seconds = given["seconds"]
    return expiry_seconds(seconds if type(seconds) is int else None, f"{param}.seconds")


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > MAX_METADATA_PAIRS:
        raise _bad_metadata(f"expected an object of at most {MAX_METADATA_PAIRS} pairs")
    for key, value in given.items():
        if not 1 <= len(key.encode()) <= MAX_METADATA_KEY_BYTES:
            raise _bad_metadata(f"expected keys of 1 to {MAX_METADATA_KEY_BYTES} bytes")
        if not isinstance(value, str) or len(value.encode()) > MAX_METADATA_VALUE_BYTES:
            raise _bad_metadata(f"expected values that are strings of at most {MAX_METADATA_VALUE_BYTES} bytes")
    mode = _aliased(given, MODE_KEYS)
    if mode == "native":
        raise ApiError(
            400, "batches are run by this gateway only, expected auto or gateway", code="unsupported_capability",
            param="metadata",
        )  # fmt: skip
    if mode not in (None, "auto", "gateway"):
        raise _bad_metadata(f"expected {MODE_KEYS[0]} to be auto or gateway")
    return cast("dict[str, str]", given)


def _retries(metadata: Mapping[str, str]) -> int:
    value = _aliased(metadata, RETRY_KEYS)
    if value is None:
        return 0
    if value not in ("0", "1", "2"):
        raise _bad_metadata(f"expected {RETRY_KEYS[0]} to be a string from '0' to '{MAX_RETRIES}'")
    return int(value)


def _aliased(metadata: Mapping[str, str], keys: tuple[str, ...]) -> str | None:
    values = {metadata[key] for key in keys if key in metadata}
    if len(values) > 1:
        raise _bad_metadata(f"{' and '.join(keys)} are names of one setting; they must not differ")
    return values.pop() if values else None


def _bad_metadata(why: str) -> ApiError:
    return ApiError(400, f"invalid metadata: {why}", code="invalid_metadata", param="metadata")
