"""``platform``: the same tests on SQLite and on PostgreSQL; one running gateway per file and database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from platform_world import PlatformWorld

from postgres_server import fresh_database, postgres_server

__all__ = ["postgres_server"]


@pytest.fixture(params=["sqlite", "postgresql"], scope="module")
def platform(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformWorld]:
    server = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
    with fresh_database(server) as url:
        world = PlatformWorld(request.param, tmp_path_factory.mktemp("platform"), url)
        world.start()
        try:
            yield world
        finally:
            world.stop()
