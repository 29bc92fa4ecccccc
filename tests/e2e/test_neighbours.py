"""What one client does wrong, or stops waiting for, is that client's alone."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.load import binary_infer, connect, http_request

pytestmark = pytest.mark.process


def sample(ports: dict[str, int], name: str, **labels: str) -> float:
    """Return the sum of the scraped samples with these labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics_port']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(
        one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    )


BAD = [
    {"name": "INPUT", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3]},
    {"name": "INPUT", "shape": [1, 5], "datatype": "FP32", "data": [1, 2, 3, 4, 5]},
    {"name": "INPUT", "shape": [1, 4], "datatype": "INT32", "data": [1, 2, 3, 4]},
    {"name": "WRONG", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]},
    {"name": "INPUT", "shape": [0, 4], "datatype": "FP32", "data": []},
    {"name": "INPUT", "shape": [-1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]},
    {"name": "INPUT", "shape": [2**62, 4], "datatype": "FP32", "data": [1]},
    {"name": "INPUT", "shape": [1, 4], "datatype": "FP32", "data": ["a", "b", "c", "d"]},
    {"name": "INPUT", "shape": [1, 4], "datatype": "FP32"},
]


def test_24_good_clients_beside_one_that_sends_malformed_requests(ports: dict[str, int]) -> None:
    stop = False

    async def good(number: int) -> int:
        connection = await connect("127.0.0.1", ports["http_port"])
        array = np.full((1, 4), float(number), np.float32)
        request = binary_infer("affine", {"INPUT": ("FP32", array)})
        done = 0
        while not stop:
            status, body = await connection.call(request)
            assert status == 200, body
            assert body.endswith((array * 2 + 1).tobytes())
            done += 1
        connection.transport.close()
        return done

    async def bad() -> int:
        nonlocal stop
        connection = await connect("127.0.0.1", ports["http_port"])
        sent = 0
        for _ in range(30):
            for tensor in BAD:
                body = json.dumps({"inputs": [tensor]}).encode()
                status, answer = await connection.call(http_request("/v2/models/affine/infer", body))
                assert status == 400, (tensor, answer)
                assert isinstance(json.loads(answer)["error"], str)
                sent += 1
            for body in (b"", b"{", b"[]", b'{"inputs": []}', b'{"inputs": {}}', b"\xff" * 40):
                status, answer = await connection.call(http_request("/v2/models/affine/infer", body))
                assert status == 400, (body, answer)
                sent += 1
        stop = True
        connection.transport.close()
        return sent

    async def run() -> None:
        *good_done, bad_sent = await asyncio.gather(*(good(number) for number in range(24)), bad())
        assert all(good_done)
        assert bad_sent == 30 * (len(BAD) + 6)

    asyncio.run(run())


def test_rule_22_a_client_that_disconnects_is_withdrawn_before_execution(ports: dict[str, int]) -> None:
    before = sample(ports, "worker_requests_shed_total", model="slow", reason="cancelled")
    array = np.ones((32, 4), np.float32)
    request = binary_infer("slow", {"INPUT": ("FP32", array)})

    async def run() -> None:
        connections = [await connect("127.0.0.1", ports["http_port"]) for _ in range(8)]
        calls = [asyncio.ensure_future(connection.call(request)) for connection in connections]
        # Full batches run one after another: once the first is answered, the last ones still wait.
        await calls[0]
        for connection in connections[1:]:
            connection.transport.abort()
        await asyncio.gather(*calls, return_exceptions=True)
        lone = await connect("127.0.0.1", ports["http_port"])
        status, _ = await lone.call(request)
        assert status == 200
        lone.transport.close()
        connections[0].transport.close()

    asyncio.run(run())
    assert sample(ports, "worker_requests_shed_total", model="slow", reason="cancelled") > before


def test_do_06_the_timeout_parameter_is_in_microseconds_and_says_so(ports: dict[str, int]) -> None:
    array = np.ones((1, 4), np.float32)

    async def run() -> None:
        connection = await connect("127.0.0.1", ports["http_port"])
        generous = binary_infer("slow", {"INPUT": ("FP32", array)}, timeout=20_000_000)
        status, _ = await connection.call(generous)
        assert status == 200
        status, body = await connection.call(binary_infer("slow", {"INPUT": ("FP32", array)}, timeout=200))
        assert status == 504, body
        assert b"0.2" in body
        assert b" ms" in body
        connection.transport.close()

    asyncio.run(run())


def test_mo_04_every_series_exists_from_the_start(ports: dict[str, int]) -> None:
    for name in ("worker_dispatch_total", "worker_queue_depth", "worker_queue_wait_seconds_count"):
        assert sample(ports, name, model="unbatched") >= 0
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics_port']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    for name in (
        "worker_dispatch_total", "worker_compute_seconds_total", "worker_queue_depth", "worker_queue_wait_seconds",
        "worker_requests_served_total", "worker_rows_served_total", "worker_model_max_batch_size",
        "worker_batch_rows", "worker_padding_rows_total", "worker_requests_shed_total", "frontend_requests_total",
    ):  # fmt: skip
        assert name.removesuffix("_total") in text, name


def test_mo_05_figures_agree_over_all_frontends(ports: dict[str, int]) -> None:
    before = {
        name: sample(ports, name, model="mlp")
        for name in ("worker_batch_rows_count", "worker_dispatch_total", "worker_requests_served_total")
    }

    async def run() -> None:
        request = binary_infer("mlp", {"INPUT": ("FP32", np.ones((1, 64), np.float32))})
        connections = [await connect("127.0.0.1", ports["http_port"]) for _ in range(12)]
        for _ in range(5):
            assert all(status == 200 for status, _ in await asyncio.gather(*(c.call(request) for c in connections)))
        for connection in connections:
            connection.transport.close()

    asyncio.run(run())
    after = {name: sample(ports, name, model="mlp") for name in before}
    grown = {name: after[name] - before[name] for name in before}
    assert grown["worker_requests_served_total"] == 60
    assert grown["worker_batch_rows_count"] == grown["worker_dispatch_total"] > 0
