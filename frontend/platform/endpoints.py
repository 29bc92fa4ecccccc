"""The endpoints of the management API: paths, roles, and what each asks of views and changes."""

from __future__ import annotations

from typing import Any, Final

from frontend.openai.errors import ApiError
from frontend.platform import documents as d
from frontend.platform import rendering
from frontend.platform.access import require_platform_admin, require_platform_reader
from frontend.platform.http_calls import MAX_NAME_CHARS, Call, Endpoint, QueryField, Who
from frontend.platform.preview_documents import PreviewDocument
from frontend.platform.views import (
    DEFAULT_PAGE,
    MAX_CHART_HOURS,
    MAX_PAGE,
    BatchStatus,
    Changes,
    IncidentStatus,
    Views,
)

ROOT: Final = "/api/v1"
ROUTE: Final = f"{ROOT}/platform/deployments/{{deployment}}/batch-scheduling"
BATCHES: Final = f"{ROOT}/workspaces/{{workspace}}/batches"
DEFAULT_CHART_HOURS: Final = 24
MAX_OFFSET: Final = 10_000_000
MAX_SEQ: Final = 10**15 - 1
PLATFORM: Final = Who("platform admins and auditors", require_platform_reader)
ADMINS: Final = Who("platform admins", require_platform_admin)
EVERYBODY: Final = Who("members (batches created with their key), workspace admins, platform admins and auditors")
ANYBODY: Final = Who("everybody with a key")
CANCELLERS: Final = Who("whoever created the batch, workspace admins and platform admins")
STATUSES: Final[tuple[BatchStatus, ...]] = ("all", "active", "finished")
INCIDENT_STATUSES: Final[tuple[IncidentStatus, ...]] = ("all", "open", "past")


def _whole(least: int, most: int, default: int | None) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return schema if default is None else {**schema, "default": default}


LIMIT: Final = QueryField("limit", "Most entries of the answer.", _whole(1, MAX_PAGE, DEFAULT_PAGE))
OFFSET: Final = QueryField("offset", "How many entries to leave out.", _whole(0, MAX_OFFSET, 0))
STATUS: Final = QueryField(
    "status", "Which batches.", {"type": "string", "enum": list(STATUSES), "default": STATUSES[0]}
)
HOURS: Final = QueryField("hours", "How far back.", _whole(1, MAX_CHART_HOURS, DEFAULT_CHART_HOURS))
BEFORE: Final = QueryField("before", "Entries with a lower seq only.", _whole(1, MAX_SEQ, None))
INCIDENTS: Final = QueryField(
    "status", "Which incidents.", {"type": "string", "enum": list(INCIDENT_STATUSES), "default": "all"}
)
ACTION: Final = QueryField("action", "Changes of this kind only.", {"type": "string", "maxLength": MAX_NAME_CHARS})
SUBJECT: Final = QueryField(
    "subject", "Changes of one deployment, workspace or batch only.", {"type": "string", "maxLength": MAX_NAME_CHARS}
)


