"""What a request and a response cost at the protocol's edge, without sockets: decode plus check, and encode.

Run: ``pytest bench/test_codec.py``. Figures are per call; compare columns of one run only.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from engines.bundle.signature import Signature, Variant
from engines.tensor import TensorSpec
from frontend.inference import InferResponse, OutputTensor
from frontend.kserve import body_codec, grpc_codec
from frontend.kserve.checks import check
from frontend.kserve.proto import message_class
from frontend.settings import EndpointSettings
from worker.channel.messages import ModelEntry

LIMITS = EndpointSettings()
SIZES = {"256 B": 64, "3 MiB": 3 << 18}


def echo_entry() -> ModelEntry:
    spec = TensorSpec("x", "f32", (-1, -1), 0)
    variant = Variant((), ((-1, -1),), ((-1, -1),), (False,))
    signature = Signature((spec,), (spec,), (spec,), (spec,), (1, 8), (variant,))
    return ModelEntry(model_id=1, name="m", version="1", state="READY", signature=signature)


ENTRY = echo_entry()


def values_of(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).random((1, count), dtype=np.float32)


def http_binary_body(values: np.ndarray[Any, Any]) -> tuple[bytes, int]:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(values.shape)}
    tensor["parameters"] = {"binary_data_size": values.nbytes}
    header = json.dumps({"id": "1", "inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return header + values.tobytes(), len(header)


def http_json_body(values: np.ndarray[Any, Any], nested: bool) -> bytes:
    data = values.tolist() if nested else values.ravel().tolist()
    tensor = {"name": "x", "datatype": "FP32", "shape": list(values.shape), "data": data}
    return json.dumps({"id": "1", "inputs": [tensor]}).encode()


def grpc_message(values: np.ndarray[Any, Any]) -> bytes:
    message: Any = message_class("ModelInferRequest")(model_name="m", id="1")
    message.inputs.add(name="x", datatype="FP32", shape=values.shape)
    message.raw_input_contents.append(values.tobytes())
    assert isinstance(message, Message)
    data: bytes = message.SerializeToString()
    return data


@pytest.mark.parametrize("size", SIZES)
def test_decode_http_binary(benchmark: Any, size: str) -> None:
    body, header_length = http_binary_body(values_of(SIZES[size]))

    def run() -> int:
        return check(body_codec.decode_infer("m", "", body, header_length, LIMITS), ENTRY, LIMITS).rows

    assert benchmark(run) == 1


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("count", [64, 3 << 18])
def test_decode_http_json(benchmark: Any, count: int, nested: bool) -> None:
    body = http_json_body(values_of(count), nested)

    def run() -> int:
        request = body_codec.decode_infer("m", "", body, None, LIMITS)
        return len(check(request, ENTRY, LIMITS).inputs)

    assert benchmark(run) == 1


@pytest.mark.parametrize("size", SIZES)
def test_decode_grpc_raw(benchmark: Any, size: str) -> None:
    data = grpc_message(values_of(SIZES[size]))
    assert benchmark(lambda: check(grpc_codec.decode_infer(data, LIMITS), ENTRY, LIMITS).rows) == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ["http binary", "http json", "grpc"])
def test_encode(benchmark: Any, form: str, size: str) -> None:
    output = OutputTensor("y", "FP32", values_of(SIZES[size]))
    response = InferResponse("m", "1", "1", [output])
    match form:
        case "http binary":
            assert len(benchmark(lambda: body_codec.encode_infer(response, True))[1]) == 2
        case "http json":
            assert len(benchmark(lambda: body_codec.encode_infer(response))[1]) == 1
        case _:
            assert benchmark(lambda: grpc_codec.encode_infer(response))


@pytest.mark.parametrize("cut", [False, True], ids=["protobuf copies", "cut out"])
def test_raw_tensor_of_a_large_message(benchmark: Any, cut: bool) -> None:
    """Why large messages are taken apart: the same 3 MiB tensor read by protobuf alone."""
    data = grpc_message(values_of(SIZES["3 MiB"]))
    request: Any = message_class("ModelInferRequest")

    def by_protobuf() -> int:
        return len(request.FromString(data).raw_input_contents[0])

    def by_cutting() -> int:
        return len(grpc_codec.open_envelope(data, LIMITS).raws[0])

    assert benchmark(by_cutting if cut else by_protobuf) == 3 << 20
