"""``runners``: a runner's surroundings on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from postgres_server import postgres_server, postgres_url
from runner_world import RunnerWorld
from store_world import world_of

__all__ = ["postgres_server", "postgres_url"]


@pytest.fixture(params=["sqlite", "postgresql"])
def runners(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunnerWorld]:
    kind = request.param
    place = str(tmp_path / "store.sqlite3") if kind == "sqlite" else request.getfixturevalue("postgres_url")
    with world_of(kind, place) as world:
        made = RunnerWorld(world, tmp_path / "files")
        world.run(made.prepare())
        yield made
        world.run(made.objects.close())
