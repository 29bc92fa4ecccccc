"""Inference messages that look like earlier ones: decoded and encoded from what was worked out then.

A client sends the same model, tensors and parameters with every request; only the id and the elements differ. In a
message as every known client writes it, model, version and id come first and the raw tensors last, so what lies
between is compared with remembered messages instead of parsed. That is right because protobuf reads fields one after
the other: equal bytes are equal fields. Whatever differs goes to ``grpc_codec``, which decides what it means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from frontend.inference import InferRequest, InferResponse, InputTensor, OutputTensor, Parameter, RequestedOutput
from frontend.kserve.grpc_codec import decode_infer, infer_parts
from frontend.kserve.proto import message_class
from frontend.kserve.raw_data import Buffer, raw_part
from frontend.kserve.shapes import refuse_large
from frontend.kserve.wire import LENGTH_DELIMITED, key, read_varint, skip_field, varint
from frontend.settings import EndpointSettings

MAX_HEADS: Final = 256
"""Models (name and version) whose messages are remembered at once."""
MAX_BODIES: Final = 4
"""Messages remembered per model: shapes in use at the same time; the one used last is tried first."""
MAX_BODY_BYTES: Final = 2048
MAX_PIECES: Final = 1024
"""Descriptions of outputs remembered at once."""
SMALL_BYTES: Final = 32 * 1024
"""Outputs together up to this size are copied into one part."""

_NAME, _VERSION, _ID, _RAW = (key(field, LENGTH_DELIMITED)[0] for field in (1, 2, 3, 7))
_FIELDS_APART: Final = frozenset((1, 2, 3, 7))
_RAW_OUTPUT_KEY: Final = key(6, LENGTH_DELIMITED)
_OUTPUT_KEY: Final = key(5, LENGTH_DELIMITED)
_ID_KEY: Final = key(3, LENGTH_DELIMITED)


@dataclass(frozen=True, slots=True)
class _Body:
    """What lies between id and raw tensors, and the request that it makes. ``inputs``: name, datatype, shape."""

    data: bytes
    version: str
    model: str
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, int], ...] | None
    parameters: dict[str, Parameter]
    timeout_us: int
    explain: bool


class RequestTemplates:
    """Decodes the ModelInferRequests of one server."""

    def __init__(self, limits: EndpointSettings) -> None:
        self._limits = limits
        self._bodies: dict[bytes, list[_Body]] = {}

    def decode(self, data: bytes | memoryview) -> InferRequest:
        """Return the request in a message; its raw tensors borrow it. Raises as ``grpc_codec.decode_infer`` does."""
        refuse_large(len(data), self._limits)
        try:
            head_end = _head_end(data)
            at = head_end
            request_id = ""
            if data[at] == _ID:
                size = data[at + 1]
                if size >= 0x80:
                    return decode_infer(data, self._limits)
                at += 2 + size
                request_id = str(data[at - size : at], "utf-8")
            bodies = self._bodies.get(bytes(data[:head_end]))
            if bodies is not None:
                for index, body in enumerate(bodies):
                    stop = at + len(body.data)
                    if data[at:stop] == body.data:
                        request = _of_template(body, request_id, data, stop)
                        if request is not None:
                            if index:
                                bodies.insert(0, bodies.pop(index))
                            return request
        except (IndexError, UnicodeDecodeError):
            # No message as clients write it.
            return decode_infer(data, self._limits)
        request = decode_infer(data, self._limits)
        self._learn(data, head_end, at, request)
        return request

    def _learn(self, data: bytes | memoryview, head_end: int, at: int, request: InferRequest) -> None:
        stop = _body_end(data, at)
        if stop - at > MAX_BODY_BYTES or not request.inputs or any(tensor.raw is None for tensor in request.inputs):
            return
        outputs = request.outputs
        if outputs is not None and any(output.region is not None for output in outputs):
            return
        body = _Body(
            bytes(data[at:stop]),
            request.version,
            request.model,
            tuple((tensor.name, tensor.datatype, tensor.shape) for tensor in request.inputs),
            None if outputs is None else tuple((output.name, output.classification) for output in outputs),
            dict(request.parameters),
            request.timeout_us,
            request.explain,
        )
        # Only what decodes to the very same is remembered: the fast way must not know the protocol better.
        if stop == len(data) or _of_template(body, request.request_id, data, stop) != request:
            return
        if len(self._bodies) >= MAX_HEADS:
            self._bodies.clear()
        bodies = self._bodies.setdefault(bytes(data[:head_end]), [])
        bodies.insert(0, body)
        del bodies[MAX_BODIES:]


class ResponseTemplates:
    """Encodes the ModelInferResponses of one server."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[object, ...], bytes] = {}

    def encode(self, response: InferResponse) -> list[Buffer]:
        """Return the parts of the message; those of large outputs borrow the response.

        Raises:
            InvalidInput: an output has no classes (classification).
        """
        outputs = response.outputs
        if response.parameters:
            return infer_parts(response)
        size = 0
        for output in outputs:
            if output.classification or output.array.dtype.hasobject:
                return infer_parts(response)
            size += output.array.nbytes
        parts: list[Buffer] = [self._head(response.model, response.version)]
        if response.request_id:
            encoded = response.request_id.encode()
            parts += (_ID_KEY, varint(len(encoded)), encoded)
        for output in outputs:
            parts.append(self._output(output))
        small = size <= SMALL_BYTES
        for output in outputs:
            raw = b"" if output.placed else output.array.tobytes() if small else raw_part(output)
            parts += (_RAW_OUTPUT_KEY, varint(len(raw)), raw)
        return [b"".join(parts)] if small else parts

    def _head(self, model: str, version: str) -> bytes:
        known = self._pieces.get((model, version))
        if known is None:
            message = message_class("ModelInferResponse")
            data = message(model_name=model, model_version=version).SerializeToString()
            known = self._keep((model, version), data)
        return known

    def _output(self, output: OutputTensor) -> bytes:
        shape = output.array.shape
        piece_key = (output.name, output.datatype, shape)
        known = self._pieces.get(piece_key)
        if known is None:
            message = message_class("ModelInferResponse.InferOutputTensor")
            data = message(name=output.name, datatype=output.datatype, shape=shape).SerializeToString()
            known = self._keep(piece_key, _OUTPUT_KEY + varint(len(data)) + data)
        return known

    def _keep(self, piece_key: tuple[object, ...], data: bytes) -> bytes:
        if len(self._pieces) >= MAX_PIECES:
            self._pieces.clear()
        self._pieces[piece_key] = data
        return data


