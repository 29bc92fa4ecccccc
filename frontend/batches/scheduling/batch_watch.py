"""What a gateway process does for batches as a whole: forecasts for whoever asks, and alerts if it has the duty."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from frontend.batches.scheduling.alerts import AlertDuty
from frontend.batches.scheduling.forecast import Forecaster, RouteOf
from frontend.batches.scheduling.webhook import Webhook, open_webhook
from frontend.batches.store.protocol import Store
from frontend.gateway_settings import GatewaySettings
from frontend.openai.addresses import NotApproved
from worker.channel.series import Series

log = logging.getLogger("batches")


class BatchWatch:
    """Between ``start`` and ``close``; used on one event loop.

    Attributes:
        forecaster: provides ``Outlooks``.

    Args:
        route_of: endpoint and model to the route that a line would take now.
        opened: set while the store can be asked; None if it can already.
    """

    def __init__(
        self,
        store: Store,
        settings: GatewaySettings,
        route_of: RouteOf,
        environ: Mapping[str, str],
        opened: asyncio.Event | None = None,
    ) -> None:
        self.forecaster = Forecaster(store, settings.batches, route_of)
        self._alerts = AlertDuty(store, settings.alerts, self.forecaster, _webhook(settings, environ), opened=opened)
        self._enabled = settings.batches.enabled

    async def start(self) -> None:
        """Begin to watch over batches, where there are any."""
        if self._enabled:
            await self._alerts.start()

    async def close(self) -> None:
        """Stop; idempotent."""
        await self._alerts.close()
        await self.forecaster.close()

    def series(self) -> Iterable[Series]:
        """Yield the figures of alerts."""
        return self._alerts.series()


def _webhook(settings: GatewaySettings, environ: Mapping[str, str]) -> Webhook | None:
    """Return the receiver of incidents; alerts without it are better than none."""
    try:
        return open_webhook(settings.alerts.webhook, environ, development=settings.development)
    except NotApproved as error:
        log.error("alerts.no_webhook %s", error)
        return None
