"""Requests that repeat an earlier one but for their tensors' bytes: recognised by their JSON header, not parsed again.

A client that sends one model's rows over and over sends the same JSON in front of them. After the first such request
was parsed, checked and answered, everything that followed from its JSON is known: the model, the rows, where in the
body each tensor lies, and all of the answer but the outputs' bytes. A later request with the same path, JSON and length
then costs a lookup, the copies and the reply: less than half of the ordinary path.

A plan is made only of what those bytes decide: tensors of fixed-size elements, one piece, no hooks, outputs of known
size; a request id may differ (``request_ids``) if it is as long. What other headers ask for (``Options``: a timeout,
an encoding of the answer, an id to be repeated) is no part of it, but done for each request. Raw tensors are copied as
they are; of a JSON body (``json_repeats``) the numbers are read. A plan holds for the very model entry it was made
with; a new table from the worker makes new entries, and the plan is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from frontend.attempts import Attempts
from frontend.httpd.exchange import Exchange
from frontend.httpd.outlet import COPY_BYTES
from frontend.httpd.wire import Headers, Part, render_front
from frontend.inference import InferRequest, InferResponse, InputTensor
from frontend.kserve.http_answers import reply_inferred
from frontend.kserve.http_options import Options
from frontend.kserve.json_repeats import JsonPlan, json_plan, opening_of
from frontend.kserve.request_ids import AroundId, split_answer, split_asked
from frontend.placed_call import Rows, rows_of
from worker.channel.client import Placement
from worker.channel.messages import ModelEntry

MAX_PLANS: Final = 256
"""Headers remembered per frontend; when more occur all are forgotten and those still in use come back at once."""
MAX_JSON_BYTES: Final = 4096
MAX_READY_BYTES: Final = COPY_BYTES - 1024
"""Answers up to this size, and their head, are copied into one piece."""
Key = tuple[bytes, bytes, int]
"""Path, JSON in front of raw tensors without the id, body's length; of a body in JSON what stands before its numbers,
without the id, and -1 less the id's length."""


@dataclass(frozen=True, slots=True)
class RawPlan:
    """All that follows from a request's path, JSON and length, where tensors and outputs are raw.

    Attributes:
        asked: the request's JSON.
        body_bytes: of the request, tensors included.
        outputs: per output of the answer its tensor's number in the placement (inputs count first) and its bytes.
        headers, json: of the answer, ``answer_bytes`` long with its outputs.
        front: as ``wire.render_front``, empty if the answer is too long to be copied.
    """

    rows: Rows
    asked: AroundId
    body_bytes: int
    outputs: tuple[tuple[int, int], ...]
    headers: Headers
    json: AroundId
    answer_bytes: int
    front: bytes

    def elements(self, body: Part) -> Part | None:
        """Return ``body``, in which ``rows.inputs`` are found; None if this plan does not cover it."""
        if len(body) != self.body_bytes:
            return None
        start = body if isinstance(body, bytes) else bytes(body[: len(self.asked)])
        return body if self.asked.begins(start) else None

    def answer(self, exchange: Exchange, options: Options, placement: Placement) -> None:
        """Answer with the outputs as the request's headers ask; the placement is released when they are sent."""
        memory = placement.memory
        json = self.json
        parts: list[Part] = [json.with_id(self.asked.id_in(exchange.body)) if json.id_bytes else json.before]
        for tensor, size in self.outputs:
            at = placement.place_of(tensor)
            parts.append(memory[at : at + size])
        if self.front and options.plain(self.answer_bytes):
            exchange.respond_ready(self.front, parts)
            placement.release()
        else:
            reply_inferred(exchange, self.headers, parts, options.accepted, placement.release)


Plan = RawPlan | JsonPlan


class Plans:
    """Plans of one frontend."""

    def __init__(self) -> None:
        self._plans: dict[Key, Plan] = {}
        self._attempts = Attempts()

    def find(self, exchange: Exchange) -> tuple[Key, Plan | None] | None:
        """Return the key of a request that may repeat, and its plan if there is one; None if it is of no such kind."""
        body = exchange.body
        length = exchange.headers.get(b"inference-header-content-length")
        if length is None:
            opening = opening_of(body)
            if opening is None:
                return None
            asked = split_asked(opening)
            key = exchange.raw_path, asked.before + asked.after, -1 - asked.id_bytes
            return key, self._plans.get(key)
        if not length.isdigit() or len(length) > 4:
            return None
        json_bytes = int(length)
        if not 0 < json_bytes <= MAX_JSON_BYTES or json_bytes > len(body):
            return None
        asked = split_asked(bytes(memoryview(body)[:json_bytes]))
        key = exchange.raw_path, asked.before + asked.after, len(body)
        return key, self._plans.get(key)

    def forget(self, key: Key) -> None:
        """Drop a plan whose model has changed."""
        self._plans.pop(key, None)

    def learn(self, key: Key, now_ns: int, body: Part, request: InferRequest, entry: ModelEntry,
              response: InferResponse, head: Headers, parts: Sequence[Part]) -> None:  # fmt: skip
        """Remember what a request that was answered the ordinary way has shown, if it is of the kind that repeats."""
        if key in self._plans or not self._attempts.take(now_ns):
            return
        plan = _plan(key, body, request, entry, response, head, parts)
        if plan is not None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan


def _plan(
    key: Key,
    body: Part,
    request: InferRequest,
    entry: ModelEntry,
    response: InferResponse,
    head: Headers,
    parts: Sequence[Part],
) -> Plan | None:
    signature = entry.signature
    if signature is None or entry.model_py or request.explain or response.parameters or response.explained:
        return None
    if response.model != entry.name or response.version != entry.version:
        return None
    names = [spec.name for spec in signature.outputs]
    if any(one.placed or one.classification or one.name not in names for one in response.outputs):
        return None
    in_json = key[2] < 0
    if len(parts) != 1 + (0 if in_json else len(response.outputs)):
        return None
    request_id = request.request_id.encode()
    text = bytes(body if in_json else body[: len(body) - sum(map(_raw_bytes, request.inputs))])
    asked, json = split_asked(text), split_answer(bytes(parts[0]), request_id)
    if json is None or asked.id_in(text) != request_id:
        return None
    # Numbers that are read become the only elements; raw ones lie where they came.
    raw = [_raw_bytes(tensor) for tensor in request.inputs]
    starts = [0] * len(raw) if in_json else list(accumulate(raw[:-1], initial=len(text)))
    rows = rows_of(entry, request, starts)
    if rows is None or any((tensor.array if in_json else tensor.raw) is None for tensor in request.inputs):
        return None
    first = len(signature.inputs)
    outputs = [(first + names.index(one.name), one) for one in response.outputs]
    if in_json:
        return json_plan(asked, request, rows, outputs, head, json)
    size = sum(map(len, parts))
    return RawPlan(
        rows,
        asked,
        len(body),
        tuple((tensor, len(part)) for (tensor, _), part in zip(outputs, parts[1:], strict=True)),
        list(head),
        json,
        size,
        render_front(head, size) if size <= MAX_READY_BYTES else b"",
    )


def _raw_bytes(tensor: InputTensor) -> int:
    return 0 if tensor.raw is None else len(memoryview(tensor.raw))
