"""grpc.health.v1 over what the frontend says of itself: one truth for every probe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from frontend.kserve import proto_schema
from frontend.serving import Serving

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
POLL_S: Final = 0.25
"""How often a watched status is looked at. Readiness has no event of its own: it also follows from the worker's and
the models' state, and a probe need not know sooner."""
_KNOWN: Final = ("", proto_schema.SERVICE)


def health_handlers(serving: Serving, draining: asyncio.Event) -> dict[str, Any]:
    """Return the handlers of Check and Watch by method path.

    Check of an unknown service is NOT_FOUND, Watch of one says SERVICE_UNKNOWN and stays open, as the health protocol
    demands. A drained server tells its watchers NOT_SERVING and ends.
    """

    def status(service: str) -> Any:
        if service not in _KNOWN:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if serving.ready() and not draining.is_set():
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING

    async def check(request: Any, context: Any) -> Any:
        if request.service not in _KNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service '{request.service[:200]}'")
        return health_pb2.HealthCheckResponse(status=status(request.service))

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        told = None
        while True:
            now = status(request.service)
            if now != told:
                told = now
                yield health_pb2.HealthCheckResponse(status=now)
            if draining.is_set():
                return
            try:
                async with asyncio.timeout(POLL_S):
                    await draining.wait()
            except TimeoutError:
                continue

    codec = {
        "request_deserializer": health_pb2.HealthCheckRequest.FromString,
        "response_serializer": health_pb2.HealthCheckResponse.SerializeToString,
    }
    return {
        f"/{HEALTH_SERVICE}/Check": grpc.unary_unary_rpc_method_handler(check, **codec),
        f"/{HEALTH_SERVICE}/Watch": grpc.unary_stream_rpc_method_handler(watch, **codec),
    }
