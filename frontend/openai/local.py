"""Calls of our own worker: ``/v1/embeddings`` for bundles that declare the task, ``/v2/models/M/infer`` for any.

An embedding bundle takes one BYTES tensor of shape [n], UTF-8 texts, and gives one FP32 tensor of shape [n, d]. Any
number of texts is one request, which the frontend cuts into pieces the worker can run.

``usage`` is 0: tokens are made inside the bundle's hook and nobody counts them, and an estimate would be a made-up
number in the place where people look for what they pay.
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Raw

from engines.errors import InvalidInput, Kind, ServingError
from engines.tensor import NDArray, TensorSpec
from frontend.inference import InferRequest, InferResponse, InputTensor, RequestedOutput
from frontend.kserve.body_codec import decode_infer, encode_infer
from frontend.kserve.status import error_body, status_of
from frontend.openai.bodies import Fields
from frontend.openai.calls import Sent, Usage
from frontend.openai.errors import ApiError, render
from frontend.serving import Serving
from worker.channel.messages import ModelEntry

TASK: Final = "embedding"
MAX_TEXTS: Final = 2048
OFFLOAD_ELEMENTS: Final = 64 * 1024
"""Answers with more numbers than this are rendered in a thread, row by row, so that other requests have their turn."""
NOT_RUN: Final = frozenset(
    {Kind.INVALID_INPUT, Kind.NOT_FOUND, Kind.NOT_READY, Kind.QUEUE_FULL, Kind.ARENA_FULL, Kind.TOO_LARGE}
)


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """What became of a call of our own worker.

    Attributes:
        kind: OK or the failure's; decides whether another route may be tried.
    """

    status: int
    body: bytes
    kind: Kind
    sent: Sent
    code: str | None = None
    usage: Usage | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _Asked:
    texts: list[str]
    as_base64: bool
    dimensions: int | None


def embedding_models(serving: Serving) -> list[str]:
    """Return the bundles that can embed, ready or not."""
    return sorted({entry.name for entry in serving.entries() if entry.task == TASK})


async def embed(
    serving: Serving, bundle: str, public_model: str, fields: Fields, arrival_ns: int, deadline_ns: int, *,
    background: bool,
) -> LocalAnswer:  # fmt: skip
    """Answer ``/v1/embeddings``; cancelling withdraws the request."""
    try:
        asked = _read(fields)
        entry = serving.entry(bundle)
        source, target = _tensors(entry)
        if asked.dimensions is not None and asked.dimensions != target.shape[1]:
            raise ApiError(
                400, f"this model gives {target.shape[1]} dimensions and cannot give {asked.dimensions}",
                code="invalid_value", param="dimensions",
            )  # fmt: skip
        texts = np.empty(len(asked.texts), dtype=np.object_)
        texts[:] = [text.encode() for text in asked.texts]
        request = InferRequest(
            bundle, entry.version, "", [InputTensor(source.name, "BYTES", texts.shape, array=texts)],
            [RequestedOutput(target.name)], deadline_ns=deadline_ns, background=background,
        )  # fmt: skip
        response = await serving.infer(request, arrival_ns)
    except ServingError as error:
        return _failed(error)
    try:
        # A copy: rows are told one after another, and shared memory should be free before that.
        vectors = np.array(response.outputs[0].array, dtype="<f4", copy=True, order="C")
    finally:
        response.release()
    if vectors.size > OFFLOAD_ELEMENTS:
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(None, _render, vectors, public_model, asked.as_base64)
    else:
        body = _render(vectors, public_model, asked.as_base64)
    return LocalAnswer(200, body, Kind.OK, Sent.ANSWERED, usage=Usage())


async def infer(
    serving: Serving, bundle: str, body: bytes, arrival_ns: int, deadline_ns: int, *, background: bool
) -> LocalAnswer:
    """Answer ``/v2/models/M/infer`` with JSON; errors have KServe's shape, as that endpoint gives them."""
    try:
        request = decode_infer(bundle, "", body, None, serving.limits)
        _refuse_regions(request)
        request.deadline_ns = deadline_ns
        request.background = background
        response = await serving.infer(request, arrival_ns)
    except ServingError as error:
        return _failed_infer(error)
    try:
        return LocalAnswer(200, _join(response), Kind.OK, Sent.ANSWERED)
    except ServingError as error:
        return _failed_infer(error)
    finally:
        response.release()


def _read(fields: Fields) -> _Asked:
    return _Asked(_texts(fields.get("input")), _is_base64(fields.get("encoding_format")), _dimensions(fields))


