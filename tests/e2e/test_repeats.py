"""A repeat is answered like the first of its kind, byte for byte; what is not one is not taken for one."""

from __future__ import annotations

import asyncio
import json

import httpx2
import numpy as np
import pytest
import tritonclient.http as httpclient

from bench.load import HttpConnection, binary_infer, connect, http_request

pytestmark = pytest.mark.process


async def exchange(connection: HttpConnection, request: bytes) -> tuple[int, bytes]:
    return await connection.call(request)


def run(ports: dict[str, int], case) -> None:
    async def body() -> None:
        connection = await connect("127.0.0.1", ports["http_port"])
        await case(connection)
        assert connection.transport is not None
        connection.transport.close()

    asyncio.run(body())


@pytest.mark.parametrize("dtype", ["u8", "i64", "f16", "f32", "f64"])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_repeats_answer_byte_for_byte_like_the_first(ports: dict[str, int], dtype: str, rows: int) -> None:
    numpy = {"u8": np.uint8, "i64": np.int64, "f16": np.float16, "f32": np.float32, "f64": np.float64}[dtype]
    wire = {"u8": "UINT8", "i64": "INT64", "f16": "FP16", "f32": "FP32", "f64": "FP64"}[dtype]

    async def case(connection: HttpConnection) -> None:
        draw = np.random.default_rng(rows)
        heads = set()
        for _ in range(12):
            array = draw.integers(0, 200, (rows, 4)).astype(numpy)
            status, body = await exchange(connection, binary_infer(f"echo_{dtype}", {"INPUT": (wire, array)}))
            assert status == 200, body
            assert body.endswith(array.tobytes())
            heads.add(body[: len(body) - array.nbytes])
        assert len(heads) == 1, "the JSON of the answers must not depend on the path taken"

    run(ports, case)


def test_two_inputs_in_either_order_and_outputs_as_asked(ports: dict[str, int]) -> None:
    one = np.arange(16, dtype=np.int32).reshape(1, 16)
    two = np.full((1, 16), 5, np.int32)
    with httpclient.InferenceServerClient(f"127.0.0.1:{ports['http_port']}") as client:
        for names in (("INPUT0", "INPUT1"), ("INPUT1", "INPUT0")):
            for wanted in (None, ["OUTPUT1"], ["OUTPUT1", "OUTPUT0"]):
                outputs = wanted and [httpclient.InferRequestedOutput(name) for name in wanted]
                for turn in range(4):
                    inputs = []
                    for name in names:
                        tensor = httpclient.InferInput(name, [1, 16], "INT32")
                        tensor.set_data_from_numpy(one + turn if name == "INPUT0" else two)
                        inputs.append(tensor)
                    result = client.infer("simple", inputs, outputs=outputs)
                    told = [output["name"] for output in result.get_response()["outputs"]]
                    assert told == (wanted or ["OUTPUT0", "OUTPUT1"])
                    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), one + turn - two)


def test_what_the_header_does_not_decide_is_decided_each_time(ports: dict[str, int]) -> None:
    """After repeats: another length, BOOL bytes, a deadline header, a row that fails, an explanation that is wanted."""
    array = np.ones((1, 4), np.float32)

    async def case(connection: HttpConnection) -> None:
        plain = binary_infer("affine", {"INPUT": ("FP32", array)})
        for _ in range(4):
            assert (await exchange(connection, plain))[0] == 200
        head, body = plain.split(b"\r\n\r\n", 1)
        cut = head.replace(b"Content-Length: %d" % len(body), b"Content-Length: %d" % (len(body) - 4), 1)
        status, answer = await exchange(connection, cut + b"\r\n\r\n" + body[:-4])
        assert (status, "unexpected size for input" in answer.decode()) == (400, True), answer
        hurried = head + b"\r\nx-request-timeout-ms: soon\r\n\r\n" + body
        assert (await exchange(connection, hurried))[0] == 400
        explained = head + b"\r\nx-ringserve-explain: 1\r\n\r\n" + body
        status, answer = await exchange(connection, explained)
        assert status == 200
        assert b"batch_size" in answer
        truth = binary_infer("echo_bool", {"INPUT": ("BOOL", np.ones((1, 4), np.bool_))})
        for _ in range(3):
            assert (await exchange(connection, truth))[0] == 200
        assert (await exchange(connection, truth[:-1] + b"\x07"))[0] == 400
        bad = array.copy()
        bad[0, 0] = 666
        for good_or_bad, expected in ((array, 200), (array, 200), (bad, 500), (array, 200)):
            status, answer = await exchange(connection, binary_infer("poison", {"INPUT": ("FP32", good_or_bad)}))
            assert status == expected, answer
        in_json = json.dumps({"inputs": [{"name": "INPUT", "shape": [1, 4], "datatype": "FP32", "data": [1] * 4}]})
        status, answer = await exchange(connection, http_request("/v2/models/affine/infer", in_json.encode()))
        assert json.loads(answer)["outputs"][0]["data"] == [3, 3, 3, 3]

    run(ports, case)


