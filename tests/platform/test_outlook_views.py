"""Forecasts in the read models: shown with the batch, and never in its way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.store.rows import BatchRow, SchedulingRow
from frontend.gateway_settings import GatewayModel, GatewaySettings, RouteSettings
from frontend.openai.principal import Principal, Role
from frontend.platform import rendering
from frontend.platform.access import batch_access
from frontend.platform.deployments import Deployments
from frontend.platform.effect_models import MAX_EFFECTS, earliest
from frontend.platform.read_models import BatchView, PreviewView
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

    async def with_settings(self, row: SchedulingRow) -> Mapping[str, tuple[Outlook, Outlook]]:
        return {
            batch_id: (outlook, replace(outlook, at_risk=False)) for batch_id, outlook in (await self.all()).items()
        }


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


# What other settings would change

ROUTED = GatewaySettings(models=(GatewayModel(name="m", routes=(RouteSettings(id="cloud", kind="openai"),)),))


def preview(world: World, outlooks: Outlooks) -> PreviewView:
    views = StoreViews(world.store, Deployments(ROUTED, lambda: ()), 2, outlooks, outlook_wait_s=0.01)
    return world.run(views.preview("cloud", {"max_concurrency": 4}))


def test_a_preview_names_batches_of_teams_and_counts_those_of_people(world: World) -> None:
    team = world.workspace()
    world.run(world.store.keys.create_workspace("ws_own", "own", "personal"))
    late, early, own = world.batch(team.id, 3), world.batch(team.id, 3), world.batch("ws_own", 3)
    known = {late.id: LATE, early.id: replace(LATE, eta_p50=1_700_000_000), own.id: LATE}
    shown = preview(world, Outlooks(known)).effects
    assert shown is not None
    assert [one.batch_id for one in shown.batches] == [early.id, late.id]
    assert (shown.left_out, shown.personal) == (0, 1)
    assert [(one.now.at_risk, one.then.at_risk) for one in shown.batches] == [(True, False)] * 2
    document = rendering.preview(preview(world, Outlooks(known))).effects
    assert document is not None
    assert document.data[0].now.eta_p50 == "2023-11-14T22:13:20Z" and document.data[0].workspace == team.name


def test_a_preview_has_room_for_the_earliest_and_counts_the_rest(world: World) -> None:
    team = world.workspace()
    batches = [world.batch(team.id, 1) for _ in range(3)]
    known = {batch.id: replace(LATE, eta_p50=at) for at, batch in enumerate(batches)}
    known |= {f"batch_f{at:031x}": replace(LATE, eta_p50=None) for at in range(MAX_EFFECTS)}
    pairs = {batch_id: (outlook, outlook) for batch_id, outlook in known.items()}
    assert list(earliest(pairs, 3)) == [batch.id for batch in batches]
    shown = preview(world, Outlooks(known)).effects
    assert shown is not None
    assert (len(shown.batches), shown.left_out) == (3, MAX_EFFECTS)


def test_a_preview_is_shown_though_its_effects_do_not_come(world: World) -> None:
    found = preview(world, Outlooks({}, slow=True))
    assert found.effects is None and found.always
