"""Inference messages over gRPC (protocols.md 1.12), to and from the protocol-neutral request and response.

Protobuf copies every tensor twice on the way in (into its own memory, then into a bytes object) and twice out. Large
messages are therefore taken apart here: the raw tensors are cut out of the message's bytes as views, protobuf parses
the rest; on the way out they are appended to what protobuf wrote. Both rely on one rule of the wire format: a field's
encoding is independent of its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from engines.errors import InvalidInput, ServingError, TooLarge
from engines.tensor import DType, NDArray, element_count
from frontend.inference import InferRequest, InferResponse, InputTensor, Parameter, RequestedOutput
from frontend.kserve.classification import classify
from frontend.kserve.client_memory import read_range
from frontend.kserve.json_data import HALF_TYPES
from frontend.kserve.parameters import classification_parameter, read_parameters
from frontend.kserve.proto import message_class
from frontend.kserve.raw_data import Buffer, raw_part
from frontend.kserve.shapes import read_datatype, read_shape, refuse_large, refuse_many, shaped, text_of
from frontend.kserve.status import error_text
from frontend.kserve.wire import LENGTH_DELIMITED, cut_field, key, varint
from frontend.settings import EndpointSettings

_Request: Final[Any] = message_class("ModelInferRequest")
_Response: Final[Any] = message_class("ModelInferResponse")
_StreamResponse: Final[Any] = message_class("ModelStreamInferResponse")

_RAW_INPUT_FIELD: Final = 7
_RAW_OUTPUT_KEY: Final = key(6, LENGTH_DELIMITED)
_STREAM_RESPONSE_KEY: Final = key(2, LENGTH_DELIMITED)
CUT_BYTES: Final = 32 * 1024
"""Messages from this size on are taken apart: below it protobuf's copies cost less than the walk over the fields."""
_OTHER_FIELDS: Final = 1024
"""Fields of a large message beside its tensors; with more, parsing would take many times the message's memory."""
_CONTENTS: Final[dict[str, str]] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class Envelope:
    """A parsed message whose raw tensors still lie in the bytes it came in."""

    __slots__ = ("message", "raws")

    def __init__(self, message: Any, raws: Sequence[Buffer]) -> None:
        self.message = message
        self.raws = raws

    @property
    def request_id(self) -> str:
        """The id to answer under, also when the rest of the message is wrong."""
        request_id: str = self.message.id
        return request_id


def open_envelope(data: Buffer, limits: EndpointSettings) -> Envelope:
    """Parse a ModelInferRequest.

    Raises:
        InvalidInput: it is no such message.
        TooLarge: it is over ``max_request_bytes``, or of very many fields.
    """
    refuse_large(len(data), limits)
    try:
        if len(data) >= CUT_BYTES:
            most = _OTHER_FIELDS + 3 * limits.max_tensors
            cut = cut_field(data, _RAW_INPUT_FIELD, most)
            if cut is not None:
                rest, raws, fields = cut
                if fields > most:
                    raise TooLarge(
                        f"request has more than {most} fields, the limit max_tensors is {limits.max_tensors}"
                    )
                return Envelope(_Request.FromString(rest), raws)
        message = _Request.FromString(data)
    except DecodeError as error:
        raise InvalidInput(f"failed to parse the ModelInferRequest message: {error}") from error
    return Envelope(message, message.raw_input_contents)


def decode_infer(data: Buffer, limits: EndpointSettings) -> InferRequest:
    """Return the request in a ModelInferRequest; large raw tensors borrow ``data``.

    Raises:
        InvalidInput: the message contradicts the protocol; names the tensor, what was expected and what came.
        TooLarge: the message, or the number of tensors, is over its limit.
        Unsupported: a tensor lies in client shared memory, which is not offered.
    """
    return read_envelope(open_envelope(data, limits), limits)


def read_envelope(envelope: Envelope, limits: EndpointSettings) -> InferRequest:
    """Return the request of a parsed message; raises as ``decode_infer`` does."""
    message = envelope.message
    refuse_many(len(message.inputs), "inputs", limits)
    refuse_many(len(message.outputs), "outputs", limits)
    options = read_parameters(_parameters(message.parameters))
    outputs = [_read_output(item, limits) for item in message.outputs]
    return InferRequest(
        message.model_name,
        message.model_version,
        message.id,
        _read_inputs(message, envelope.raws, limits),
        outputs or None,
        options.values,
        binary_default=True,
        timeout_us=options.timeout_us,
        explain=options.explain,
    )


def encode_infer(response: InferResponse) -> bytes:
    """Return the serialised ModelInferResponse, every output raw; nothing borrows the response afterwards.

    Raises:
        InvalidInput: an output has no classes (classification).
    """
    return b"".join(infer_parts(response))


def encode_stream_infer(response: InferResponse) -> bytes:
    """Return the serialised ModelStreamInferResponse around a response; nothing borrows it afterwards."""
    return b"".join(stream_infer_parts(response))


def stream_infer_parts(response: InferResponse) -> list[Buffer]:
    """Return the parts of a ModelStreamInferResponse; those of large outputs borrow the response."""
    parts = infer_parts(response)
    return [_STREAM_RESPONSE_KEY + varint(sum(map(len, parts))), *parts]


def encode_stream_error(error: ServingError | str, request_id: str) -> bytes:
    """Return the serialised ModelStreamInferResponse that tells a failure under its request's id."""
    message = _StreamResponse(error_message=error_text(error))
    message.infer_response.id = request_id
    data: bytes = message.SerializeToString()
    return data


