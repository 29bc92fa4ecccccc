"""HTTP inference bodies: against the real client's builder and reader, and against everything that is wrong."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.http import InferInput, InferRequestedOutput, InferResult
from tritonclient.http._utils import _get_inference_request

from engines.errors import InvalidInput, ServingError, TooLarge, Unsupported
from engines.tensor import BY_WIRE, DTYPES
from frontend.inference import InferRequest, InferResponse, OutputTensor
from frontend.kserve.body_codec import HEADER_LENGTH, decode_infer, encode_infer
from frontend.settings import EndpointSettings

LIMITS = EndpointSettings()
JSON_TYPES = [dtype for dtype in DTYPES if dtype.wire not in ("FP16", "BF16")]


def decode(document: Any, binary: bytes = b"", limits: EndpointSettings = LIMITS) -> InferRequest:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_infer("m", "", text + binary, len(text), limits)


def one(data: Any, datatype: str = "FP32", shape: Any = (2, 3), **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "A", "shape": list(shape), "datatype": datatype, "data": data, **more}]}


def binary_input(size: Any, datatype: str = "FP32", shape: Any = (1,)) -> dict[str, Any]:
    item = {"name": "A", "shape": list(shape), "datatype": datatype, "parameters": {"binary_data_size": size}}
    return {"inputs": [item]}


@st.composite
def arrays(draw: st.DrawFn, wires: list[str]) -> tuple[str, np.ndarray[Any, Any]]:
    wire = draw(st.sampled_from(wires))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    if wire == "BF16":
        base = draw(hnp.arrays(np.float32, shape, elements=st.floats(width=32)))
        return wire, base.astype(ml_dtypes.bfloat16)
    if wire == "BYTES":
        array = np.empty(shape, dtype=np.object_)
        for index in np.ndindex(shape):
            array[index] = draw(st.binary(max_size=12))
        return wire, array
    return wire, draw(hnp.arrays(BY_WIRE[wire].numpy, shape))


def equal(one_array: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one_array.shape != other.shape:
        return False
    if one_array.dtype.hasobject:
        return bool(one_array.tolist() == other.tolist())
    return one_array.tobytes() == other.tobytes()


@settings(deadline=None)
@given(arrays([dtype.wire for dtype in DTYPES]), st.booleans())
def test_the_real_clients_binary_requests_are_read(drawn: tuple[str, np.ndarray[Any, Any]], named: bool) -> None:
    wire, array = drawn
    tensor = InferInput("A", list(array.shape), wire)
    tensor.set_data_from_numpy(array, binary_data=True)
    outputs = [InferRequestedOutput("Y", binary_data=False)] if named else None
    body, header_length = _get_inference_request([tensor], "id-1", outputs, 0, False, False, 0, None, {"k": 1.5})
    request = decode_infer("m", "1", memoryview(body), header_length, LIMITS)
    raw = request.inputs[0].raw
    assert raw is not None
    assert (request.request_id, request.inputs[0].shape) == ("id-1", array.shape)
    assert request.parameters["k"] == 1.5
    if wire != "BYTES":
        assert bytes(raw) == array.tobytes()
    if named:
        assert request.outputs is not None and request.outputs[0].binary is False
    else:
        assert request.binary_default and request.outputs is None


@settings(deadline=None)
@given(arrays([dtype.wire for dtype in DTYPES]), st.booleans())
def test_the_real_client_reads_binary_answers(drawn: tuple[str, np.ndarray[Any, Any]], by_default: bool) -> None:
    wire, array = drawn
    output = OutputTensor("Y", wire, array, binary=None if by_default else True)
    headers, parts = encode_infer(InferResponse("m", "1", "i", [output]), by_default)
    result = InferResult.from_response_body(b"".join(parts), header_length=int(dict(headers)[HEADER_LENGTH]))
    told = result.as_numpy("Y")
    # The client reads no object array out of zero bytes, and knows bfloat16 by its own means.
    if array.size:
        assert equal(np.asarray(told).reshape(array.shape), array)
    assert result.get_response()["id"] == "i"


@settings(deadline=None)
@given(arrays([dtype.wire for dtype in JSON_TYPES]))
def test_json_tensors_make_the_round_trip(drawn: tuple[str, np.ndarray[Any, Any]]) -> None:
    wire, array = drawn
    try:
        headers, parts = encode_infer(InferResponse("m", "1", "", [OutputTensor("A", wire, array)]))
    except InvalidInput:
        finite = wire == "BYTES" or np.isfinite(array).all()
        assert not (wire != "BYTES" and finite), "only values that JSON cannot carry may be refused"
        return
    assert headers == [("Content-Type", "application/json")]
    document = json.loads(b"".join(parts), parse_constant=pytest.fail)
    assert "id" not in document
    output = document["outputs"][0]
    assert len(output["data"]) == array.size
    again = decode({"inputs": [output]}).inputs[0].array
    assert (again is not None and equal(again, array)) or (wire == "BYTES" and array.size == 0)


@given(st.binary(max_size=300), st.none() | st.integers(-5, 320))
def test_arbitrary_bytes_raise_nothing_unforeseen(body: bytes, header_length: int | None) -> None:
    try:
        decode_infer("m", "", body, header_length, LIMITS)
    except ServingError:
        return


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_arbitrary_fields_raise_nothing_unforeseen(data: st.DataObject) -> None:
    document = one([1, 2], "INT32", [2])
    target = data.draw(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]))
    document["inputs"][0][target] = data.draw(JSON_VALUES)
    document[data.draw(st.sampled_from(["id", "parameters", "outputs", "other"]))] = data.draw(JSON_VALUES)
    try:
        decode(document)
    except ServingError:
        return


WRONG: list[tuple[str, Any, str]] = [
    ("5 of 6", one([1, 2, 3, 4, 5]), r"shape \[2,3\] holds 6 elements, data holds 5"),
    ("7 of 6", one([1, 2, 3, 4, 5, 6, 7]), "Shape does not match true shape of 'data' field"),
    ("ragged", one([[1, 2, 3], [4, 5]]), "ragged"),
    ("ragged, count agrees", one([[1, 2, 3, 4], [5, 6]]), "ragged: lists of 2 and of 4 entries"),
    ("element beside list", one([1, [2, 3, 4, 5, 6]]), "ragged"),
    ("string in FP32", one([1, "2", 3, 4, 5, 6]), "element 1 must be a number for datatype 'FP32', got \"2\""),
    ("null in FP32", one([1, None, 3, 4, 5, 6]), "element 1 must be a number"),
    ("boolean in INT32", one([True], "INT32", [1]), "must be an integer"),
    ("fraction in INT32", one([1.5], "INT32", [1]), "must be an integer"),
    ("number in BOOL", one([1], "BOOL", [1]), "must be a boolean"),
    ("number in BYTES", one([1], "BYTES", [1]), "must be a string"),
    ("UINT8 256", one([0, 256], "UINT8", [2]), "element 1 is 256, UINT8 holds 0 to 255"),
    ("UINT8 -1", one([-1], "UINT8", [1]), "element 0 is -1"),
    ("UINT64 2**64", one([2**64], "UINT64", [1]), "UINT64 holds 0 to 18446744073709551615"),
    ("INT64 2**63", one([2**63], "INT64", [1]), "INT64 holds"),
    ("FP32 1e39", one([1e39], "FP32", [1]), "out of the range of FP32"),
    ("no data", one(None), "non-array"),
    ("data missing", {"inputs": [{"name": "A", "shape": [1], "datatype": "FP32"}]}, "But no field is set"),
    ("both kinds of data", one([1], shape=[1], parameters={"binary_data_size": 0}), "both are set"),
    ("datatype unknown", one([1], "FLOAT", [1]), "invalid datatype for input A: got 'FLOAT'"),
    ("datatype empty", one([1], "", [1]), "invalid datatype"),
    ("negative size", one([1], shape=[-1]), "Unable to parse 'shape'"),
    ("fractional size", one([1], shape=[1.0]), "failed to parse the request JSON buffer"),
    ("33 axes", one([1], shape=[1] * 33), "at most 32 axes"),
    ("size beyond memory", one([], shape=[0, 2**80]), "too large"),
    ("count beyond memory", one([1], shape=[2**70]), "data holds 1"),
    ("blank", b" ", "failed to parse the request JSON buffer"),
    ("cut short", b'{"inputs":[', "failed to parse the request JSON buffer"),
    ("NaN token", b'{"inputs":[{"name":"A","shape":[1],"datatype":"FP32","data":[NaN]}]}', "failed to parse"),
    ("an array", [], "failed to parse the request JSON buffer"),
    ("no inputs field", {"id": "1"}, "missing required field `inputs`"),
    ("id a number", {"inputs": [], "id": 1}, "failed to parse"),
    ("parameters a list", {"inputs": [], "parameters": []}, "failed to parse"),
    ("parameter a list", {"inputs": [], "parameters": {"p": [1]}}, "parameter 'p': expected"),
    ("reserved parameter", {"inputs": [], "parameters": {"triton_x": 1}}, "keys starting with 'triton_' are reserved"),
    ("priority a string", {"inputs": [], "parameters": {"priority": "high"}}, "'priority' must be an integer"),
    ("priority negative", {"inputs": [], "parameters": {"priority": -1}}, "'priority' must be between 0"),
    (
        "timeout a word",
        {"inputs": [], "parameters": {"timeout": "soon"}},
        "'timeout' must be an integer of microseconds",
    ),
    ("timeout negative", {"inputs": [], "parameters": {"timeout": -1}}, "'timeout' must be between 0 and"),
    ("timeout 2**63", {"inputs": [], "parameters": {"timeout": 2**63}}, "'timeout' must be between 0 and"),
    ("timeout a fraction", {"inputs": [], "parameters": {"timeout": 1.0}}, "'timeout' must be an integer"),
    ("binary_data a word", {"inputs": [], "outputs": [{"name": "Y", "parameters": {"binary_data": "x"}}]}, "a boolean"),
    ("0 classes", {"inputs": [], "outputs": [{"name": "Y", "parameters": {"classification": 0}}]}, "positive integer"),
    ("size a word", binary_input("4"), "Unable to parse 'binary_data_size'"),
    ("size negative", binary_input(-4), "Unable to parse 'binary_data_size'"),
    ("size beyond the body", binary_input(4), "binary_data_size is 4 bytes, the body has 0 left"),
]


@pytest.mark.parametrize(("document", "text"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_pi_03_bs_09_what_is_wrong_is_named(document: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        decode(document)


def test_an_empty_body_is_no_json() -> None:
    with pytest.raises(InvalidInput, match="failed to parse the request JSON buffer: The document is empty"):
        decode_infer("m", "", b"", None, LIMITS)


def test_left_over_bytes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="unexpected additional input data for model 'm'"):
        decode(binary_input(4), b"\0" * 5)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_pi_09_half_types_have_one_answer_in_json(datatype: str) -> None:
    with pytest.raises(InvalidInput, match=f"{datatype} data as JSON is not supported, use the binary data format"):
        decode(one([0.1], datatype, [1]))
    array = np.ones(1, dtype=BY_WIRE[datatype].numpy)
    with pytest.raises(InvalidInput, match=f"output 'Y': {datatype} data cannot be sent as JSON, use the binary"):
        encode_infer(InferResponse("m", "1", "", [OutputTensor("Y", datatype, array)]))


def test_pi_03_nesting_that_fits_by_count_is_taken_in_reading_order() -> None:
    expected = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    for data in ([1, 2, 3, 4, 5, 6], [[1, 2], [3, 4], [5, 6]], [[[1], [2], [3]], [[4], [5], [6]]]):
        array = decode(one(data)).inputs[0].array
        assert array is not None
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("depth", [1, 8, 9, 100])
def test_nesting_up_to_the_limit_is_read(depth: int) -> None:
    data: Any = 1
    for _ in range(depth):
        data = [data]
    array = decode(one(data, shape=[1])).inputs[0].array
    assert array is not None and array.tolist() == [1.0]


@pytest.mark.parametrize(
    "data",
    [b"[" * 101 + b"1" + b"]" * 101, b"[1," + b"[" * 120 + b"]" * 120 + b"]", b"[" * 200_000, b"[1," + b"[" * 200_000],
)
def test_nesting_beyond_the_limit_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"exceeds maximum allowed limit \(100\)|ragged"):
        decode(b'{"inputs":[{"name":"A","shape":[1],"datatype":"FP32","data":' + data + b"}]}")


def test_deep_nesting_elsewhere_is_no_crash() -> None:
    for text in (b'{"inputs":[],"x":' + b"[" * 200_000, b"[" * 200_000):
        with pytest.raises(InvalidInput):
            decode(text)


def test_unknown_keys_and_empty_ids_mean_nothing() -> None:
    request = decode({**one([1], shape=[1]), "id": "", "model_name": "other", "x": {"y": [1]}})
    assert request.request_id == ""
    assert (request.model, request.outputs) == ("m", None)


def test_do_06_timeout_is_in_microseconds() -> None:
    request = decode({"inputs": [], "parameters": {"timeout": 200000, "sequence_id": "s", "sequence_start": True}})
    assert request.timeout_us == 200_000
    assert request.parameters["sequence_id"] == "s"
    assert decode({"inputs": [], "parameters": {"timeout": 0}}).timeout_us == 0


def test_binary_and_json_tensors_mix_and_output_parameters_override() -> None:
    document = {
        "inputs": [
            {"name": "A", "shape": [2], "datatype": "INT16", "parameters": {"binary_data_size": 4}},
            {"name": "B", "shape": [1], "datatype": "BOOL", "data": [True]},
            {"name": "C", "shape": [0], "datatype": "FP32", "parameters": {"binary_data_size": 0}},
            {"name": "D", "shape": [1], "datatype": "UINT8", "parameters": {"binary_data_size": 1}},
        ],
        "outputs": [{"name": "X", "parameters": {"binary_data": False}}, {"name": "Y"}],
        "parameters": {"binary_data_output": True},
    }
    request = decode(document, b"\1\0\2\0\7")
    assert [bytes(t.raw) if t.raw is not None else t.array for t in request.inputs] == [b"\1\0\2\0", [True], b"", b"\7"]
    array = np.ones(2, dtype=np.int8)
    assert request.outputs is not None
    outputs = [OutputTensor(o.name, "INT8", array, o.binary) for o in request.outputs]
    headers, parts = encode_infer(InferResponse("m", "1", "", outputs), request.binary_default)
    length = int(dict(headers)[HEADER_LENGTH])
    body = b"".join(parts)
    assert body[length:] == b"\1\1"
    assert [sorted(o) for o in json.loads(body[:length])["outputs"]] == [
        ["data", "datatype", "name", "shape"],
        ["datatype", "name", "parameters", "shape"],
    ]


def test_limits_are_named() -> None:
    small = EndpointSettings(max_request_bytes=1024, max_tensors=2, max_bytes_element=3)
    with pytest.raises(TooLarge, match="max_request_bytes is 1024"):
        decode(b" " * 1025, limits=small)
    item = one([1], shape=[1])["inputs"][0]
    with pytest.raises(TooLarge, match="3 inputs, the limit max_tensors is 2"):
        decode({"inputs": [item] * 3}, limits=small)
    with pytest.raises(TooLarge, match="3 outputs, the limit max_tensors is 2"):
        decode({"inputs": [], "outputs": [{"name": "x"}] * 3}, limits=small)
    with pytest.raises(TooLarge, match="element 1 is 4 bytes, the limit max_bytes_element is 3"):
        decode(one(["abc", "abcd"], "BYTES", [2]), limits=small)


@pytest.mark.parametrize("header_length", [-1, 3])
def test_a_header_length_outside_of_the_body_is_refused(header_length: int) -> None:
    with pytest.raises(InvalidInput, match=f"{HEADER_LENGTH} is {header_length}, expected 0 to 2"):
        decode_infer("m", "", b"{}", header_length, LIMITS)


@pytest.mark.parametrize("place", ["inputs", "outputs"])
def test_client_shared_memory_is_not_offered(place: str) -> None:
    tensor = {"name": "A", "shape": [1], "datatype": "FP32", "parameters": {"shared_memory_region": "r"}}
    with pytest.raises(Unsupported, match=r"global\.endpoints\.system_shared_memory\.enabled is false"):
        decode({"inputs": [], place: [tensor]})


def test_nd_01_not_finite_outputs_never_make_invalid_json() -> None:
    array = np.array([1.0, np.nan, np.inf, -np.inf], dtype=np.float32)
    with pytest.raises(InvalidInput, match="output 'Y': element 1 is nan, which JSON cannot carry; use the binary"):
        encode_infer(InferResponse("m", "1", "", [OutputTensor("Y", "FP32", array)]))
    _, parts = encode_infer(InferResponse("m", "1", "", [OutputTensor("Y", "FP32", array, binary=True)]))
    assert bytes(parts[1]) == array.tobytes()


def test_bytes_that_are_no_text_ask_for_the_binary_form() -> None:
    array = np.array([b"\xff"], dtype=np.object_)
    with pytest.raises(InvalidInput, match="output 'Y': an element is not UTF-8 text, use the binary"):
        encode_infer(InferResponse("m", "1", "", [OutputTensor("Y", "BYTES", array)]))


def test_classification_lists_the_best_first() -> None:
    scores = np.array([[0.1, 3.0, 3.0], [5.0, -1.0, np.nan]], dtype=np.float32)
    output = OutputTensor("Y", "FP32", scores, classification=2)
    _, parts = encode_infer(InferResponse("m", "1", "", [output]))
    told = json.loads(parts[0])["outputs"][0]
    assert (told["datatype"], told["shape"]) == ("BYTES", [2, 2])
    assert told["data"] == ["3.000000:1", "3.000000:2", "5.000000:0", "-1.000000:1"]
    flat = OutputTensor("Y", "UINT8", np.array([1, 255, 3], dtype=np.uint8), classification=9)
    assert json.loads(encode_infer(InferResponse("m", "1", "", [flat]))[1][0])["outputs"][0]["data"] == [
        "255:1",
        "3:2",
        "1:0",
    ]


def test_outputs_that_are_not_contiguous_keep_their_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    _, parts = encode_infer(InferResponse("m", "1", "", [OutputTensor("Y", "INT32", array, binary=True)]))
    assert bytes(parts[1]) == np.ascontiguousarray(array).tobytes()


def test_numbers_are_told_in_the_fewest_digits_that_are_exact() -> None:
    """A third of what the same numbers take as Python floats; also where a model leaves them in another order."""
    array = np.array([[0.1, 1 / 3], [16777216.0, -1.17549435e-38], [2.5, 0.0]], np.float32)
    _, parts = encode_infer(InferResponse("m", "1", "", [OutputTensor("Y", "FP32", array.T)]))
    assert b'"data":[0.1,16777216.0,2.5,0.33333334,-1.1754944e-38,0.0]' in b"".join(parts)
