"""The fast way through an inference message gives what the careful one gives, for whatever message."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import ServingError
from frontend.inference import InferRequest, InferResponse, OutputTensor
from frontend.kserve import infer_templates
from frontend.kserve.grpc_codec import decode_infer, encode_infer
from frontend.kserve.infer_templates import MAX_BODIES, RequestTemplates, ResponseTemplates
from frontend.kserve.proto import message_class
from frontend.kserve.wire import varint
from frontend.settings import EndpointSettings

LIMITS = EndpointSettings()
REQUEST: Any = message_class("ModelInferRequest")

words = st.sampled_from(["", "m", "model", "v" * 130, "ünï"])


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    message = REQUEST(model_name=draw(words), model_version=draw(st.sampled_from(["", "1"])), id=draw(words))
    raws = draw(st.booleans())
    for number in range(draw(st.integers(0, 2))):
        elements = draw(st.sampled_from([0, 1, 4, 40, 5000]))
        tensor = message.inputs.add(name=f"x{number}", datatype="FP32", shape=[1, elements])
        if raws:
            message.raw_input_contents.append(bytes(4 * elements))
        else:
            tensor.contents.fp32_contents.extend([1.0] * elements)
    if draw(st.booleans()):
        message.parameters["note"].string_param = draw(words)
    if draw(st.booleans()):
        message.outputs.add(name="y").parameters["classification"].int64_param = draw(st.integers(1, 3))
    data: bytes = message.SerializeToString()
    # As another library may write it, or a broken one: in another order, with fields twice, cut, or with more behind.
    match draw(st.integers(0, 7)):
        case 0:
            data = b"\x3a\x01x" + data
        case 1:
            data += REQUEST(id="late").SerializeToString()
        case 2:
            data += REQUEST(model_name="late").SerializeToString()
        case 3:
            data = data[: draw(st.integers(0, len(data)))]
        case 4:
            data += b"\x3a\x00"
    return data


def outcome(decode: Any, data: bytes) -> InferRequest | tuple[type, str]:
    try:
        request: InferRequest = decode(data)
    except ServingError as error:
        return type(error), str(error)
    return request


def same(one: Any, other: Any) -> bool:
    """Compare requests whose decoded elements are arrays."""
    if not isinstance(one, InferRequest) or not isinstance(other, InferRequest):
        return bool(one == other)
    for given_one, given_other in zip(one.inputs, other.inputs, strict=True):
        if given_one.array is not None:
            np.testing.assert_array_equal(given_one.array, given_other.array)
            given_one.array = given_other.array = None
    return one == other


@given(st.lists(messages(), max_size=6), st.booleans())
def test_decoding_by_template_is_decoding(sequence: list[bytes], view: bool) -> None:
    templates = RequestTemplates(LIMITS)
    for data in [*sequence, *sequence]:
        found = outcome(templates.decode, memoryview(data) if view else data)  # type: ignore[arg-type]
        assert same(found, outcome(lambda data: decode_infer(data, LIMITS), data))


def request_of(request_id: str = "", elements: int = 4, name: str = "x") -> bytes:
    message = REQUEST(model_name="m", id=request_id)
    message.inputs.add(name=name, datatype="FP32", shape=[1, elements])
    message.raw_input_contents.append(np.arange(elements, dtype=np.float32).tobytes())
    assert isinstance(message, Message)
    data: bytes = message.SerializeToString()
    return data


def test_requests_that_differ_in_id_and_elements_are_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    templates = RequestTemplates(LIMITS)
    templates.decode(request_of("first"))
    monkeypatch.setattr(infer_templates, "decode_infer", None)
    for request_id in ("", "a", "ünï", "b" * 127):
        request = templates.decode(request_of(request_id))
        assert (request.model, request.request_id, request.inputs[0].shape) == ("m", request_id, (1, 4))


def test_requests_do_not_share_what_they_may_change() -> None:
    message = REQUEST(model_name="m")
    message.parameters["note"].string_param = "kept"
    message.outputs.add(name="y")
    message.inputs.add(name="x", datatype="FP32", shape=[1])
    message.raw_input_contents.append(bytes(4))
    data = message.SerializeToString()
    templates = RequestTemplates(LIMITS)
    templates.decode(data)
    first = templates.decode(data)
    assert first.outputs is not None
    first.parameters.clear()
    first.outputs[0].name = "changed"
    first.inputs[0].name = "changed"
    assert templates.decode(data) == decode_infer(data, LIMITS)


def test_a_raw_size_in_more_bytes_than_needed_is_still_understood() -> None:
    data = request_of(elements=4)
    at = data.index(b"\x3a\x10")
    padded = data[: at + 1] + b"\x90\x80\x00" + data[at + 2 :]
    templates = RequestTemplates(LIMITS)
    templates.decode(data)
    assert templates.decode(padded) == decode_infer(padded, LIMITS)
    endless = data[: at + 1] + b"\x80" * 11 + data[at + 2 :]
    assert outcome(templates.decode, endless) == outcome(lambda data: decode_infer(data, LIMITS), endless)


def test_what_is_remembered_is_bounded() -> None:
    templates = RequestTemplates(LIMITS)
    for elements in range(1, 40):
        assert templates.decode(request_of(elements=elements)).inputs[0].shape == (1, elements)
    (bodies,) = templates._bodies.values()
    assert len(bodies) == MAX_BODIES
    templates.decode(request_of(name="n" * 5000))
    assert len(bodies) == MAX_BODIES


arrays = st.sampled_from(
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 4), dtype=np.int64),
        np.array(3, dtype=np.uint8),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        np.ones((1, 3), dtype=ml_dtypes.bfloat16),
        np.array([b"bytes", b""], dtype=np.object_),
        np.arange(20_000, dtype=np.float64).reshape(2, -1),
        np.array([True, False]),
    ]
)


@given(
    st.lists(st.tuples(arrays, st.booleans(), st.sampled_from([0, 0, 2])), max_size=3),
    words,
    words,
    st.dictionaries(st.sampled_from(["a", "b"]), st.one_of(st.integers(0, 9), st.text(max_size=3)), max_size=2),
)
def test_encoding_by_template_is_encoding(
    tensors: list[tuple[Any, bool, int]], request_id: str, model: str, parameters: dict[str, Any]
) -> None:
    outputs = []
    for number, (array, placed, classes) in enumerate(tensors):
        output = OutputTensor(f"y{number}", "FP32", array, placed=placed)
        if array.ndim > 1 and array.size:
            output.classification = classes
        outputs.append(output)
    response = InferResponse(model, "1", request_id, outputs, parameters)
    templates = ResponseTemplates()
    for _ in range(2):
        assert b"".join(templates.encode(response)) == encode_infer(response)


def test_large_outputs_are_lent_not_copied() -> None:
    array = np.zeros((1, 50_000), dtype=np.float32)
    response = InferResponse("m", "1", "", [OutputTensor("y", "FP32", array)])
    parts = ResponseTemplates().encode(response)
    array[:] = 1
    assert b"".join(parts).endswith(varint(array.nbytes) + array.tobytes())
