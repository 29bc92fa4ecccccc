"""KServe v2 over HTTP, byte by byte, against a double of Serving."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest
from http_double import Answer, Running, get, post
from serving_double import DoubleServing

from engines.errors import Kind
from frontend.kserve.http_routes import KserveApp
from frontend.kserve.status import STATUS
from frontend.settings import EndpointSettings

INFER = "/v2/models/echo_f32/infer"
ROWS = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.fixture
def double() -> DoubleServing:
    return DoubleServing()


@pytest.fixture
def kserve(serve: Any, double: DoubleServing) -> Running:
    return serve(KserveApp(double), double.limits)


def body_of(answer: Answer) -> Any:
    return json.loads(answer.body)


def ask(server: Running, data: bytes, **options: Any) -> Answer:
    with server.client() as client:
        return client.ask(data, **options)


def infer(path: str = INFER, *headers: str, document: Any = ROWS) -> bytes:
    return post(json.dumps(document).encode(), path, *headers)


def binary(array: np.ndarray[Any, Any], *headers: str, path: str = INFER) -> bytes:
    raw = array.tobytes()
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "shape": array.shape,
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": len(raw)},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return post(head + raw, path, f"Inference-Header-Content-Length: {len(head)}", *headers)


def test_json_in_json_out(kserve: Running) -> None:
    answer = ask(kserve, infer())
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert body_of(answer)["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]


@pytest.mark.parametrize("rows", [1, 50_000])
def test_binary_in_binary_out_and_memory_released(kserve: Running, double: DoubleServing, rows: int) -> None:
    array = np.arange(rows * 4, dtype="<f4").reshape(rows, 4)
    double.models["echo_f32"] = double.models["free"]
    answer = ask(kserve, binary(array))
    assert (answer.status, answer.headers["content-type"]) == (200, "application/octet-stream")
    length = int(answer.headers["inference-header-content-length"])
    assert answer.body[length:] == array.tobytes()
    kserve.wait(double.until(lambda: double.responses_out == 0))


@pytest.mark.parametrize("content_type", [None, "application/octet-stream", "application/x-www-form-urlencoded", "x"])
def test_content_type_decides_nothing(kserve: Running, content_type: str | None) -> None:
    headers = [] if content_type is None else [f"Content-Type: {content_type}"]
    assert ask(kserve, infer(INFER, *headers)).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_requests_and_answers(kserve: Running, encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    unpack = gzip.decompress if encoding == "gzip" else zlib.decompress
    body = pack(json.dumps(ROWS).encode())
    accept = f"Accept-Encoding: br, {encoding};q=0.5, identity;q=0"
    answer = ask(kserve, post(body, INFER, f"Content-Encoding: {encoding}", accept))
    assert (answer.status, answer.headers["content-encoding"]) == (200, encoding)
    assert json.loads(unpack(answer.body))["outputs"][0]["data"] == [1, 2, 3, 4]


def test_large_answers_are_compressed_and_released(kserve: Running, double: DoubleServing) -> None:
    array = np.arange(400_000, dtype="<f4").reshape(-1, 4)
    answer = ask(kserve, binary(array, "Accept-Encoding: gzip", path="/v2/models/free/infer"))
    length = int(answer.headers["inference-header-content-length"])
    assert gzip.decompress(answer.body)[length:] == array.tobytes()
    kserve.wait(double.until(lambda: double.responses_out == 0))


def test_only_successful_inference_is_compressed(kserve: Running) -> None:
    accept = "Accept-Encoding: gzip, deflate, br"
    for request in (
        get("/v2", accept),
        get("/v2/models/simple/config", accept),
        get("/v2/models/simple/stats", accept),
        infer("/v2/models/broken/infer", accept),
        get("/nowhere", accept),
    ):
        answer = ask(kserve, request)
        assert "content-encoding" not in answer.headers
        assert isinstance(body_of(answer), dict)


def test_other_content_encodings_are_refused_with_a_hint(kserve: Running) -> None:
    answer = ask(kserve, infer(INFER, "Content-Encoding: br"))
    assert (answer.status, answer.headers["accept-encoding"]) == (501, "gzip, deflate")
    assert "Unsupported compression type" in body_of(answer)["error"]


def test_a_bomb_is_refused_by_its_inflated_size(serve: Any) -> None:
    double = DoubleServing(EndpointSettings(max_request_bytes=100_000))
    server = serve(KserveApp(double), double.limits)
    answer = ask(server, post(gzip.compress(bytes(90_000_000)), INFER, "Content-Encoding: gzip"))
    assert (answer.status, "max_request_bytes" in body_of(answer)["error"]) == (413, True)
    assert double.started == []


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "", "5, 6", "9" * 30, "100000"])
def test_a_wrong_header_length_is_told(kserve: Running, value: str) -> None:
    answer = ask(kserve, infer(INFER, f"Inference-Header-Content-Length: {value}"))
    assert (answer.status, "Inference-Header-Content-Length" in body_of(answer)["error"]) == (400, True)


def test_the_timeout_header_sets_the_deadline(kserve: Running, double: DoubleServing) -> None:
    assert ask(kserve, infer(INFER, "x-request-timeout-ms: 250")).status == 200
    assert double.last_request is not None
    assert double.last_request.deadline_ns == kserve.now_ns + 250_000_000
    ask(kserve, infer())
    assert double.last_request.deadline_ns is None


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "1e3", "99999999999", "", "5, 6"])
def test_a_wrong_timeout_header_is_told_with_its_unit_do_06(kserve: Running, double: DoubleServing, value: str) -> None:
    answer = ask(kserve, infer(INFER, f"X-Request-Timeout-Ms: {value}"))
    assert answer.status == 400
    assert "milliseconds from 1 to 86400000" in body_of(answer)["error"]
    assert double.started == []


def test_a_disconnect_withdraws_the_request(kserve: Running, double: DoubleServing) -> None:
    client = kserve.client()
    client.send(infer("/v2/models/held/infer", document={"id": "gone", **ROWS}))
    kserve.wait(double.until(lambda: len(double.held) == 1))
    client.sock.close()
    kserve.wait(double.until(lambda: double.cancelled == ["gone"]))
    kserve.call(double.release_held)
    assert double.responses_out == 0


def test_a_half_closed_client_is_answered(kserve: Running, double: DoubleServing) -> None:
    with kserve.client() as client:
        client.send(infer("/v2/models/held/infer"))
        client.sock.shutdown(1)
        kserve.wait(double.until(lambda: len(double.held) == 1))
        kserve.call(double.release_held)
        assert client.answer().status == 200
    assert double.cancelled == []


def test_pipelined_inferences_finish_in_any_order(kserve: Running, double: DoubleServing) -> None:
    with kserve.client() as client:
        client.send(infer("/v2/models/held/infer", document={"id": "a", **ROWS}) + infer(document={"id": "b", **ROWS}))
        kserve.wait(double.until(lambda: double.started == ["a", "b"]))
        kserve.call(lambda: None)
        kserve.call(double.release_held)
        assert [body_of(client.answer())["id"] for _ in range(2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v2/models/none/infer", 404, "Request for unknown model: 'none' is not found"),
        ("/v2/models/simple/versions/99/infer", 404, "Request for unknown model: 'simple' version 99 is not found"),
        ("/v2/models/simple/versions/x/infer", 404, "Not Found"),
        ("/v2/models/loading/infer", 503, "not at ready state"),
        ("/v2/models/full/infer", 429, "Exceeds maximum queue size"),
        ("/v2/models/late/infer", 504, "Request timeout expired"),
        ("/v2/models/broken/infer", 500, "failed while running"),
        ("/v2/models/fixed/infer", 400, "unexpected shape for input 'x'"),
    ],
)
def test_failures_have_their_own_statuses_pi_10_do_02(kserve: Running, path: str, status: int, text: str) -> None:
    answer = ask(kserve, infer(path))
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
    assert text in body_of(answer)["error"]
    assert list(body_of(answer)) == ["error"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_no_kind_of_failure_is_told_with_200_pi_11() -> None:
    assert all(STATUS[kind].http >= 400 for kind in Kind if kind is not Kind.OK)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"nonsense", b'{"inputs": 3}', b'{"inputs": [{"name": "x"}]}', b"\xff\xfe", b"[" * 5000],
)
def test_bad_json_is_400_and_the_connection_stays_pi_03(kserve: Running, body: bytes) -> None:
    with kserve.client() as client:
        answer = client.ask(post(body, INFER))
        assert (answer.status, isinstance(body_of(answer)["error"], str)) == (400, True)
        assert client.ask(infer()).status == 200


@pytest.mark.parametrize("data", [[1, 2, 3], [1, 2, 3, 4, 5], [[1, 2], [3]], ["a", "b", "c", "d"], [1, 2, 3, None]])
def test_json_data_that_does_not_fit_is_400_pi_03(kserve: Running, data: list[Any]) -> None:
    document = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": data}]}
    answer = ask(kserve, infer(document=document))
    assert (answer.status, "'x'" in body_of(answer)["error"]) == (400, True)


@pytest.mark.parametrize("suffix", ["", "/"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_is_told_apart_by_status_pi_13(kserve: Running, double: DoubleServing, suffix: str, method: str) -> None:
    def status(path: str) -> int:
        return ask(kserve, get(path + suffix, method=method), head=method == "HEAD").status

    paths = ["/v2/health/live", "/v2/health/ready", "/v2/models/simple/ready", "/v2/models/loading/ready"]
    assert [status(path) for path in paths] == [200, 200, 200, 503]
    double.is_ready = False
    assert [status(path) for path in paths] == [200, 503, 200, 503]
    assert status("/v2/models/none/ready") == 404


def test_health_bodies(kserve: Running, double: DoubleServing) -> None:
    assert body_of(ask(kserve, get("/v2/health/live"))) == {"live": True}
    assert body_of(ask(kserve, get("/v2/health/ready"))) == {"ready": True}
    double.is_ready = False
    assert body_of(ask(kserve, get("/v2/health/ready"))) == {"ready": False}
    assert body_of(ask(kserve, get("/v2/models/simple/ready"))) == {"name": "simple", "ready": True}


def test_metadata_config_statistics_and_index(kserve: Running) -> None:
    assert body_of(ask(kserve, get("/v2")))["name"] == "ringserve"
    for path in ("/v2/models/simple", "/v2/models/simple/versions/1", "/v2/models/simple?x=y"):
        assert [one["name"] for one in body_of(ask(kserve, get(path)))["inputs"]] == ["INPUT0", "INPUT1"]
    assert body_of(ask(kserve, get("/v2/models/simple/config")))["max_batch_size"] == 8
    assert body_of(ask(kserve, get("/v2/models/simple/stats")))["model_stats"][0]["name"] == "simple"
    assert len(body_of(ask(kserve, get("/v2/models/stats")))["model_stats"]) > 1
    states = {one["name"]: one["state"] for one in body_of(ask(kserve, post(b"", "/v2/repository/index")))}
    assert (states["simple"], states["loading"]) == ("READY", "LOADING")
    ready = body_of(ask(kserve, post(b'{"ready": true}', "/v2/repository/index")))
    assert "loading" not in [one["name"] for one in ready]
    assert ask(kserve, post(b'{"ready": 1}', "/v2/repository/index")).status == 400
    for path in ("/v2/models/none", "/v2/models/none/config", "/v2/models/none/stats"):
        answer = ask(kserve, get(path))
        assert (answer.status, "unknown model: 'none'" in body_of(answer)["error"]) == (404, True)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", INFER, "POST"),
        ("HEAD", INFER, "POST"),
        ("POST", "/v2", "GET, HEAD"),
        ("DELETE", "/v2/models/simple", "GET, HEAD"),
        ("GET", "/v2/repository/index", "POST"),
        ("PUT", "/v2/logging", "GET, HEAD, POST"),
        ("OPTIONS", "/v2/health/live", "GET, HEAD"),
    ],
)
def test_other_methods_are_405(kserve: Running, method: str, path: str, allow: str) -> None:
    answer = ask(kserve, get(path, method=method), head=method == "HEAD")
    assert (answer.status, answer.headers["allow"]) == (405, allow)
    assert method == "HEAD" or body_of(answer) == {"error": "Method Not Allowed"}


@pytest.mark.parametrize("path", ["/", "/v2/nothing", "/v2//models/simple", "/V2", "/v2%2Fmodels%2Fsimple", "*"])
def test_unknown_paths_are_404(kserve: Running, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        answer = ask(kserve, get(path, method=method))
        assert (answer.status, body_of(answer)) == (404, {"error": "Not Found"})


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("POST", "/v2/repository/models/simple/load", 503, "explicit model load / unload is not allowed if polling"),
        ("POST", "/v2/repository/models/simple/unload", 503, "explicit model load / unload is not allowed if polling"),
        ("POST", "/v2/repository/other/index", 501, "'repository_name' specification is not supported"),
        ("POST", "/v2/systemsharedmemory/region/r/register", 501, "system_shared_memory.enabled is false"),
        ("POST", "/v2/cudasharedmemory/region/r/register", 501, "CUDA shared memory is not offered"),
        ("GET", "/v2/systemsharedmemory/region/r/status", 404, "Unable to find shared memory region: 'r'"),
        ("GET", "/v2/trace/setting", 501, "trace is not offered"),
        ("POST", "/v2/models/simple/trace/setting", 501, "trace is not offered"),
        ("GET", "/v2/logging", 501, "logging is not offered"),
        ("POST", "/v2/models/simple/generate", 501, "generate is not offered"),
    ],
)
def test_parts_not_offered_say_so(kserve: Running, method: str, path: str, status: int, text: str) -> None:
    answer = ask(kserve, get(path, method=method))
    assert (answer.status, text in body_of(answer)["error"]) == (status, True)


@pytest.mark.parametrize("kind", ["systemsharedmemory", "cudasharedmemory"])
def test_shared_memory_is_empty_and_can_be_unregistered(kserve: Running, kind: str) -> None:
    assert body_of(ask(kserve, get(f"/v2/{kind}/status"))) == []
    for path in (f"/v2/{kind}/unregister", f"/v2/{kind}/region/any/unregister"):
        assert ask(kserve, post(b"", path)).status == 200


def test_the_request_id_header_comes_back(kserve: Running) -> None:
    for request in (
        infer(INFER, "X-Request-Id: abc"),
        get("/v2", "x-request-id: abc"),
        get("/no", "x-request-id: abc"),
    ):
        assert ask(kserve, request).headers["x-request-id"] == "abc"


def test_refusals_of_the_server_are_kserve_errors(serve: Any) -> None:
    double = DoubleServing(EndpointSettings(max_request_bytes=1024, max_header_bytes=1024))
    server = serve(KserveApp(double), double.limits)
    for request, status in (
        (post(b"x" * 2000, INFER), 413),
        (get("/v2", "X: " + "x" * 2000), 431),
        (b"rubbish\r\n\r\n", 400),
    ):
        answer = ask(server, request)
        assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
        assert isinstance(body_of(answer)["error"], str)
