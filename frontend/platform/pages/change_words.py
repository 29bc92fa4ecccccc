"""Rows of the audit log as people read them: what was changed, and what it was before. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from frontend.platform import words
from frontend.platform.audit_details import BATCH_CANCELLED, SETTINGS_UPDATED, WEIGHT_UPDATED
from frontend.platform.pages import wording
from frontend.platform.read_models import AuditView

ACTIONS: Final = {
    SETTINGS_UPDATED: "Batch scheduling",
    WEIGHT_UPDATED: "Weight",
    BATCH_CANCELLED: "Batch cancelled",
}
TITLES: Final = {
    "concurrency": "Batch lines at once",
    "live_traffic": "Yield to live traffic",
    "server_load": "Server load signal",
    "metrics_url": "Server metrics URL",
    "window": "Time window",
    "priority": "Priority hint",
    "weight": "Weight",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that changed; ``before`` None where the log says only what was saved."""

    title: str
    before: str | None
    after: str


@dataclass(frozen=True, slots=True)
class ChangeText:
    """A row of the audit log in words.

    Attributes:
        note: what is to say where there are no differences.
    """

    row: AuditView
    action: str
    differences: tuple[Difference, ...]
    note: str


def change_text(row: AuditView) -> ChangeText:
    """Return a row in words."""
    details = msgspec.json.decode(row.details, type=dict)
    action = ACTIONS.get(row.action, row.action)
    if row.action == BATCH_CANCELLED:
        state = words.STATUS_TEXTS.get(str(details.get("state")), "").lower()
        return ChangeText(row, action, (), f"It was {state}." if state else "")
    changes = details.get("changes")
    if changes is None:
        return ChangeText(row, action, tuple(_saved(details)), "")
    found = tuple(
        Difference(TITLES.get(name, name.replace("_", " ").capitalize()), change["before"], change["after"])
        for name, change in changes.items()
    )
    return ChangeText(row, action, found, "" if found else "Saved without a change.")


def _saved(details: Mapping[str, Any]) -> list[Difference]:
    """Return what a row of an older version says: what was saved, and no more."""
    found = []
    for name, title in (("max_concurrency", "concurrency"), ("yield_live_threshold", "live_traffic"),
                        ("server_metrics", "server_load"), ("window", "window"), ("priority", "priority"),
                        ("weight", "weight")):  # fmt: skip
        if name in details:
            found.append(Difference(TITLES[title], None, _value(details[name])))
    return found


def _value(value: Any) -> str:
    if value is None or value is False:
        return "Off"
    return "On" if value is True else wording.number(value)
