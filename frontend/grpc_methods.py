"""The RPCs of a frontend as functions from message bytes to message bytes; every gRPC server serves the same ones.

Failures are ``ServingError``; the server tells them as ``outcome_of`` says. ModelInfer and ModelStreamInfer are not
here: how their tensors and answers move is each server's own.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from engines.errors import Internal, InvalidInput, NotFound, NotReady, ServingError, Unsupported
from frontend.kserve import metadata, proto_schema
from frontend.kserve.client_memory import CUDA_TEXT, unknown
from frontend.kserve.proto import message_class
from frontend.kserve.status import error_text, status_of
from frontend.serving import Serving
from frontend.settings import EndpointSettings

log = logging.getLogger("frontend.grpc")

MAX_DEADLINE_S: Final = 365 * 24 * 3600.0
"""Remaining time from which on a deadline counts as none: clients send the end of time for 'never'."""
INFER_PATH: Final = f"/{proto_schema.SERVICE}/ModelInfer"
STREAM_PATH: Final = f"/{proto_schema.SERVICE}/{proto_schema.STREAM_RPC}"

Method = Callable[[bytes], Awaitable[bytes]]


class GrpcMethods:
    """The unary RPCs of the KServe service, apart from ModelInfer."""

    def __init__(self, serving: Serving, limits: EndpointSettings) -> None:
        self._serving = serving
        self._limits = limits

    def by_path(self) -> dict[str, Method]:
        """Return every unary method but ModelInfer by its path; those that are not offered say so when called."""
        offered: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "SystemSharedMemoryStatus": self._memory_status,
            "SystemSharedMemoryRegister": self._memory_register,
            "SystemSharedMemoryUnregister": self._memory_unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
        }
        apart = ("ModelInfer", proto_schema.STREAM_RPC)
        return {
            f"/{proto_schema.SERVICE}/{rpc}": offered.get(rpc) or _not_offered(rpc)
            for rpc in proto_schema.RPCS
            if rpc not in apart
        }

    async def _server_live(self, data: bytes) -> bytes:
        return _rendered("ServerLiveResponse", {"live": self._serving.live()})

    async def _server_ready(self, data: bytes) -> bytes:
        return _rendered("ServerReadyResponse", {"ready": self._serving.ready()})

    async def _model_ready(self, data: bytes) -> bytes:
        request = _parsed("ModelReadyRequest", data)
        try:
            self._serving.entry(request.name, request.version)
            ready = True
        except (NotFound, NotReady):
            ready = False
        return _rendered("ModelReadyResponse", {"ready": ready})

    async def _server_metadata(self, data: bytes) -> bytes:
        return _rendered("ServerMetadataResponse", metadata.server_metadata(self._limits))

    async def _model_metadata(self, data: bytes) -> bytes:
        request = _parsed("ModelMetadataRequest", data)
        entry = self._serving.entry(request.name, request.version)
        versions = self._serving.versions(request.name)
        return _rendered("ModelMetadataResponse", metadata.model_metadata(entry, versions))

    async def _model_config(self, data: bytes) -> bytes:
        request = _parsed("ModelConfigRequest", data)
        entry = self._serving.entry(request.name, request.version)
        return _rendered("ModelConfigResponse", {"config": metadata.model_config(entry)})

    async def _model_statistics(self, data: bytes) -> bytes:
        request = _parsed("ModelStatisticsRequest", data)
        statistics = await self._serving.statistics(request.name, request.version)
        return _rendered("ModelStatisticsResponse", metadata.statistics_document(statistics))

    async def _repository_index(self, data: bytes) -> bytes:
        request = _parsed("RepositoryIndexRequest", data)
        index = metadata.repository_index(self._serving.entries(), request.ready)
        return _rendered("RepositoryIndexResponse", {"models": index})

    async def _memory_status(self, data: bytes) -> bytes:
        request = _parsed("SystemSharedMemoryStatusRequest", data)
        regions = {str(region["name"]): region for region in self._serving.memory.status(request.name)}
        return _rendered("SystemSharedMemoryStatusResponse", {"regions": regions})

    async def _memory_register(self, data: bytes) -> bytes:
        request = _parsed("SystemSharedMemoryRegisterRequest", data)
        await self._serving.memory.register(request.name, request.key, request.offset, request.byte_size)
        return b""

    async def _memory_unregister(self, data: bytes) -> bytes:
        request = _parsed("SystemSharedMemoryUnregisterRequest", data)
        await self._serving.memory.unregister(request.name)
        return b""

    async def _cuda_status(self, data: bytes) -> bytes:
        request = _parsed("CudaSharedMemoryStatusRequest", data)
        if request.name:
            raise unknown(request.name)
        return b""

    async def _cuda_register(self, data: bytes) -> bytes:
        raise Unsupported(CUDA_TEXT)

    async def _cuda_unregister(self, data: bytes) -> bytes:
        # Nothing is registered, so all is unregistered; load generators ask for it before they start.
        return b""


def deadline_ns(remaining_s: float | None, now_ns: int) -> int | None:
    """Return the absolute deadline of an RPC, None if it has none that matters."""
    if remaining_s is None or not remaining_s < MAX_DEADLINE_S:
        return None
    return now_ns + int(remaining_s * 1e9)


def outcome_of(error: ServingError) -> tuple[int, str, int | None]:
    """Return how a failure is told: status number, message, and seconds for ``retry-after`` in the trailers."""
    status = status_of(error)
    return status.grpc, error_text(error), status.retry_after_s


def failure_of(error: Exception) -> ServingError:
    """Return what to tell about an exception; one nobody foresaw is logged and told as an internal error."""
    if isinstance(error, ServingError):
        return error
    log.error("rpc.failed", exc_info=error)
    return Internal("internal error")


def _not_offered(rpc: str) -> Method:
    async def method(data: bytes) -> bytes:
        raise Unsupported(f"{rpc} is not offered by this server")

    return method


def _parsed(name: str, data: bytes) -> Any:
    try:
        return message_class(name).FromString(data)
    except DecodeError as error:
        raise InvalidInput(f"failed to parse the {name} message: {error}") from error


def _rendered(name: str, document: metadata.Document) -> bytes:
    message = json_format.ParseDict(document, message_class(name)(), ignore_unknown_fields=True)
    data: bytes = message.SerializeToString()
    return data
