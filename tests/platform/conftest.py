"""``platform``: the same tests on SQLite and on PostgreSQL; one running gateway per file and database."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from platform_world import PlatformWorld

from postgres_server import PostgresServer, postgres_server

__all__ = ["postgres_server"]


@pytest.fixture(params=["sqlite", "postgresql"], scope="module")
def platform(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformWorld]:
    url, server = "", None
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres_server")
        assert isinstance(server, PostgresServer)
        name = "t" + uuid.uuid4().hex
        server.sql(f"CREATE DATABASE {name}")
        url = server.url(name)
    world = PlatformWorld(request.param, tmp_path_factory.mktemp("platform"), url)
    world.start()
    try:
        yield world
    finally:
        world.stop()
        if server is not None:
            server.sql(f"DROP DATABASE {name} WITH (FORCE)")
