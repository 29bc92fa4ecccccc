"""Requests against the client signature, directly and through both protocols: the same mistake, the same answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_double import entries, entry, spec
from tritonclient.grpc import service_pb2

from engines.errors import InvalidInput, Kind, ServingError, TooLarge
from engines.tensor import DTYPES
from frontend.inference import InferRequest, InputTensor, RequestedOutput
from frontend.kserve import body_codec, grpc_codec
from frontend.kserve.checks import Checked, check
from frontend.kserve.contract import MAX_CONTRACTS, MAX_FORMS, contract_of
from frontend.settings import EndpointSettings

LIMITS = EndpointSettings(max_tensors=4, max_bytes_element=8)
MODELS = entries()


@dataclass(frozen=True)
class Tensor:
    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes


@dataclass(frozen=True)
class Wanted:
    """A request in no protocol's words; ``over_http`` and ``over_grpc`` render it with what clients send."""

    model: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)

    def over_http(self) -> InferRequest:
        document: dict[str, Any] = {
            "inputs": [
                {
                    "name": t.name,
                    "datatype": t.datatype,
                    "shape": list(t.shape),
                    "parameters": {"binary_data_size": len(t.raw)},
                }
                for t in self.inputs
            ],
            "parameters": {**self.parameters, "binary_data_output": True},
        }
        if self.outputs:
            document["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in self.outputs]
        text = json.dumps(document).encode()
        body = text + b"".join(t.raw for t in self.inputs)
        return body_codec.decode_infer(self.model, "", body, len(text), LIMITS)

    def over_grpc(self) -> InferRequest:
        message = service_pb2.ModelInferRequest(model_name=self.model)
        for t in self.inputs:
            message.inputs.add(name=t.name, datatype=t.datatype, shape=t.shape)
            message.raw_input_contents.append(t.raw)
        for name in self.outputs:
            message.outputs.add(name=name)
        for name, value in self.parameters.items():
            if isinstance(value, bool):
                message.parameters[name].bool_param = value
            elif isinstance(value, int):
                choice = "int64_param" if value < 2**63 else "uint64_param"
                setattr(message.parameters[name], choice, value)
            elif isinstance(value, float):
                message.parameters[name].double_param = value
            else:
                message.parameters[name].string_param = value
        return grpc_codec.decode_infer(message.SerializeToString(), LIMITS)


A = Tensor("INPUT0", "INT32", (2, 16), bytes(128))
B = Tensor("INPUT1", "INT32", (2, 16), bytes(128))
GOOD = Wanted("simple", (A, B))


def echo(dtype: str, datatype: str, shape: tuple[int, ...], raw: bytes, **more: Any) -> Wanted:
    return Wanted(f"echo_{dtype}", (Tensor("x", datatype, shape, raw),), **more)


MISTAKES: list[tuple[str, Wanted, Kind, str]] = [
    (
        "too few inputs",
        replace(GOOD, inputs=(A,)),
        Kind.INVALID_INPUT,
        "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], "
        "but missing required input(s) ['INPUT1']",
    ),
    (
        "too many inputs",
        replace(GOOD, inputs=(A, B, replace(A, name="C"))),
        Kind.INVALID_INPUT,
        "expected 2 inputs but got 3 inputs for model 'simple'. Got input(s) ['INPUT0', 'INPUT1', 'C'], "
        "unexpected input(s) ['C']",
    ),
    ("no inputs", replace(GOOD, inputs=()), Kind.INVALID_INPUT, "expected 2 inputs but got 0 inputs"),
    (
        "wrong name",
        replace(GOOD, inputs=(A, replace(B, name="X"))),
        Kind.INVALID_INPUT,
        "unexpected inference input 'X' for model 'simple'",
    ),
    ("twice", replace(GOOD, inputs=(A, A)), Kind.INVALID_INPUT, "input 'INPUT0' appears more than once"),
    (
        "wrong datatype",
        replace(GOOD, inputs=(replace(A, datatype="FP32"), B)),
        Kind.INVALID_INPUT,
        "inference input 'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'",
    ),
    (
        "unknown datatype",
        replace(GOOD, inputs=(replace(A, datatype="INT33"), B)),
        Kind.INVALID_INPUT,
        "invalid datatype for input INPUT0: got 'INT33'",
    ),
    (
        "wrong size",
        replace(GOOD, inputs=(A, replace(B, shape=(2, 17), raw=bytes(136)))),
        Kind.INVALID_INPUT,
        "unexpected shape for input 'INPUT1' for model 'simple'. Expected [-1,16], got [2,17]",
    ),
    (
        "wrong rank",
        replace(GOOD, inputs=(A, replace(B, shape=(32,)))),
        Kind.INVALID_INPUT,
        "Expected [-1,16], got [32]",
    ),
    ("rank 0", replace(GOOD, inputs=(A, replace(B, shape=(), raw=bytes(4)))), Kind.INVALID_INPUT, "got []"),
    (
        "negative size",
        replace(GOOD, inputs=(A, replace(B, shape=(-1, 16)))),
        Kind.INVALID_INPUT,
        "All input dimensions should be specified",
    ),
    (
        "huge size",
        replace(GOOD, inputs=(replace(A, shape=(2**62, 16)), B)),
        Kind.INVALID_INPUT,
        f"input byte size mismatch for input 'INPUT0' for model 'simple'. Expected {2**68}, got 128",
    ),
    ("33 axes", echo("f32", "FP32", (1,) * 33, bytes(4)), Kind.INVALID_INPUT, "at most 32 axes"),
    (
        "rows differ",
        replace(GOOD, inputs=(A, replace(B, shape=(1, 16), raw=bytes(64)))),
        Kind.INVALID_INPUT,
        "input 'INPUT1' batch size does not match other inputs for 'simple': expected 2, got 1",
    ),
    ("no rows", echo("f32", "FP32", (0, 4), b""), Kind.INVALID_INPUT, "input 'x' has zero rows"),
    (
        "too few bytes",
        echo("f32", "FP32", (1, 4), bytes(15)),
        Kind.INVALID_INPUT,
        "input byte size mismatch for input 'x' for model 'echo_f32'. Expected 16, got 15",
    ),
    ("too many bytes", echo("f32", "FP32", (1, 4), bytes(17)), Kind.INVALID_INPUT, "Expected 16, got 17"),
    ("no bytes", echo("f32", "FP32", (1, 4), b""), Kind.INVALID_INPUT, "Expected 16, got 0"),
    ("bool of 2", echo("bool", "BOOL", (1, 4), b"\0\1\2\0"), Kind.INVALID_INPUT, "must be 0 or 1, got 2"),
    (
        "strings cut",
        echo("bytes", "BYTES", (1, 4), b"\1\0\0\0a\1\0"),
        Kind.INVALID_INPUT,
        "incomplete string length indicator",
    ),
    ("string short", echo("bytes", "BYTES", (1, 4), b"\4\0\0\0a"), Kind.INVALID_INPUT, "incomplete string data"),
    (
        "strings missing",
        echo("bytes", "BYTES", (1, 4), b"\1\0\0\0a"),
        Kind.INVALID_INPUT,
        "unexpected number of string elements: expected 4, got 1",
    ),
    ("string too long", echo("bytes", "BYTES", (1, 4), b"\x09\0\0\0" + bytes(9)), Kind.TOO_LARGE, "max_bytes_element"),
    ("strings beyond memory", echo("bytes", "BYTES", (2**60, 4), b""), Kind.INVALID_INPUT, "string elements"),
    (
        "unknown output",
        replace(GOOD, outputs=("OUTPUT0", "Z")),
        Kind.INVALID_INPUT,
        "unexpected inference output 'Z' for model 'simple'",
    ),
    (
        "output twice",
        replace(GOOD, outputs=("OUTPUT0", "OUTPUT0")),
        Kind.INVALID_INPUT,
        "output 'OUTPUT0' is requested more than once",
    ),
    ("many inputs", replace(GOOD, inputs=(A,) * 5), Kind.TOO_LARGE, "5 inputs, the limit max_tensors is 4"),
    ("many outputs", replace(GOOD, outputs=("OUTPUT0",) * 5), Kind.TOO_LARGE, "5 outputs, the limit max_tensors is 4"),
    ("priority", replace(GOOD, parameters={"priority": "high"}), Kind.INVALID_INPUT, "'priority' must be an integer"),
    ("timeout", replace(GOOD, parameters={"timeout": "soon"}), Kind.INVALID_INPUT, "integer of microseconds"),
    ("timeout -1", replace(GOOD, parameters={"timeout": -1}), Kind.INVALID_INPUT, "must be between 0"),
    ("timeout 2**63", replace(GOOD, parameters={"timeout": 2**63}), Kind.INVALID_INPUT, "must be between 0"),
    ("timeout 1.5", replace(GOOD, parameters={"timeout": 1.5}), Kind.INVALID_INPUT, "integer of microseconds"),
    ("timeout true", replace(GOOD, parameters={"timeout": True}), Kind.INVALID_INPUT, "integer of microseconds"),
    ("reserved", replace(GOOD, parameters={"triton_x": 1}), Kind.INVALID_INPUT, "reserved"),
]


@pytest.mark.parametrize(("wanted", "kind", "text"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_st_08_both_protocols_answer_a_mistake_alike(wanted: Wanted, kind: Kind, text: str) -> None:
    told = []
    for render in (wanted.over_http, wanted.over_grpc):
        with pytest.raises(ServingError) as caught:
            check(render(), MODELS[wanted.model], LIMITS)
        assert caught.value.kind is kind
        assert text in str(caught.value)
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("render", [Wanted.over_http, Wanted.over_grpc], ids=["http", "grpc"])
def test_a_good_request_is_proven_without_a_copy(render: Callable[[Wanted], InferRequest]) -> None:
    raw = np.arange(32, dtype="<i4").tobytes()
    parameters = {"triton_enable_empty_final_response": True, "sequence_id": 3, "mine": "x"}
    request = render(Wanted("simple", (B, replace(A, raw=raw)), parameters=parameters))
    checked = check(request, MODELS["simple"], LIMITS)
    assert checked.rows == 2
    first = checked.inputs[0]
    assert (first.spec.name, first.shape) == ("INPUT0", (2, 16))
    assert first.raw is not None and first.raw == raw
    np.testing.assert_array_equal(first.as_array(), np.arange(32).reshape(2, 16))
    assert not first.as_array().flags.owndata
    assert [output.name for output in checked.outputs] == ["OUTPUT0", "OUTPUT1"]


def checked_raw(model: str, raw: bytes) -> Checked:
    return check(body_codec.decode_infer(model, "", raw, 0, LIMITS), MODELS[model], LIMITS)


def test_a_raw_request_takes_its_description_from_the_model() -> None:
    row = np.arange(4, dtype=np.float32)
    assert checked_raw("echo_f32", row.tobytes()).inputs[0].as_array().tolist() == [row.tolist()]
    assert checked_raw("free", row.tobytes()).inputs[0].shape == (1, 4)
    assert checked_raw("scalar", row[:1].tobytes()).inputs[0].shape == ()
    text = entry("text", (spec("x", "bytes", -1, 1),), (spec("y", "bytes", -1, 1),))
    checked = check(body_codec.decode_infer("text", "", b"abc", 0, LIMITS), text, LIMITS)
    assert checked.inputs[0].as_array().tolist() == [[b"abc"]]


@pytest.mark.parametrize(
    ("model", "raw", "text"),
    [
        ("simple", bytes(64), "a raw binary request is only for models with one input"),
        ("echo_f32", bytes(15), "Expected 16, got 15"),
        ("free", bytes(15), "Expected 12, got 15"),
        ("echo_bytes", b"abc", "got the single element of a raw binary request"),
    ],
)
def test_a_raw_request_that_does_not_fit_is_refused(model: str, raw: bytes, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        checked_raw(model, raw)


def test_a_raw_request_with_two_free_sizes_cannot_be_deduced() -> None:
    model = entry("image", (spec("x", "u8", -1, -1, -1),), (spec("y", "u8", -1),))
    with pytest.raises(InvalidInput, match="cannot be deduced"):
        check(body_codec.decode_infer("image", "", bytes(12), 0, LIMITS), model, LIMITS)


def test_a_model_without_a_batch_axis_has_one_row() -> None:
    request = InferRequest("fixed", "", "", [InputTensor("x", "FP32", (3,), raw=bytes(12))])
    assert check(request, MODELS["fixed"], LIMITS).rows == 1


def test_a_batch_axis_elsewhere_is_found() -> None:
    model = entry("late", (spec("x", "f32", 3, -1, batch_axis=1),), (spec("y", "f32", 3, -1, batch_axis=1),))
    request = InferRequest("late", "", "", [InputTensor("x", "FP32", (3, 5), raw=bytes(60))])
    assert check(request, model, LIMITS).rows == 5


def test_zero_elements_beside_rows_are_a_tensor() -> None:
    request = InferRequest("free", "", "", [InputTensor("x", "FP32", (2, 0), raw=b"")])
    checked = check(request, MODELS["free"], LIMITS)
    assert (checked.rows, checked.inputs[0].as_array().shape) == (2, (2, 0))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_outputs_as_json_are_refused_before_the_model_runs(dtype: str) -> None:
    model = MODELS[f"echo_{dtype}"]
    assert model.signature is not None
    tensor = InputTensor("x", model.signature.inputs[0].element.wire, (1, 4), raw=bytes(8))
    with pytest.raises(InvalidInput, match=r"output 'y': .* cannot be sent as JSON"):
        check(InferRequest(model.name, "", "", [tensor]), model, LIMITS)
    check(InferRequest(model.name, "", "", [tensor], binary_default=True), model, LIMITS)
    check(InferRequest(model.name, "", "", [tensor], [RequestedOutput("y", True)]), model, LIMITS)


def test_classes_of_strings_are_refused_before_the_model_runs() -> None:
    raw = b"\1\0\0\0a" * 4
    request = InferRequest(
        "echo_bytes", "", "", [InputTensor("x", "BYTES", (1, 4), raw=raw)], [RequestedOutput("y", True, 2)]
    )
    with pytest.raises(InvalidInput, match="classification needs a numeric output"):
        check(request, MODELS["echo_bytes"], LIMITS)


@given(
    st.sampled_from([dtype.wire for dtype in DTYPES]),
    st.lists(st.integers(0, 2**70), max_size=4).map(tuple),
    st.binary(max_size=64),
    st.sampled_from(sorted(MODELS)),
)
def test_arbitrary_tensors_raise_nothing_unforeseen(wire: str, shape: tuple[int, ...], raw: bytes, model: str) -> None:
    try:
        checked = check(InferRequest(model, "", "", [InputTensor("x", wire, shape, raw=raw)]), MODELS[model], LIMITS)
    except ServingError:
        return
    assert checked.inputs[0].as_array().shape == shape


def test_too_many_tensors_are_refused_before_their_names_are_compared() -> None:
    tensors = [InputTensor(str(i), "FP32", (1,), raw=bytes(4)) for i in range(5)]
    with pytest.raises(TooLarge, match="max_tensors is 4"):
        check(InferRequest("simple", "", "", tensors), MODELS["simple"], LIMITS)


def test_of_a_known_form_only_the_content_is_new() -> None:
    def two(raw: bytes, flag: bytes) -> InferRequest:
        return InferRequest(
            "known", "", "", [InputTensor("flag", "BOOL", (2, 1), raw=flag), InputTensor("x", "FP32", (2, 3), raw=raw)]
        )

    inputs = (spec("x", "f32", -1, 3), spec("flag", "bool", -1, 1))
    model = entry("known", inputs, (spec("y", "f32", -1, 3),))
    for _ in range(2):
        checked = check(two(bytes(range(24)), b"\1\0"), model, LIMITS)
        assert [(given.spec.name, given.shape) for given in checked.inputs] == [("x", (2, 3)), ("flag", (2, 1))]
        assert (checked.rows, checked.inputs[1].as_array().tolist()) == (2, [[True], [False]])
        assert checked.inputs[0].as_array().tobytes() == bytes(range(24))
    with pytest.raises(InvalidInput, match="Expected 24, got 23"):
        check(two(bytes(23), b"\1\0"), model, LIMITS)
    with pytest.raises(InvalidInput, match="must be 0 or 1, got 2"):
        check(two(bytes(24), b"\1\2"), model, LIMITS)


def test_forms_and_signatures_are_remembered_up_to_a_limit() -> None:
    model = entry("many", (spec("x", "u8", -1),), (spec("y", "u8", -1),))
    assert model.signature is not None
    contract = contract_of(model.signature)
    assert contract_of(model.signature) is contract
    for rows in range(1, MAX_FORMS + 10):
        request = InferRequest("many", "", "", [InputTensor("x", "UINT8", (rows,), raw=bytes(rows))])
        assert check(request, model, LIMITS).rows == rows
        assert len(contract.forms) <= MAX_FORMS
    others = [entry("other", (spec("x", "u8", -1),), (spec("y", "u8", -1),)) for _ in range(MAX_CONTRACTS)]
    for other in others:
        assert other.signature is not None
        assert contract_of(other.signature).signature is other.signature
    assert contract_of(model.signature) is not contract