def infer_parts(response: InferResponse) -> list[Buffer]:
    """Return the parts of a serialised ModelInferResponse, every output raw; the outputs' parts borrow the response.

    Raises:
        InvalidInput: an output has no classes (classification).
    """
    message = _Response(model_name=response.model, model_version=response.version, id=response.request_id)
    for name, value in response.parameters.items():
        _set_parameter(message.parameters[name], value)
    parts: list[Buffer] = [b""]
    for tensor in response.outputs:
        output = classify(tensor) if tensor.classification else tensor
        message.outputs.add(name=output.name, datatype=output.datatype, shape=output.array.shape)
        # Clients count one raw part for every output, whether or not its data is there.
        raw = b"" if output.placed else raw_part(output)
        parts += (_RAW_OUTPUT_KEY, varint(len(raw)), raw)
    parts[0] = message.SerializeToString()
    return parts


def _set_parameter(parameter: Any, value: Parameter) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int():
            if value < 2**63:
                parameter.int64_param = value
            else:
                parameter.uint64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value


def _parameters(parameters: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, parameter in parameters.items():
        which = parameter.WhichOneof("parameter_choice")
        values[name] = None if which is None else getattr(parameter, which)
    return values


def _read_output(item: Any, limits: EndpointSettings) -> RequestedOutput:
    output = RequestedOutput(item.name, binary=True)
    if item.parameters:
        parameters = _parameters(item.parameters)
        output.region = read_range(parameters, f"output '{item.name}'", limits.system_shared_memory)
        if "classification" in parameters:
            output.classification = classification_parameter(parameters["classification"], item.name)
    return output


def _read_inputs(message: Any, raws: Sequence[Buffer], limits: EndpointSettings) -> list[InputTensor]:
    model = message.model_name
    described = message.inputs
    if len(raws) > len(described):
        raise InvalidInput(
            f"unexpected additional input data for model '{model}': "
            f"{len(described)} inputs, but {len(raws)} buffers in raw_input_contents"
        )
    inputs: list[InputTensor] = []
    index = 0
    for item in described:
        name = item.name
        dtype = read_datatype(name, item.datatype)
        shape = read_shape(name, item.shape)
        contents = item.contents if item.HasField("contents") else None
        region = None
        if item.parameters:
            region = read_range(_parameters(item.parameters), f"input '{name}'", limits.system_shared_memory)
        if region is not None:
            if contents is not None and contents.ListFields():
                raise InvalidInput(
                    f"contents field must not be specified when using shared memory for '{name}' for model '{model}'"
                )
            inputs.append(InputTensor(name, item.datatype, shape, region=region))
            continue
        if not raws:
            array = _read_contents(name, dtype, shape, contents, model, limits)
            inputs.append(InputTensor(name, item.datatype, shape, array=array))
            continue
        if contents is not None and contents.ListFields():
            raise InvalidInput(
                f"contents field must not be specified when using raw_input_contents for '{name}' for model '{model}'"
            )
        if index >= len(raws):
            raise InvalidInput(
                f"unable to find data for input tensor '{name}' for model '{model}' in request: "
                f"{len(described)} inputs, but {len(raws)} buffers in raw_input_contents"
            )
        inputs.append(InputTensor(name, item.datatype, shape, raw=raws[index]))
        index += 1
    if index < len(raws):
        raise InvalidInput(
            f"unexpected additional input data for model '{model}': "
            f"{index} inputs outside of shared memory, but {len(raws)} buffers in raw_input_contents"
        )
    return inputs


def _read_contents(
    name: str, dtype: DType, shape: tuple[int, ...], contents: Any, model: str, limits: EndpointSettings
) -> NDArray:
    if dtype.wire in HALF_TYPES:
        raise InvalidInput(
            f"input '{name}': {dtype.wire} data has no typed contents, send it in raw_input_contents (binary data)"
        )
    field = _CONTENTS[dtype.wire]
    filled = [] if contents is None else [descriptor.name for descriptor, _ in contents.ListFields()]
    count = element_count(shape)
    if filled and filled != [field]:
        raise InvalidInput(
            f"input '{name}' of datatype '{dtype.wire}' must set only '{field}' in contents, got {', '.join(filled)}"
        )
    if not filled and count:
        raise InvalidInput(
            f"unable to find data for input tensor '{name}' for model '{model}' in request: "
            f"expected {count} elements in contents.{field} or a buffer in raw_input_contents"
        )
    values = getattr(contents, field) if filled else ()
    if len(values) != count:
        raise InvalidInput(
            f"unexpected number of elements in contents.{field} of input '{name}' for model '{model}': "
            f"shape {text_of(shape)} holds {count}, got {len(values)}"
        )
    return shaped(name, _array(name, dtype, values, limits), shape)


def _array(name: str, dtype: DType, values: Any, limits: EndpointSettings) -> NDArray:
    if dtype.numpy.kind == "O":
        array = np.empty(len(values), dtype=np.object_)
        for index, element in enumerate(values):
            if len(element) > limits.max_bytes_element:
                raise TooLarge(
                    f"input '{name}': element {index} is {len(element)} bytes, "
                    f"the limit max_bytes_element is {limits.max_bytes_element}"
                )
            array[index] = element
        return array
    try:
        return np.fromiter(values, dtype=dtype.numpy, count=len(values))
    except OverflowError as error:
        bounds = np.iinfo(dtype.numpy)
        at = next(index for index, value in enumerate(values) if not bounds.min <= value <= bounds.max)
        raise InvalidInput(
            f"input '{name}': element {at} is {values[at]}, {dtype.wire} holds {bounds.min} to {bounds.max}"
        ) from error
