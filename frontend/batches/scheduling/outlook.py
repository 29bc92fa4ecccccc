"""When a batch is expected to end, as every reader gets it: the API, the pages, ``ringserve batch show``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from frontend.batches.store.rows import SchedulingRow, WindowHours


@dataclass(frozen=True, slots=True)
class Outlook:
    """The forecast of one unfinished batch; times in Unix seconds.

    Attributes:
        eta_p50, eta_p90: the batch has ended by then in 5 (9) of 10 cases; None = not within the horizon.
        at_risk: ``eta_p90`` is past ``expires_at`` (or past the horizon): the batch may expire before it is done.
        window_hours: the shortest completion window, counted from the batch's creation, that ``eta_p90`` would hold;
            None = not even the longest.
        measured_lines: finished lines that the line times come from; 0 = nothing measured yet, a guess.
    """

    eta_p50: int | None
    eta_p90: int | None
    expires_at: int
    at_risk: bool
    window_hours: WindowHours | None
    measured_lines: int


class Outlooks(Protocol):
    """The read model of the forecasts. Answers are at most some seconds old and cost the event loop nothing."""

    async def all(self) -> Mapping[str, Outlook]:
        """Return the outlook of every unfinished batch that waits for or runs on a route, by batch id."""
        ...

    async def of(self, batch_id: str) -> Outlook | None:
        """Return the outlook of one batch; None if it has ended or nothing is known of it yet."""
        ...


class WhatIf(Outlooks, Protocol):
    """Outlooks under other settings too."""

    async def with_settings(self, row: SchedulingRow) -> Mapping[str, tuple[Outlook, Outlook]]:
        """Return the outlooks of the batches that want a route, by batch id: as things are, and under these settings.

        What gates would have done is told from what was seen, as far as that goes (``settings_past``).
        """
        ...


def outlook_document(outlook: Outlook) -> dict[str, Any]:
    """Return the forecast as APIs show it, times in Unix seconds."""
    return {
        "eta_p50": outlook.eta_p50,
        "eta_p90": outlook.eta_p90,
        "at_risk": outlook.at_risk,
        "suggested_completion_window": None if outlook.window_hours is None else f"{outlook.window_hours}h",
        "measured_lines": outlook.measured_lines,
    }
