"""grpc.health.v1 over what the frontend says of itself: one truth for every probe, whichever server carries it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from engines.errors import InvalidInput, NotFound
from frontend.kserve import proto_schema
from frontend.serving import Serving

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
CHECK_PATH: Final = f"/{HEALTH_SERVICE}/Check"
WATCH_PATH: Final = f"/{HEALTH_SERVICE}/Watch"
POLL_S: Final = 0.25
"""How often a watched status is looked at. Readiness has no event of its own: it also follows from the worker's and
the models' state, and a probe need not know sooner."""
_KNOWN: Final = ("", proto_schema.SERVICE)


class Health:
    """Check and Watch. A server that drains is NOT_SERVING."""

    def __init__(self, serving: Serving, draining: asyncio.Event) -> None:
        self._serving = serving
        self._draining = draining

    async def check(self, data: bytes) -> bytes:
        """Return the HealthCheckResponse to a HealthCheckRequest.

        Raises:
            NotFound: unknown service, as the health protocol demands.
            InvalidInput: not a HealthCheckRequest.
        """
        service = _service(data)
        if service not in _KNOWN:
            raise NotFound(f"unknown service '{service[:200]}'")
        return self._told(service)

    async def watch(self, data: bytes) -> AsyncIterator[bytes]:
        """Yield the status now and after every change; an unknown service is SERVICE_UNKNOWN and stays open.

        A drain is told and ends it.

        Raises:
            InvalidInput: not a HealthCheckRequest.
        """
        service = _service(data)
        told = b""
        while True:
            # Looked at before the status is told: a drain that begins while the client takes one is still to be told.
            draining = self._draining.is_set()
            now = self._told(service)
            if now != told:
                told = now
                yield now
            if draining:
                return
            try:
                async with asyncio.timeout(POLL_S):
                    await self._draining.wait()
            except TimeoutError:
                continue

    def _told(self, service: str) -> bytes:
        response: Any = health_pb2.HealthCheckResponse
        if service not in _KNOWN:
            status = response.SERVICE_UNKNOWN
        elif self._serving.ready() and not self._draining.is_set():
            status = response.SERVING
        else:
            status = response.NOT_SERVING
        data: bytes = response(status=status).SerializeToString()
        return data


def _service(data: bytes) -> str:
    try:
        service: str = health_pb2.HealthCheckRequest.FromString(data).service
    except DecodeError as error:
        raise InvalidInput(f"failed to parse the HealthCheckRequest message: {error}") from error
    return service
