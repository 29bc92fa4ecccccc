"""What raised an incident and what ended it, as people read it. Pure.

Details are what the rule wrote down (``frontend.batches.scheduling.incident_state``). An older version wrote less; of
what is missing nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from frontend.batches.store.rows import SECOND_US
from frontend.platform import words
from frontend.platform.pages import wording
from frontend.platform.read_models import IncidentView

RULES: Final = {
    "batch_stalled": "No progress",
    "batch_failed": "Failed batch",
    "batch_at_risk": "May expire",
}
ENDS: Final = {
    "progress": "The batch went on: lines of it ended again.",
    "waits": "The batch waits for something that is no fault now.",
    "on_time": "The forecast has room to spare again.",
    "day_passed": "A day had passed: a failed batch is shown for 24 hours.",
    "rule_removed": "The alert rule is not configured any more.",
}


@dataclass(frozen=True, slots=True)
class IncidentText:
    """An incident in words.

    Attributes:
        kind: what sort of trouble it is.
        raised: sentences; times stand in them as instants for the template, see ``Moment``.
        ended: empty while it is open.
    """

    incident: IncidentView
    kind: str
    raised: tuple[tuple[str | Moment, ...], ...]
    ended: str
    batch_id: str


@dataclass(frozen=True, slots=True)
class Moment:
    """An instant within a sentence."""

    at_us: int


def incident_text(incident: IncidentView) -> IncidentText:
    """Return an incident in words."""
    details = msgspec.json.decode(incident.details, type=dict)
    return IncidentText(
        incident=incident,
        kind=RULES.get(str(details.get("kind")), incident.rule),
        raised=tuple(_raised(details)),
        ended="" if incident.resolved_at_us is None else _ended(details),
        batch_id=str(details.get("batch", "")),
    )


def _raised(details: Mapping[str, Any]) -> list[tuple[str | Moment, ...]]:
    found: list[tuple[str | Moment, ...]] = []
    if "window_minutes" in details:
        limit = wording.duration(details["window_minutes"] * 60 * SECOND_US)
        found.append(
            (f"The rule fires after {limit} without progress while nothing legitimate keeps the batch waiting.",)
        )
    if details.get("error_code"):
        found.append((f"The batch's error code is {details['error_code']}.",))
    if "expires_at" in details:
        found.append(_forecast(details))
        needed = details.get("suggested_completion_window")
        found.append(
            (f"A completion window of {needed} would hold." if needed else "No completion window would hold.",)
        )
    if "total" in details:
        found.append((f"{wording.number(details['done'])} of {wording.count(details['total'], 'line')} were done.",))
    return found


def _forecast(details: Mapping[str, Any]) -> tuple[str | Moment, ...]:
    expires = Moment(details["expires_at"] * SECOND_US)
    if details.get("eta_p90") is None:
        return ("In 9 of 10 cases it would end later than can be foreseen; its window is over at ", expires, ".")
    end = Moment(details["eta_p90"] * SECOND_US)
    return ("In 9 of 10 cases it would end by ", end, "; its window is over at ", expires, ".")


def _ended(details: Mapping[str, Any]) -> str:
    code = details.get("ended_by")
    if code == "batch_ended":
        state = words.STATUS_TEXTS.get(str(details.get("ended_state")), "")
        return f"The batch ended: {state.lower()}." if state else "The batch ended."
    return ENDS.get(str(code), "What raised it is over.")
