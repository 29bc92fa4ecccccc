"""Real client libraries, unchanged, against a real node."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from engines.tensor import BY_NAME
from node_models import ECHO_DTYPES

pytestmark = pytest.mark.process


def tensor(module, name: str, array: np.ndarray):
    datatype = np_to_triton_dtype(array.dtype)
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def sample(dtype: str, rows: int = 3) -> np.ndarray:
    draw = np.random.default_rng(7)
    numpy = BY_NAME[dtype].numpy
    if dtype == "bool":
        return draw.integers(0, 2, (rows, 4)).astype(bool)
    if numpy.kind in "iu":
        info = np.iinfo(numpy)
        return draw.integers(info.min, info.max, (rows, 4), dtype=numpy, endpoint=True)
    return draw.standard_normal((rows, 4)).astype(numpy)


@pytest.mark.parametrize("dtype", ECHO_DTYPES)
def test_same_request_on_both_protocols_is_bit_equal(ports: dict[str, int], dtype: str) -> None:
    array = sample(dtype)
    with httpclient.InferenceServerClient(f"127.0.0.1:{ports['http_port']}") as http:
        over_http = http.infer(f"echo_{dtype}", [tensor(httpclient, "INPUT", array)]).as_numpy("OUTPUT")
    with grpcclient.InferenceServerClient(f"127.0.0.1:{ports['grpc_port']}") as grpc:
        over_grpc = grpc.infer(f"echo_{dtype}", [tensor(grpcclient, "INPUT", array)]).as_numpy("OUTPUT")
    assert over_http.dtype == over_grpc.dtype == array.dtype
    assert over_http.tobytes() == over_grpc.tobytes() == array.tobytes()


def test_two_outputs_in_json_and_in_binary(ports: dict[str, int]) -> None:
    one = np.arange(16, dtype=np.int32).reshape(1, 16)
    two = np.full((1, 16), 3, np.int32)
    with httpclient.InferenceServerClient(f"127.0.0.1:{ports['http_port']}") as client:
        inputs = []
        for name, array, binary in (("INPUT0", one, False), ("INPUT1", two, True)):
            made = httpclient.InferInput(name, [1, 16], "INT32")
            made.set_data_from_numpy(array, binary_data=binary)
            inputs.append(made)
        outputs = [
            httpclient.InferRequestedOutput("OUTPUT1", binary_data=False),
            httpclient.InferRequestedOutput("OUTPUT0", binary_data=True),
        ]
        for compression in (None, "gzip", "deflate"):
            result = client.infer(
                "simple", inputs, outputs=outputs, request_id="r-1",
                request_compression_algorithm=compression, response_compression_algorithm=compression,
            )  # fmt: skip
            assert result.get_response()["id"] == "r-1"
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), one + two)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), one - two)


def test_http_aio_client(ports: dict[str, int]) -> None:
    async def run() -> None:
        async with httpaio.InferenceServerClient(f"127.0.0.1:{ports['http_port']}") as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("affine")
            assert (await client.get_server_metadata())["name"] == "ringserve"
            assert (await client.get_model_config("affine"))["max_batch_size"] == 32
            array = sample("f32")
            answers = await asyncio.gather(
                *(client.infer("affine", [tensor(httpclient, "INPUT", array + n)]) for n in range(8))
            )
            for n, answer in enumerate(answers):
                np.testing.assert_array_equal(answer.as_numpy("OUTPUT"), (array + n) * 2 + 1)
            with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
                await client.infer("nope", [tensor(httpclient, "INPUT", array)])

    asyncio.run(run())


def test_grpc_aio_client_with_stream(ports: dict[str, int]) -> None:
    async def run() -> None:
        async with grpcaio.InferenceServerClient(f"127.0.0.1:{ports['grpc_port']}") as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("simple")).inputs[0].name == "INPUT0"
            array = sample("f32")

            async def requests():
                for n in range(10):
                    model = "nope" if n == 4 else "affine"
                    yield {
                        "model_name": model,
                        "inputs": [tensor(grpcclient, "INPUT", array + n)],
                        "request_id": str(n),
                    }

            seen = []
            async for result, error in client.stream_infer(requests()):
                if error is not None:
                    seen.append("error")
                    continue
                n = int(result.get_response().id)
                np.testing.assert_array_equal(result.as_numpy("OUTPUT"), (array + n) * 2 + 1)
                seen.append(n)
            assert seen == [0, 1, 2, 3, "error", 5, 6, 7, 8, 9]

    asyncio.run(run())


def test_grpc_client_sees_metadata_config_statistics_index(ports: dict[str, int]) -> None:
    with grpcclient.InferenceServerClient(f"127.0.0.1:{ports['grpc_port']}") as client:
        assert client.is_server_live()
        assert client.get_server_metadata().name == "ringserve"
        assert client.get_model_config("affine").config.max_batch_size == 32
        array = sample("f32", rows=2)
        before = client.get_inference_statistics("affine").model_stats[0]
        client.infer("affine", [tensor(grpcclient, "INPUT", array)])
        after = client.get_inference_statistics("affine").model_stats[0]
        assert after.inference_count - before.inference_count == 2
        assert after.execution_count - before.execution_count == 1
        assert after.inference_stats.success.count - before.inference_stats.success.count == 1
        index = {(model.name, model.version): model.state for model in client.get_model_repository_index().models}
        assert index["affine", "1"] == "READY"
        assert {("versions", "1"), ("versions", "3")} <= index.keys()


def test_versions_newest_by_default(ports: dict[str, int]) -> None:
    array = sample("f32")
    with httpclient.InferenceServerClient(f"127.0.0.1:{ports['http_port']}") as client:
        inputs = [tensor(httpclient, "INPUT", array)]
        np.testing.assert_array_equal(client.infer("versions", inputs).as_numpy("OUTPUT"), array * 2 + 1)
        np.testing.assert_array_equal(client.infer("versions", inputs, model_version="1").as_numpy("OUTPUT"), array)
        with pytest.raises(InferenceServerException, match="version 2 is not found"):
            client.infer("versions", inputs, model_version="2")


def test_model_without_batch_axis(ports: dict[str, int]) -> None:
    with httpclient.InferenceServerClient(f"127.0.0.1:{ports['http_port']}") as client:
        metadata = client.get_model_metadata("unbatched")
        shape = metadata["inputs"][0]["shape"]
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        name = metadata["inputs"][0]["name"]
        result = client.infer("unbatched", [tensor(httpclient, name, array)])
        assert list(result.as_numpy(metadata["outputs"][0]["name"]).shape) == metadata["outputs"][0]["shape"]


def test_hooks_and_their_errors_on_both_protocols(ports: dict[str, int]) -> None:
    cases = [
        (b"refuse", 400, "INVALID_ARGUMENT", "is not wanted"),
        (b"post", 400, "INVALID_ARGUMENT", "refused afterwards"),
        (b"raise", 500, "INTERNAL", "preprocess raised RuntimeError"),
    ]
    good = np.array([b"ab", b"", b"xyz"], dtype=np.object_)
    for module, port in ((httpclient, "http_port"), (grpcclient, "grpc_port")):
        with module.InferenceServerClient(f"127.0.0.1:{ports[port]}") as client:
            result = client.infer("text", [tensor(module, "TEXT", good)])
            assert result.as_numpy("UPPER").tolist() == [b"AB", b"", b"XYZ"]
            np.testing.assert_array_equal(result.as_numpy("LENGTH"), np.float32([2, 0, 3]))
            for text, http_status, grpc_status, message in cases:
                with pytest.raises(InferenceServerException, match=message) as caught:
                    client.infer("text", [tensor(module, "TEXT", np.array([text], dtype=np.object_))])
                status = caught.value.status()
                assert status == (str(http_status) if module is httpclient else f"StatusCode.{grpc_status}")
                assert "secret detail" not in str(caught.value)


KSERVE_CLIENT = """
import asyncio, json, sys
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig


