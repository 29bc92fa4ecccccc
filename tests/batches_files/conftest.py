"""``gateway``: one running gateway for the tests of a file; each test uses workspaces of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_gateway import LiveGateway, live_gateway

from postgres_server import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    with live_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running
