"""What reasons and states are called in front of people; the API has the codes."""

from __future__ import annotations

from typing import Final

from frontend.batches.runner.gates import NOT_LEGITIMATE, Reason
from frontend.platform.read_models import BatchSummary

REASON_TEXTS: Final[dict[str, str]] = {
    Reason.RATE_LIMITED: "Rate limited · backing off",
    Reason.OUTSIDE_WINDOW: "Outside its time window",
    Reason.LIVE_TRAFFIC: "Yielding to live traffic",
    Reason.METRICS_UNAVAILABLE: "Server metrics unavailable",
    Reason.SERVER_BUSY: "Server busy",
    Reason.WORKERS: "Gateway batch workers busy",
    Reason.CONCURRENCY: "At its batch limit",
    Reason.FAIR_SHARE: "Other batches' turn",
    Reason.ROUTE_COOLING: "Route cooling down",
}
QUEUED: Final = "Queued — waiting for capacity"
STATUS_TEXTS: Final[dict[str, str]] = {
    "validating": "Accepted",
    "in_progress": "Running",
    "finalizing": "Writing results",
    "cancelling": "Cancelling",
    "completed": "Completed",
    "failed": "Failed",
    "cancelled": "Cancelled",
    "expired": "Expired",
}


def reason_text(reason: str | None) -> str | None:
    """Return what people read, the code itself for one that is not known here."""
    return None if reason is None else REASON_TEXTS.get(reason, reason)


def is_fault(reason: str | None) -> bool:
    """Return whether waiting for this is a fault that somebody should mend."""
    return reason in NOT_LEGITIMATE


def shown_status(batch: BatchSummary) -> str:
    """Return the status of a batch as pages show it (rule 68)."""
    return QUEUED if batch.waiting_reason is not None else STATUS_TEXTS[batch.status]
