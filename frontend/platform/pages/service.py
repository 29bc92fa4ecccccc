"""The pages of one frontend process, put together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from engines.errors import Unavailable
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import KeyRow, WorkspaceRow
from frontend.gateway_settings import GatewaySettings
from frontend.openai.auth import Authenticator
from frontend.platform.pages.app import PagesApp
from frontend.platform.pages.assets import Assets
from frontend.platform.pages.batch_pages import BatchPages, ResultFiles
from frontend.platform.pages.platform_pages import ChangePages, IncidentPages, WorkspacePages
from frontend.platform.pages.rendering import Renderer
from frontend.platform.pages.route_pages import RoutePages
from frontend.platform.pages.sessions import SecretUnusable, Sessions
from frontend.platform.views import Changes, Views

log = logging.getLogger("pages")


class Door(Protocol):
    """A store that may still be closed: ``frontend.openai.service.StoreDoor``."""

    store: Store
    opened: asyncio.Event


class PagesService:
    """What a frontend holds for ``/ui``.

    Attributes:
        sessions: for the API, which accepts a browser that is signed in.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        door: Door,
        authenticator: Authenticator,
        views: Views,
        changes: Changes,
        files: ResultFiles,
        environ: Mapping[str, str],
    ) -> None:
        pages = settings.pages
        self.sessions = Sessions(
            _Keys(door),
            Path(settings.state_dir),
            pages.session_hours * 3600,
            environ.get(pages.secret_env, "") if pages.secret_env else "",
            secret_name=pages.secret_env,
        )
        self._assets = Assets()
        renderer = Renderer(self._assets)
        self.app = PagesApp(
            authenticator,
            self.sessions,
            self._assets,
            renderer,
            {
                "routes": RoutePages(views, changes, renderer),
                "batches": BatchPages(views, changes, files, renderer),
                "incidents": IncidentPages(views, renderer),
                "workspaces": WorkspacePages(views, changes, renderer),
                "changes": ChangePages(views, renderer),
            },
            pages.public_url,
        )

    def start(self) -> None:
        """Be ready to answer; without a usable secret every page says so, and nothing else fails."""
        self._assets.start()
        try:
            self.sessions.start()
        except SecretUnusable as error:
            log.error("pages.no_sessions %s", error)
            self.app.out_of_order = True

    async def close(self) -> None:
        """Give up what is under way; idempotent."""
        await self.app.close()


class _Keys:
    """Provides ``KeySource`` over a store that comes later."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def key(self, key_id: str) -> KeyRow | None:
        return await self._open().keys.key(key_id)

    async def workspace(self, id_or_name: str) -> WorkspaceRow | None:
        return await self._open().keys.workspace(id_or_name)

    def _open(self) -> Store:
        if not self._door.opened.is_set():
            raise Unavailable("the gateway's store is not open")
        return self._door.store
