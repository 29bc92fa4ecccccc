from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from http_double import Running, Told

from frontend.httpd.exchange import Application
from frontend.settings import EndpointSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "kserve"))  # its double of Serving serves these tests too

Serve = Callable[..., Running]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that are stopped at the end of the test."""
    running: list[Running] = []

    def start(app: Application, limits: EndpointSettings | None = None) -> Running:
        server = Running(app, limits or EndpointSettings())
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def app() -> Told:
    return Told()


@pytest.fixture
def server(serve: Serve, app: Told) -> Running:
    return serve(app)