def test_a_repeat_keeps_its_deadline(ports: dict[str, int]) -> None:
    async def case(connection: HttpConnection) -> None:
        request = binary_infer("slow", {"INPUT": ("FP32", np.ones((1, 4), np.float32))}, timeout=20_000_000)
        assert [(await exchange(connection, request))[0] for _ in range(3)] == [200, 200, 200]
        late = binary_infer("slow", {"INPUT": ("FP32", np.ones((1, 4), np.float32))}, timeout=10)
        assert [(await exchange(connection, late))[0] for _ in range(3)] == [504, 504, 504]

    run(ports, case)


def test_the_same_head_with_another_json_is_another_request(ports: dict[str, int]) -> None:
    array = np.ones((1, 4), np.float32)

    async def case(connection: HttpConnection) -> None:
        plain = binary_infer("affine", {"INPUT": ("FP32", array)})
        for other, expected in ((b'"INPUX"', 400), (b'"INPUT"', 200)):
            for _ in range(3):
                assert (await exchange(connection, plain))[0] == 200
            changed = plain.replace(b'"INPUT"', other)
            assert len(changed) == len(plain)
            status, answer = await exchange(connection, changed)
            assert status == expected, answer
        assert (await exchange(connection, plain))[0] == 200

    run(ports, case)


def test_repeats_that_come_together_are_answered_in_their_order(ports: dict[str, int]) -> None:
    async def body() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["http_port"])
        for count in (1, 1, 1, 2, 5, 1, 20, 1):
            arrays = [np.full((1, 4), number, np.float32) for number in range(count)]
            writer.write(b"".join(binary_infer("echo_f32", {"INPUT": ("FP32", array)}) for array in arrays))
            for array in arrays:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 "), head
                length = int(head.lower().split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0])
                assert (await reader.readexactly(length)).endswith(array.tobytes())
        writer.close()
        await writer.wait_closed()

    asyncio.run(body())


@pytest.mark.parametrize(
    "asked",
    [
        b"Accept-Encoding: gzip, deflate, br",
        b"Accept-Encoding: gzip, identity;q=0",
        b"Accept-Encoding: deflate, *;q=0\r\nX-Request-Id: 1b9d6bcd-bbfd",
        b"X-Request-Timeout-Ms: 30000",
        b"X-Request-Timeout-Ms: 0",
    ],
)
def test_headers_are_heeded_as_where_nothing_is_recognised(ports: dict[str, int], asked: bytes) -> None:
    """The header that wants no explanation keeps a request from being recognised, and asks for nothing else."""

    async def case(connection: HttpConnection) -> None:
        for model, rows in (("echo_f32", 1), ("echo_f32", 32), ("slow", 1)):
            for number in range(3):
                array = np.full((rows, 4), number, np.float32)
                shape = f'{{"inputs":[{{"name":"INPUT","shape":[{rows},4],"datatype":"FP32","data":'
                text = (shape + json.dumps(array.reshape(-1).tolist()) + "}]}").encode()
                in_json = http_request(f"/v2/models/{model}/infer", text)
                for plain in (binary_infer(model, {"INPUT": ("FP32", array)}), in_json):
                    request = plain.replace(b"\r\n", b"\r\n%b\r\n" % asked, 1)
                    ordinary = request.replace(b"\r\n", b"\r\nX-Ringserve-Explain: 0\r\n", 1)
                    answer, expected = await exchange(connection, request), await exchange(connection, ordinary)
                    assert answer == expected

    run(ports, case)


def test_the_timeout_header_of_a_repeat_counts(ports: dict[str, int]) -> None:
    async def case(connection: HttpConnection) -> None:
        plain = binary_infer("slow", {"INPUT": ("FP32", np.ones((1, 4), np.float32))})
        for timeout_ms, expected in ((60_000, 200), (60_000, 200), (1, 504), (1, 504), (60_000, 200)):
            request = plain.replace(b"\r\n", b"\r\nX-Request-Timeout-Ms: %d\r\n" % timeout_ms, 1)
            status, body = await exchange(connection, request)
            assert status == expected, body

    run(ports, case)


def test_clients_that_accept_compression_get_their_numbers(ports: dict[str, int]) -> None:
    url = f"http://127.0.0.1:{ports['http_port']}/v2/models/affine/infer"
    with httpx2.Client(timeout=60) as session:
        for number in range(40):
            count = 4 * (1 + number % 2 * 31)
            tensor = {"name": "INPUT", "shape": [count // 4, 4], "datatype": "FP32", "data": [number] * count}
            answer = session.post(url, json={"inputs": [tensor]}, headers={"X-Request-Id": str(number)})
            assert answer.headers["X-Request-Id"] == str(number)
            assert answer.json()["outputs"][0]["data"] == [2 * number + 1] * count
