"""The management API of one frontend process, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from frontend.batches.scheduling.outlook import WhatIf
from frontend.batches.store.protocol import Store
from frontend.gateway_settings import GatewaySettings
from frontend.openai.auth import Authenticator
from frontend.platform.app import PlatformApp
from frontend.platform.callers import Callers
from frontend.platform.changes import StoreChanges
from frontend.platform.deployments import Deployments
from frontend.platform.endpoints import PlatformEndpoints
from frontend.platform.store_views import StoreViews


class PlatformService:
    """What a frontend holds for ``/api/v1``; the store is opened and closed by its owner.

    Attributes:
        views, changes: for the pages, too.
        callers: its ``sessions`` is set by whoever keeps sessions.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        store: Store,
        authenticator: Authenticator,
        bundles: Callable[[], Iterable[str]],
        outlooks: WhatIf | None = None,
    ) -> None:
        deployments = Deployments(settings, bundles)
        self.views = StoreViews(store, deployments, settings.batches.default_max_concurrency, outlooks)
        self.changes = StoreChanges(store, self.views)
        self.callers = Callers(authenticator, settings.pages.public_url)
        self.app = PlatformApp(self.callers, PlatformEndpoints(self.views, self.changes).table())

    async def close(self) -> None:
        """Give up what is under way; idempotent."""
        await self.app.close()
