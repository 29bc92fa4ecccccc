"""Files and batches of one frontend process, started and closed together: what goes under ``/v1`` beside the models."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from engines.errors import ServingError
from frontend.batches.files import Files
from frontend.batches.http_routes import FilesAndBatches, mount
from frontend.batches.jobs import Jobs
from frontend.batches.model_check import PlannedModels
from frontend.batches.objects import open_objects
from frontend.batches.prospects import Forecasts, Prospects
from frontend.batches.runner.expiry import ExpirySweeper
from frontend.batches.runner.figures import event_series
from frontend.batches.store.protocol import Store
from frontend.batches.sweeper import Sweeper
from frontend.batches.validation import InputCheck
from frontend.gateway_settings import GatewaySettings
from frontend.httpd.exchange import Application
from frontend.openai.auth import Authenticator
from frontend.openai.calls import Executor
from worker.channel.series import Series

log = logging.getLogger(__name__)


class BatchesService:
    """What a frontend holds for ``/v1/files`` and ``/v1/batches``; the store is opened and closed by its owner."""

    def __init__(
        self,
        settings: GatewaySettings,
        store: Store,
        authenticator: Authenticator,
        executor: Executor,
        forecasts: Forecasts | None = None,
    ) -> None:
        self.objects = open_objects(settings, Path(settings.state_dir))
        self._check = InputCheck(self.objects)
        self._models = PlannedModels(executor)
        self.sweeper = Sweeper(store, self.objects)
        self.expiry = ExpirySweeper(store, self.objects, settings.files.batch_retention_days)
        self.files = Files(store, self.objects, settings.files)
        self._jobs = Jobs(store, self.objects, self._check, self._models, settings.batches)
        prospects = None if forecasts is None else Prospects(forecasts)
        self._app = FilesAndBatches(authenticator, self.files, self._jobs, prospects)

    def mounted(self) -> dict[bytes, Application]:
        """Return the applications below ``/v1/``, by first path segment."""
        return mount(self._app)

    def series(self) -> Iterable[Series]:
        """Yield the figures of this process's part in batches."""
        yield event_series("created", self._jobs.created)
        for state in ("cancelled", "expired"):
            yield event_series(state, self.expiry.ended[state])

    async def start(self) -> None:
        """Be ready to answer; a storage that is away now is asked again by every upload."""
        self._models.start()
        await self._check.start()
        try:
            await self.objects.start()
        except ServingError as error:
            log.error("files.storage_not_ready %s", error)
        await self.sweeper.start()
        await self.expiry.start()

    async def close(self) -> None:
        """Give up what is under way; idempotent."""
        await self._app.close()
        await self.expiry.close()
        await self.sweeper.close()
        await self._check.close()
        await self.objects.close()
