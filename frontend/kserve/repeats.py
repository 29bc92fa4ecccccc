"""Requests that repeat an earlier one but for their tensors' bytes: recognised by their JSON header, not parsed again.

A client that sends one model's rows over and over sends the same JSON in front of them. After the first such request
was parsed, checked and answered, everything that followed from its JSON is known: the model, the rows, where in the
body each tensor lies, and all of the answer but the outputs' bytes. A later request with the same path, JSON and length
then costs a lookup, the copies and the reply: less than half of the ordinary path.

A plan is made only of what those bytes decide: raw tensors of fixed-size elements, one piece, no hooks, every output
raw and of known size, no request id (it is rarely the same), no options in other headers. It holds for the very model
entry it was made with; a new table from the worker makes new entries, and the plan is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engines.bundle.variants import match_variant
from engines.tensor import element_count
from frontend.httpd.exchange import Exchange
from frontend.httpd.outlet import COPY_BYTES
from frontend.httpd.wire import Headers, Part, render_front
from frontend.inference import InferRequest, InferResponse
from worker.channel.messages import ModelEntry

MAX_PLANS: Final = 256
"""Headers remembered per frontend; when more occur all are forgotten and those still in use come back at once."""
MAX_JSON_BYTES: Final = 4096
MAX_READY_BYTES: Final = COPY_BYTES - 1024
"""Answers up to this size, and their head, are copied into one piece."""
_OPTIONS: Final = (
    b"accept-encoding", b"content-encoding", b"x-request-timeout-ms", b"x-ringserve-explain", b"x-request-id",
    b"transfer-encoding",
)  # fmt: skip
"""Headers that change what a request means or how it is answered: requests with one take the ordinary path."""

Key = tuple[bytes, bytes, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """All that follows from a request's path, JSON and length.

    Attributes:
        asked: the request's JSON.
        inputs: per executable input its first byte in the body and the one after its last.
        outputs: per output of the answer its tensor's number in the placement (inputs count first) and its bytes.
        timeout_us: 0 if the JSON carries none.
        json: the answer's JSON part; ``headers`` its headers.
        front: of the answer, as ``wire.render_front``; empty if the answer is too long to be copied.
    """

    entry: ModelEntry
    variant: int
    rows: int
    asked: bytes
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    timeout_us: int
    headers: Headers
    json: bytes
    front: bytes

    def repeated_by(self, body: Part) -> bool:
        """Return whether a body of the length that this plan was made for begins with the same JSON."""
        return (body if isinstance(body, bytes) else bytes(body[: len(self.asked)])).startswith(self.asked)


class Plans:
    """Plans of one frontend."""

    def __init__(self) -> None:
        self._plans: dict[Key, Plan] = {}

    def find(self, exchange: Exchange) -> tuple[Key, Plan | None] | None:
        """Return the key of a request that may repeat, and its plan if there is one; None if it is of no such kind."""
        headers = exchange.headers
        length = headers.get(b"inference-header-content-length")
        if length is None or not length.isdigit() or len(length) > 4:
            return None
        json_bytes = int(length)
        body = exchange.body
        if not 0 < json_bytes <= MAX_JSON_BYTES or json_bytes > len(body):
            return None
        for name in _OPTIONS:
            if name in headers:
                return None
        key = (exchange.raw_path, bytes(memoryview(body)[:json_bytes]), len(body))
        return key, self._plans.get(key)

    def forget(self, key: Key) -> None:
        """Drop a plan whose model has changed."""
        self._plans.pop(key, None)

    def learn(self, key: Key, request: InferRequest, entry: ModelEntry, response: InferResponse, head: Headers,
              parts: Sequence[Part]) -> None:  # fmt: skip
        """Remember what a request that was answered the ordinary way has shown, if it is of the kind that repeats."""
        plan = _plan(key[1], request, entry, response, head, parts)
        if plan is not None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan


def _plan(
    asked: bytes,
    request: InferRequest,
    entry: ModelEntry,
    response: InferResponse,
    head: Headers,
    parts: Sequence[Part],
) -> Plan | None:
    signature = entry.signature
    if signature is None or entry.model_py or request.request_id or request.explain or response.explained:
        return None
    if response.model != entry.name or response.version != entry.version or len(parts) != 1 + len(response.outputs):
        return None
    spans: dict[str, tuple[tuple[int, ...], int]] = {}
    at = len(asked)
    for tensor in request.inputs:
        if tensor.raw is None or tensor.region is not None:
            return None
        spans[tensor.name] = (tensor.shape, at)
        at += len(memoryview(tensor.raw))
    inputs: list[tuple[int, int]] = []
    shapes: list[tuple[int, ...]] = []
    rows = 1
    for spec in signature.inputs:
        # A BOOL byte must be looked at, and a BYTES tensor taken apart.
        if spec.name not in spans or spec.dtype in ("bool", "bytes"):
            return None
        shape, start = spans[spec.name]
        inputs.append((start, start + element_count(shape) * spec.element.itemsize))
        shapes.append(shape)
        if spec.batch_axis is not None:
            rows = shape[spec.batch_axis]
    variant = match_variant(signature, shapes)
    if variant < 0 or any(signature.variants[variant].dynamic_outputs):
        return None
    if signature.coalesces and rows > signature.max_rows:
        return None
    names = [spec.name for spec in signature.outputs]
    if any(one.placed or one.classification or one.name not in names for one in response.outputs):
        return None
    first = len(signature.inputs)
    outputs = tuple(
        (first + names.index(one.name), len(part)) for one, part in zip(response.outputs, parts[1:], strict=True)
    )
    size = sum(map(len, parts))
    front = render_front(head, size) if size <= MAX_READY_BYTES else b""
    return Plan(
        entry, variant, rows, asked, tuple(inputs), outputs, request.timeout_us, list(head), bytes(parts[0]), front
    )
