"""JSON requests that repeat an earlier one but for their numbers: answered as if each were the first of its kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from bench.load import HttpConnection, connect, http_request

pytestmark = pytest.mark.process


def run(ports: dict[str, int], case: Callable[[HttpConnection], Awaitable[None]]) -> None:
    async def body() -> None:
        connection = await connect("127.0.0.1", ports["http_port"])
        await case(connection)
        assert connection.transport is not None
        connection.transport.close()

    asyncio.run(body())


def request_for(model: str, wire: str, shape: list[int], data: str, extra: str = "") -> bytes:
    text = f'{{"inputs":[{{"name":"INPUT","shape":{json.dumps(shape)},"datatype":"{wire}","data":{data}}}]{extra}}}'
    return http_request(f"/v2/models/{model}/infer", text.encode())


@pytest.mark.parametrize(
    ("name", "wire", "dtype"),
    [("u8", "UINT8", np.uint8), ("i64", "INT64", np.int64), ("f32", "FP32", np.float32), ("f64", "FP64", np.float64)],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_numbers_come_back_exactly_whatever_their_length(
    ports: dict[str, int], name: str, wire: str, dtype: type, rows: int
) -> None:
    draw = np.random.default_rng(rows)

    async def case(connection: HttpConnection) -> None:
        heads = set()
        for turn in range(12):
            if np.issubdtype(dtype, np.integer):
                array = draw.integers(0, min(np.iinfo(dtype).max, 10 ** (turn + 1)), (rows, 4)).astype(dtype)
            else:
                array = (draw.standard_normal((rows, 4)) * 10.0 ** (3 * turn - 18)).astype(dtype)
            data = array.tolist() if turn % 3 == 2 else array.reshape(-1).tolist()
            status, body = await connection.call(request_for(f"echo_{name}", wire, [rows, 4], json.dumps(data)))
            assert status == 200, body
            answer = json.loads(body)
            back = np.array(answer["outputs"][0].pop("data"), dtype)
            np.testing.assert_array_equal(back, array.reshape(-1))
            heads.add(json.dumps(answer))
        assert len(heads) == 1, "what surrounds the numbers must not depend on the path taken"

    run(ports, case)


REPEATED = "[1, 2, 3, 4]"


@pytest.mark.parametrize(
    ("data", "expected", "words"),
    [
        ("[1, 2, 3]", 400, "4 elements, data holds 3"),
        ("[1, 2, 3, 4, 5]", 400, "4 elements, data holds 5"),
        ("[1, 2, 3, true]", 400, "element 3 must be a number"),
        ('[1, 2, 3, "4"]', 400, "element 3 must be a number"),
        ("[1, 2, 3, null]", 400, "element 3 must be a number"),
        ("[1, 2, 3, 4e38]", 400, "out of the range of FP32"),
        ("[1, 2, 3, NaN]", 400, "JSON"),
        ("[1, 2, [3, 4]]", 400, "ragged"),
        ("[1, 2, 3, 4", 400, "JSON"),
        ("[]", 400, "4 elements, data holds 0"),
        ("", 400, "JSON"),
        ("7", 400, "non-array"),
        ('[1,2,3,4],"data":[5,6,7,8]', 200, "5"),
        ('[1,2,3,4],"shape":[1,2]', 400, "2 elements, data holds 4"),
        ('[1,2,3,4]}],"inputs":[{"name":"NO","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]', 400, "NO"),
        ("[[1], [2], [3], [4]]", 200, "1"),
        (" \n[ 1 ,2,\t3, 4e0 ] ", 200, "1"),
    ],
)
def test_after_repeats_every_other_body_is_read_as_ever(
    ports: dict[str, int], data: str, expected: int, words: str
) -> None:
    """The same request on a fresh kind and after repeats: same status, same words."""

    async def case(connection: HttpConnection) -> None:
        for spelling in ("", f',"parameters":{{"fresh":"{len(data)}{expected}"}}'):
            odd = request_for("echo_f32", "FP32", [1, 4], data, spelling)
            if not spelling:
                for _ in range(4):
                    status, body = await connection.call(request_for("echo_f32", "FP32", [1, 4], REPEATED))
                    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [1, 2, 3, 4])
            status, body = await connection.call(odd)
            assert status == expected, body
            assert words in body.decode(), body

    run(ports, case)


def test_what_json_cannot_carry_is_told_in_repeats_too(ports: dict[str, int]) -> None:
    """An output that becomes infinite: 3 x + 0 of the largest float."""

    async def case(connection: HttpConnection) -> None:
        for _ in range(4):
            status, body = await connection.call(request_for("affine", "FP32", [1, 4], "[1, 2, 3, 4]"))
            assert status == 200, body
        status, body = await connection.call(request_for("affine", "FP32", [1, 4], "[1, 2, 3, 3.4e38]"))
        assert status == 400
        assert "element 3 is inf, which JSON cannot carry" in body.decode()
        status, body = await connection.call(request_for("affine", "FP32", [1, 4], "[1, 2, 3, 4]"))
        assert status == 200

    run(ports, case)


IDS = ["r0", "r1", "r2", "r3", "r10", "r11", "r12", "a-b_c.d:e", "", "r4", 'q\\"', "\\u0041", "ü", "r5"]


@pytest.mark.parametrize("spelling", ['{"id":ID,REST}', '{"id": ID, REST}', '{REST,"id":ID}'])
def test_an_id_is_answered_with_each_request(ports: dict[str, int], spelling: str) -> None:
    rest = '"inputs":[{"name":"INPUT","shape":[1,4],"datatype":"FP32","data":[1,2,3,NUMBER]}]'

    async def case(connection: HttpConnection) -> None:
        for number, request_id in enumerate(IDS):
            text = spelling.replace("REST", rest).replace("ID", f'"{request_id}"').replace("NUMBER", str(number))
            status, body = await connection.call(http_request("/v2/models/echo_f32/infer", text.encode()))
            answer = json.loads(body)
            assert (status, answer.get("id", "")) == (200, json.loads(f'"{request_id}"'))
            assert answer["outputs"][0]["data"] == [1, 2, 3, number]

    run(ports, case)


@pytest.mark.parametrize("spelling", ['{"id":ID,REST}', '{"id": ID, REST}', '{REST,"id":ID}'])
def test_an_id_is_answered_with_raw_tensors_too(ports: dict[str, int], spelling: str) -> None:
    rest = (
        '"inputs":[{"name":"INPUT","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}],'
        '"parameters":{"binary_data_output":true}'
    )

    async def case(connection: HttpConnection) -> None:
        for number, request_id in enumerate(IDS):
            text = spelling.replace("REST", rest).replace("ID", f'"{request_id}"').encode()
            raw = np.full((1, 4), number, np.float32).tobytes()
            headers = {"Inference-Header-Content-Length": str(len(text))}
            status, body = await connection.call(http_request("/v2/models/echo_f32/infer", text + raw, headers))
            assert status == 200, body
            assert body.endswith(raw)
            assert json.loads(body[: -len(raw)]).get("id", "") == json.loads(f'"{request_id}"')

    run(ports, case)
