"""Both gRPC servers against real clients, in process: tritonclient, its asyncio twin, and bare grpcio.

Every test runs once per server (``kind``): what one of them answers, the other answers too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from any_grpc import server_of
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from serving_double import DoubleServing
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from frontend.grpc_server import RunningGrpcServer
from frontend.kserve.proto_schema import RPCS as ALL_RPCS
from frontend.settings import EndpointSettings


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str) -> Any:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def simple_inputs(rows: int = 2) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[Any]]:
    a = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16)
    b = np.full((rows, 16), 3, dtype=np.int32)
    return a, b, [tensor("INPUT0", a, "INT32"), tensor("INPUT1", b, "INT32")]


def request_of(model: str = "echo_f32", request_id: str = "", values: Any = (1, 2, 3, 4)) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    array = np.array(values, dtype=np.float32)
    message.inputs.add(name="x", datatype="FP32", shape=[1, len(array)])
    message.raw_input_contents.append(array.tobytes())
    return message


def test_health_and_metadata(client: Any, double: DoubleServing) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert client.is_model_ready("simple", "1")
    assert not client.is_model_ready("loading")
    assert not client.is_model_ready("nobody")
    server = client.get_server_metadata()
    assert server.name == double.limits.server_name
    assert "binary_tensor_data" in server.extensions
    model = client.get_model_metadata("simple")
    assert (model.name, list(model.versions), model.platform) == ("simple", ["1"], "onnxruntime")
    assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [
        ("INPUT0", "INT32", [-1, 16]),
        ("INPUT1", "INT32", [-1, 16]),
    ]


def test_config_statistics_and_index(client: Any) -> None:
    config = client.get_model_config("simple").config
    assert config.max_batch_size == 8
    assert list(config.input[0].dims) == [16]
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert list(config.dynamic_batching.preferred_batch_size) == [1, 8]
    assert client.get_model_config("fixed", as_json=True)["config"].get("max_batch_size", 0) == 0
    stats = client.get_inference_statistics("simple").model_stats
    assert [(s.name, s.inference_count, s.inference_stats.success.ns) for s in stats] == [("simple", 7, 12345)]
    states = {m.name: m.state for m in client.get_model_repository_index().models}
    assert states["simple"] == "READY"
    assert states["loading"] == "LOADING"


def test_infer_returns_raw_outputs_and_echoes_the_id(client: Any) -> None:
    a, b, inputs = simple_inputs()
    result = client.infer("simple", inputs, request_id="r-1", outputs=[triton.InferRequestedOutput("OUTPUT1")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)
    assert result.as_numpy("OUTPUT0") is None
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("r-1", "simple", "1")
    assert len(response.raw_output_contents) == 1


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client: Any, algorithm: str) -> None:
    a, b, inputs = simple_inputs()
    result = client.infer("simple", inputs, compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)


def test_bytes_half_types_and_classification(client: Any) -> None:
    texts = np.array([[b"a", b"", "\u00e9".encode(), b"\x00\xff"]], dtype=np.object_)
    result = client.infer("echo_bytes", [tensor("x", texts, "BYTES")])
    np.testing.assert_array_equal(result.as_numpy("y"), texts)
    halves = np.array([[0.1, 65504, np.inf, np.nan]], dtype=ml_dtypes.bfloat16)
    result = client.infer("echo_bf16", [tensor("x", halves, "BF16")])
    assert bytes(result.get_response().raw_output_contents[0]) == halves.tobytes()
    values = np.array([[0.5, 4.0, -1.0, 2.0]], dtype=np.float32)
    wanted = [triton.InferRequestedOutput("y", class_count=2)]
    result = client.infer("echo_f32", [tensor("x", values, "FP32")], outputs=wanted)
    assert result.as_numpy("y").tolist() == [[b"4.000000:1", b"2.000000:3"]]


def test_parameters_of_either_integer_type(client: Any, double: DoubleServing) -> None:
    _, _, inputs = simple_inputs()
    client.infer("simple", inputs, priority=2, timeout=5_000_000, sequence_id=7, parameters={"mine": "x"})
    assert double.last_request is not None
    assert double.last_request.timeout_us == 5_000_000
    assert double.last_request.parameters["mine"] == "x"
    client.infer("simple", inputs, parameters={"note": True, "weight": 0.5})
    assert double.last_request.parameters == {"note": True, "weight": 0.5}


MISTAKES: list[tuple[str, Callable[[Any], None], grpc.StatusCode, str]] = [
    (
        "unknown model",
        lambda m: setattr(m, "model_name", "nobody"),
        grpc.StatusCode.NOT_FOUND,
        "unknown model: 'nobody'",
    ),
    ("unknown version", lambda m: setattr(m, "model_version", "99"), grpc.StatusCode.NOT_FOUND, "version 99"),
    ("word as version", lambda m: setattr(m, "model_version", "x"), grpc.StatusCode.INVALID_ARGUMENT, "version string"),
    ("loading", lambda m: setattr(m, "model_name", "loading"), grpc.StatusCode.UNAVAILABLE, "LOADING"),
    ("model fails", lambda m: setattr(m, "model_name", "broken"), grpc.StatusCode.INTERNAL, "failed"),
    ("late", lambda m: setattr(m, "model_name", "late"), grpc.StatusCode.DEADLINE_EXCEEDED, "expired"),
    ("surplus", lambda m: m.raw_input_contents.append(b""), grpc.StatusCode.INVALID_ARGUMENT, "unexpected additional"),
    ("no data", lambda m: m.ClearField("raw_input_contents"), grpc.StatusCode.INVALID_ARGUMENT, "unable to find data"),
    (
        "mixed",
        lambda m: m.inputs[0].contents.fp32_contents.extend([1.0] * 4),
        grpc.StatusCode.INVALID_ARGUMENT,
        "contents field must not be specified when using raw_input_contents",
    ),
    (
        "client shared memory",
        lambda m: setattr(m.inputs[0].parameters["shared_memory_region"], "string_param", "r"),
        grpc.StatusCode.UNIMPLEMENTED,
        "shared memory",
    ),
]


@pytest.mark.parametrize(("change", "code", "text"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_pi_10_mistakes_keep_their_own_status(
    address: str, change: Callable[[Any], None], code: grpc.StatusCode, text: str
) -> None:
    message = request_of()
    change(message)
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message)
    assert caught.value.code() == code
    assert text in caught.value.details()


def test_a_full_queue_says_when_to_come_back(address: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request_of("full"))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after", "1") in [(item.key, item.value) for item in caught.value.trailing_metadata()]


def test_garbage_is_an_invalid_argument(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for data in (b"\xff\xff", b"\x0a\x05ab", b"\x3a" * 40_000):
            with pytest.raises(grpc.RpcError) as caught:
                call(data)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


OFFERED = {
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics",
    "ModelInfer", "ModelStreamInfer", "RepositoryIndex", "SystemSharedMemoryStatus", "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister", "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
}  # fmt: skip


@pytest.mark.parametrize("rpc", sorted(set(ALL_RPCS) - OFFERED))
def test_rpcs_that_are_not_offered_say_so(address: str, rpc: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/inference.GRPCInferenceService/{rpc}")(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert rpc in caught.value.details()


def test_shared_memory_that_is_off_can_be_listed_and_unregistered_but_not_registered(client: Any) -> None:
    assert not client.get_system_shared_memory_status().regions
    assert not client.get_cuda_shared_memory_status().regions
    client.unregister_system_shared_memory("any")
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    for call, text in (
        (lambda: client.register_system_shared_memory("r", "/r", 8), "system_shared_memory.enabled is false"),
        (lambda: client.register_cuda_shared_memory("r", b"", 0, 8), "CUDA shared memory is not offered"),
    ):
        with pytest.raises(InferenceServerException, match=text) as caught:
            call()
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    assert "system_shared_memory" not in client.get_server_metadata().extensions


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
def test_pi_13_health_check_follows_readiness(address: str, double: DoubleServing, service: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        assert stub.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        double.is_ready = False
        try:
            assert stub.Check(request).status == health_pb2.HealthCheckResponse.NOT_SERVING
        finally:
            double.is_ready = True
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_health_watch_tells_changes_and_ends_with_a_drain(with_server: Callable[..., None]) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            # Iterated, not read(): that returns EOF once the status is there, whatever came before it.
            watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
            seen = [(await anext(watch)).status]
            double.is_ready = False
            seen.append((await anext(watch)).status)
            double.is_ready = True
            seen.append((await anext(watch)).status)
            draining = asyncio.create_task(server.drain(20))
            seen += [answer.status async for answer in watch]
            await draining
        response = health_pb2.HealthCheckResponse
        assert seen == [response.SERVING, response.NOT_SERVING, response.SERVING, response.NOT_SERVING]

    with_server(test)


def test_reflection_describes_the_service(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "inference.GRPCInferenceService" in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        service = pool.FindServiceByName("inference.GRPCInferenceService")
        assert len(service.methods) == 20
        assert pool.FindMessageTypeByName("inference.ModelConfig").fields_by_name["max_batch_size"].number == 4


def test_pi_05_a_message_over_the_limit_names_it(kind: str, with_server: Callable[..., None]) -> None:
    # Far beyond the limit grpcio refuses by itself, in its own words.
    beyond = "larger than max" if kind == "grpcio" else "max_request_bytes is 1048576"
    limits = EndpointSettings(max_request_bytes=1 << 20)

    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with triton_aio.InferenceServerClient(address) as client:
            fits = np.zeros((1, (1 << 18) - 64), dtype=np.float32)
            result = await client.infer("free", [tensor("x", fits, "FP32")])
            assert result.as_numpy("y").shape == fits.shape
            for elements, text in ((1 << 18, "max_request_bytes is 1048576"), (5 << 20, beyond)):
                over = np.zeros((1, elements), dtype=np.float32)
                with pytest.raises(InferenceServerException) as caught:
                    await client.infer("free", [tensor("x", over, "FP32")])
                assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
                assert text in caught.value.message()
            assert len(double.started) == 1

    with_server(test, limits)


def test_a_compressed_bomb_is_not_inflated_beyond_the_limit(kind: str, with_server: Callable[..., None]) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(bytes(64 << 20))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            text = "larger than max" if kind == "grpcio" else "inflates to more than"
            assert text in str(caught.value.details())

    with_server(test, EndpointSettings(max_request_bytes=1 << 20))


def test_large_tensors_pass_beyond_the_libraries_default(with_server: Callable[..., None]) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        values = np.random.default_rng(7).random((2, 3 << 19), dtype=np.float32)
        async with triton_aio.InferenceServerClient(address) as client:
            result = await client.infer("free", [tensor("x", values, "FP32")])
            np.testing.assert_array_equal(result.as_numpy("y"), values)
        assert double.responses_out == 0

    with_server(test)


def test_pi_12_bad_requests_of_a_stream_are_told_under_their_ids(with_server: Callable[..., None]) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        messages = [
            request_of(request_id="good-0"),
            request_of("nobody", "unknown"),
            request_of(request_id="shape", values=(1, 2, 3)),
            request_of(request_id="good-1"),
            request_of("broken", "broken"),
            request_of(request_id="good-2"),
        ]
        async with grpc.aio.insecure_channel(address) as channel:
            stream = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(messages))
            answers = [answer async for answer in stream]
        assert [a.infer_response.id for a in answers] == [m.id for m in messages]
        failed = {a.infer_response.id: a.error_message for a in answers if a.error_message}
        assert set(failed) == {"unknown", "shape", "broken"}
        assert "Request for unknown model: 'nobody' is not found" in failed["unknown"]
        assert "unexpected shape for input 'x'" in failed["shape"]
        assert double.responses_out == 0

    with_server(test)


def test_bs_12_answers_of_a_stream_keep_the_order_of_the_requests(with_server: Callable[..., None]) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        ids = [str(i) for i in range(500)]
        # Every third waits until the others are done, so completion order differs from request order.
        messages = [request_of("held" if i % 3 == 0 else "echo_f32", ids[i]) for i in range(500)]
        async with grpc.aio.insecure_channel(address) as channel:
            stream = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(messages))
            reading = asyncio.create_task(_ids(stream))
            released = 0
            while released < 167:
                await double.until(lambda: bool(double.held))
                released += len(double.held)
                double.release_held()
            assert await reading == ids
        assert double.started == ids
        assert double.responses_out == 0

    with_server(test)


async def _ids(stream: Any) -> list[str]:
    return [answer.infer_response.id async for answer in stream]


def test_pi_12_a_cancelled_stream_withdraws_what_waits(with_server: Callable[..., None]) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stream = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            await stream.write(request_of(request_id="first"))
            for index in range(50):
                await stream.write(request_of("held", f"held-{index}"))
            await stream.write(request_of(request_id="finished-behind"))
            assert (await stream.read()).infer_response.id == "first"
            await double.until(lambda: len(double.started) == 52 and double.responses_out == 1)
            stream.cancel()
            await double.until(lambda: len(double.cancelled) == 50 and double.responses_out == 0)

    with_server(test)


def test_streams_through_the_sync_client(client: Any) -> None:
    answers: list[Any] = []
    client.start_stream(callback=lambda result, error: answers.append((result, error)))
    a, b, inputs = simple_inputs()
    for index in range(4):
        client.async_stream_infer("simple", inputs, request_id=str(index), enable_empty_final_response=True)
    client.stop_stream()
    assert [result.get_response().id for result, error in answers if error is None] == ["0", "1", "2", "3"]
    np.testing.assert_array_equal(answers[3][0].as_numpy("OUTPUT0"), a + b)


def test_a_cancelled_call_is_withdrawn(with_server: Callable[..., None]) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request_of("held", "gone"))
            await double.until(lambda: "gone" in double.started)
            call.cancel()
            await double.until(lambda: double.cancelled == ["gone"])

    with_server(test)


def test_do_05_client_deadlines_arrive_and_expired_calls_are_withdrawn(with_server: Callable[..., None]) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            await stub.ModelInfer(request_of())
            assert double.last_request is not None and double.last_request.deadline_ns is None
            await stub.ModelInfer(request_of(), timeout=60)
            assert double.last_request.deadline_ns is not None
            await stub.ModelInfer(request_of(), timeout=2**31)
            assert double.last_request.deadline_ns is None
            calls = [stub.ModelInfer(request_of("held"), timeout=0.002) for _ in range(200)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert {o.code() for o in outcomes} == {grpc.StatusCode.DEADLINE_EXCEEDED}  # type: ignore[union-attr]
            assert (await stub.ModelInfer(request_of(request_id="after"))).id == "after"
            await double.until(lambda: all(call.cancelled for call in double.held))
        assert double.responses_out == 0

    with_server(test)


def test_a_drain_finishes_what_runs_and_ends_streams(with_server: Callable[..., None]) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            running = stub.ModelInfer(request_of("held", "running"))
            stream = stub.ModelStreamInfer()
            await stream.write(request_of("held", "streamed"))
            await double.until(lambda: len(double.held) == 2)
            draining = asyncio.create_task(server.drain(20))
            await asyncio.sleep(0)
            double.release_held()
            assert (await running).id == "running"
            answers = aiter(stream)
            assert (await anext(answers)).infer_response.id == "streamed"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(answers)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            await draining

    with_server(test)


def test_two_servers_share_a_port_and_a_taken_one_is_refused(kind: str, with_server: Callable[..., None]) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        port = int(address.rpartition(":")[2])
        second = server_of(kind, double, port)
        assert await second.start() == port
        await second.close()
        await second.close()
        bad = server_of(kind, double, port, "203.0.113.1")
        with pytest.raises(OSError, match="cannot listen"):
            await bad.start()

    with_server(test)


def test_unforeseen_failures_are_internal_and_tell_nothing(
    with_server: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(double: DoubleServing, server: RunningGrpcServer, address: str) -> None:
        def start(*_: Any) -> None:
            raise RuntimeError("secret")

        double.start = start  # type: ignore[method-assign,assignment]
        async with grpc.aio.insecure_channel(address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(request_of())
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
            answers = [a async for a in stub.ModelStreamInfer(iter([request_of(request_id="i")]))]
            assert [(a.error_message, a.infer_response.id) for a in answers] == [("internal error", "i")]

    with_server(test)
    assert "secret" in caplog.text