def _head_end(data: bytes | memoryview) -> int:
    """Return where model name and version end, if a message begins with them and they are short; else 0.

    Raises:
        IndexError: the message ends there.
    """
    at = 0
    for field in (_NAME, _VERSION):
        if data[at] == field:
            size = data[at + 1]
            if size >= 0x80:
                return 0
            at += 2 + size
    return at


def _body_end(data: bytes | memoryview, at: int) -> int:
    """Return where the raw tensors begin, if nothing before them is a field that must not be there; else ``at``."""
    start = at
    try:
        while at < len(data) and data[at] != _RAW:
            field, end = skip_field(data, at)
            if field in _FIELDS_APART:
                return start
            at = end
    except (IndexError, ValueError):
        return start
    return at


def _of_template(body: _Body, request_id: str, data: bytes | memoryview, at: int) -> InferRequest | None:
    """Return the request that a remembered body and the raw tensors from ``at`` on make; None if they do not fit."""
    inputs: list[InputTensor] = []
    view = memoryview(data)
    end = len(data)
    for name, datatype, shape in body.inputs:
        if at + 1 >= end or data[at] != _RAW:
            return None
        size = data[at + 1]
        at += 2
        if size >= 0x80:
            upper = data[at]
            if upper < 0x80:
                size += (upper - 1) << 7
                at += 1
            else:
                try:
                    size, at = read_varint(data, at - 1)
                except ValueError:
                    return None
        inputs.append(InputTensor(name, datatype, shape, view[at : at + size]))
        at += size
    if at != end:
        return None
    outputs = None
    if body.outputs is not None:
        outputs = [RequestedOutput(name, True, classification) for name, classification in body.outputs]
    return InferRequest(
        body.model, body.version, request_id, inputs, outputs, dict(body.parameters), True, body.timeout_us,
        explain=body.explain,
    )  # fmt: skip
