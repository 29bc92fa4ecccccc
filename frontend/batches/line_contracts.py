"""What each endpoint asks of a line's body, checked before a batch is accepted. Pure.

Light on purpose: the fields that decide whether a line can be run at all are checked, everything else travels to the
upstream untouched, which knows its own parameters best. Values are judged by their JSON kind without being built.

``/v2/models/M/infer`` is an extension: a line is a KServe v2 JSON request for a model of our own worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from frontend.openai.calls import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, infer_model

Fault = tuple[str, str]
"""Code and fixed message."""

MAX_MODEL_CHARS: Final = 256
_STREAM: Final = ("invalid_body", "stream must be false or absent: lines of a batch are not streamed.")
_BACKGROUND: Final = (
    "unsupported_feature",
    "background is not available in a batch: every line runs in the background.",
)
_MODEL: Final = ("invalid_body", "model must be a non-empty string.")
_BOTH_MAXIMA: Final = ("invalid_body", "max_tokens and max_completion_tokens must not both be given.")
NOT_OBJECT: Final = (
    "invalid_line",
    "A line must be an object with exactly custom_id, method, url and body; body is an object.",
)


NULL: Final = Raw(b"null")


class _Known(msgspec.Struct, gc=False):
    """Fields that matter here; anything else is skipped. Absent and null are one."""

    model: Raw = NULL
    messages: Raw = NULL
    prompt: Raw = NULL
    input: Raw = NULL
    inputs: Raw = NULL
    stream: Raw = NULL
    background: Raw = NULL
    max_tokens: Raw = NULL
    max_completion_tokens: Raw = NULL
    max_output_tokens: Raw = NULL


@dataclass(frozen=True, slots=True)
class Checked:
    """What a good body says: its public model and its limit of output tokens (None: none given)."""

    model: str
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Contract:
    """The rules of one endpoint.

    Attributes:
        generates: answers have output tokens, so that a maximum can be asked for.
        model: of all lines if the path names it, else None: each body names its own.
    """

    endpoint: str
    check: Callable[[_Known], Fault | None]
    limits: tuple[str, ...]
    generates: bool
    model: str | None = None


_decoder: Final = msgspec.json.Decoder(_Known)


def contract_of(endpoint: str) -> Contract | None:
    """Return the contract of a batch endpoint, None if batches do not run it."""
    if (model := infer_model(endpoint)) is not None:
        return Contract(endpoint, _infer, (), False, model)
    return _CONTRACTS.get(endpoint)


def check_body(contract: Contract, body: Raw) -> Checked | Fault:
    """Return what a line's body says, or the first thing wrong with it. ``body`` is valid JSON."""
    try:
        known = _decoder.decode(body)
    except msgspec.ValidationError:
        return NOT_OBJECT
    model = contract.model
    if model is None:
        model = _text(known.model)
        if not model or len(model) > MAX_MODEL_CHARS:
            return _MODEL
    if _first(known.stream) not in b"fn":  # false, null
        return _STREAM
    if (fault := contract.check(known)) is not None:
        return fault
    maximum: int | None = None
    for name in contract.limits:
        raw = getattr(known, name)
        if _first(raw) == b"n":
            continue
        if maximum is not None:
            return _BOTH_MAXIMA
        maximum = _whole(raw)
        if maximum is None:
            return "invalid_body", f"{name} must be a whole number, 0 or more."
    return Checked(model, maximum)


def _chat(known: _Known) -> Fault | None:
    return None if _items(known.messages, b"{") else ("invalid_body", "messages must be a non-empty array of objects.")


def _completion(known: _Known) -> Fault | None:
    if _first(known.prompt) == b'"' or _items(known.prompt, b'"[0123456789'):
        return None
    return "invalid_body", "prompt must be a string, or a non-empty array of strings or tokens."


def _response(known: _Known) -> Fault | None:
    if _first(known.background) not in b"fn":
        return _BACKGROUND
    # Without input there may be a prompt template, which the upstream knows.
    if _first(known.input) in b'"n' or _items(known.input, b"{"):
        return None
    return "invalid_body", "input must be a string or a non-empty array of objects."


def _embedding(known: _Known) -> Fault | None:
    if _first(known.input) == b'"' or _items(known.input, b'"[0123456789'):
        return None
    return "invalid_body", "input must be a string, or a non-empty array of strings or tokens."


def _infer(known: _Known) -> Fault | None:
    if _items(known.inputs, b"{"):
        return None
    return "invalid_body", "inputs must be a non-empty array of tensors (KServe v2 JSON)."


_CONTRACTS: Final = {
    contract.endpoint: contract
    for contract in (
        Contract(CHAT, _chat, ("max_tokens", "max_completion_tokens"), True),
        Contract(COMPLETIONS, _completion, ("max_tokens",), True),
        Contract(RESPONSES, _response, ("max_output_tokens",), True),
        Contract(EMBEDDINGS, _embedding, (), False),
    )
}
ENDPOINTS: Final = tuple(_CONTRACTS)


def _first(raw: Raw) -> bytes:
    """Return the first byte of a JSON value: ``{ [ " t f n`` or of a number."""
    return bytes(memoryview(raw)[:1])


def _items(raw: Raw, kinds: bytes) -> bool:
    """Return whether this is an array whose first item begins with one of ``kinds``."""
    if _first(raw) != b"[":
        return False
    head = bytes(memoryview(raw)[1:65]).lstrip() or bytes(memoryview(raw)[1:]).lstrip()
    return head[:1] in kinds


def _text(raw: Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return ""


def _whole(raw: Raw) -> int | None:
    text = bytes(memoryview(raw)[:16])
    return int(text) if text.isdigit() and len(memoryview(raw)) < 16 else None
