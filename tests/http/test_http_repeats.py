"""Requests that repeat an earlier one: answered by a plan exactly as the ordinary path does, whatever the headers."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import httpx2
import numpy as np
import pytest
import tritonclient.http as httpclient
import urllib3
from http_double import Answer, Running, post
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placing_double import DoubleApp
from serving_double import DoubleServing, entry, spec

from frontend.httpd.exchange import Exchange
from frontend.kserve.compression import MIN_COMPRESSED_BYTES
from frontend.kserve.http_answers import OFFLOAD_BYTES
from frontend.kserve.http_routes import KserveApp
from frontend.repeat_call import RepeatCall

pytestmark = pytest.mark.interpreted

ORDINARY = "X-Ringserve-Explain: 0"
"""Asks for nothing, and keeps a request from being recognised."""
WIDE = 4096
UNPACK: dict[str | None, Callable[[bytes], bytes]] = {None: bytes, "gzip": gzip.decompress, "deflate": zlib.decompress}


@pytest.fixture
def double() -> DoubleServing:
    made = DoubleServing()
    made.models["wide"] = entry("wide", (spec("x", "f32", -1, WIDE),), (spec("y", "f32", -1, WIDE),))
    return made


@pytest.fixture
def kserve(serve: Any, double: DoubleServing) -> Running:
    server: Running = serve(KserveApp(double, lambda *asked: RepeatCall(double.app, *asked) and None), double.limits)

    def make_app() -> None:
        double.app = DoubleApp(double, lambda: server.now_ns)

    server.call(make_app)
    return server


def submitted(double: DoubleServing) -> int:
    count: int = double.app.channel.submitted
    return count


def submitted_are(double: DoubleServing, count: int) -> bool:
    return submitted(double) == count


def infer(array: np.ndarray[Any, Any], *headers: str, raw: bool = True, model: str = "", version: str = "1.1") -> bytes:
    model = model or ("wide" if array.shape[1] == WIDE else "echo_f32")
    described: dict[str, Any] = {"name": "x", "shape": array.shape, "datatype": "FP32"}
    path = f"/v2/models/{model}/infer"
    if not raw:
        described["data"] = array.reshape(-1).tolist()
        return post(json.dumps({"inputs": [described]}).encode(), path, *headers, version=version)
    described["parameters"] = {"binary_data_size": array.nbytes}
    text = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    length = f"Inference-Header-Content-Length: {len(text)}"
    return post(text + array.tobytes(), path, length, *headers, version=version)


def told(answer: Answer) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return all of an answer that may be compared."""
    return answer.status, [header for header in answer.headers.items() if header[0] != "date"], answer.body


ACCEPT = [
    None, "", "gzip, deflate", "gzip, deflate, br, zstd", "deflate", "*", "identity", "gzip;q=0", "br",
    "gzip, identity;q=0", "deflate, *;q=0", "gzip;q=0.1, identity;q=0.5, *;q=0", "nonsense;;=,", "*;q=0",
]  # fmt: skip
HEADERS = st.fixed_dictionaries(
    {
        "Accept-Encoding": st.sampled_from(ACCEPT),
        "X-Request-Id": st.sampled_from([None, None, "a", "1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed", "with words: é", ""]),
        "X-Request-Timeout-Ms": st.sampled_from([None, None, "5", "86400000", "0", "soon", ""]),
        "Content-Encoding": st.sampled_from([None, None, None, "identity", "br"]),
        "Connection": st.sampled_from([None, None, None, "keep-alive"]),
    }
)
ASKED = st.tuples(HEADERS, st.sampled_from([1, 2, 8]), st.sampled_from([4, 4, WIDE]), st.booleans())


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(ASKED, min_size=1, max_size=6), version=st.sampled_from(["1.1", "1.1", "1.1", "1.0"]))
def test_headers_are_heeded_as_on_the_ordinary_path(
    kserve: Running, double: DoubleServing, asked: list[Any], version: str
) -> None:
    """Each request thrice on one connection, which knows it from the first on, against one that is never recognised."""
    with kserve.client() as client, kserve.client() as other:
        for wanted, rows, width, raw in asked:
            headers = [f"{name}: {value}" for name, value in wanted.items() if value is not None]
            if version == "1.0":
                headers = ["Connection: keep-alive", *(line for line in headers if not line.startswith("Connection"))]
            for turn in range(3):
                array = np.full((rows, width), turn, np.float32)
                answer = client.ask(infer(array, *headers, raw=raw, version=version))
                expected = other.ask(infer(array, *headers, ORDINARY, raw=raw, version=version))
                assert told(answer) == told(expected)
    kserve.wait(double.until(lambda: double.responses_out == 0))


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize(
    "headers",
    [
        ["Accept-Encoding: gzip, deflate, br"],
        ["Accept-Encoding: gzip, identity;q=0"],
        ["X-Request-Id: seven", "Accept-Encoding: deflate"],
        ["X-Request-Timeout-Ms: 700"],
    ],
)
@pytest.mark.parametrize("width", [4, WIDE])
def test_such_requests_are_recognised(
    kserve: Running, double: DoubleServing, raw: bool, headers: list[str], width: int
) -> None:
    with kserve.client() as client:
        for turn in range(4):
            array = np.full((8 if raw else 2, width), turn, np.float32)
            one_more = [f"X-Other: {turn // 2}"]  # a head that is parsed, and then one that is known
            answer = client.ask(infer(array, *headers, *one_more, raw=raw))
            assert (answer.status, submitted(double)) == (200, turn)
            body = UNPACK[answer.headers.get("content-encoding")](answer.body)
            if raw:
                assert body.endswith(array.tobytes())
            else:
                assert json.loads(body)["outputs"][0]["data"] == array.reshape(-1).tolist()
    kserve.wait(double.until(lambda: double.responses_out == 0))


