"""The gRPC server of a frontend: KServe's service, health and reflection, on grpcio's asyncio server.

Handlers take and give bytes: the codecs decide when protobuf is worth its copies. Every failure leaves as the status
that ``status.STATUS`` says, its text as the details; one nobody foresaw is logged and leaves as INTERNAL.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from engines.errors import Internal, InvalidInput, NotFound, NotReady, ServingError, Unsupported
from frontend.grpc_health import HEALTH_SERVICE, health_handlers
from frontend.grpc_reflection import enable_reflection
from frontend.grpc_stream import InferStream
from frontend.kserve import metadata, proto_schema
from frontend.kserve.grpc_codec import decode_infer, encode_infer
from frontend.kserve.proto import message_class
from frontend.kserve.status import error_text, status_of
from frontend.serving import Serving
from frontend.settings import EndpointSettings, GrpcSettings

log = logging.getLogger("frontend.grpc")

MESSAGE_ROOM_BYTES: Final = 16 * 1024 * 1024
"""How far above ``max_request_bytes`` a message is still read, to be refused with a text that names the setting; gRPC's
own refusal, which only gives a number, stands beyond."""
MAX_DEADLINE_S: Final = 365 * 24 * 3600.0
"""Remaining time from which on a deadline counts as none: clients send the end of time for 'never'."""
MIN_PING_INTERVAL_MS: Final = 10_000
"""Pings of idle clients are tolerated from this interval on; gRPC's default of 5 minutes closes their connections."""

Body = Callable[[bytes, Any], Awaitable[bytes]]


