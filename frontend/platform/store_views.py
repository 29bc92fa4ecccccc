"""The read models of ``views``, from the store and the routes of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from frontend.batches.jobs import is_batch_id, no_batch
from frontend.batches.scheduling.outlook import Outlook, WhatIf
from frontend.batches.scheduling.plain_words import in_words
from frontend.batches.scheduling.settings_document import BadSettings, read_settings
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import SECOND_US, BatchRow, SchedulingRow
from frontend.openai.errors import ApiError
from frontend.openai.principal import Principal
from frontend.platform.access import BatchAccess, batch_access, no_workspace
from frontend.platform.batch_models import Beside, batch_summary, incident_view, lane_view
from frontend.platform.chart_state import chart
from frontend.platform.deployments import Deployments, no_deployment, removed
from frontend.platform.effect_models import MAX_EFFECTS, earliest, effects
from frontend.platform.read_models import (
    AuditView,
    BatchRows,
    BatchSummary,
    BatchView,
    CallerNames,
    ChartView,
    Deployment,
    Effects,
    IncidentView,
    Outcome,
    PersonalTotals,
    PreviewView,
    RouteView,
    Scope,
    WorkspaceView,
)
from frontend.platform.route_models import live_closed_percent, next_intervals, route_status
from frontend.platform.versions import version_of
from frontend.platform.views import BatchStatus, IncidentStatus

ACTIVE: Final[Mapping[str, bool | None]] = {"active": True, "finished": False, "all": None}
HOUR_US: Final = 3600 * SECOND_US
WEEK_US: Final = 7 * 24 * HOUR_US
IN_LOOP_HOURS: Final = 24
"""A chart of more hours is put together in a thread: it would hold up other requests for some milliseconds."""

OUTLOOK_WAIT_S: Final = 2.0
"""How long a page waits for forecasts; they are made on, so that the next one finds them."""


class StoreViews:
    """Provides ``Views``."""

    def __init__(
        self,
        store: Store,
        deployments: Deployments,
        default_max_concurrency: int,
        outlooks: WhatIf | None = None,
        outlook_wait_s: float = OUTLOOK_WAIT_S,
    ) -> None:
        self._store = store
        self._deployments = deployments
        self._default_cap = default_max_concurrency
        self._outlooks = outlooks
        self._outlook_wait_s = outlook_wait_s

    async def now_us(self) -> int:
        """See ``Views``."""
        return await self._store.now_us()

    # Routes

    def deployments(self) -> tuple[Deployment, ...]:
        """See ``Views``."""
        return self._deployments.all()

    async def deployment(self, route_id: str) -> Deployment:
        """See ``Views``."""
        found = self._deployments.find(route_id)
        if found is not None:
            return found
        stored = await self._store.scheduling.settings(route_id)
        now_us = await self._store.now_us()
        if stored is None and not await self._store.explain.edges(route_id, 0, now_us, limit=1):
            raise no_deployment()
        return removed(route_id)

    def defaults(self, route_id: str) -> SchedulingRow:
        """See ``Views``."""
        return SchedulingRow(route_id, max_concurrency=self._default_cap)

    async def routes_view(self) -> tuple[RouteView, ...]:
        """See ``Views``."""
        known = self._deployments.all()
        names = {deployment.id for deployment in known}
        left = (row.route_id for row in await self._store.scheduling.all_settings() if row.route_id not in names)
        return await self._routes((*known, *map(removed, left)))

    async def route_view(self, route_id: str) -> RouteView:
        """See ``Views``."""
        return (await self._routes((await self.deployment(route_id),)))[0]

    async def chart_view(self, route_id: str, hours: int) -> ChartView:
        """See ``Views``."""
        await self.deployment(route_id)
        to_us = await self._store.now_us()
        from_us = to_us - hours * HOUR_US
        edges = await self._store.explain.edges(route_id, from_us, to_us)
        minutes = await self._store.explain.minutes(route_id, from_us, to_us)
        if hours > IN_LOOP_HOURS:
            return await asyncio.to_thread(chart, route_id, edges, minutes, from_us, to_us)
        return chart(route_id, edges, minutes, from_us, to_us)

    async def preview(self, route_id: str, document: Mapping[str, Any], from_us: int | None = None) -> PreviewView:
        """See ``Views``."""
        settings = await self.read_document(route_id, document, "")
        now_us = await self._store.now_us()
        observed = []
        if settings.yield_live_threshold is not None:
            minutes = await self._store.explain.minutes(route_id, now_us - WEEK_US, now_us)
            observed = [minute for minute in minutes if minute.observed_us > 0]
        intervals = next_intervals(settings, now_us if from_us is None else from_us)
        return PreviewView(
            words=in_words(settings),
            always=intervals is None,
            intervals=intervals or (),
            live_closed_percent=live_closed_percent(settings, observed),
            observed_minutes=len(observed),
            effects=await self._effects(settings),
        )

    async def _effects(self, settings: SchedulingRow) -> Effects | None:
        if self._outlooks is None:
            return None
        try:
            async with asyncio.timeout(self._outlook_wait_s):
                found = await self._outlooks.with_settings(settings)
        except TimeoutError:
            return None
        rows = [await self._store.batches.get(None, batch_id) for batch_id in earliest(found, MAX_EFFECTS)]
        workspaces = {one.id: one for one in await self._store.keys.workspaces()} if rows else {}
        return effects(found, [row for row in rows if row is not None], workspaces)

    async def read_document(self, route_id: str, document: Mapping[str, Any], updated_by: str) -> SchedulingRow:
        """Return the settings in a document for a route. Raises: ApiError 404, 409, 400 with ``param``."""
        deployment = await self.deployment(route_id)
        if not deployment.configured:
            raise ApiError(
                409, "this deployment is not configured any more: its settings can be read, but not changed",
                param="deployment",
            )  # fmt: skip
        try:
            facts = self._deployments.facts(deployment)
            return read_settings(dict(document), facts, updated_at=0, updated_by=updated_by)
        except BadSettings as error:
            raise ApiError(400, str(error), param=error.param or None) from error

    async def _routes(self, deployments: Sequence[Deployment]) -> tuple[RouteView, ...]:
        scheduling = self._store.scheduling
        if len(deployments) == 1:
            one = await scheduling.settings(deployments[0].id)
            stored = {} if one is None else {one.route_id: one}
        else:
            stored = {row.route_id: row for row in await scheduling.all_settings()}
        signals = {row.route_id: row for row in await scheduling.signals()}
        counts = {row.route_id: row for row in await scheduling.route_counts()}
        caps = {row.route_id: row for row in await scheduling.caps()}
        savers = await self._store.views.key_names(sorted({row.updated_by for row in stored.values()}))
        now_us = await self._store.now_us()
        found = []
        for deployment in deployments:
            row = stored.get(deployment.id)
            settings = row or self.defaults(deployment.id)
            route = deployment.id
            found.append(
                RouteView(
                    deployment=deployment,
                    settings=settings,
                    stored=row is not None,
                    version=version_of(row),
                    updated_at_us=None if row is None else row.updated_at,
                    updated_by=None if row is None else savers.get(row.updated_by),
                    status=route_status(settings, signals.get(route), counts.get(route), caps.get(route), now_us),
                    now_us=now_us,
                )
            )
        return tuple(found)

    # Batches

    async def access(self, principal: Principal, workspace: str) -> BatchAccess:
        """See ``Views``."""
        row = await self._store.keys.workspace(workspace)
        if row is None:
            raise no_workspace()
        return batch_access(principal, row.id, personal=row.kind == "personal")

    async def batch_rows(
        self, principal: Principal, access: BatchAccess, status: BatchStatus, limit: int, offset: int
    ) -> BatchRows:
        """See ``Views``."""
        page = await self._store.batches.list_batches(
            access.workspace_id, limit, offset=offset, active=ACTIVE[status], api_key_id=access.own_key_id
        )
        return await self._rows(principal, page.rows, access.scope, has_more=page.has_more)

    async def batch_view(self, principal: Principal, access: BatchAccess, batch_id: str) -> BatchView:
        """See ``Views``."""
        return await self._batch(principal, await self.batch_row(access, batch_id))

    async def batch_row(self, access: BatchAccess, batch_id: str) -> BatchRow:
        """Return a batch that the caller may see. Raises: ApiError 404."""
        row = await self._store.batches.get(access.workspace_id, batch_id) if is_batch_id(batch_id) else None
        if row is None or access.own_key_id not in (None, row.api_key_id):
            raise no_batch()
        return row

    async def all_batch_rows(self, principal: Principal, status: BatchStatus, limit: int, offset: int) -> BatchRows:
        """See ``Views``."""
        page = await self._store.views.platform_batches(limit, offset=offset, active=ACTIVE[status])
        return await self._rows(principal, page.rows, "workspace", has_more=page.has_more)

    async def any_batch_view(self, principal: Principal, batch_id: str) -> BatchView:
        """See ``Views``."""
        row = await self._store.batches.get(None, batch_id) if is_batch_id(batch_id) else None
        if row is None:
            raise no_batch()
        try:
            access = await self.access(principal, row.workspace_id)
        except ApiError:
            raise no_batch() from None  # the same as for one that does not exist
        return await self._batch(principal, await self.batch_row(access, batch_id))

    async def personal_totals(self) -> PersonalTotals:
        """See ``Views``."""
        totals = await self._store.views.personal_totals()
        workspaces = await self._store.keys.workspaces()
        return PersonalTotals(
            workspaces=sum(one.kind == "personal" for one in workspaces),
            unfinished=totals.unfinished,
            finished=totals.batches - totals.unfinished,
            total=totals.request_total,
            completed=totals.request_completed,
            failed=totals.request_failed,
        )

    async def _batch(self, principal: Principal, row: BatchRow) -> BatchView:
        summary = (await self._summaries(principal, [row]))[0]
        outcomes = await self._store.batches.outcomes(row.id)
        positions = () if row.finished else await self._store.views.positions(row.id)
        return BatchView(
            batch=summary,
            outcomes=tuple(Outcome(one.state, one.code, one.lines) for one in outcomes),
            scheduling=tuple(lane_view(one, self._deployments.model_of) for one in positions),
            outlook=summary.outlook,
        )

    async def _rows(self, principal: Principal, rows: Sequence[BatchRow], scope: Scope, *, has_more: bool) -> BatchRows:
        return BatchRows(tuple(await self._summaries(principal, rows)), has_more, scope)

    async def _summaries(self, principal: Principal, rows: Sequence[BatchRow]) -> list[BatchSummary]:
        unfinished = [row.id for row in rows if not row.finished]
        beside = Beside(
            running=await self._store.scheduling.running_by_batch(unfinished) if unfinished else {},
            reasons=await self._store.views.waiting_reasons(unfinished) if unfinished else {},
            key_names=await self._store.views.key_names(sorted({row.api_key_id for row in rows})) if rows else {},
            workspace_names=await self._workspace_names({row.workspace_id for row in rows}),
            outlooks=await self._outlooks_of(unfinished),
        )
        return [batch_summary(row, principal, beside) for row in rows]

    async def _workspace_names(self, ids: Collection[str]) -> Mapping[str, str]:
        if len(ids) > 1:
            return {one.id: one.name for one in await self._store.keys.workspaces()}
        found = [await self._store.keys.workspace(one) for one in ids]
        return {one.id: one.name for one in found if one is not None}

    async def _outlooks_of(self, batch_ids: Sequence[str]) -> Mapping[str, Outlook]:
        if self._outlooks is None or not batch_ids:
            return {}
        try:
            async with asyncio.timeout(self._outlook_wait_s):
                return await self._outlooks.all()
        except TimeoutError:
            return {}

    # Workspaces, incidents, changes

    async def names_of(self, principal: Principal) -> CallerNames:
        """See ``Views``."""
        row = await self._store.keys.workspace(principal.workspace_id)
        names = await self._store.views.key_names([principal.key_id])
        return CallerNames(principal.workspace_id if row is None else row.name, names.get(principal.key_id))

    async def workspaces(self) -> tuple[WorkspaceView, ...]:
        """See ``Views``."""
        weights = await self._store.scheduling.weights()
        rows = await self._store.keys.workspaces()
        return tuple(WorkspaceView(row.id, row.name, row.kind, weights.get(row.id, 1)) for row in rows)

    async def incidents(self, which: IncidentStatus, limit: int, offset: int = 0) -> tuple[IncidentView, ...]:
        """See ``Views``."""
        alerts = self._store.alerts
        if which == "open":
            # They come oldest first.
            rows = (await alerts.open_incidents())[::-1][offset : offset + limit]
        else:
            rows = await alerts.incidents(limit, offset=offset, resolved=which == "past")
        workspaces = {one.id: one for one in await self._store.keys.workspaces()} if rows else {}
        return tuple(incident_view(row, workspaces.get(row.workspace_id or "")) for row in rows)

    async def audit_log(
        self, limit: int, before_seq: int | None, action: str | None = None, subject: str | None = None
    ) -> tuple[AuditView, ...]:
        """See ``Views``."""
        rows = await self._store.scheduling.audit_log(limit, before_seq, action=action, subject=subject)
        names = await self._store.views.key_names(sorted({row.actor_key_id for row in rows if row.actor_key_id}))
        return tuple(
            AuditView(
                row.seq, row.at, row.action, row.actor_key_id, names.get(row.actor_key_id or ""), row.workspace_id,
                row.subject, row.details,
            )
            for row in rows
        )  # fmt: skip
