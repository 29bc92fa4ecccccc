"""Settings, windows, changes of the clocks and readings as people read them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from frontend.batches.scheduling.load_limits import Reading
from frontend.batches.scheduling.settings_document import clock_text, window_of
from frontend.batches.scheduling.window_state import MINUTE_US, Change, Interval, Note, NoteKind, Window
from frontend.batches.store.rows import SchedulingRow

OFF: Final = "Off"
ANY_TIME: Final = "Any time"
DEFAULT_LATENCY_SHARE_PERCENT: Final = 20
_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


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
    window = window_of(row)
    return InWords(
        concurrency=_concurrency(row),
        live_traffic=_live_traffic(row),
        server_load=limits_in_words(row),
        metrics_url=row.metrics_url or OFF,
        window=ANY_TIME if window is None else window_in_words(window),
        priority=OFF if row.priority is None else f"{row.priority:,}",
    )


def limits_in_words(row: SchedulingRow) -> str:
    """Return ``Pause if waiting > 0 or KV cache > 90%``."""
    limits = (
        ("waiting", row.metrics_max_waiting, ""),
        ("running", row.metrics_max_running, ""),
        ("KV cache", row.metrics_max_kv_cache_percent, "%"),
    )
    parts = [f"{name} > {limit:,}{unit}" for name, limit, unit in limits if limit is not None]
    return f"Pause if {' or '.join(parts)}" if parts else OFF


def window_in_words(window: Window) -> str:
    """Return ``Mon–Fri 19:00–07:00 (America/New_York)``."""
    times = "all day"
    if window.start_minute != window.end_minute:
        times = f"{clock_text(window.start_minute)}–{clock_text(window.end_minute)}"
    return f"{days_in_words(sorted(window.days))} {times} ({window.timezone})"


def days_in_words(days: Sequence[int]) -> str:
    """Return ascending weekdays, 0 = Monday, as ``Every day``, ``Mon–Fri`` or ``Mon, Wed, Sat–Sun``."""
    if len(days) == len(_DAYS):
        return "Every day"
    runs: list[list[int]] = []
    for day in days:
        if runs and day == runs[-1][-1] + 1:
            runs[-1].append(day)
        else:
            runs.append([day])
    return ", ".join(_DAYS[run[0]] if len(run) == 1 else f"{_DAYS[run[0]]}–{_DAYS[run[-1]]}" for run in runs)


def reading_in_words(reading: Reading) -> str:
    """Return ``3 waiting · 1 running · KV cache 91.3%``, or why there is no reading."""
    if reading.error is not None:
        return f"Unavailable ({reading.error.value.replace('_', ' ')}) · treated as busy"
    parts = []
    if reading.waiting is not None:
        parts.append(f"{reading.waiting:,} waiting")
    if reading.running is not None:
        parts.append(f"{reading.running:,} running")
    if reading.kv_cache_permille is not None:
        parts.append(f"KV cache {reading.kv_cache_permille / 10:g}%")
    return " · ".join(parts) if parts else "None of the gauges is there"


def notes_in_words(interval: Interval) -> str | None:
    """Return what changes of the clocks do to an interval, None if nothing."""
    return "; ".join(map(note_in_words, interval.notes)) or None


def note_in_words(note: Note) -> str:
    """Return ``1 h shorter: the clocks go forward on Sun 29 Mar from 01:00 to 02:00``."""
    change = change_in_words(note.change)
    match note.kind:
        case NoteKind.SHORTER | NoteKind.LONGER:
            return f"{length_in_words(abs(note.difference_us))} {note.kind.value}: {change}"
        case NoteKind.OPENS_TWICE:
            return f"opens twice: {change}"
        case NoteKind.SKIPPED:
            day = _date(_EPOCH + timedelta(days=note.day))
            return f"does not open on {day}: {change}"


def change_in_words(change: Change) -> str:
    """Return which way the clocks go, on which day, and between which times."""
    before, after = (_EPOCH + timedelta(microseconds=change.at_us + us) for us in (change.before_us, change.after_us))
    way = "forward" if after > before else "back"
    # A change may lead to another day: at midnight, or where a zone changes sides of the date line.
    until = f"{after:%H:%M}" if after.date() == before.date() else f"{_date(after)} {after:%H:%M}"
    return f"the clocks go {way} on {_date(before)} from {before:%H:%M} to {until}"


def length_in_words(length_us: int) -> str:
    """Return hours and minutes, such as ``1 h`` or ``10 h 30 min``."""
    hours, minutes = divmod(length_us // MINUTE_US, 60)
    return " ".join([f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (minutes > 0)) or "0 min"


def _concurrency(row: SchedulingRow) -> str:
    if row.min_concurrency is None:
        return f"{row.max_concurrency} at once"
    share = row.latency_share_percent or DEFAULT_LATENCY_SHARE_PERCENT
    return (
        f"{row.min_concurrency} to {row.max_concurrency} at once, while live p95 is at most {share}% above its baseline"
    )


def _live_traffic(row: SchedulingRow) -> str:
    if row.yield_live_threshold is None:
        return OFF
    text = f"Pause while live requests ≥ {row.yield_live_threshold:,}"
    if row.reopen_after_s is None:
        return text
    return f"{text}, and for up to {row.reopen_after_s} s after them"


def _date(at: datetime) -> str:
    # Not strftime's names: they follow the locale of the process.
    return f"{_DAYS[at.weekday()]} {at.day} {_MONTHS[at.month - 1]}"