class GrpcServer:
    """KServe over gRPC on one port, which other processes may share (SO_REUSEPORT).

    Life: ``start``, ``drain`` (optional), ``close``; closing twice, or before the start, is harmless.
    """

    def __init__(
        self, serving: Serving, host: str, port: int, settings: GrpcSettings, limits: EndpointSettings
    ) -> None:
        self._serving = serving
        self._host = host
        self._port = port
        self._settings = settings
        self._limits = limits
        self._draining = asyncio.Event()
        self._server: Any = None

    async def start(self) -> int:
        """Bind, serve, and return the port.

        Raises:
            OSError: the address cannot be bound.
        """
        server = grpc.aio.server(
            options=_options(self._limits), maximum_concurrent_rpcs=self._settings.max_concurrent_rpcs
        )
        server.add_generic_rpc_handlers((_Service(self._handlers()),))
        if self._settings.reflection:
            enable_reflection(server, (proto_schema.SERVICE, HEALTH_SERVICE))
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            port: int = server.add_insecure_port(f"{host}:{self._port}")
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {host}:{self._port}: {error}") from error
        await server.start()
        self._server = server
        return port

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, let RPCs under way finish, and cancel what is left after ``timeout_s``.

        Streams answer what they have read and end; health watchers are told NOT_SERVING and end.
        """
        self._draining.set()
        if self._server is not None:
            await self._server.stop(timeout_s)

    async def close(self) -> None:
        """Stop at once; RPCs under way are cancelled."""
        self._draining.set()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    def _handlers(self) -> dict[str, Any]:
        bodies: dict[str, Body] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._repository_index,
        }
        handlers: dict[str, Any] = {}
        for rpc in proto_schema.RPCS:
            path = f"/{proto_schema.SERVICE}/{rpc}"
            if rpc == proto_schema.STREAM_RPC:
                handlers[path] = grpc.stream_stream_rpc_method_handler(self._model_stream_infer)
            else:
                handlers[path] = grpc.unary_unary_rpc_method_handler(_guarded(bodies.get(rpc) or _not_offered(rpc)))
        handlers.update(health_handlers(self._serving, self._draining))
        return handlers

    async def _server_live(self, data: bytes, context: Any) -> bytes:
        return _rendered("ServerLiveResponse", {"live": self._serving.live()})

    async def _server_ready(self, data: bytes, context: Any) -> bytes:
        return _rendered("ServerReadyResponse", {"ready": self._serving.ready()})

    async def _model_ready(self, data: bytes, context: Any) -> bytes:
        request = _parsed("ModelReadyRequest", data)
        try:
            self._serving.entry(request.name, request.version)
            ready = True
        except (NotFound, NotReady):
            ready = False
        return _rendered("ModelReadyResponse", {"ready": ready})

    async def _server_metadata(self, data: bytes, context: Any) -> bytes:
        return _rendered("ServerMetadataResponse", metadata.server_metadata(self._limits))

    async def _model_metadata(self, data: bytes, context: Any) -> bytes:
        request = _parsed("ModelMetadataRequest", data)
        entry = self._serving.entry(request.name, request.version)
        versions = self._serving.versions(request.name)
        return _rendered("ModelMetadataResponse", metadata.model_metadata(entry, versions))

    async def _model_config(self, data: bytes, context: Any) -> bytes:
        request = _parsed("ModelConfigRequest", data)
        entry = self._serving.entry(request.name, request.version)
        return _rendered("ModelConfigResponse", {"config": metadata.model_config(entry)})

    async def _model_statistics(self, data: bytes, context: Any) -> bytes:
        request = _parsed("ModelStatisticsRequest", data)
        statistics = await self._serving.statistics(request.name, request.version)
        return _rendered("ModelStatisticsResponse", metadata.statistics_document(statistics))

    async def _repository_index(self, data: bytes, context: Any) -> bytes:
        request = _parsed("RepositoryIndexRequest", data)
        index = metadata.repository_index(self._serving.entries(), request.ready)
        return _rendered("RepositoryIndexResponse", {"models": index})

    async def _model_infer(self, data: bytes, context: Any) -> bytes:
        arrival_ns = time.monotonic_ns()
        request = decode_infer(data, self._limits)
        request.deadline_ns = deadline_ns(context.time_remaining(), arrival_ns)
        response = await self._serving.infer(request, arrival_ns)
        try:
            return encode_infer(response)
        finally:
            response.release()

    async def _model_stream_infer(self, requests: Any, context: Any) -> None:
        arrival_ns = time.monotonic_ns()
        stream = InferStream(
            self._serving, self._limits, context, deadline_ns(context.time_remaining(), arrival_ns), self._draining
        )
        await stream.run()


def deadline_ns(remaining_s: float | None, now_ns: int) -> int | None:
    """Return the absolute deadline of an RPC, None if it has none that matters."""
    if remaining_s is None or not remaining_s < MAX_DEADLINE_S:
        return None
    return now_ns + int(remaining_s * 1e9)


async def abort(context: Any, error: ServingError) -> None:
    """End an RPC with an error's status; raises, as every abort does."""
    status = status_of(error)
    trailing = () if status.retry_after_s is None else (("retry-after", str(status.retry_after_s)),)
    await context.abort(_CODES[status.grpc], error_text(error), trailing)


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a method path."""

    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def service(self, details: Any) -> Any:
        return self._handlers.get(details.method)


_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


def _guarded(body: Body) -> Body:
    async def handler(data: bytes, context: Any) -> bytes:
        try:
            return await body(data, context)
        except ServingError as error:
            failure = error
        except Exception:
            log.exception("rpc.failed")
            failure = Internal("internal error")
        await abort(context, failure)
        return b""

    return handler


def _not_offered(rpc: str) -> Body:
    async def body(data: bytes, context: Any) -> bytes:
        raise Unsupported(f"{rpc} is not offered by this server")

    return body


def _parsed(name: str, data: bytes) -> Any:
    try:
        return message_class(name).FromString(data)
    except DecodeError as error:
        raise InvalidInput(f"failed to parse the {name} message: {error}") from error


def _rendered(name: str, document: metadata.Document) -> bytes:
    message = json_format.ParseDict(document, message_class(name)(), ignore_unknown_fields=True)
    data: bytes = message.SerializeToString()
    return data


def _options(limits: EndpointSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", min(limits.max_request_bytes + MESSAGE_ROOM_BYTES, 2**31 - 1)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.max_connection_idle_ms", min(int(limits.idle_timeout_seconds * 1000), 2**31 - 1)),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
