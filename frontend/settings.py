"""Settings of one frontend process: frozen values, parsed once by the node and handed over as JSON."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from frontend.gateway_settings import GatewaySettings
from worker.config import ChannelSettings, Positive

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]


class SystemSharedMemorySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``global.endpoints.system_shared_memory`` of the node file: tensors in shared memory that clients register.

    Off by default: whoever reaches the port may then read and write every object that is allowed here, also one that
    another client registered.

    Attributes:
        key_prefix: only objects whose names begin so may be registered; empty allows all.
        max_regions: registered at once, over all clients.
        max_bytes: of all registered regions together.
    """

    enabled: bool = False
    key_prefix: str = ""
    max_regions: Count = 64
    max_bytes: Count = 1024 * 1024 * 1024


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``global.endpoints`` of the node file. Port 0 lets the node choose a free one; the default host is loopback.

    Attributes:
        max_request_bytes: body (HTTP, also after decompression) or message (gRPC); the same on both protocols.
        max_tensors: inputs and outputs a request may name.
        max_bytes_element: one element of a BYTES tensor.
        max_connections: per frontend; further ones are closed with 503.
        max_header_bytes: request line and headers.
        idle_timeout_seconds: a keep-alive connection without a request.
        read_timeout_seconds: from a request's first byte to its last.
        write_timeout_seconds: a client that does not read its answer.
        drain_timeout_seconds: how long requests in flight may take after SIGTERM.
    """

    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    metrics_port: Port = 8002
    max_request_bytes: Annotated[int, Meta(ge=1024, le=1 << 31)] = 64 * 1024 * 1024
    max_tensors: Count = 256
    max_bytes_element: Count = 64 * 1024 * 1024
    max_connections: Count = 4096
    max_header_bytes: Annotated[int, Meta(ge=1024)] = 64 * 1024
    idle_timeout_seconds: Positive = 120.0
    read_timeout_seconds: Positive = 60.0
    write_timeout_seconds: Positive = 60.0
    drain_timeout_seconds: Positive = 30.0
    server_name: str = "ringserve"
    system_shared_memory: SystemSharedMemorySettings = SystemSharedMemorySettings()


class GrpcSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``global.grpc`` of the node file.

    Attributes:
        server: ``fast`` (own HTTP/2 protocol) or ``grpcio``; both answer the same.
        max_concurrent_rpcs: per frontend; further calls are refused with RESOURCE_EXHAUSTED.
    """

    server: str = "fast"
    max_concurrent_rpcs: Count = 4096
    reflection: bool = True


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``global.control`` of the node file: the gRPC service that shows and changes how the node schedules.

    Attributes:
        endpoint: ``unix:NAME.sock`` in the run directory, ``HOST:PORT``, or ``none``.
        allow_remote: whether HOST may be an address that other machines reach.
    """

    endpoint: str = "unix:control.sock"
    allow_remote: bool = False


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All a frontend process is told.

    Attributes:
        worker_sockets: Unix socket of every worker it should attach to.
        accept_socket: where the node hands over accepted connections; empty to listen itself.
        dispatch_timeout_seconds: deadline of a request that brings none.
        hook_threads: threads that run hooks of mode ``thread``.
        gateway: ``/v1``; not offered unless enabled.
    """

    name: str
    run_dir: str
    worker_sockets: tuple[str, ...]
    accept_socket: str = ""
    endpoints: EndpointSettings = EndpointSettings()
    grpc: GrpcSettings = GrpcSettings()
    channel: ChannelSettings = ChannelSettings()
    dispatch_timeout_seconds: Positive = 30.0
    hook_threads: Count = 8
    gateway: GatewaySettings = GatewaySettings()