class PlatformEndpoints:
    """All handlers."""

    def __init__(self, views: Views, changes: Changes) -> None:
        self._views = views
        self._changes = changes

    def table(self) -> tuple[Endpoint, ...]:
        """Return every endpoint."""
        return (*self._of_deployments(), *self._of_batches(), *self._of_platform())

    def _of_deployments(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint(
                "GET", f"{ROOT}/platform/deployments", self.list_deployments,
                "Every deployment with settings and status", PLATFORM, d.DeploymentsDocument,
            ),
            Endpoint(
                "GET", ROUTE, self.get_scheduling,
                "Batch scheduling of a deployment", PLATFORM, d.SchedulingDocument, fails=(404,), version=_version,
            ),
            Endpoint(
                "PUT", ROUTE, self.put_scheduling,
                "Replace the whole batch scheduling of a deployment; what is left out is off", ADMINS,
                d.SchedulingDocument, body=d.SettingsDocument, fails=(404, 409, 412), version=_version,
            ),
            Endpoint(
                "POST", f"{ROUTE}/preview", self.preview,
                "What settings would mean, without saving them", PLATFORM,
                PreviewDocument, body=d.SettingsDocument, fails=(404, 409),
            ),
            Endpoint(
                "GET", f"{ROUTE}/history", self.history,
                "Why lines of a deployment did or did not start", PLATFORM,
                d.ChartDocument, query=(HOURS,), fails=(404,),
            ),
        )  # fmt: skip

    def _of_batches(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint(
                "GET", BATCHES, self.list_batches,
                "Batches of a workspace, newest first", EVERYBODY,
                d.BatchesDocument, query=(STATUS, LIMIT, OFFSET), fails=(404,),
            ),
            Endpoint(
                "GET", f"{BATCHES}/{{batch}}", self.get_batch,
                "One batch, its outcomes and what it waits for", EVERYBODY, d.BatchPageDocument, fails=(404,),
            ),
            Endpoint(
                "POST", f"{BATCHES}/{{batch}}/cancel", self.cancel_batch,
                "Stop a batch; lines that run are finished and kept",
                CANCELLERS, d.BatchPageDocument, fails=(404, 409),
            ),
            Endpoint(
                "GET", f"{ROOT}/platform/batches", self.list_all_batches,
                "Batches of all team and project workspaces; personal ones as totals", PLATFORM,
                d.AllBatchesDocument, query=(STATUS, LIMIT, OFFSET),
            ),
        )  # fmt: skip

    def _of_platform(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint(
                "GET", f"{ROOT}/me", self.me, "Whom the key belongs to", ANYBODY, d.CallerDocument,
            ),
            Endpoint(
                "GET", f"{ROOT}/platform/workspaces", self.list_workspaces,
                "Workspaces and their weights", PLATFORM, d.WorkspacesDocument,
            ),
            Endpoint(
                "PUT", f"{ROOT}/platform/workspaces/{{workspace}}/batch-weight", self.put_weight,
                "Set a workspace's share of routes that several want", ADMINS,
                d.WorkspaceDocument, body=d.WeightDocument, fails=(404,),
            ),
            Endpoint(
                "GET", f"{ROOT}/platform/incidents", self.list_incidents,
                "What alert rules found, newest first; past incidents by their end", PLATFORM, d.IncidentsDocument,
                query=(INCIDENTS, LIMIT, OFFSET),
            ),
            Endpoint(
                "GET", f"{ROOT}/platform/audit-log", self.list_audit_log,
                "Who changed what, newest first", PLATFORM, d.AuditLogDocument, query=(LIMIT, BEFORE, ACTION, SUBJECT),
            ),
        )  # fmt: skip

    # Deployments

    async def list_deployments(self, call: Call) -> d.DeploymentsDocument:
        """Return every route."""
        routes = await self._views.routes_view()
        return d.DeploymentsDocument(
            data=[rendering.scheduling(one, self._views.defaults(one.deployment.id)) for one in routes]
        )

    async def get_scheduling(self, call: Call) -> d.SchedulingDocument:
        """Return settings and status of a route."""
        route_id = call.path["deployment"]
        return rendering.scheduling(await self._views.route_view(route_id), self._views.defaults(route_id))

    async def put_scheduling(self, call: Call) -> d.SchedulingDocument:
        """Replace the settings of a route; return what GET would."""
        route_id = call.path["deployment"]
        view = await self._changes.put_settings(call.principal, route_id, call.body, call.versions)
        return rendering.scheduling(view, self._views.defaults(route_id))

    async def preview(self, call: Call) -> PreviewDocument:
        """Return what settings would mean."""
        return rendering.preview(await self._views.preview(call.path["deployment"], call.body))

    async def history(self, call: Call) -> d.ChartDocument:
        """Return what happened on a route."""
        hours = call.number("hours", DEFAULT_CHART_HOURS, 1, MAX_CHART_HOURS)
        return rendering.chart(await self._views.chart_view(call.path["deployment"], hours))

    # Batches

    async def list_batches(self, call: Call) -> d.BatchesDocument:
        """Return one page of a workspace's batches."""
        access = await self._views.access(call.principal, call.path["workspace"])
        return rendering.batches(await self._views.batch_rows(call.principal, access, *_page(call)))

    async def get_batch(self, call: Call) -> d.BatchPageDocument:
        """Return one batch of a workspace."""
        access = await self._views.access(call.principal, call.path["workspace"])
        return rendering.batch_page(await self._views.batch_view(call.principal, access, call.path["batch"]))

    async def cancel_batch(self, call: Call) -> d.BatchPageDocument:
        """Ask a batch to stop."""
        access = await self._views.access(call.principal, call.path["workspace"])
        return rendering.batch_page(await self._changes.cancel_batch(call.principal, access, call.path["batch"]))

    async def list_all_batches(self, call: Call) -> d.AllBatchesDocument:
        """Return one page of the installation's batches."""
        rows = await self._views.all_batch_rows(call.principal, *_page(call))
        return rendering.all_batches(rows, await self._views.personal_totals())

    # Workspaces, incidents, changes

    async def me(self, call: Call) -> d.CallerDocument:
        """Return who calls."""
        principal = call.principal
        names = await self._views.names_of(principal)
        return d.CallerDocument(
            workspace_id=principal.workspace_id,
            workspace=names.workspace,
            key_id=principal.key_id,
            key_name=names.key,
            role=principal.role,
        )

    async def list_workspaces(self, call: Call) -> d.WorkspacesDocument:
        """Return every workspace."""
        return d.WorkspacesDocument(data=[rendering.workspace(one) for one in await self._views.workspaces()])

    async def put_weight(self, call: Call) -> d.WorkspaceDocument:
        """Give a workspace another weight."""
        unknown = next((name for name in call.body if name != "weight"), None)
        if unknown is not None:
            raise ApiError(400, "unknown field; expected weight", param=unknown[:64] or None)
        weight = call.body.get("weight")
        return rendering.workspace(await self._changes.set_weight(call.principal, call.path["workspace"], weight))

    async def list_incidents(self, call: Call) -> d.IncidentsDocument:
        """Return incidents."""
        wanted = call.choice("status", INCIDENT_STATUSES)
        which = next(one for one in INCIDENT_STATUSES if one == wanted)
        limit, offset = call.number("limit", DEFAULT_PAGE, 1, MAX_PAGE), call.number("offset", 0, 0, MAX_OFFSET)
        found = await self._views.incidents(which, limit, offset)
        return d.IncidentsDocument(data=[rendering.incident(one) for one in found])

    async def list_audit_log(self, call: Call) -> d.AuditLogDocument:
        """Return the audit log."""
        limit = call.number("limit", DEFAULT_PAGE, 1, MAX_PAGE)
        before = call.number("before", MAX_SEQ, 1, MAX_SEQ)
        found = await self._views.audit_log(limit + 1, before, call.name("action"), call.name("subject"))
        return d.AuditLogDocument(data=[rendering.audit(one) for one in found[:limit]], has_more=len(found) > limit)


def _version(document: d.SchedulingDocument) -> str:
    return document.version


def _page(call: Call) -> tuple[BatchStatus, int, int]:
    wanted = call.choice("status", STATUSES)
    status = next(one for one in STATUSES if one == wanted)
    return status, call.number("limit", DEFAULT_PAGE, 1, MAX_PAGE), call.number("offset", 0, 0, MAX_OFFSET)
