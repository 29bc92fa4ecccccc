"""``world``: the same test on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from postgres_server import postgres_server, postgres_url
from runner_world import RunnerWorld
from store_world import World, world_of

__all__ = ["postgres_server", "postgres_url"]


@pytest.fixture(params=["sqlite", "postgresql"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    kind = request.param
    place = str(tmp_path / "store.sqlite3") if kind == "sqlite" else request.getfixturevalue("postgres_url")
    with world_of(kind, place) as made:
        yield made


@pytest.fixture
def runners(world: World, tmp_path: Path) -> Iterator[RunnerWorld]:
    made = RunnerWorld(world, tmp_path / "files")
    world.run(made.prepare())
    yield made
    world.run(made.objects.close())
