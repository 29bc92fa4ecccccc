"""gRPC inference messages: typed contents, raw contents, and the walk that cuts large tensors out of a message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferResult, service_pb2

from engines.errors import InvalidInput, ServingError, TooLarge, Unsupported
from engines.tensor import BY_WIRE
from frontend.inference import InferResponse, OutputTensor
from frontend.kserve.grpc_codec import (
    CUT_BYTES,
    decode_infer,
    encode_infer,
    encode_stream_error,
    encode_stream_infer,
)
from frontend.kserve.wire import cut_field
from frontend.settings import EndpointSettings

LIMITS = EndpointSettings(max_bytes_element=64 * 1024)

CONTENTS: list[tuple[str, str, list[Any]]] = [
    ("BOOL", "bool_contents", [True, False]),
    ("INT8", "int_contents", [-128, 127]),
    ("INT16", "int_contents", [-32768, 32767]),
    ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
    ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
    ("UINT8", "uint_contents", [0, 255]),
    ("UINT16", "uint_contents", [0, 65535]),
    ("UINT32", "uint_contents", [0, 2**32 - 1]),
    ("UINT64", "uint64_contents", [0, 2**64 - 1]),
    ("FP32", "fp32_contents", [0.5, float("inf")]),
    ("FP64", "fp64_contents", [1e300, -0.0]),
    ("BYTES", "bytes_contents", [b"", b"\xff"]),
]


def typed(wire: str, fields: dict[str, list[Any]], shape: tuple[int, ...] = (2,)) -> Any:
    message = service_pb2.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="A", datatype=wire, shape=shape)
    for name, values in fields.items():
        getattr(tensor.contents, name).extend(values)
    return message


def decode(message: Any, limits: EndpointSettings = LIMITS) -> Any:
    return decode_infer(message.SerializeToString(), limits)


@pytest.mark.parametrize(("wire", "name", "values"), CONTENTS, ids=[case[0] for case in CONTENTS])
def test_typed_contents_of_every_datatype(wire: str, name: str, values: list[Any]) -> None:
    array = decode(typed(wire, {name: values})).inputs[0].array
    assert array.dtype == BY_WIRE[wire].numpy
    assert array.tolist() == values


WRONG: list[tuple[str, Any, str]] = [
    ("UINT8 256", typed("UINT8", {"uint_contents": [1, 256]}), "element 1 is 256, UINT8 holds 0 to 255"),
    ("INT8 128", typed("INT8", {"int_contents": [128, 0]}), "element 0 is 128, INT8 holds -128 to 127"),
    ("INT16 -32769", typed("INT16", {"int_contents": [-32769, 0]}), "INT16 holds -32768 to 32767"),
    (
        "wrong field",
        typed("FP32", {"int_contents": [1, 2]}),
        "must set only 'fp32_contents' in contents, got int_conte",
    ),
    ("two fields", typed("FP32", {"fp32_contents": [1, 2], "int_contents": [1]}), "must set only 'fp32_contents'"),
    ("too few", typed("FP32", {"fp32_contents": [1]}), r"shape \[2\] holds 2, got 1"),
    ("too many", typed("FP32", {"fp32_contents": [1, 2, 3]}), r"shape \[2\] holds 2, got 3"),
    ("none", typed("FP32", {}), "unable to find data for input tensor 'A' for model 'm' in request"),
    ("huge shape", typed("FP32", {"fp32_contents": [1]}, (2**62, 2**62)), "got 1"),
    (
        "FP16",
        typed("FP16", {"fp32_contents": [1, 2]}),
        "FP16 data has no typed contents, send it in raw_input_contents",
    ),
    (
        "BF16",
        typed("BF16", {"fp32_contents": [1, 2]}),
        "BF16 data has no typed contents, send it in raw_input_contents",
    ),
]


@pytest.mark.parametrize(("message", "text"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_typed_contents_that_do_not_fit_are_named(message: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        decode(message)


def test_an_empty_tensor_needs_no_contents() -> None:
    assert decode(typed("INT8", {}, (0, 3))).inputs[0].array.shape == (0, 3)


def test_a_long_element_of_typed_bytes_is_too_large() -> None:
    with pytest.raises(TooLarge, match="element 1 is 70000 bytes, the limit max_bytes_element is 65536"):
        decode(typed("BYTES", {"bytes_contents": [b"", bytes(70000)]}))


def raw_message(count: int = 2, buffers: int = 2, size: int = 8) -> Any:
    message = service_pb2.ModelInferRequest(model_name="m", id="i")
    for index in range(count):
        message.inputs.add(name=f"A{index}", datatype="UINT8", shape=[size])
    message.raw_input_contents.extend(bytes([index]) * size for index in range(buffers))
    return message


@pytest.mark.parametrize("size", [8, CUT_BYTES], ids=["parsed", "cut"])
def test_raw_contents_count_as_many_as_inputs(size: int) -> None:
    request = decode(raw_message(size=size))
    assert [bytes(tensor.raw) for tensor in request.inputs] == [bytes(size), b"\1" * size]
    with pytest.raises(InvalidInput, match="unable to find data for input tensor 'A1'"):
        decode(raw_message(buffers=1, size=size))
    with pytest.raises(InvalidInput, match="2 inputs, but 3 buffers in raw_input_contents"):
        decode(raw_message(buffers=3, size=size))
    mixed = raw_message(size=size)
    mixed.inputs[1].contents.uint_contents.extend([1])
    with pytest.raises(InvalidInput, match="must not be specified when using raw_input_contents for 'A1'"):
        decode(mixed)


def test_large_raw_tensors_borrow_the_message() -> None:
    data = raw_message(size=CUT_BYTES).SerializeToString()
    raw = decode_infer(data, LIMITS).inputs[0].raw
    assert isinstance(raw, memoryview)
    assert raw.obj is data


def test_leftover_binary_sizes_and_empty_contents_are_ignored_and_shared_memory_refused() -> None:
    message = raw_message()
    message.inputs[0].parameters["binary_data_size"].int64_param = 99
    message.inputs[1].contents.SetInParent()
    assert len(decode(message).inputs) == 2
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(Unsupported, match="input 'A0': parameter 'shared_memory_region'"):
        decode(message)


def test_parameters_of_every_choice_are_read() -> None:
    message = raw_message()
    message.parameters["b"].bool_param = True
    message.parameters["d"].double_param = 0.5
    message.parameters["s"].string_param = "x"
    message.parameters["priority"].uint64_param = 2
    message.parameters["timeout"].int64_param = 7
    request = decode(message)
    assert request.parameters == {"b": True, "d": 0.5, "s": "x", "priority": 2, "timeout": 7}
    assert request.timeout_us == 7
    message.parameters["empty"].SetInParent()
    with pytest.raises(InvalidInput, match=r"parameter 'empty': expected .* got null"):
        decode(message)


def test_a_message_of_very_many_fields_is_refused_unparsed() -> None:
    with pytest.raises(TooLarge, match="more than 1792 fields, the limit max_tensors is 256"):
        decode_infer(b"\x2a\x00" * CUT_BYTES, LIMITS)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_unforeseen(data: bytes) -> None:
    try:
        decode_infer(data, LIMITS)
    except ServingError:
        return


FIELDS = st.lists(
    st.one_of(
        st.binary(max_size=20).map(lambda value: service_pb2.ModelInferRequest(raw_input_contents=[value])),
        st.text(max_size=5).map(lambda value: service_pb2.ModelInferRequest(id=value, model_name=value)),
        st.lists(st.integers(-5, 2**63 - 1), max_size=3).map(
            lambda shape: service_pb2.ModelInferRequest(
                inputs=[service_pb2.ModelInferRequest.InferInputTensor(name="A", shape=shape)]
            )
        ),
    ).map(lambda message: message.SerializeToString()),
    max_size=8,
).map(b"".join)


@given(FIELDS)
def test_the_walk_finds_what_protobuf_finds(data: bytes) -> None:
    cut = cut_field(data, 7, 100)
    assert cut is not None
    rest, values, _ = cut
    whole = service_pb2.ModelInferRequest.FromString(data)  # type: ignore[attr-defined]
    assert [bytes(value) for value in values] == list(whole.raw_input_contents)
    whole.ClearField("raw_input_contents")
    assert service_pb2.ModelInferRequest.FromString(rest) == whole  # type: ignore[attr-defined]


@given(st.binary(max_size=60))
def test_the_walk_is_never_more_lenient_than_protobuf(data: bytes) -> None:
    cut = cut_field(data, 7, 100)
    if cut is None:
        return
    rest, values, _ = cut
    try:
        parts = service_pb2.ModelInferRequest.FromString(rest)  # type: ignore[attr-defined]
        whole = service_pb2.ModelInferRequest.FromString(data)  # type: ignore[attr-defined]
    except Exception:
        with pytest.raises(ServingError):
            decode_infer(data, LIMITS)
        return
    assert [bytes(value) for value in values] == list(whole.raw_input_contents)
    assert parts.model_name == whole.model_name


@settings(deadline=None)
@given(st.sampled_from(sorted(BY_WIRE)), st.integers(0, 3), st.text(max_size=5))
def test_the_real_client_reads_answers(wire: str, rows: int, request_id: str) -> None:
    if wire == "BYTES":
        array = np.array([[b"a", b"\x00\xff"]] * rows, dtype=np.object_).reshape(rows, 2)
    else:
        array = np.arange(rows * 2).reshape(rows, 2).astype(BY_WIRE[wire].numpy)
    response = InferResponse("m", "1", request_id, [OutputTensor("Y", wire, array)], {"reason": "filled", "n": 3})
    message = service_pb2.ModelInferResponse.FromString(encode_infer(response))  # type: ignore[attr-defined]
    told = InferResult(message).as_numpy("Y")
    if rows:
        assert told.tolist() == array.tolist()
    assert (message.id, message.model_name, message.model_version) == (request_id, "m", "1")
    assert message.parameters["reason"].string_param == "filled"
    assert message.parameters["n"].int64_param == 3
    streamed = service_pb2.ModelStreamInferResponse.FromString(encode_stream_infer(response))  # type: ignore[attr-defined]
    assert streamed.infer_response == message
    assert not streamed.error_message


def test_stream_errors_carry_the_id_of_their_request() -> None:
    data = encode_stream_error(InvalidInput("wrong"), "i-7")
    message = service_pb2.ModelStreamInferResponse.FromString(data)  # type: ignore[attr-defined]
    assert (message.error_message, message.infer_response.id) == ("wrong", "i-7")
