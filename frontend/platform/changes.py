"""What people change: settings of routes, weights of workspaces, batches they stop. One place for API and pages.

Each change checks the role of whoever asks and leaves a row in the audit log. No row holds an address: a metrics URL
says where a server stands inside the network.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engines.errors import NotFound
from frontend.batches.jobs import no_batch
from frontend.batches.store.errors import BatchNotCancellable
from frontend.batches.store.protocol import Store
from frontend.batches.store.route_rows import AuditRow
from frontend.batches.store.rows import SchedulingRow
from frontend.openai.auth import Forbidden
from frontend.openai.errors import ApiError
from frontend.openai.principal import Principal
from frontend.platform.access import BatchAccess, no_workspace, require_platform_admin
from frontend.platform.deployments import Deployments
from frontend.platform.read_models import BatchView, RouteView, WorkspaceView
from frontend.platform.store_views import StoreViews, read_document

log = logging.getLogger(__name__)

MIN_WEIGHT: Final = 1
MAX_WEIGHT: Final = 100


class StoreChanges:
    """Provides ``Changes``."""

    def __init__(self, store: Store, deployments: Deployments, views: StoreViews) -> None:
        self._store = store
        self._deployments = deployments
        self._views = views

    async def put_settings(self, principal: Principal, route_id: str, document: Mapping[str, Any]) -> RouteView:
        """See ``Changes``."""
        require_platform_admin(principal)
        settings = read_document(self._deployments, route_id, document, principal.key_id)
        audit = _audit("batch_scheduling.updated", principal, None, route_id, settings_details(settings))
        await self._store.scheduling.put_settings(settings, audit)
        log.info("platform.scheduling_updated route=%s key=%s", route_id, principal.key_id)
        return await self._views.route_view(route_id)

    async def cancel_batch(self, principal: Principal, access: BatchAccess, batch_id: str) -> BatchView:
        """See ``Changes``."""
        if not access.may_cancel:
            raise Forbidden("an auditor's key reads settings and states; it changes nothing")
        row = await self._views.batch_row(access, batch_id)
        audit = _audit("batch.cancelled", principal, access.workspace_id, batch_id, {"state": row.state})
        try:
            await self._store.batches.cancel(access.workspace_id, batch_id, audit)
        except NotFound:
            raise no_batch() from None
        except BatchNotCancellable as error:
            raise ApiError(409, "the batch has ended; it is unchanged") from error
        return await self._views.batch_view(principal, access, batch_id)

    async def set_weight(self, principal: Principal, workspace: str, weight: object) -> WorkspaceView:
        """See ``Changes``."""
        require_platform_admin(principal)
        row = await self._store.keys.workspace(workspace)
        if row is None:
            raise no_workspace()
        if not isinstance(weight, int) or isinstance(weight, bool) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ApiError(400, f"expected a whole number from {MIN_WEIGHT} to {MAX_WEIGHT}", param="weight")
        audit = _audit("batch_weight.updated", principal, row.id, row.id, {"weight": weight})
        await self._store.scheduling.set_weight(row.id, weight, audit)
        return WorkspaceView(row.id, row.name, row.kind, weight)


def settings_details(settings: SchedulingRow) -> dict[str, Any]:
    """Return what the audit log keeps of settings."""
    details: dict[str, Any] = {
        "max_concurrency": settings.max_concurrency,
        "yield_live_threshold": settings.yield_live_threshold,
        "server_metrics": settings.metrics_url is not None,
        "priority": settings.priority,
        "window": settings.window_timezone is not None,
    }
    if settings.min_concurrency is not None:
        details["min_concurrency"] = settings.min_concurrency
        details["latency_share_percent"] = settings.latency_share_percent
    return details


def _audit(
    action: str, principal: Principal, workspace_id: str | None, subject: str, details: Mapping[str, Any]
) -> AuditRow:
    text = msgspec.json.encode(details).decode()
    return AuditRow(action, workspace_id, principal.key_id, subject, text)
