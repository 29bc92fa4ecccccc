"""Which gRPC server a frontend runs: the one that ``grpc.server`` names."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from frontend.serving import Serving
from frontend.settings import EndpointSettings, GrpcSettings

if TYPE_CHECKING:
    from frontend.app import FrontendApp


class RunningGrpcServer(Protocol):
    """A gRPC server, whichever it is."""

    async def start(self) -> int: ...
    async def drain(self, timeout_s: float) -> None: ...
    async def close(self) -> None: ...


@runtime_checkable
class AdoptingGrpcServer(Protocol):
    """One that can serve connections which the node accepted."""

    async def start(self, *, listen: bool = True, closed: Callable[[], None] = ...) -> int: ...
    def adopt(self, sock: socket.socket) -> None: ...


def make_grpc_server(
    serving: Serving,
    host: str,
    port: int,
    settings: GrpcSettings,
    limits: EndpointSettings,
    app: FrontendApp | None = None,
) -> RunningGrpcServer:
    """Return the server to start; the fast one runs calls that repeat an earlier one through ``app``.

    Only the chosen one is imported: grpcio alone is tens of MiB in every frontend.
    """
    if settings.server == "fast":
        from frontend.grpc_fast.server import FastGrpcServer

        return FastGrpcServer(serving, host, port, settings, limits, app=app)
    from frontend.grpc import GrpcServer

    return GrpcServer(serving, host, port, settings, limits)
