"""What the Batches API says of a batch's end: the ``forecast`` of an unfinished batch, and a warning in words.

It is an extension of the batch object: clients that do not know the field pass it by. A forecast never costs an answer:
what takes longer than ``PATIENCE_S``, or cannot be read now, is left out; so is one that nothing is known for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from frontend.batches.scheduling.outlook import Outlook, Outlooks, outlook_document
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.rows import BatchRow

log = logging.getLogger(__name__)

PATIENCE_S: Final = 1.0


class Forecasts(Outlooks, Protocol):
    """``frontend.batches.scheduling.forecast.Forecaster``."""

    async def would(self, row: BatchRow, lines: Mapping[str, int]) -> Outlook: ...

    def route_of(self, endpoint: str, model: str) -> str: ...


class Prospects:
    """Forecasts as the Batches API shows them."""

    def __init__(self, forecasts: Forecasts, patience_s: float = PATIENCE_S) -> None:
        self._forecasts = forecasts
        self._patience_s = patience_s

    async def of(self, row: BatchRow) -> dict[str, Any] | None:
        """Return the forecast of a batch; None if it has ended or nothing is known."""
        return None if row.finished else await self._told(row, self._forecasts.of(row.id))

    async def of_new(self, row: BatchRow, lines: Mapping[str, int]) -> dict[str, Any] | None:
        """Return the forecast of a batch that was just created, of so many lines by model."""
        routes: dict[str, int] = {}
        for model, count in lines.items():
            route = self._forecasts.route_of(row.endpoint, model)
            if not route:
                return None
            routes[route] = routes.get(route, 0) + count
        return await self._told(row, self._forecasts.would(row, routes))

    async def _told(self, row: BatchRow, asked: Awaitable[Outlook | None]) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(self._patience_s):
                outlook = await asked
        except (TimeoutError, StoreUnavailable) as error:
            log.info("batches.no_forecast batch=%s error=%s", row.id, type(error).__name__)
            return None
        except Exception:
            log.exception("batches.forecast_broke batch=%s", row.id)
            return None
        return None if outlook is None or not outlook.measured_lines else forecast_document(row, outlook)


def forecast_document(row: BatchRow, outlook: Outlook) -> dict[str, Any]:
    """Return the ``forecast`` of a batch object: the outlook, and ``warning``, null while all is well."""
    return {**outlook_document(outlook), "warning": warning(row, outlook) if outlook.at_risk else None}


def warning(row: BatchRow, outlook: Outlook) -> str:
    """Return in words that a batch is at risk, and which completion window would hold."""
    ends = "later than can be foreseen" if outlook.eta_p90 is None else f"by {_utc(outlook.eta_p90)}"
    remedy = (
        "no completion window would hold"
        if outlook.window_hours is None
        else f"a completion window of {outlook.window_hours}h would hold"
    )
    return (
        f"the batch may expire before it is done: in 9 of 10 cases it ends {ends}, and its window of"
        f" {row.completion_window_hours}h is over at {_utc(outlook.expires_at)}; {remedy}"
    )


def _utc(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
