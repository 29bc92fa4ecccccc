"""Real clients, unchanged, against the HTTP server and a double of Serving."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from http_double import Running
from serving_double import DoubleServing
from tritonclient.utils import InferenceServerException

from frontend.kserve.http_routes import KserveApp
from frontend.settings import EndpointSettings

ONE = np.arange(16, dtype=np.int32).reshape(1, 16)
TWO = np.full((1, 16), 3, np.int32)


@pytest.fixture
def double() -> DoubleServing:
    return DoubleServing()


@pytest.fixture
def kserve(serve: Any, double: DoubleServing) -> Running:
    return serve(KserveApp(double), double.limits)


def inputs(module: Any, binary: bool = True) -> list[Any]:
    made = []
    for name, array in (("INPUT0", ONE), ("INPUT1", TWO)):
        one = module.InferInput(name, [1, 16], "INT32")
        one.set_data_from_numpy(array, binary_data=binary)
        made.append(one)
    return made


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
def test_tritonclient_http(kserve: Running, binary: bool, algorithm: str | None) -> None:
    with httpclient.InferenceServerClient(f"127.0.0.1:{kserve.port}", concurrency=4) as client:
        result = client.infer(
            "simple",
            inputs(httpclient, binary),
            outputs=[httpclient.InferRequestedOutput(name, binary_data=binary) for name in ("OUTPUT0", "OUTPUT1")],
            request_id="seven",
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        assert (result.as_numpy("OUTPUT0") == ONE + TWO).all()
        assert (result.as_numpy("OUTPUT1") == ONE - TWO).all()
        assert result.get_response()["id"] == "seven"


def test_tritonclient_http_questions(kserve: Running, double: DoubleServing) -> None:
    with httpclient.InferenceServerClient(f"127.0.0.1:{kserve.port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("simple", "1")
        assert not client.is_model_ready("none")
        assert client.get_server_metadata()["name"] == "ringserve"
        assert client.get_model_metadata("simple")["versions"] == ["1"]
        assert client.get_model_config("simple", "1")["max_batch_size"] == 8
        assert client.get_inference_statistics("simple")["model_stats"][0]["execution_count"] == 3
        assert {one["name"] for one in client.get_model_repository_index()} >= {"simple", "loading"}
        assert client.get_system_shared_memory_status() == []
        assert client.get_cuda_shared_memory_status() == []
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed"):
            client.load_model("simple")
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'none' is not found"):
            client.infer("none", inputs(httpclient))
        double.is_ready = False
        assert not client.is_server_ready()


def test_tritonclient_http_many_at_once(kserve: Running) -> None:
    with httpclient.InferenceServerClient(f"127.0.0.1:{kserve.port}", concurrency=8) as client:
        calls = [client.async_infer("simple", inputs(httpclient)) for _ in range(50)]
        assert all((call.get_result().as_numpy("OUTPUT0") == ONE + TWO).all() for call in calls)


def test_tritonclient_aio(kserve: Running) -> None:
    async def use() -> None:
        async with httpaio.InferenceServerClient(f"127.0.0.1:{kserve.port}") as client:
            assert await client.is_server_live()
            assert (await client.get_server_metadata())["name"] == "ringserve"
            assert (await client.get_model_config("simple"))["max_batch_size"] == 8
            assert (await client.get_inference_statistics("simple"))["model_stats"]
            results = await asyncio.gather(*(client.infer("simple", inputs(httpaio)) for _ in range(50)))
            assert all((result.as_numpy("OUTPUT1") == ONE - TWO).all() for result in results)
            one = httpaio.InferInput("x", [1, 4], "FP32")
            one.set_data_from_numpy(np.zeros((1, 4), np.float32))
            with pytest.raises(InferenceServerException, match="Exceeds maximum queue size"):
                await client.infer("full", [one])

    asyncio.run(use())


def test_a_client_timeout_withdraws_the_request(kserve: Running, double: DoubleServing) -> None:
    client = httpclient.InferenceServerClient(f"127.0.0.1:{kserve.port}", network_timeout=0.2)
    one = httpclient.InferInput("x", [1, 4], "FP32")
    one.set_data_from_numpy(np.zeros((1, 4), np.float32))
    with pytest.raises(Exception, match="timed out"):
        client.infer("held", [one], request_id="late")
    client.close()
    kserve.wait(double.until(lambda: double.cancelled == ["late"]))


def curl(*arguments: str, stdin: bytes = b"") -> tuple[int, bytes]:
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "20", "-w", "\n%{http_code}", *arguments],
        input=stdin,
        capture_output=True,
        check=True,
    )
    body, _, status = done.stdout.rpartition(b"\n")
    return int(status), body


def test_curl(kserve: Running) -> None:
    url = f"http://127.0.0.1:{kserve.port}/v2"
    assert curl(f"{url}/health/live") == (200, b'{"live":true}')
    assert curl("--head", f"{url}/health/ready")[0] == 200
    assert curl("--http1.0", f"{url}/health/live") == (200, b'{"live":true}')
    assert curl("--http2", f"{url}/health/live") == (200, b'{"live":true}')
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})
    for options in (
        [],
        ["-H", "Transfer-Encoding: chunked"],
        ["-H", "Expect: 100-continue"],
        ["--http2"],
        ["--compressed"],
    ):
        status, answer = curl(*options, "-d", body, f"{url}/models/echo_f32/infer")
        assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [1, 2, 3, 4])
    rows = np.arange(800_000).reshape(-1, 4)
    large = {"inputs": [{"name": "x", "shape": rows.shape, "datatype": "FP32", "data": rows.ravel().tolist()}]}
    status, answer = curl("--data-binary", "@-", f"{url}/models/free/infer", stdin=json.dumps(large).encode())
    assert (status, json.loads(answer)["outputs"][0]["shape"]) == (200, [200_000, 4])


def test_curl_reads_the_refusal_of_a_large_body(serve: Any) -> None:
    double = DoubleServing(EndpointSettings(max_request_bytes=1024))
    server = serve(KserveApp(double), double.limits)
    url = f"http://127.0.0.1:{server.port}/v2/models/echo_f32/infer"
    for options in ([], ["-H", "Expect:"], ["-H", "Transfer-Encoding: chunked", "-H", "Expect:"]):
        status, answer = curl(*options, "--data-binary", "@-", url, stdin=bytes(20_000_000))
        assert (status, b"max_request_bytes = 1024 bytes" in answer) == (413, True)
