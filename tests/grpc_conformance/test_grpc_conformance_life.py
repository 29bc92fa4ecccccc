"""Both gRPC servers: sizes, deadlines, cancels, limits, order and drain, with real clients."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from serving_double import DoubleServing
from tritonclient.grpc import service_pb2, service_pb2_grpc

from frontend.grpc_server import RunningGrpcServer
from frontend.settings import EndpointSettings

MIB = 1 << 20
INFER = "/inference.GRPCInferenceService/ModelInfer"
WithServer = Callable[..., None]


def request_of(model: str = "echo_f32", request_id: str = "", shape: tuple[int, int] = (1, 4)) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    message.inputs.add(name="x", datatype="FP32", shape=shape)
    message.raw_input_contents.append(np.arange(shape[0] * shape[1], dtype=np.float32).tobytes())
    return message


def stub_of(channel: Any) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def test_pi_05_messages_of_64_mib_pass_both_ways(with_server: WithServer) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with triton_aio.InferenceServerClient(address) as client:
            for size in (int(3.9 * MIB), int(4.1 * MIB), 64 * MIB):
                values = np.random.default_rng(7).integers(0, 2**31, (1, size // 4), np.int32).view(np.float32)
                tensor = triton.InferInput("x", list(values.shape), "FP32")
                tensor.set_data_from_numpy(values)
                result = await client.infer("free", [tensor])
                assert result.as_numpy("y").tobytes() == values.tobytes()
        assert double.responses_out == 0

    with_server(test, EndpointSettings(max_request_bytes=65 * MIB))


def test_large_messages_of_several_calls_and_of_a_stream_at_once(with_server: WithServer) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = stub_of(channel)
            calls = [stub.ModelInfer(request_of("free", str(n), (1, MIB))) for n in range(8)]
            stream = stub.ModelStreamInfer(iter([request_of("free", str(n), (1, MIB)) for n in range(12)]))
            small = [await stub.ModelInfer(request_of(request_id=f"small-{n}")) for n in range(20)]
            assert [answer.id for answer in small] == [f"small-{n}" for n in range(20)]
            streamed = [answer.infer_response async for answer in stream]
            assert [answer.id for answer in streamed] == [str(n) for n in range(12)]
            expected = request_of("free", "", (1, MIB)).raw_input_contents[0]
            for answer in [*streamed, *await asyncio.gather(*calls)]:
                assert answer.raw_output_contents[0] == expected
        assert double.responses_out == 0

    with_server(test)


def test_a_stream_that_nobody_reads_is_held_back_and_then_answered_in_order(with_server: WithServer) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stream = stub_of(channel).ModelStreamInfer()
            count, sent = 400, 0

            async def write() -> None:
                nonlocal sent
                for number in range(count):
                    await stream.write(request_of("free", str(number), (1, 16 * 1024)))
                    sent += 1
                await stream.done_writing()

            writing = asyncio.create_task(write())
            await double.until(lambda: len(double.started) > 20)
            ids = [answer.infer_response.id async for answer in stream]
            await writing
            assert (sent, ids) == (count, [str(number) for number in range(count)])
        assert double.responses_out == 0

    with_server(test)


def test_do_05_many_calls_with_tiny_deadlines_leave_nothing_behind(with_server: WithServer) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = stub_of(channel)
            turns = asyncio.Semaphore(64)

            async def one(number: int) -> grpc.StatusCode | str:
                async with turns:
                    model = "held" if number % 2 else "echo_f32"
                    try:
                        answer = await stub.ModelInfer(request_of(model, str(number)), timeout=0.001 * (1 + number % 4))
                    except grpc.aio.AioRpcError as error:
                        return error.code()
                    assert answer.id == str(number)
                    return "ok"

            outcomes = await asyncio.gather(*(one(number) for number in range(1000)))
            assert set(outcomes) <= {"ok", grpc.StatusCode.DEADLINE_EXCEEDED}
            assert set(outcomes[1::2]) == {grpc.StatusCode.DEADLINE_EXCEEDED}
            after = await asyncio.gather(*(stub.ModelInfer(request_of(request_id=f"n{n}")) for n in range(100)))
            assert [answer.id for answer in after] == [f"n{n}" for n in range(100)]
            await double.until(lambda: all(call.cancelled for call in double.held))
        assert double.responses_out == 0

    with_server(test)


def test_a_stream_has_a_deadline_too(with_server: WithServer) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stream = stub_of(channel).ModelStreamInfer(iter([request_of("held", "late")]), timeout=0.2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [answer async for answer in stream]
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await double.until(lambda: double.cancelled == ["late"])

    with_server(test)


def test_a_client_that_leaves_withdraws_all_its_requests(with_server: WithServer) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        channel = grpc.aio.insecure_channel(address)
        stub = stub_of(channel)
        calls = [stub.ModelInfer(request_of("held", str(number))) for number in range(10)]
        stream = stub.ModelStreamInfer(iter([request_of("held", f"s{number}") for number in range(10)]))
        reading = asyncio.create_task(stream.read())
        await double.until(lambda: len(double.held) == 20)
        await channel.close()
        await double.until(lambda: len(double.cancelled) == 20)
        await asyncio.gather(reading, *calls, return_exceptions=True)
        assert double.responses_out == 0

    with_server(test)


def test_calls_over_the_limit_are_refused_and_later_ones_are_not(with_server: WithServer) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as first, grpc.aio.insecure_channel(address) as second:
            held = [stub_of(channel).ModelInfer(request_of("held")) for channel in (first, second)]
            await double.until(lambda: len(double.held) == 2)
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(address, options=options) as third:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub_of(third).ModelInfer(request_of())
                assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "Concurrent RPC limit exceeded" in str(caught.value.details())
                double.release_held()
                await asyncio.gather(*held)
                assert (await stub_of(third).ModelInfer(request_of(request_id="after"))).id == "after"

    with_server(test, settings={"max_concurrent_rpcs": 2})


@pytest.mark.parametrize("path", ["/inference.GRPCInferenceService/Nothing", "/nobody.Service/ModelInfer"])
def test_unknown_methods_are_unimplemented(address: str, path: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(path)(b"x" * 100_000)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "Method not found" in caught.value.details()


@pytest.mark.parametrize("name", ["ünï", "100 %", "line\nbreak\ttab", "%41", "🙂", "x" * 5000])
def test_any_text_arrives_in_a_status(address: str, name: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        stub_of(channel).ModelInfer(request_of(name))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    if len(name) < 1000:
        assert f"Request for unknown model: '{name}' is not found" == caught.value.details()
    else:
        assert caught.value.details().endswith("...")


@pytest.mark.parametrize("package", ["grpc.reflection.v1alpha", "grpc.reflection.v1"])
def test_both_versions_of_reflection_describe_themselves(address: str, package: str) -> None:
    request = reflection_pb2.ServerReflectionRequest
    asked = [
        request(list_services=""),
        request(file_containing_symbol=f"{package}.ServerReflectionRequest"),
        request(file_containing_symbol="no.such.Thing"),
        request(file_by_filename="grpc_service.proto"),
        request(all_extension_numbers_of_type="inference.ModelConfig"),
        request(),
    ]
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(
            f"/{package}.ServerReflection/ServerReflectionInfo",
            request_serializer=request.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        listed, own, missing, file, extensions, nothing = list(call(iter(asked)))
    assert f"{package}.ServerReflection" in {service.name for service in listed.list_services_response.service}
    described = descriptor_pb2.FileDescriptorProto.FromString(own.file_descriptor_response.file_descriptor_proto[0])
    assert described.package == package
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert missing.original_request == asked[2]
    names = [
        descriptor_pb2.FileDescriptorProto.FromString(data).name
        for data in file.file_descriptor_response.file_descriptor_proto
    ]
    assert names == ["grpc_service.proto", "model_config.proto"]
    assert extensions.all_extension_numbers_response.base_type_name == "inference.ModelConfig"
    assert nothing.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_watch_of_an_unknown_service_says_so_and_stays_open(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert watch.is_active()
        watch.cancel()


def test_garbage_in_any_method_is_an_invalid_argument(address: str) -> None:
    paths = ["/inference.GRPCInferenceService/ModelReady", "/grpc.health.v1.Health/Check"]
    with grpc.insecure_channel(address) as channel:
        for path in paths:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(b"\xff\xff\xff")
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff\xff\xff"))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_keepalive_options_of_a_client_are_tolerated(address: str) -> None:
    options = triton.KeepAliveOptions(
        keepalive_time_ms=2**31 - 1, keepalive_timeout_ms=20_000, keepalive_permit_without_calls=False
    )
    with triton.InferenceServerClient(address, keepalive_options=options) as client:
        tensor = triton.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 4), dtype=np.float32))
        for _ in range(3):
            assert client.infer("echo_f32", [tensor]).as_numpy("y").tolist() == [[1.0] * 4]


def test_a_drain_finishes_many_calls_under_way_and_refuses_none(with_server: WithServer) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [stub_of(channel).ModelInfer(request_of("held", str(number))) for number in range(100)]
            await double.until(lambda: len(double.held) == 100)
            draining = asyncio.create_task(server.drain(20))
            await asyncio.sleep(0)
            double.release_held()
            answers = await asyncio.gather(*calls)
            assert [answer.id for answer in answers] == [str(number) for number in range(100)]
            await draining
        assert double.responses_out == 0

    with_server(test)


def test_what_a_drain_cannot_finish_is_cut_and_withdrawn(with_server: WithServer) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [stub_of(channel).ModelInfer(request_of("held", str(number))) for number in range(3)]
            await double.until(lambda: len(double.held) == 3)
            await server.drain(0.05)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(outcome, grpc.aio.AioRpcError) for outcome in outcomes)
            await double.until(lambda: len(double.cancelled) == 3)

    with_server(test)


KSERVE_CLIENT = """
import asyncio, json, sys
import numpy as np
from kserve import InferInput, InferRequest
from kserve.inference_client import InferenceGRPCClient

async def main():
    client = InferenceGRPCClient(url=sys.argv[1])
    found = {"live": await client.is_server_live(), "ready": await client.is_server_ready(),
             "model": await client.is_model_ready("echo_f32")}
    for binary in (True, False):
        tensor = InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.arange(4, dtype=np.float32).reshape(1, 4), binary_data=binary)
        answer = await client.infer(InferRequest(model_name="echo_f32", infer_inputs=[tensor]))
        found[str(binary)] = answer.outputs[0].as_numpy().ravel().tolist()
    await client.close()
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest.mark.process
def test_the_kserve_client_in_a_process_of_its_own(address: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KSERVE_CLIENT, address], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    values = [0.0, 1.0, 2.0, 3.0]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "live": True, "ready": True, "model": True, "True": values, "False": values,
    }  # fmt: skip