def _texts(raw: Raw | None) -> list[str]:
    if raw is None or bytes(raw) == b"null":
        raise ApiError(
            400, "you must provide an input parameter", code="missing_required_parameter", param="input"
        )  # fmt: skip
    try:
        given = msgspec.json.decode(raw, type=str | list[str])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise ApiError(400, _wrong_input(bytes(raw)), code="invalid_type", param="input") from None
    texts = [given] if isinstance(given, str) else given
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise ApiError(
            400, f"expected 1 to {MAX_TEXTS} texts, got {len(texts)}", code="invalid_value", param="input"
        )  # fmt: skip
    for index, text in enumerate(texts):
        if not text:
            raise ApiError(400, f"text {index} is empty", code="invalid_value", param="input")
    return texts


def _wrong_input(raw: bytes) -> str:
    if raw.startswith(b"[") and raw[1:].lstrip()[:1] in b"[0123456789":
        return "expected a text or a list of texts; lists of token numbers do not fit, this model makes its own"

    return "expected a text or a list of texts"


def _is_base64(raw: Raw | None) -> bool:
    text = b"null" if raw is None else bytes(raw)
    if text not in (b'"base64"', b'"float"', b"null"):
        raise ApiError(400, "expected float or base64", code="invalid_value", param="encoding_format")
    return text == b'"base64"'


def _dimensions(fields: Fields) -> int | None:
    raw = fields.get("dimensions")
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=int | None)
    except msgspec.DecodeError:
        raise ApiError(400, "expected a whole number", code="invalid_type", param="dimensions") from None


def _tensors(entry: ModelEntry) -> tuple[TensorSpec, TensorSpec]:
    """Return the tensor that takes texts and the one that gives vectors."""
    signature = entry.signature
    if entry.task == TASK and signature is not None and len(signature.client_inputs) == 1:
        source = signature.client_inputs[0]
        vectors = [
            spec
            for spec in signature.client_outputs
            if spec.dtype == "f32" and len(spec.shape) == 2 and spec.batch_axis == 0 and spec.shape[1] > 0
        ]
        if source.dtype == "bytes" and len(source.shape) == 1 and len(vectors) == 1:
            return source, vectors[0]
    raise ApiError(
        400,
        f"model '{entry.name}' does not embed: that needs a bundle with 'task: {TASK}', one input BYTES [n] and one"
        " output FP32 [n, d]",
        code="unsupported_endpoint", param="model",
    )  # fmt: skip


def _render(vectors: NDArray, model: str, as_base64: bool) -> bytes:
    rows = []
    for index, row in enumerate(vectors):
        told: Any = base64.b64encode(row.tobytes()).decode() if as_base64 else row.tolist()
        rows.append(msgspec.json.encode({"object": "embedding", "index": index, "embedding": told}))
    tail = msgspec.json.encode({"model": model, "usage": {"prompt_tokens": 0, "total_tokens": 0}})
    return b'{"object":"list","data":[' + b",".join(rows) + b"]," + tail[1:]


def _join(response: InferResponse) -> bytes:
    headers, parts = encode_infer(response)
    if len(headers) > 1:
        raise InvalidInput("binary outputs do not fit into a JSON answer; leave binary_data out of the outputs")
    return b"".join(parts)


def _refuse_regions(request: InferRequest) -> None:
    """A line runs long after it was written, in another process, for whoever sent it: no client's memory is its own."""
    for tensor in [*request.inputs, *(request.outputs or ())]:
        if tensor.region is not None:
            raise InvalidInput(f"tensor '{tensor.name}' names client shared memory, which a line cannot use")


def _failed(error: ServingError) -> LocalAnswer:
    told = render(error)
    return LocalAnswer(told.status, told.body, error.kind, _sent(error), told.code, headers=told.headers)


def _failed_infer(error: ServingError) -> LocalAnswer:
    told = render(error)
    return LocalAnswer(
        status_of(error).http, error_body(error), error.kind, _sent(error), told.code, headers=told.headers
    )  # fmt: skip


def _sent(error: ServingError) -> Sent:
    # A worker that went away in the middle counts as not run: an inference leaves nothing behind.
    if error.kind in (Kind.NOT_READY, Kind.UNAVAILABLE, Kind.QUEUE_FULL, Kind.ARENA_FULL):
        return Sent.DECLINED
    return Sent.NOT_SENT if isinstance(error, ApiError) or error.kind in NOT_RUN else Sent.MAYBE_RUN
