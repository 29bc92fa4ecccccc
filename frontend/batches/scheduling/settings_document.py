"""Scheduling settings as a document: read and checked, shown, and said in plain words. Pure.

Interface under construction; the signatures stand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from frontend.batches.scheduling.window_state import Window
from frontend.batches.store.rows import SchedulingRow


class BadSettings(ValueError):
    """A document that is refused; nothing was changed.

    Attributes:
        param: path of what is wrong within the document, such as ``window.days``; empty for the document itself.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """What the checks need to know of a route.

    Attributes:
        kind: of its upstream, as in the node file.
        metrics_urls: every URL at which metrics may be read.
    """

    route_id: str
    kind: str
    metrics_urls: Collection[str]


def read_settings(document: Any, route: RouteFacts, *, updated_at: int, updated_by: str) -> SchedulingRow:
    """Return the settings in a decoded document; what it omits or has null is off.

    Raises:
        BadSettings: the first mistake.
    """
    raise NotImplementedError


def settings_document(row: SchedulingRow) -> dict[str, Any]:
    """Return the document that ``read_settings`` reads as this row."""
    raise NotImplementedError


def supports_priority(kind: str) -> bool:
    """Return whether routes of this kind may have a priority hint."""
    raise NotImplementedError


def window_of(row: SchedulingRow) -> Window | None:
    """Return the window of a row; None for any time."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class InWords:
    """Settings as people read them."""

    concurrency: str
    live_traffic: str
    server_load: str
    metrics_url: str
    window: str
    priority: str


def in_words(row: SchedulingRow) -> InWords:
    """Return every setting as a phrase, ``Off`` and ``Any time`` included."""
    raise NotImplementedError
