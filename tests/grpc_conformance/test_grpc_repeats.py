"""Calls that repeat an earlier one: answered byte for byte as the first; what is not one is not taken for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
from any_grpc import server_of
from hypothesis import given
from hypothesis import strategies as st
from raw_grpc import INFER, RawClient, framed
from serving_double import DoubleServing

from frontend.attempts import MAX_ATTEMPTS
from frontend.grpc_fast.repeats import MAX_TEMPLATES, Templates, layout_of
from frontend.grpc_server import RunningGrpcServer
from frontend.inference import InferResponse, OutputTensor
from frontend.kserve.grpc_codec import decode_infer, infer_parts
from frontend.kserve.proto import message_class
from frontend.settings import EndpointSettings

pytestmark = pytest.mark.interpreted

Scenario = Callable[[DoubleServing, RawClient], Any]


def request_of(
    model: str = "simple", request_id: str = "", names: tuple[str, ...] = ("INPUT0", "INPUT1"), rows: int = 1,
    outputs: tuple[str, ...] = (), first: int = 0, **parameters: int,
) -> bytes:  # fmt: skip
    """Return a message; ``first`` is the first element of the first tensor."""
    message: Any = message_class("ModelInferRequest")(model_name=model, id=request_id)
    for number, name in enumerate(names):
        width, wire = (16, "INT32") if model == "simple" else (4, "FP32")
        message.inputs.add(name=name, datatype=wire, shape=[rows, width])
        array = np.full((rows, width), first + number, np.int32 if wire == "INT32" else np.float32)
        message.raw_input_contents.append(array.tobytes())
    for name in outputs:
        message.outputs.add(name=name)
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    data: bytes = message.SerializeToString()
    return data


def answer_of(body: bytes) -> Any:
    assert body[:5] == b"\0" + (len(body) - 5).to_bytes(4, "big")
    return message_class("ModelInferResponse").FromString(body[5:])


@pytest.fixture
def scenario() -> Callable[[Scenario], None]:
    """Run a coroutine with a server that knows calls again, and a client of it."""

    async def run(body: Scenario) -> None:
        double = DoubleServing(EndpointSettings())
        server: RunningGrpcServer = server_of("repeats", double, 0)
        client = await RawClient.open(f"127.0.0.1:{await server.start()}")
        try:
            await body(double, client)
            assert double.responses_out == 0
            assert not client.closed
        finally:
            await client.close()
            await server.close()

    return lambda body: asyncio.run(run(body))


async def told(client: RawClient, message: bytes, **fields: str) -> bytes:
    answer = await client.call(framed(message), **fields)
    assert answer.status == 0, answer.text
    return bytes(answer.data)


def test_repeats_are_answered_byte_for_byte_like_the_first(scenario: Callable[[Scenario], None]) -> None:
    async def test(double: DoubleServing, client: RawClient) -> None:
        for order in (("INPUT0", "INPUT1"), ("INPUT1", "INPUT0")):
            for outputs in ((), ("OUTPUT1",), ("OUTPUT1", "OUTPUT0")):
                for rows in (1, 3):
                    message = request_of(names=order, outputs=outputs, rows=rows)
                    before = double.app.channel.submitted
                    first = await told(client, message)
                    assert double.app.channel.submitted == before
                    assert [await told(client, message) for _ in range(3)] == [first] * 3
                    assert double.app.channel.submitted == before + 3
                    other = answer_of(await told(client, request_of(names=order, outputs=outputs, rows=rows, first=7)))
                    difference = (1 if order[0] == "INPUT1" else -1) * np.ones((rows, 16), np.int32)
                    at = [output.name for output in other.outputs].index("OUTPUT1")
                    assert other.raw_output_contents[at] == difference.tobytes()
                    assert double.app.channel.submitted == before + 4

    scenario(test)


def test_repeats_under_ids_are_answered_under_them(scenario: Callable[[Scenario], None]) -> None:
    async def test(double: DoubleServing, client: RawClient) -> None:
        plain = answer_of(await told(client, request_of()))
        for number, request_id in enumerate(("1", "a longer id, of words", "x" * 127)):
            answer = answer_of(await told(client, request_of(request_id=request_id)))
            assert double.app.channel.submitted == number + 1
            assert answer.id == request_id
            answer.id = ""
            assert answer == plain
        for request_id in ("x" * 128, "größer"):
            answer = answer_of(await told(client, request_of(request_id=request_id)))
            assert (answer.id, double.app.channel.submitted) == (request_id, 3)

    scenario(test)


def test_what_a_template_does_not_say_is_decided_each_time(scenario: Callable[[Scenario], None]) -> None:
    async def test(double: DoubleServing, client: RawClient) -> None:
        message = request_of("echo_f32", names=("x",))
        for _ in range(3):
            await told(client, message)
        assert double.app.channel.submitted == 2
        cut = await client.call(framed(message[:-4]))
        assert (cut.status, double.app.channel.submitted) == (3, 2)
        longer = message[:-17] + bytes((20,)) + message[-16:] + bytes(4)
        answer = await client.call(framed(longer))
        assert (answer.status, double.app.channel.submitted) == (3, 2)
        assert "x" in answer.text
        wrong_flag = await client.call(framed(message, 2))
        assert (wrong_flag.status, double.app.channel.submitted) == (13, 2)
        twice = await client.call(framed(message) + framed(message))
        assert (twice.status, double.app.channel.submitted) == (12, 2)
        fails = request_of("broken", names=("x",))
        for _ in range(3):
            assert (await client.call(framed(fails))).status == 13
        assert double.app.channel.submitted == 2
        truth: Any = message_class("ModelInferRequest")(model_name="echo_bool")
        truth.inputs.add(name="x", datatype="BOOL", shape=[1, 4])
        truth.raw_input_contents.append(b"\1\0\1\0")
        for _ in range(3):
            await told(client, truth.SerializeToString())
        assert double.app.channel.submitted == 2

    scenario(test)


def test_repeats_keep_the_timeouts_of_their_calls(scenario: Callable[[Scenario], None]) -> None:
    async def test(double: DoubleServing, client: RawClient) -> None:
        message = request_of("echo_f32", names=("x",))
        budgets_ms: list[int | None] = []
        for fields in ({}, {}, {"grpc_timeout": "5S"}, {"grpc_timeout": "70M"}, {}):
            await told(client, message, **fields)
            deadline_ns, arrival_ns = double.last_request and double.last_request.deadline_ns, double.last_arrival_ns
            budgets_ms.append(None if deadline_ns is None else (deadline_ns - arrival_ns) // 1_000_000)
        assert (budgets_ms, double.app.channel.submitted) == ([None, None, 5000, 4_200_000, None], 4)
        hurried = request_of("echo_f32", names=("x",), timeout=2_000_000)
        for fields, budget_ms in (({}, 2000), ({"grpc_timeout": "1S"}, 1000), ({"grpc_timeout": "9S"}, 2000)):
            await told(client, hurried, **fields)
            if double.app.channel.submitted > 4:
                assert double.last_request is not None and double.last_request.deadline_ns is not None
                assert double.last_request.deadline_ns - double.last_arrival_ns == budget_ms * 1_000_000
        assert double.app.channel.submitted == 6

    scenario(test)


def test_the_time_of_a_repeat_counts_from_its_head(scenario: Callable[[Scenario], None]) -> None:
    async def test(double: DoubleServing, client: RawClient) -> None:
        message = request_of("echo_f32", names=("x",))
        for _ in range(2):
            await told(client, message)
        stream_id = client.start(INFER, grpc_timeout="1M")
        # The head was read when a later call is answered.
        await told(client, message)
        before_data_ns = time.monotonic_ns()
        await client.send(stream_id, framed(message))
        assert (await client.answer(stream_id)).status == 0
        assert double.app.channel.submitted == 3
        assert double.last_request is not None and double.last_request.deadline_ns is not None
        assert double.last_request.deadline_ns - double.last_arrival_ns == 60_000_000_000
        assert double.last_arrival_ns < before_data_ns

    scenario(test)


@pytest.mark.parametrize(
    ("asked", "recognised"),
    [
        ({}, True),
        ({"client_timeout": 5.0}, True),
        ({"client_timeout": 71.237}, True),
        ({"timeout": 60_000_000}, True),
        ({"headers": {"x-any": "thing"}}, True),
        ({"request_id": "a"}, True),
        # This message would not become shorter by gzip, so grpcio sends it as it is.
        ({"compression_algorithm": "gzip"}, True),
        ({"compression_algorithm": "deflate"}, False),
    ],
)
def test_calls_of_a_real_client_are_recognised(asked: dict[str, Any], recognised: bool) -> None:
    """Whatever it says beside the message; one that comes compressed takes the ordinary way."""

    async def run() -> None:
        double = DoubleServing(EndpointSettings())
        server: RunningGrpcServer = server_of("repeats", double, 0)
        port = await server.start()
        async with grpcaio.InferenceServerClient(f"127.0.0.1:{port}") as client:
            for turn in range(6):
                tensor = grpcclient.InferInput("x", [1, 4], "FP32")
                array = np.full((1, 4), turn, np.float32)
                tensor.set_data_from_numpy(array)
                answer = await client.infer("echo_f32", [tensor], **asked)
                np.testing.assert_array_equal(answer.as_numpy("y"), array)
                assert double.app.channel.submitted == (turn if recognised else 0)
        await server.close()

    asyncio.run(run())


def test_a_repeat_that_is_cancelled_is_withdrawn(scenario: Callable[[Scenario], None]) -> None:
    async def test(double: DoubleServing, client: RawClient) -> None:
        message = request_of("held", names=("x",))
        for _ in range(2):
            stream_id = client.start(INFER)
            await client.send(stream_id, framed(message))
            await double.until(lambda: bool(double.held))
            double.release_held()
            assert (await client.answer(stream_id)).status == 0
        stream_id = client.start(INFER)
        await client.send(stream_id, framed(message))
        await double.until(lambda: len(double.held) == 1)
        client.h2.reset_stream(stream_id)
        client.flush()
        await double.until(lambda: len(double.cancelled) == 1)
        assert double.app.channel.submitted == 2

    scenario(test)


# Templates by themselves

ENTRY_OF = DoubleServing().models


class Table:
    """A serving whose table can be replaced."""

    def __init__(self) -> None:
        self.table = list(ENTRY_OF.values())

    def entries(self) -> Any:
        return self.table

    def entry(self, model: str, version: str = "") -> Any:
        return ENTRY_OF[model]


def learnt(*messages: bytes) -> Templates:
    """Return templates that have seen these messages of ``echo_f32`` answered."""
    serving: Any = Table()
    templates = Templates(serving)
    for message in messages:
        learn(templates, message)
    return templates


def learn(templates: Templates, message: bytes, table: object = None, now_ns: int = 0) -> None:
    request = decode_infer(message, EndpointSettings())
    array = np.frombuffer(memoryview(request.inputs[0].raw or b""), np.float32).reshape(request.inputs[0].shape)
    response = InferResponse("echo_f32", "1", request.request_id, [OutputTensor("y", "FP32", array)])
    table = templates._serving.entries() if table is None else table
    templates.learn(now_ns, message, request, table, response, infer_parts(response))


def found(templates: Templates, message: bytes, before: bytes = b"", after: bytes = b"") -> Any:
    data = before + framed(message) + after
    return templates.find(data, len(before), len(data) - len(after))


@given(st.binary(max_size=20), st.binary(max_size=20), st.text("ab1", max_size=6), st.floats(width=32))
def test_a_message_is_found_wherever_it_lies(before: bytes, after: bytes, request_id: str, value: float) -> None:
    templates = learnt(request_of("echo_f32", names=("x",)))
    message = request_of("echo_f32", request_id, names=("x",))[:-4] + np.float32(value).tobytes()
    template, data, first, told_id = found(templates, message, before, after)
    assert (data[first : first + 16], told_id) == (message[-16:], request_id.encode())
    array = np.frombuffer(data, np.float32, 4, first).reshape(1, 4)
    opening, size = template.opening_under(told_id)
    expected = infer_parts(InferResponse("echo_f32", "1", request_id, [OutputTensor("y", "FP32", array)]))
    assert opening + array.tobytes() == framed(b"".join(expected))
    assert size == len(opening) + 16


@given(st.data())
def test_a_message_that_differs_anywhere_before_its_elements_is_not_found(data: st.DataObject) -> None:
    message = request_of("echo_f32", "id", names=("x",))
    templates = learnt(request_of("echo_f32", names=("x",)))
    layout = layout_of(message)
    assert layout is not None and found(templates, message) is not None
    first = layout.raws[0][0]
    head, identified = layout.head_end, layout.id_end
    at = data.draw(st.one_of(st.integers(0, head + 1), st.integers(identified, first - 1)))
    changed = bytearray(message)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert found(templates, bytes(changed)) is None
    for stop in range(len(message)):
        assert found(templates, message[:stop]) is None


def test_a_new_table_forgets_what_was_learnt() -> None:
    message = request_of("echo_f32", names=("x",))
    templates = learnt(message)
    assert found(templates, message) is not None
    serving: Any = templates._serving
    serving.table = list(serving.table)
    assert found(templates, message) is None
    # Answered by a model of the table before: it may be another one by now.
    learn(templates, message, list(serving.table))
    assert found(templates, message) is None
    learn(templates, message)
    assert found(templates, message) is not None


def test_calls_of_one_kind_that_were_under_way_together_are_learnt_once() -> None:
    templates = learnt(
        *[request_of("echo_f32", names=("x",), request_id=str(number)) for number in range(MAX_ATTEMPTS)]
    )
    assert sum(map(len, templates._by_bytes.values())) == 1
    other = request_of("echo_f32", names=("x",), rows=2)
    learn(templates, other)
    assert found(templates, other) is not None


def test_what_never_repeats_is_learnt_within_limits() -> None:
    templates = learnt()
    for number in range(MAX_ATTEMPTS + 10):
        learn(templates, request_of("echo_f32", names=("x",), rows=1 + number % 8, key=number))
    assert sum(map(len, templates._by_bytes.values())) <= MAX_TEMPLATES
    late = request_of("echo_f32", names=("x",), rows=2, late=1)
    learn(templates, late)
    assert found(templates, late) is None
    learn(templates, late, now_ns=1_000_000_000)
    assert found(templates, late) is not None


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x0a\x01m",
        b"\x3a\x00",
        b"\x3a\x00\x0a\x01m",
        b"\x0a\x01m\x1a\x01i\x0a\x01n\x3a\x00",
        b"\x0a\x01m\x2a\x00\x1a\x01i\x3a\x00",
        b"\x0a\x01m\x3a\x00\x2a\x00",
        b"\x0a\x01m\x3a\x05",
        b"\x12\x01v\x0a\x01m\x3a\x00",
        b"\x0a\x81\x00mm\x3a\x00",
        b"\xff" * 12,
    ],
)
def test_other_orders_of_fields_have_no_layout(message: bytes) -> None:
    assert layout_of(message) is None
