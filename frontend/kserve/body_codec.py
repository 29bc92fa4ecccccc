"""Inference bodies over HTTP: JSON, and the binary tensor data extension (protocols.md 1.2, 1.3).

A body is a JSON document, followed by raw tensors in the order of the inputs that carry ``binary_data_size`` when the
header ``Inference-Header-Content-Length`` says where the JSON ends. Length 0 means: the body is the raw tensor of a
model with one input, and every output is wanted raw.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw

from engines.errors import InvalidInput
from frontend.inference import InferRequest, InferResponse, InputTensor, OutputTensor, Promised, RequestedOutput
from frontend.kserve.classification import classify
from frontend.kserve.client_memory import read_range
from frontend.kserve.json_data import NESTING_TEXT, decode_data, encode_data
from frontend.kserve.parameters import (
    classification_parameter,
    flag_parameter,
    read_parameters,
)
from frontend.kserve.raw_data import Buffer, raw_part
from frontend.kserve.shapes import read_datatype, read_shape, refuse_large, refuse_many
from frontend.kserve.status import JSON_TYPE
from frontend.settings import EndpointSettings

BINARY_TYPE: Final = "application/octet-stream"
HEADER_LENGTH: Final = "Inference-Header-Content-Length"
RAW_REQUEST: Final = ""
"""Name and datatype of the input of a raw request: ``checks.check`` takes both, and the shape, from the model."""

Headers = list[tuple[str, str]]


_NO_DATA: Final = Raw()


class _Input(msgspec.Struct, gc=False):
    name: str
    shape: tuple[int, ...]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Raw = _NO_DATA


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: dict[str, Any] | None = None


class _Body(msgspec.Struct, gc=False):
    inputs: list[_Input]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


_NO_BINARY: Final = memoryview(b"")
_decoder: Final = msgspec.json.Decoder(_Body)
_encoder: Final = msgspec.json.Encoder()


def decode_infer(
    model: str, version: str, body: Buffer, header_length: int | None, limits: EndpointSettings
) -> InferRequest:
    """Return the request in a decompressed body; raw tensors borrow it.

    Args:
        header_length: value of ``Inference-Header-Content-Length``, None if the header was absent.

    Raises:
        InvalidInput: the body contradicts the protocol; names the tensor, what was expected and what came.
        TooLarge: the body, or the number of tensors, is over its limit.
        Unsupported: a tensor lies in client shared memory, which is not offered.
    """
    refuse_large(len(body), limits)
    if header_length is None:
        return _request(model, version, body, _NO_BINARY, limits)
    view = memoryview(body)
    if header_length == 0:
        tensor = InputTensor(RAW_REQUEST, RAW_REQUEST, (), raw=view)
        return InferRequest(model, version, "", [tensor], binary_default=True)
    if not 0 <= header_length <= len(view):
        raise InvalidInput(f"{HEADER_LENGTH} is {header_length}, expected 0 to {len(view)}, the length of the body")
    return _request(model, version, view[:header_length], view[header_length:], limits)


def decode_promised(
    model: str, version: str, text: Buffer, tensor_bytes: int, limits: EndpointSettings
) -> InferRequest:
    """Return the request in the JSON of a body whose raw tensors are still to come; their ``room`` is a ``Promised``.

    Args:
        text: what lies before the raw tensors, not empty.
        tensor_bytes: of all raw tensors together.

    Raises:
        ServingError: as ``decode_infer`` would of the whole body.
    """
    return _request(model, version, text, tensor_bytes, limits)


def _request(
    model: str, version: str, text: Buffer, binary: memoryview | int, limits: EndpointSettings
) -> InferRequest:
    document = _parse(text)
    refuse_many(len(document.inputs), "inputs", limits)
    options = read_parameters(document.parameters) if document.parameters else None
    inputs = _read_inputs(model, document.inputs, binary, limits)
    outputs = _read_outputs(document.outputs, limits) if document.outputs else None
    if options is None:
        return InferRequest(model, version, document.id or "", inputs, outputs)
    return InferRequest(
        model,
        version,
        document.id or "",
        inputs,
        outputs,
        options.values,
        options.binary_default,
        options.timeout_us,
        explain=options.explain,
    )


def encode_infer(response: InferResponse, binary_default: bool = False) -> tuple[Headers, list[Buffer]]:
    """Return content headers and the body's parts; parts borrow the response's arrays until it is released.

    Args:
        binary_default: ``binary_default`` of the request: the form of outputs whose own ``binary`` is None.

    Raises:
        InvalidInput: an output cannot be told in JSON (FP16, BF16, NaN or infinity, BYTES that are no UTF-8); the
            message names it and says to ask for the binary form. JSON that a strict parser refuses is never sent.
    """
    outputs: list[dict[str, Any]] = []
    parts: list[Buffer] = []
    for tensor in response.outputs:
        output = classify(tensor) if tensor.classification else tensor
        described: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype,
            "shape": output.array.shape,
        }
        if output.placed:
            # Not even "parameters": one client takes them for a promise of binary data.
            pass
        elif _is_binary(output, binary_default):
            part = raw_part(output)
            described["parameters"] = {"binary_data_size": len(part)}
            parts.append(part)
        else:
            described["data"] = encode_data(output)
        outputs.append(described)
    document: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.request_id:
        document["id"] = response.request_id
    if response.parameters:
        document["parameters"] = response.parameters
    document["outputs"] = outputs
    header = _encoder.encode(document)
    if not parts:
        return [("Content-Type", JSON_TYPE)], [header]
    return [("Content-Type", BINARY_TYPE), (HEADER_LENGTH, str(len(header)))], [header, *parts]


def _parse(text: Buffer) -> _Body:
    if not len(text):
        raise InvalidInput("failed to parse the request JSON buffer: The document is empty")
    try:
        return _decoder.decode(text)
    except RecursionError as error:
        raise InvalidInput(f"failed to parse the request JSON buffer: {NESTING_TEXT}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidInput(f"failed to parse the request JSON buffer: {error}") from error


def _read_inputs(
    model: str, described: list[_Input], binary: memoryview | int, limits: EndpointSettings
) -> list[InputTensor]:
    """``binary``: the raw tensors, or how many bytes of them will come."""
    inputs: list[InputTensor] = []
    at = 0
    binary_bytes = binary if isinstance(binary, int) else len(binary)
    for item in described:
        dtype = read_datatype(item.name, item.datatype)
        shape = read_shape(item.name, item.shape)
        size = region = None
        if parameters := item.parameters:
            size = parameters.get("binary_data_size")
            if size is None or len(parameters) > 1:
                region = read_range(parameters, f"input '{item.name}'", limits.system_shared_memory)
        has_data = item.data is not _NO_DATA
        if region is not None:
            if has_data or size is not None:
                raise InvalidInput(
                    f"input '{item.name}': Input must set only one of the following fields: 'data', 'binary_data_size' "
                    "in 'parameters', 'shared_memory_region' in 'parameters'. But more than one is set"
                )
            inputs.append(InputTensor(item.name, item.datatype, shape, region=region))
            continue
        if (size is None) is not has_data:
            raise InvalidInput(
                f"input '{item.name}': Input must set only one of the following fields: 'data', 'binary_data_size' in "
                f"'parameters'. But {'no field is set' if size is None else 'both are set'}"
            )
        if has_data:
            array = decode_data(item.name, dtype, shape, item.data, limits.max_bytes_element)
            inputs.append(InputTensor(item.name, item.datatype, shape, array=array))
            continue
        if type(size) is not int or size < 0:
            raise InvalidInput(f"input '{item.name}': Unable to parse 'binary_data_size': expected an integer >= 0")
        if size > binary_bytes - at:
            raise InvalidInput(
                f"unexpected size for input '{item.name}': binary_data_size is {size} bytes, "
                f"the body has {binary_bytes - at} left after its JSON and the tensors before"
            )
        if isinstance(binary, int):
            inputs.append(InputTensor(item.name, item.datatype, shape, room=Promised(size)))
        else:
            inputs.append(InputTensor(item.name, item.datatype, shape, raw=binary[at : at + size]))
        at += size
    if at != binary_bytes:
        raise InvalidInput(
            f"unexpected additional input data for model '{model}': "
            f"the inputs' binary_data_size add up to {at} bytes, the body has {binary_bytes}"
        )
    return inputs


def _read_outputs(described: list[_Output], limits: EndpointSettings) -> list[RequestedOutput]:
    refuse_many(len(described), "outputs", limits)
    outputs: list[RequestedOutput] = []
    for item in described:
        output = RequestedOutput(item.name)
        if parameters := item.parameters:
            where = f"output '{item.name}'"
            for key, value in parameters.items():
                if key == "binary_data":
                    output.binary = flag_parameter(key, value, where)
                elif key == "classification":
                    output.classification = classification_parameter(value, item.name)
            if output.binary is None or len(parameters) > 1:
                output.region = read_range(parameters, where, limits.system_shared_memory)
        outputs.append(output)
    return outputs


def _is_binary(output: OutputTensor, binary_default: bool) -> bool:
    return binary_default if output.binary is None else output.binary
