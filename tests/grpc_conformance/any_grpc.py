"""The gRPC servers that every test of the protocol runs on."""

from __future__ import annotations

from typing import Any

import pytest
from placing_double import DoubleApp
from serving_double import DoubleServing

from frontend.grpc_server import RunningGrpcServer, make_grpc_server
from frontend.settings import GrpcSettings

HOST = "127.0.0.1"
KINDS = ("grpcio", "fast", pytest.param("repeats", marks=pytest.mark.interpreted))
"""``repeats`` is the fast one that knows calls again."""


def server_of(kind: str, double: DoubleServing, port: int, host: str = HOST, **settings: Any) -> RunningGrpcServer:
    """Return a server of that kind over a double, not started."""
    wanted = GrpcSettings(server="grpcio" if kind == "grpcio" else "fast", **settings)
    app: Any = DoubleApp(double) if kind == "repeats" else None
    double.app = app
    return make_grpc_server(double, host, port, wanted, double.limits, app)
