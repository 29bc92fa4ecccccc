"""The read models behind API and pages: what each method gives. Nothing here checks who asks; ``access`` does.

Every call asks the store anew and may raise ``StoreUnavailable``. ``store_views`` has the implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from frontend.batches.store.rows import SchedulingRow
from frontend.openai.principal import Principal
from frontend.platform.access import BatchAccess
from frontend.platform.read_models import (
    AuditView,
    BatchRows,
    BatchView,
    CallerNames,
    ChartView,
    Deployment,
    IncidentView,
    PersonalTotals,
    PreviewView,
    RouteView,
    WorkspaceView,
)
from frontend.platform.versions import Versions

BatchStatus = Literal["active", "finished", "all"]
IncidentStatus = Literal["all", "open", "past"]

DEFAULT_PAGE = 50
MAX_PAGE = 200
MAX_CHART_HOURS = 14 * 24


class Views(Protocol):
    """Reads."""

    async def now_us(self) -> int:
        """Return the store's time."""
        ...

    def deployments(self) -> tuple[Deployment, ...]:
        """Return every route that is known here, by model in configured order."""
        ...

    async def deployment(self, route_id: str) -> Deployment:
        """Return a route, also one that is not configured any more, while something of it is stored.

        Raises:
            ApiError: 404.
        """
        ...

    def defaults(self, route_id: str) -> SchedulingRow:
        """Return the settings of a route for which none were saved."""
        ...

    async def routes_view(self) -> tuple[RouteView, ...]:
        """Return every route with settings and status; last, those with settings that are not configured any more."""
        ...

    async def route_view(self, route_id: str) -> RouteView:
        """Raises: ApiError 404."""
        ...

    async def chart_view(self, route_id: str, hours: int) -> ChartView:
        """Return the last hours of a route. Raises: ApiError 404."""
        ...

    async def preview(self, route_id: str, document: Mapping[str, Any], from_us: int | None = None) -> PreviewView:
        """Return what a settings document would mean from then (now) on.

        Raises:
            ApiError: 404 and 409 for the route, 400 with ``param`` for the document, as a save would.
        """
        ...

    async def access(self, principal: Principal, workspace: str) -> BatchAccess:
        """Return what the caller may do in a workspace, given by id or name. Raises: ApiError 404, Forbidden."""
        ...

    async def batch_rows(
        self, principal: Principal, access: BatchAccess, status: BatchStatus, limit: int, offset: int
    ) -> BatchRows:
        """Return one page of a workspace's batches."""
        ...

    async def batch_view(self, principal: Principal, access: BatchAccess, batch_id: str) -> BatchView:
        """Raises: ApiError 404, also for one that the caller may not see."""
        ...

    async def all_batch_rows(self, principal: Principal, status: BatchStatus, limit: int, offset: int) -> BatchRows:
        """Return one page of the batches of all team and project workspaces, for platform roles."""
        ...

    async def any_batch_view(self, principal: Principal, batch_id: str) -> BatchView:
        """Return a batch of any team or project workspace, or of the caller's own. Raises: ApiError 404, Forbidden."""
        ...

    async def personal_totals(self) -> PersonalTotals: ...

    async def names_of(self, principal: Principal) -> CallerNames: ...

    async def workspaces(self) -> tuple[WorkspaceView, ...]:
        """Return every workspace with its weight."""
        ...

    async def incidents(self, which: IncidentStatus, limit: int, offset: int = 0) -> tuple[IncidentView, ...]:
        """Return incidents, newest first; past ones by their end."""
        ...

    async def audit_log(
        self, limit: int, before_seq: int | None, action: str | None = None, subject: str | None = None
    ) -> tuple[AuditView, ...]:
        """Return changes, newest first; of one action, about one subject, if they are given."""
        ...


class Changes(Protocol):
    """Writes; each checks the caller's role by itself and leaves an audit row in the same transaction."""

    async def put_settings(
        self, principal: Principal, route_id: str, document: Mapping[str, Any], versions: Versions = None
    ) -> RouteView:
        """Replace a route's whole settings; a refused document changes nothing.

        Args:
            versions: of the settings that may be replaced.

        Raises:
            Forbidden: no platform admin.
            ApiError: 404 for the route, 409 if it is not configured any more, 400 with ``param`` for the document, 412
                if there are settings of another version.
        """
        ...

    async def cancel_batch(self, principal: Principal, access: BatchAccess, batch_id: str) -> BatchView:
        """Ask a batch to stop; harmless to repeat. Raises: Forbidden; ApiError 404, 409 if it has ended."""
        ...

    async def set_weight(self, principal: Principal, workspace: str, weight: object) -> WorkspaceView:
        """Raises: Forbidden; ApiError 404, 400."""
        ...
