"""gRPC calls that repeat an earlier one, through a real worker: the same answers, errors and deadlines as the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from frontend.kserve.proto import message_class

pytestmark = pytest.mark.process

Infer = Callable[..., bytes]


@pytest.fixture
def infer(ports: dict[str, int]) -> Iterator[Infer]:
    with grpc.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
        yield channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")


def message_of(model: str, arrays: dict[str, np.ndarray], wire: str, **parts: Any) -> bytes:
    message: Any = message_class("ModelInferRequest")(model_name=model, id=parts.get("id", ""))
    for name, array in arrays.items():
        message.inputs.add(name=name, datatype=wire, shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    for name in parts.get("outputs", ()):
        message.outputs.add(name=name)
    if "timeout_us" in parts:
        message.parameters["timeout"].int64_param = parts["timeout_us"]
    data: bytes = message.SerializeToString()
    return data


def answer_of(data: bytes) -> Any:
    return message_class("ModelInferResponse").FromString(data)


@pytest.mark.parametrize("dtype", ["u8", "i64", "f16", "f32", "f64"])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_repeats_answer_like_the_first(infer: Infer, dtype: str, rows: int) -> None:
    numpy = {"u8": np.uint8, "i64": np.int64, "f16": np.float16, "f32": np.float32, "f64": np.float64}[dtype]
    wire = {"u8": "UINT8", "i64": "INT64", "f16": "FP16", "f32": "FP32", "f64": "FP64"}[dtype]
    draw = np.random.default_rng(rows)
    rest = set()
    for turn in range(12):
        array = draw.integers(0, 200, (rows, 4)).astype(numpy)
        request_id = f"id-{turn}" if turn % 2 else ""
        answer = answer_of(infer(message_of(f"echo_{dtype}", {"INPUT": array}, wire, id=request_id)))
        assert answer.id == request_id
        assert answer.raw_output_contents[0] == array.tobytes()
        answer.id = ""
        del answer.raw_output_contents[:]
        rest.add(answer.SerializeToString(deterministic=True))
    assert len(rest) == 1


def test_two_inputs_in_either_order_and_outputs_as_asked(infer: Infer) -> None:
    one, two = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 5, np.int32)
    for names in (("INPUT0", "INPUT1"), ("INPUT1", "INPUT0")):
        for outputs in ((), ("OUTPUT1",), ("OUTPUT1", "OUTPUT0")):
            for turn in range(4):
                given = {"INPUT0": one + turn, "INPUT1": two}
                message = message_of("simple", {name: given[name] for name in names}, "INT32", outputs=outputs)
                answer = answer_of(infer(message))
                told = [output.name for output in answer.outputs]
                assert told == list(outputs or ("OUTPUT0", "OUTPUT1"))
                expected = {"OUTPUT0": given["INPUT0"] + two, "OUTPUT1": given["INPUT0"] - two}
                assert list(answer.raw_output_contents) == [expected[name].tobytes() for name in told]


def test_errors_and_deadlines_of_repeats(infer: Infer) -> None:
    def code(message: bytes, timeout: float | None = None) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            infer(message, timeout=timeout)
        found: grpc.StatusCode = caught.value.code()
        return found

    good, bad = np.ones((1, 4), np.float32), np.full((1, 4), 666, np.float32)
    for array, fails in ((good, False), (good, False), (bad, True), (good, False), (bad, True)):
        message = message_of("poison", {"INPUT": array}, "FP32")
        if fails:
            assert code(message) is grpc.StatusCode.INTERNAL
        else:
            infer(message)
    slow = message_of("slow", {"INPUT": good}, "FP32")
    for _ in range(3):
        infer(slow, timeout=60)
    assert [code(slow, 0.002) for _ in range(3)] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 3
    for _ in range(2):
        infer(message_of("slow", {"INPUT": good}, "FP32", timeout_us=60_000_000))
    late = message_of("slow", {"INPUT": good}, "FP32", timeout_us=10)
    assert [code(late) for _ in range(3)] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 3
