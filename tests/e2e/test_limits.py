"""Every limit of the node file, reached in a real node: a clear refusal that names it, then service as before."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from bench.load import binary_infer, connect, http_request
from real_node import Node, raw_output

pytestmark = pytest.mark.process

NODE_FILE = """
global:
  endpoints: {max_request_bytes: 65536, max_tensors: 2, max_bytes_element: 64, max_connections: 24}
  channel: {arena_bytes: 1048576, max_in_flight: 4}
  scheduler: {max_queue_depth: 3}
"""


@pytest.fixture(scope="module")
def tight(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    folder = tmp_path_factory.mktemp("tight")
    (folder / "node.yaml").write_text(NODE_FILE)
    with Node(models, folder / "run", frontends=1, node_file=folder / "node.yaml") as node:
        yield node.ports


def rows(count: int) -> dict[str, tuple[str, np.ndarray]]:
    return {"INPUT": ("FP32", np.ones((count, 4), np.float32))}


async def check_served(port: int) -> None:
    connection = await connect("127.0.0.1", port)
    status, body = await connection.call(binary_infer("affine", rows(1)))
    assert status == 200, body
    connection.transport.close()


def test_request_bytes_on_both_protocols(tight: dict[str, int]) -> None:
    array = np.ones((5000, 4), np.float32)

    async def run() -> None:
        connection = await connect("127.0.0.1", tight["http_port"])
        status, body = await connection.call(binary_infer("affine", {"INPUT": ("FP32", array)}))
        assert status == 413
        assert "max_request_bytes" in json.loads(body)["error"]
        assert "65536" in json.loads(body)["error"]
        await check_served(tight["http_port"])

    asyncio.run(run())
    with grpcclient.InferenceServerClient(f"127.0.0.1:{tight['grpc_port']}") as client:
        tensor = grpcclient.InferInput("INPUT", [5000, 4], "FP32")
        tensor.set_data_from_numpy(array)
        with pytest.raises(InferenceServerException, match="max_request_bytes") as caught:
            client.infer("affine", [tensor])
        assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_tensors_and_bytes_elements(tight: dict[str, int]) -> None:
    def tensor(name: str, value: str) -> dict[str, object]:
        return {"name": name, "shape": [1], "datatype": "BYTES", "data": [value]}

    async def run() -> None:
        connection = await connect("127.0.0.1", tight["http_port"])
        many = json.dumps({"inputs": [tensor(f"T{n}", "x") for n in range(3)]}).encode()
        status, body = await connection.call(http_request("/v2/models/text/infer", many))
        assert (status, "max_tensors" in body.decode()) == (413, True), body
        long = json.dumps({"inputs": [tensor("TEXT", "x" * 65)]}).encode()
        status, body = await connection.call(http_request("/v2/models/text/infer", long))
        assert (status, "max_bytes_element" in body.decode()) == (413, True), body
        connection.transport.close()

    asyncio.run(run())


def test_requests_in_flight_and_queue_depth_are_retryable_refusals(tight: dict[str, int]) -> None:
    async def run() -> None:
        connections = [await connect("127.0.0.1", tight["http_port"]) for _ in range(7)]
        request = binary_infer("slow", rows(32))
        answers = await asyncio.gather(*(connection.call(request) for connection in connections))
        statuses = sorted(status for status, _ in answers)
        assert statuses.count(200) >= 3, statuses
        refused = [body.decode() for status, body in answers if status == 429]
        assert refused, statuses
        assert set(statuses) == {200, 429}
        assert all("max_in_flight" in text or "max_queue_depth" in text or "arena_bytes" in text for text in refused)
        for connection in connections:
            connection.transport.close()
        await check_served(tight["http_port"])

    asyncio.run(run())


def test_a_request_cut_into_more_pieces_than_may_be_in_flight_is_served(tight: dict[str, int]) -> None:
    array = np.arange(3000 * 4, dtype=np.float32).reshape(3000, 4)

    async def run() -> None:
        connection = await connect("127.0.0.1", tight["http_port"])
        status, body = await connection.call(binary_infer("affine", {"INPUT": ("FP32", array)}))
        assert status == 200, body
        np.testing.assert_array_equal(raw_output(body, 4), array * 2 + 1)
        connection.transport.close()

    asyncio.run(run())


def test_connections(tight: dict[str, int]) -> None:
    async def run() -> None:
        open_ones = [await connect("127.0.0.1", tight["http_port"]) for _ in range(24)]
        for one in open_ones:
            assert (await one.call(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200
        extra = await connect("127.0.0.1", tight["http_port"])
        with contextlib.suppress(OSError):
            status, body = await extra.call(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert status == 503
            assert b"max_connections" in body
        for one in open_ones:
            one.transport.close()

    asyncio.run(run())
