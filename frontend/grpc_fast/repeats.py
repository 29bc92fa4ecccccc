"""ModelInfer calls that repeat an earlier one but for id and elements: recognised by their bytes, not taken apart.

As ``frontend.kserve.repeats`` does for HTTP. A client writes the same bytes in front of a model's rows every time:
model and version, then the id if there is one, then the description of the tensors, then each raw tensor behind its
length. Protobuf reads fields one after the other, so equal bytes are equal fields. After the first such call was
answered the ordinary way, all that follows from those bytes is known: where in the message each tensor lies, how the
rows are placed, and all of the answer but the outputs' bytes. A later call then is one object, a comparison, the
copies and the answer.

A template is made only of what the bytes decide (``frontend.kserve.repeats`` lists it), and holds for the model table
it was made under; a new table forgets them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from frontend.attempts import Attempts
from frontend.inference import InferRequest, InferResponse
from frontend.kserve.proto import message_class
from frontend.kserve.wire import LENGTH_DELIMITED, key, read_varint, skip_field, varint
from frontend.placed_call import Rows, rows_of
from frontend.serving import Serving
from worker.channel.messages import ModelEntry

if TYPE_CHECKING:
    from frontend.inference import OutputTensor

MAX_TEMPLATES: Final = 256
"""Kinds of message remembered per frontend; when more occur all are forgotten, and those in use come back at once."""
MAX_SAME_SIZE: Final = 4
"""Of them those of one size: each is compared in turn."""
MAX_DESCRIPTION_BYTES: Final = 2048
MAX_ANSWER_BYTES: Final = 32 * 1024
"""Outputs are copied; larger ones are better lent, as the ordinary way does."""
PREFIX_BYTES: Final = 5
"""Compression flag and length in front of a message."""

_MODEL, _VERSION, _ID, _RAW = (key(field, LENGTH_DELIMITED)[0] for field in (1, 2, 3, 7))
_OUTPUT_KEY: Final = key(5, LENGTH_DELIMITED)
_RAW_OUTPUT_KEY: Final = key(6, LENGTH_DELIMITED)
_SHORT: Final = 0x80
"""Lengths below take one byte."""


class Layout(NamedTuple):
    """Where the parts of a message lie: model and version, id, description, raw tensors (first byte and end)."""

    head_end: int
    id_end: int
    raws: list[tuple[int, int]]


class Template:
    """What is known of messages that differ in id and elements only.

    Attributes:
        rows: what is submitted.
        data_bytes: of a framed message without an id.
        opening: all of it up to the first element.
        head, description: model and version; what follows the id, up to the first element.
        between: what stands before each further tensor, and where, from the first element on.
        outputs: of each the number of its tensor in a placement, where inputs count first, its bytes, and what stands
            before them.
        answer_bytes, answer_opening: of a framed answer without an id.
        answer_head, answer_description: of an answer, before and after the id.
    """

    __slots__ = (
        "answer_bytes", "answer_description", "answer_head", "answer_opening", "between", "data_bytes", "description",
        "head", "opening", "outputs", "rows",
    )  # fmt: skip

    def __init__(self, message: bytes, layout: Layout, rows: Rows, answer: _AnswerParts) -> None:
        first = layout.raws[0][0]
        self.rows = rows
        self.head = message[: layout.head_end]
        self.description = message[layout.id_end : first]
        self.data_bytes = PREFIX_BYTES + len(message) - (layout.id_end - layout.head_end)
        self.opening = framed(self.data_bytes - PREFIX_BYTES, self.head, self.description)
        self.between = tuple(
            (end - first, message[end:start])
            for (_, end), (start, _) in zip(layout.raws, layout.raws[1:], strict=False)
        )
        self.outputs = answer.outputs
        self.answer_head = answer.head
        self.answer_description = answer.description
        self.answer_bytes = PREFIX_BYTES + answer.message_bytes
        self.answer_opening = framed(answer.message_bytes, answer.head, answer.description)

    def fits(self, data: bytes, first: int) -> bool:
        """Return whether what stands between the tensors, of which the first begins at ``first``, is as it was."""
        return all(data.startswith(text, first + offset) for offset, text in self.between)

    def opening_under(self, request_id: bytes) -> tuple[bytes, int]:
        """Return a framed answer up to its first element, and the size of all of it."""
        if not request_id:
            return self.answer_opening, self.answer_bytes
        told = bytes((_ID, len(request_id))) + request_id
        size = self.answer_bytes + len(told)
        return framed(size - PREFIX_BYTES, self.answer_head, told, self.answer_description), size


Found = tuple[Template, bytes, int, bytes]
"""A message's template, the bytes it lies in, where in them its elements begin, and its id."""


