"""JSON requests that repeat an earlier one but for their numbers: only the numbers are read.

As ``repeats`` for raw tensors. A body is taken apart at the one list under ``"data"``: if what stands before and after
it is the same as in an earlier body, and the list is JSON, then the body is that earlier one with other numbers. What
is not beyond doubt (other nesting, booleans, numbers out of range, a wrong count) takes the ordinary path, which tells
what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from engines.tensor import DType
from frontend.httpd.exchange import Exchange
from frontend.httpd.wire import Headers, Part, render_front
from frontend.inference import InferRequest, OutputTensor
from frontend.kserve.http_answers import reply_inferred
from frontend.kserve.http_options import Options
from frontend.kserve.json_data import numbers_text, pack_quickly
from frontend.kserve.request_ids import AroundId
from frontend.placed_call import Rows
from worker.channel.client import Placement

MAX_BODY_BYTES: Final = 64 * 1024
"""Longer bodies take the ordinary path: what surrounds their numbers costs little beside them."""
_DATA: Final = b'"data"'
_BRACKETS: Final = re.compile(rb"[\[\]]")
_NO_LENGTH: Final = b"Content-Length: 0\r\n"


@dataclass(frozen=True, slots=True)
class JsonOutput:
    """One output of the answer: ``tensor`` counts in the placement, inputs first; ``after`` follows its numbers."""

    name: str
    tensor: int
    dtype: np.dtype[Any]
    count: int
    after: bytes


@dataclass(frozen=True, slots=True)
class JsonPlan:
    """All that follows from what surrounds the numbers of a request.

    Attributes:
        before, after: of the body, around the list.
        count: numbers in the list.
        headers: of the answer; ``front`` is its head without its length.
        opening: of its text, up to the first output's numbers.
    """

    rows: Rows
    before: AroundId
    after: bytes
    dtype: DType
    count: int
    headers: Headers
    front: bytes
    opening: AroundId
    outputs: tuple[JsonOutput, ...]

    def elements(self, body: Part) -> Part | None:
        """Return the raw elements in a body; None if this plan does not cover it."""
        text = bytes(body)
        if not (self.before.begins(text) and text.endswith(self.after)):
            return None
        room = bytearray(self.count * self.dtype.itemsize)
        numbers = text[len(self.before) : len(text) - len(self.after)]
        return room if pack_quickly(self.dtype, self.count, numbers, room) else None

    def answer(self, exchange: Exchange, options: Options, placement: Placement) -> None:
        """Answer with the outputs as the request's headers ask; they are not needed afterwards.

        Raises:
            InvalidInput: an output cannot be told in JSON.
        """
        memory = placement.memory
        parts: list[Part] = [self.opening.with_id(self.before.id_in(exchange.body))]
        for output in self.outputs:
            array = np.frombuffer(memory, output.dtype, output.count, placement.place_of(output.tensor))
            parts += (numbers_text(output.name, array), output.after)
        placement.release()
        length = sum(map(len, parts))
        if options.plain(length):
            exchange.respond_ready(b"%bContent-Length: %d\r\n" % (self.front, length), parts)
        else:
            reply_inferred(exchange, self.headers, parts, options.accepted, None)


def opening_of(body: Part) -> bytes | None:
    """Return what stands before the numbers in a body of the kind that repeats; None for other bodies."""
    if len(body) > MAX_BODY_BYTES:
        return None
    text = bytes(body)
    at = text.find(_DATA)
    return text[:at] if at > 0 else None


def json_plan(
    asked: AroundId,
    request: InferRequest,
    rows: Rows,
    outputs: Sequence[tuple[int, OutputTensor]],
    head: Headers,
    told: AroundId,
) -> JsonPlan | None:
    """Return the plan that a request and its answer show; None if they are not of the kind that repeats.

    Args:
        asked, told: the body and its answer.
        outputs: in the answer's order, each with its tensor's number in the placement; all are told in JSON.
    """
    # The id lies before all lists, or there is none: it would not be found otherwise.
    body, answer = (asked.after, told.after) if asked.id_bytes else (asked.before, told.before)
    signature = rows.entry.signature
    assert signature is not None
    if len(request.inputs) != 1 or len(signature.inputs) != 1 or (array := request.inputs[0].array) is None:
        return None
    # Text with escapes might name the list in another way.
    if body.count(_DATA) != 1 or answer.count(_DATA) != len(outputs) or b"\\" in body or b"\\" in answer:
        return None
    if len(answer) > MAX_BODY_BYTES:
        return None
    dtype = signature.inputs[0].element
    room = bytearray(array.nbytes)
    start, stop = _list_after(body, 0)
    # A proof by example that this list is the tensor.
    if not array.size or not pack_quickly(dtype, array.size, body[start:stop], room) or room != array.tobytes():
        return None
    lists = []
    at = 0
    for _ in outputs:
        lists.append(_list_after(answer, at))
        at = lists[-1][1]
    ends = [start for start, _ in lists[1:]] + [len(answer)]
    described = tuple(
        JsonOutput(output.name, tensor, output.array.dtype, output.array.size, answer[stop:end])
        for (tensor, output), (_, stop), end in zip(outputs, lists, ends, strict=True)
    )
    if any(output.dtype.hasobject for output in described):
        return None
    front = render_front(head, 0).removesuffix(_NO_LENGTH)
    before, opening = asked.up_to(start), told.up_to(lists[0][0])
    return JsonPlan(rows, before, body[stop:], dtype, array.size, list(head), front, opening, described)


def _list_after(text: bytes, at: int) -> tuple[int, int]:
    """Return where the list under the next ``"data"`` begins and ends, if it holds no strings; twice 0 if none."""
    start = text.find(b"[", text.find(_DATA, at))
    depth = 0
    for bracket in _BRACKETS.finditer(text, start):
        depth += 1 if bracket.group() == b"[" else -1
        if depth == 0:
            return start, bracket.end()
    return 0, 0
