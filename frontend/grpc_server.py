"""Which gRPC server a frontend runs: the one that ``grpc.server`` names."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from frontend.serving import Serving
from frontend.settings import EndpointSettings, GrpcSettings

if TYPE_CHECKING:
    from frontend.grpc_fast.repeats import Repeat


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
    repeat: Repeat | None = None,
) -> RunningGrpcServer:
    """Return the server to start; ``repeat`` is ``FrontendApp.repeat``, which only the fast one uses.

    Only the chosen one is imported: grpcio alone is tens of MiB in every frontend.
    """
    if settings.server == "fast":
        from frontend.grpc_fast.server import FastGrpcServer

        return FastGrpcServer(serving, host, port, settings, limits, repeat=repeat)
    from frontend.grpc import GrpcServer

    return GrpcServer(serving, host, port, settings, limits)
