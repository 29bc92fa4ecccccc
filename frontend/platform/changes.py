"""What people change: settings of routes, weights of workspaces, batches they stop. One place for API and pages.

Each change checks the role of whoever asks and leaves a row in the audit log, which says what was before and after.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engines.errors import NotFound
from frontend.batches.jobs import no_batch
from frontend.batches.store.errors import BatchNotCancellable, SettingsChanged
from frontend.batches.store.protocol import Store
from frontend.batches.store.route_rows import AuditRow
from frontend.openai.auth import Forbidden
from frontend.openai.errors import ApiError
from frontend.openai.principal import Principal
from frontend.platform.access import BatchAccess, no_workspace, require_platform_admin
from frontend.platform.audit_details import (
    BATCH_CANCELLED,
    SETTINGS_UPDATED,
    WEIGHT_UPDATED,
    settings_details,
    weight_details,
)
from frontend.platform.read_models import BatchView, RouteView, WorkspaceView
from frontend.platform.store_views import StoreViews
from frontend.platform.versions import Versions, version_of

log = logging.getLogger(__name__)

MIN_WEIGHT: Final = 1
MAX_WEIGHT: Final = 100
MAX_RACES: Final = 5
"""How often settings are looked at again because somebody else saved others in between."""


class StoreChanges:
    """Provides ``Changes``."""

    def __init__(self, store: Store, views: StoreViews) -> None:
        self._store = store
        self._views = views

    async def put_settings(
        self, principal: Principal, route_id: str, document: Mapping[str, Any], versions: Versions = None
    ) -> RouteView:
        """See ``Changes``."""
        require_platform_admin(principal)
        settings = await self._views.read_document(route_id, document, principal.key_id)
        scheduling = self._store.scheduling
        for _ in range(MAX_RACES):
            current = await scheduling.settings(route_id)
            if versions is not None and version_of(current) not in versions:
                raise ApiError(412, "others changed these settings in the meantime; read them again", param="If-Match")
            details = settings_details(current or self._views.defaults(route_id), settings)
            audit = _audit(SETTINGS_UPDATED, principal, None, route_id, details)
            try:
                # Compared even where any version will do: what the audit row says was before must be what was.
                await scheduling.put_settings(settings, audit, expected=0 if current is None else current.updated_at)
            except SettingsChanged:
                continue
            log.info("platform.scheduling_updated route=%s key=%s", route_id, principal.key_id)
            return await self._views.route_view(route_id)
        raise ApiError(409, "others keep changing these settings at this moment; try again")

    async def cancel_batch(self, principal: Principal, access: BatchAccess, batch_id: str) -> BatchView:
        """See ``Changes``."""
        if not access.may_cancel:
            raise Forbidden("an auditor's key reads settings and states; it changes nothing")
        row = await self._views.batch_row(access, batch_id)
        audit = _audit(BATCH_CANCELLED, principal, access.workspace_id, batch_id, {"state": row.state})
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
        before = (await self._store.scheduling.weights()).get(row.id, 1)
        audit = _audit(WEIGHT_UPDATED, principal, row.id, row.id, weight_details(before, weight))
        await self._store.scheduling.set_weight(row.id, weight, audit)
        return WorkspaceView(row.id, row.name, row.kind, weight)


def _audit(
    action: str, principal: Principal, workspace_id: str | None, subject: str, details: Mapping[str, Any]
) -> AuditRow:
    text = msgspec.json.encode(details).decode()
    return AuditRow(action, workspace_id, principal.key_id, subject, text)