class Templates:
    """Templates of one server."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._table: object = None
        self._count = 0
        self._attempts = Attempts()
        self._by_bytes: dict[int, list[Template]] = {}

    def find(self, data: bytes, at: int, stop: int) -> Found | None:
        """Return what is known of the framed message ``data[at:stop]``."""
        if self._serving.entries() is not self._table:
            return None
        for template in self._by_bytes.get(stop - at, ()):
            if data.startswith(template.opening, at):
                first = at + len(template.opening)
                if template.between and not template.fits(data, first):
                    return None
                return template, data, first, b""
        return self._find_with_id(data, at, stop)

    def learn(self, now_ns: int, message: bytes, request: InferRequest, table: object, response: InferResponse,
              answer: Iterable[Any]) -> None:  # fmt: skip
        """Remember what an answered request has shown, if it is of the kind that repeats.

        Args:
            table: ``entries`` as it was when the request began; after a change nothing says which model has answered.
            answer: as it was sent, in parts.
        """
        entries = self._serving.entries()
        if entries is not table:
            return
        if entries is not self._table:
            self._table, self._count = entries, 0
            self._by_bytes.clear()
        known = framed(len(message), message)
        # Many of one kind may be under way before the first is answered.
        if self.find(known, 0, len(known)) is not None or not self._attempts.take(now_ns):
            return
        template = _template(self._serving.entry(request.model, request.version), message, request, response)
        if template is None:
            return
        # Only what makes the very same answer is remembered: the fast way must not know the protocol better.
        if _answer(template, request, response)[PREFIX_BYTES:] != b"".join(answer):
            return
        if self._count >= MAX_TEMPLATES:
            self._count = 0
            self._by_bytes.clear()
        same = self._by_bytes.setdefault(template.data_bytes, [])
        same.insert(0, template)
        self._count += 1 if len(same) <= MAX_SAME_SIZE else 0
        del same[MAX_SAME_SIZE:]

    def _find_with_id(self, data: bytes, at: int, stop: int) -> Found | None:
        message = at + PREFIX_BYTES
        try:
            if data[message] != _MODEL or data[message + 1] >= _SHORT:
                return None
            end = message + 2 + data[message + 1]
            if data[end] == _VERSION:
                end += 2 + data[end + 1]
            size = data[end + 1]
            if data[end] != _ID or size >= _SHORT or end + size > stop:
                return None
        except IndexError:
            return None
        for template in self._by_bytes.get(stop - at - 2 - size, ()):
            if data.startswith(template.head, message) and data.startswith(template.description, end + 2 + size):
                first = end + 2 + size + len(template.description)
                request_id = data[end + 2 : end + 2 + size]
                # Flag and length in one: an uncompressed message of just this size.
                whole = int.from_bytes(data[at:message], "big") == stop - message
                if whole and len(template.head) == end - message and request_id.isascii():
                    return (template, data, first, request_id) if template.fits(data, first) else None
        return None


class _AnswerParts(NamedTuple):
    """Of an answer: what is always the same. ``outputs`` as in ``Template``."""

    head: bytes
    description: bytes
    outputs: tuple[tuple[int, int, bytes], ...]
    message_bytes: int


def framed(message_bytes: int, *parts: bytes) -> bytes:
    """Return the beginning of a framed, uncompressed message."""
    return b"".join((message_bytes.to_bytes(PREFIX_BYTES, "big"), *parts))


def layout_of(message: bytes) -> Layout | None:
    """Return where the parts of a ModelInferRequest lie if they stand in the order of every known client."""
    at = head_end = id_end = 0
    raws: list[tuple[int, int]] = []
    seen = 0
    try:
        while at < len(message):
            field, end = skip_field(message, at)
            if field in (1, 2, 3):
                if raws or field <= seen or message[at + 1] >= _SHORT:
                    return None
                seen = field
                id_end = end
                head_end = end if field < 3 else head_end
            elif field == 7:
                if message[at] != _RAW:
                    return None
                _, start = read_varint(message, at + 1)
                raws.append((start, end))
            elif raws:
                return None
            else:
                seen = 7
            at = end
    except (IndexError, ValueError):
        return None
    if not raws or not head_end or raws[0][0] - id_end > MAX_DESCRIPTION_BYTES:
        return None
    return Layout(head_end, id_end, raws)


def _template(entry: ModelEntry, message: bytes, request: InferRequest, response: InferResponse) -> Template | None:
    signature = entry.signature
    if signature is None or request.explain or response.parameters:
        return None
    if response.model != entry.name or response.version != entry.version:
        return None
    layout = layout_of(message)
    if layout is None or any(tensor.raw is None for tensor in request.inputs):
        return None
    if not len(layout.raws) == len(request.inputs) == len(signature.inputs):
        return None
    first = layout.raws[0][0]
    rows = rows_of(entry, request, [start - first for start, _ in layout.raws])
    if rows is None:
        return None
    names = [spec.name for spec in (*signature.inputs, *signature.outputs)]
    answer = _answer_parts(names, len(signature.inputs), response)
    return None if answer is None else Template(message, layout, rows, answer)


def _answer(template: Template, request: InferRequest, response: InferResponse) -> bytes:
    opening, _ = template.opening_under(request.request_id.encode())
    parts = [opening]
    for output, (_, _, before) in zip(response.outputs, template.outputs, strict=True):
        parts += (before, output.array.tobytes())
    return b"".join(parts)


def _answer_parts(names: Sequence[str], first: int, response: InferResponse) -> _AnswerParts | None:
    response_class: Any = message_class("ModelInferResponse")
    described: list[bytes] = []
    outputs: list[tuple[int, int, bytes]] = []
    elements_bytes = 0
    for output in response.outputs:
        if output.placed or output.classification or output.array.dtype.hasobject or output.name not in names[first:]:
            return None
        described.append(_described(output))
        size = output.array.nbytes
        elements_bytes += size
        outputs.append((names.index(output.name, first), size, _RAW_OUTPUT_KEY + varint(size)))
    if not outputs or elements_bytes > MAX_ANSWER_BYTES:
        return None
    # What stands before the first output's elements belongs to the description.
    opening: bytes = response_class(model_name=response.model, model_version=response.version).SerializeToString()
    description = b"".join(described) + outputs[0][2]
    outputs[0] = (*outputs[0][:2], b"")
    between_bytes = sum(len(before) for *_, before in outputs)
    message_bytes = len(opening) + len(description) + between_bytes + elements_bytes
    return _AnswerParts(opening, description, tuple(outputs), message_bytes)


def _described(output: OutputTensor) -> bytes:
    message: Any = message_class("ModelInferResponse.InferOutputTensor")
    data: bytes = message(name=output.name, datatype=output.datatype, shape=output.array.shape).SerializeToString()
    return _OUTPUT_KEY + varint(len(data)) + data
