"""Forecasts in the read models: shown with the batch, and never in its way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.store.rows import BatchRow
from frontend.gateway_settings import GatewaySettings
from frontend.openai.principal import Principal, Role
from frontend.platform import rendering
from frontend.platform.access import batch_access
from frontend.platform.deployments import Deployments
from frontend.platform.read_models import BatchView
from frontend.platform.store_views import StoreViews
from store_world import World, world_of

LATE = Outlook(eta_p50=1_800_000_000, eta_p90=None, expires_at=0, at_risk=True, window_hours=72, measured_lines=9)


class Outlooks:
    """Forecasts of a test; with ``slow`` they never come."""

    def __init__(self, known: Mapping[str, Outlook], *, slow: bool = False) -> None:
        self._known = known
        self._slow = slow

    async def all(self) -> Mapping[str, Outlook]:
        if self._slow:
            await asyncio.Event().wait()
        return self._known

    async def of(self, batch_id: str) -> Outlook | None:
        return (await self.all()).get(batch_id)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_of("sqlite", str(tmp_path / "store.sqlite3")) as made:
        yield made


def view(world: World, batch: BatchRow, outlooks: Outlooks) -> BatchView:
    deployments = Deployments(GatewaySettings(), lambda: ())
    views = StoreViews(world.store, deployments, 2, outlooks, outlook_wait_s=0.01)
    person = Principal(batch.workspace_id, "key", Role.WORKSPACE_ADMIN)
    access = batch_access(person, batch.workspace_id, personal=False)
    return world.run(views.batch_view(person, access, batch.id))


def test_an_outlook_is_told_with_times_as_all_others(world: World) -> None:
    batch = world.batch(world.workspace().id, 3)
    shown = rendering.batch_page(view(world, batch, Outlooks({batch.id: LATE}))).batch.outlook
    assert shown is not None
    assert (shown.eta_p50, shown.eta_p90) == ("2027-01-15T08:00:00Z", None)
    assert shown.at_risk and shown.suggested_completion_window == "72h" and shown.measured_lines == 9


def test_a_batch_that_nobody_can_foresee_has_none(world: World) -> None:
    batch = world.batch(world.workspace().id, 3)
    assert rendering.batch_page(view(world, batch, Outlooks({}))).batch.outlook is None


def test_a_batch_is_shown_though_its_forecast_does_not_come(world: World) -> None:
    batch = world.batch(world.workspace().id, 3)
    assert view(world, batch, Outlooks({batch.id: LATE}, slow=True)).outlook is None


def test_a_batch_that_ended_is_not_forecast(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 1)
    world.claim(batch, [0])
    world.finish(batch, 0)
    world.run(world.store.runner.mark_finalizing("r1", batch.id, "file-o", "file-e"))
    assert world.run(world.store.runner.finalize("r1", batch.id, "completed")) is not None
    assert view(world, batch, Outlooks({batch.id: LATE})).outlook is None