async def main(http_port, grpc_port):
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = {}
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    base = f"http://127.0.0.1:{http_port}"
    found["live"] = await rest.is_server_live(base)
    found["ready"] = await rest.is_server_ready(base)
    found["model_ready"] = await rest.is_model_ready(base, "affine")
    for binary in (False, True):
        tensor = InferInput("INPUT", [2, 4], "FP32")
        tensor.set_data_from_numpy(array, binary_data=binary)
        request = InferRequest(model_name="affine", infer_inputs=[tensor])
        answer = await rest.infer(base, request, model_name="affine")
        found[f"rest_{binary}"] = answer.outputs[0].as_numpy().ravel().tolist()
    await rest.close()
    grpc = InferenceGRPCClient(url=f"127.0.0.1:{grpc_port}")
    found["grpc_ready"] = await grpc.is_server_ready()
    for binary in (False, True):
        tensor = InferInput("INPUT", [2, 4], "FP32")
        tensor.set_data_from_numpy(array, binary_data=binary)
        answer = await grpc.infer(InferRequest(model_name="affine", infer_inputs=[tensor]))
        found[f"grpc_{binary}"] = answer.outputs[0].as_numpy().ravel().tolist()
    await grpc.close()
    print("RESULT " + json.dumps(found))


asyncio.run(main(*sys.argv[1:]))
"""


def test_kserve_sdk_in_a_process_of_its_own(ports: dict[str, int]) -> None:
    command = [sys.executable, "-c", KSERVE_CLIENT, str(ports["http_port"]), str(ports["grpc_port"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    expected = (np.arange(8, dtype=np.float32) * 2 + 1).tolist()
    assert found["live"] and found["ready"] and found["model_ready"] and found["grpc_ready"]
    for key in ("rest_False", "rest_True", "grpc_False", "grpc_True"):
        assert found[key] == expected, key


def test_curl(ports: dict[str, int]) -> None:
    body = json.dumps({"inputs": [{"name": "INPUT", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})
    url = f"http://127.0.0.1:{ports['http_port']}/v2/models/affine/infer"
    done = subprocess.run(["curl", "-sS", "-d", body, url], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [3, 5, 7, 9]


@pytest.mark.parametrize("mebibytes", [3.9, 4.1, 60.0])
def test_pi_05_large_tensors_on_both_protocols(ports: dict[str, int], mebibytes: float) -> None:
    rows = int(mebibytes * 2**20 / 16)
    array = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    for module, port in ((httpclient, "http_port"), (grpcclient, "grpc_port")):
        with module.InferenceServerClient(f"127.0.0.1:{ports[port]}") as client:
            result = client.infer("echo_f32", [tensor(module, "INPUT", array[: min(rows, 65536)])])
            np.testing.assert_array_equal(result.as_numpy("OUTPUT"), array[: min(rows, 65536)])


def test_pi_05_over_the_limit_says_so_on_both_protocols(ports: dict[str, int]) -> None:
    rows = 65 * 2**20 // 16
    array = np.zeros((rows, 4), np.float32)
    with (
        httpclient.InferenceServerClient(f"127.0.0.1:{ports['http_port']}") as client,
        pytest.raises(InferenceServerException, match="max_request_bytes") as caught,
    ):
        client.infer("echo_f32", [tensor(httpclient, "INPUT", array)])
    assert caught.value.status() == "413"
    with (
        grpcclient.InferenceServerClient(f"127.0.0.1:{ports['grpc_port']}") as client,
        pytest.raises(InferenceServerException, match=r"67108864|max_request_bytes") as caught,
    ):
        client.infer("echo_f32", [tensor(grpcclient, "INPUT", array)])
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