def test_each_request_gets_its_own_id_back(kserve: Running, double: DoubleServing) -> None:
    array = np.ones((1, 4), np.float32)
    with kserve.client() as client:
        for number in range(6):
            assert client.ask(infer(array, f"X-Request-Id: id-{number}")).headers["x-request-id"] == f"id-{number}"
            assert "x-request-id" not in client.ask(infer(array)).headers
    assert submitted(double) == 11


@pytest.mark.parametrize("raw", [True, False])
def test_a_traced_request_is_known_and_answered_under_its_own_id(
    kserve: Running, double: DoubleServing, raw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = []

    def handle(app: KserveApp, exchange: Exchange) -> None:
        handled.append(exchange)
        ordinary(app, exchange)

    ordinary = KserveApp.handle
    monkeypatch.setattr(KserveApp, "handle", handle)
    with kserve.client() as client:
        for turn in range(8):
            array = np.full((1 + turn // 4, 4), turn, np.float32)  # of another length from the fifth on
            traced = [f"traceparent: 00-{turn:032x}-{turn:016x}-01", f"X-Request-Id: id-{turn * 7}"]
            answer = client.ask(infer(array, *traced, raw=raw))
            assert (answer.status, answer.headers["x-request-id"]) == (200, f"id-{turn * 7}")
            if raw:
                assert answer.body.endswith(array.tobytes())
            else:
                assert json.loads(answer.body)["outputs"][0]["data"] == array.reshape(-1).tolist()
    assert submitted(double) == 6
    # The one that teaches the plan and the one that finds it, for each length.
    assert len(handled) == 4
    kserve.wait(double.until(lambda: double.responses_out == 0))


def test_what_is_derived_from_a_head_never_differs_from_its_headers(kserve: Running, double: DoubleServing) -> None:
    """Beside a trace: the timeout, the encodings and the length of the JSON, which a handler keeps with the head."""
    array = np.ones((1, 4), np.float32)
    with kserve.client() as client, kserve.client() as other:
        for turn in range(24):
            headers = [
                f"traceparent: {turn:02}",
                f"X-Request-Timeout-Ms: {(100, 200)[turn // 4 % 2]}",
                f"Accept-Encoding: {('gzip,identity;q=0', 'br,identity;q=0.1')[(turn + 2) // 4 % 2]}",
            ]
            asked = infer(array, *headers)
            if turn % 8 == 7:
                length = asked.index(b"Inference-Header-Content-Length: ") + len(b"Inference-Header-Content-Length: ")
                asked = asked[:length] + b"2" + asked[length + 1 :]
            expected = other.ask(asked.replace(b"traceparent: ", b"X-Ringserve-Explain: 0\r\ntraceparent: "))
            answer = client.ask(asked)
            assert told(answer) == told(expected)
            if answer.status == 200:
                assert double.last_request is not None
                assert double.last_request.deadline_ns == kserve.now_ns + (100, 200)[turn // 4 % 2] * 1_000_000


@pytest.mark.parametrize("raw", [True, False])
def test_an_answer_is_compressed_from_a_size_on(kserve: Running, double: DoubleServing, raw: bool) -> None:
    """Whether that is known beforehand, or only when the numbers are told."""
    double.models["echo_f32"] = entry("echo_f32", (spec("x", "f32", -1, -1),), (spec("y", "f32", -1, -1),), (1, 512))
    sizes = set()
    with kserve.client() as client:
        for rows in range(20, 120, 2):
            for number in (1.0, 1.0, 1.5):
                array = np.full((rows, 3), number, np.float32)
                answer = client.ask(infer(array, "Accept-Encoding: gzip", raw=raw, model="echo_f32"))
                encoding = answer.headers.get("content-encoding")
                body = UNPACK[encoding](answer.body)
                assert (encoding == "gzip") == (len(body) >= MIN_COMPRESSED_BYTES)
                sizes.add(encoding)
    assert sizes == {None, "gzip"}


def test_large_repeats_are_compressed_off_the_loop_and_released(kserve: Running, double: DoubleServing) -> None:
    array = np.arange(8 * WIDE, dtype=np.float32).reshape(8, WIDE)
    assert array.nbytes > OFFLOAD_BYTES
    with kserve.client() as client:
        for turn in range(3):
            answer = client.ask(infer(array + turn, "Accept-Encoding: gzip"))
            assert gzip.decompress(answer.body).endswith((array + turn).tobytes())
    assert submitted(double) == 2
    # The client leaves while that is under way.
    for count in (3, 4, 5):
        with kserve.client() as client:
            client.send(infer(array, "Accept-Encoding: gzip"))
            kserve.wait(double.until(partial(submitted_are, double, count)))
    kserve.wait(double.until(lambda: double.responses_out == 0))


def test_the_timeout_of_a_repeat_counts_from_its_head(kserve: Running, double: DoubleServing) -> None:
    array = np.ones((1, 4), np.float32)
    with kserve.client() as client:
        for timeout_ms in (250, 250, 80, 7000):
            assert client.ask(infer(array, f"X-Request-Timeout-Ms: {timeout_ms}")).status == 200
            assert double.last_request is not None
            assert double.last_request.deadline_ns == kserve.now_ns + timeout_ms * 1_000_000
        assert submitted(double) == 3
        head, _, body = infer(array, "X-Request-Timeout-Ms: 250").partition(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        kserve.until(lambda: kserve.server.counters.in_flight == 1)
        kserve.now_ns += 300_000_000
        answer = client.ask(body)
        assert (answer.status, submitted(double)) == (504, 3)
        assert "no answer within 250.000 ms" in json.loads(answer.body)["error"]


def test_a_failed_repeat_is_not_compressed(kserve: Running, double: DoubleServing) -> None:
    array = np.ones((1, 4), np.float32)
    headers = ["Accept-Encoding: gzip, identity;q=0", "X-Request-Id: mine", "X-Request-Timeout-Ms: 1000"]
    with kserve.client() as client:
        for _ in range(2):
            assert client.ask(infer(array, *headers)).headers["content-encoding"] == "gzip"
        client.send(infer(array, *headers)[:-1])
        kserve.until(lambda: kserve.server.counters.in_flight == 1)
        kserve.now_ns += 2_000_000_000
        answer = client.ask(infer(array)[-1:])
        assert (answer.status, answer.headers["x-request-id"]) == (504, "mine")
        assert "content-encoding" not in answer.headers
        assert "error" in json.loads(answer.body)


# Real clients, as they come

BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]}]}


def _expect(document: Any) -> None:
    assert document["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("client", ["httpx2", "aiohttp", "urllib3", "tritonclient"])
def test_real_clients_are_recognised(kserve: Running, double: DoubleServing, client: str) -> None:
    url = f"http://127.0.0.1:{kserve.port}/v2/models/echo_f32/infer"
    count = 5
    if client == "httpx2":
        with httpx2.Client(timeout=20) as session:
            for _ in range(count):
                _expect(session.post(url, json=BODY).json())
    elif client == "aiohttp":

        async def run() -> None:
            async with aiohttp.ClientSession() as session:
                for _ in range(count):
                    async with session.post(url, json=BODY) as answer:
                        _expect(await answer.json())

        asyncio.run(run())
    elif client == "urllib3":
        # As requests has it send.
        with urllib3.PoolManager(headers={"Accept-Encoding": "gzip, deflate", "Accept": "*/*"}) as pool:
            for _ in range(count):
                _expect(pool.request("POST", url, json=BODY, timeout=20).json())
    else:
        with httpclient.InferenceServerClient(f"127.0.0.1:{kserve.port}") as session:
            tensor = httpclient.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
            for _ in range(count):
                answer = session.infer("echo_f32", [tensor], response_compression_algorithm="gzip", timeout=2_000_000)
                assert (answer.as_numpy("y") == 1).all()
    assert submitted(double) == count - 1
