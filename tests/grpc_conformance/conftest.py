"""Fixtures that run a test once on each gRPC server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
import uvloop

sys.path.append(str(Path(__file__).parents[1] / "kserve"))

from any_grpc import HOST, KINDS, server_of
from serving_double import DoubleServing, LoopThread

from frontend.grpc_server import RunningGrpcServer
from frontend.settings import EndpointSettings


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which server; tests that do not look at it run on all."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    """The loop of servers and of asyncio clients, as in a frontend."""
    thread = LoopThread(uvloop.new_event_loop())
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def double(kind: str) -> DoubleServing:
    return DoubleServing()


@pytest.fixture(scope="module")
def address(kind: str, double: DoubleServing, loop: LoopThread) -> Iterator[str]:
    async def start() -> tuple[RunningGrpcServer, int]:
        server = server_of(kind, double, 0)
        return server, await server.start()

    server, port = loop.run(start())
    yield f"{HOST}:{port}"
    loop.run(server.close())


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address) as made:
        yield made


@asynccontextmanager
async def serving(
    kind: str, limits: EndpointSettings | None = None, settings: dict[str, Any] | None = None
) -> AsyncIterator[tuple[DoubleServing, RunningGrpcServer, str]]:
    double = DoubleServing(limits)
    server = server_of(kind, double, 0, **(settings or {}))
    port = await server.start()
    try:
        yield double, server, f"{HOST}:{port}"
    finally:
        await server.close()


Scenario = Callable[[DoubleServing, RunningGrpcServer, str], Awaitable[None]]


@pytest.fixture
def with_server(kind: str, loop: LoopThread) -> Callable[..., None]:
    """Run a coroutine beside a server of its own."""

    def run_scenario(
        scenario: Scenario, limits: EndpointSettings | None = None, settings: dict[str, Any] | None = None
    ) -> None:
        async def run() -> None:
            async with serving(kind, limits, settings) as (double, server, address):
                await scenario(double, server, address)

        loop.run(run())

    return run_scenario
