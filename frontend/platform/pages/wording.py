"""Numbers, times and states as people read them; pure. Times are microseconds since 1970, shown in UTC.

A browser with scripts shows times in its own zone: ``<time>`` carries the instant.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal
from zoneinfo import ZoneInfo

from frontend.platform import words
from frontend.platform.read_models import BatchSummary, LaneView, Reading, RouteStatus

Tone = Literal["good", "wait", "fault", "calm"]
"""How a state is coloured; never the only sign of it."""
STARTING: Final = "Starting lines"
IDLE: Final = "Idle"
_ENDED_TONES: Final[dict[str, Tone]] = {"completed": "good", "failed": "fault", "expired": "fault"}
ROLES: Final = {
    "member": "Member",
    "workspace_admin": "Workspace admin",
    "platform_admin": "Platform admin",
    "auditor": "Auditor",
}


def number(value: float) -> str:
    """Return ``12,345``."""
    return f"{value:,}"


def count(value: int, one: str, many: str = "") -> str:
    """Return ``1 line``, ``2 lines``."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def moment(at_us: int | None, zone: ZoneInfo | None = None) -> str:
    """Return ``30 Nov 2026, 16:20 UTC``, a dash for None."""
    if at_us is None:
        return "–"
    at = local(at_us, zone)
    return f"{at.day} {at:%b %Y, %H:%M} {at.tzname()}"


def local(at_us: int, zone: ZoneInfo | None = None) -> datetime:
    """Return the instant on a wall clock, by default UTC."""
    at = datetime.fromtimestamp(at_us / 1e6, UTC)
    return at if zone is None else at.astimezone(zone)


def machine(at_us: int) -> str:
    """Return what a ``datetime`` attribute holds."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(length_us: int) -> str:
    """Return ``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    seconds = max(0, length_us) // 1_000_000
    if seconds < 60:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def ago(at_us: int, now_us: int) -> str:
    """Return ``just now`` or ``5 min ago``."""
    passed_us = now_us - at_us
    return "just now" if passed_us < 2_000_000 else f"{duration(passed_us)} ago"


def kv_percent(permille: int) -> str:
    """Return ``91.3%``."""
    return f"{permille / 10:.1f}%"


def load_text(reading: Reading | None, *, configured: bool) -> str:
    """Return the Server load tile (rule 84)."""
    if not configured:
        return "Not configured"
    if reading is None:
        return "Not read yet"
    if not reading.ok:
        why = (reading.error or "no answer").replace("_", " ")
        return f"Unavailable ({why}) · treated as busy"
    parts = []
    if reading.waiting is not None:
        parts.append(f"{number(reading.waiting)} waiting")
    if reading.running is not None:
        parts.append(f"{number(reading.running)} running")
    if reading.kv_cache_permille is not None:
        parts.append(f"KV cache {kv_percent(reading.kv_cache_permille)}")
    return " · ".join(parts) or "Nothing reported"


def route_state(status: RouteStatus) -> tuple[str, Tone]:
    """Return the Status tile and its tone (rule 84)."""
    if status.paused_reason is not None:
        text = words.reason_text(status.paused_reason) or ""
        return text, "fault" if words.is_fault(status.paused_reason) else "wait"
    return (STARTING, "good") if status.running_lines else (IDLE, "calm")


def batch_state(batch: BatchSummary) -> tuple[str, Tone]:
    """Return a batch's status as shown and its tone (rule 68)."""
    text = words.shown_status(batch)
    if batch.waiting_reason is not None:
        return text, "fault" if words.is_fault(batch.waiting_reason) else "wait"
    if batch.finished:
        return text, _ENDED_TONES.get(batch.state, "calm")
    return text, "good" if batch.status in ("in_progress", "finalizing") else "calm"


def lane_state(lane: LaneView) -> tuple[str, Tone]:
    """Return what a batch does on one route, and its tone (rule 85)."""
    if lane.reason is not None:
        return words.reason_text(lane.reason) or "", "fault" if words.is_fault(lane.reason) else "wait"
    return (STARTING, "good") if lane.running_lines or lane.waiting_lines else (IDLE, "calm")


def share(part: int, whole: int) -> float:
    """Return percent of ``whole``, 0 of nothing; shown rounded down so that 100 means all."""
    return 0.0 if whole <= 0 else min(100.0, 100 * part / whole)
