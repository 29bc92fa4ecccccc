"""Health's Watch step by step, without a server: what happens while the client takes a status."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2
from serving_double import DoubleServing

from frontend.grpc_health import Health


def test_a_drain_that_begins_while_a_status_is_taken_is_told() -> None:
    async def test() -> list[int]:
        draining = asyncio.Event()
        watch = Health(DoubleServing(), draining).watch(b"")
        told = [await anext(watch)]
        # A server resumes the watch when its write is done; by then the client may have read and the drain begun.
        draining.set()
        told += [data async for data in watch]
        return [health_pb2.HealthCheckResponse.FromString(data).status for data in told]

    response = health_pb2.HealthCheckResponse
    assert asyncio.run(test()) == [response.SERVING, response.NOT_SERVING]
