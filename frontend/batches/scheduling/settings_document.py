"""Scheduling settings of a route as a document: read and checked, and shown again. Pure.

Checks go in a fixed order and the first failure is told: the shape of the whole document, then max_concurrency, the
live threshold and how long it holds, the limits of the server load, its URL, the priority hint and the window.

Source: batches.md 1.15 (rule 73), 1.16 (rule 77), 1.17 (rules 80 and 81).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from frontend.batches.scheduling import zones
from frontend.batches.scheduling.window_state import Window
from frontend.batches.store.rows import SchedulingRow

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
PRIORITY_KINDS: Final = frozenset({"vllm", "openai_compatible"})
MAX_CONCURRENCY: Final = 256
MAX_THRESHOLD: Final = 100_000
MAX_REOPEN_S: Final = 600
MAX_REQUESTS: Final = 100_000
MAX_PERCENT: Final = 100
MAX_PRIORITY: Final = 1_000_000
MAX_LATENCY_SHARE_PERCENT: Final = 1000
MAX_ZONE_CHARS: Final = 64
MIN_URL_CHARS: Final = 12
MAX_URL_CHARS: Final = 2048
_TIME: Final = re.compile(r"(?:[01][0-9]|2[0-3]):[0-5][0-9]")
_NAMES: Final = (
    "max_concurrency", "yield_live_threshold", "metrics", "priority", "window", "latency_share_percent",
    "reopen_after_s",
)  # fmt: skip
_LIMITS: Final = ("max_waiting", "max_running", "max_kv_cache_percent")
_WINDOW: Final = ("timezone", "days", "start", "end")


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
    _check_shape(document)
    least, most = _concurrency(document)
    threshold = document.get("yield_live_threshold")
    _check_range(threshold, 1, MAX_THRESHOLD, "yield_live_threshold")
    reopen_after_s = document.get("reopen_after_s")
    if reopen_after_s is not None and threshold is None:
        raise BadSettings("reopen_after_s needs a yield_live_threshold", "reopen_after_s")
    _check_range(reopen_after_s, 1, MAX_REOPEN_S, "reopen_after_s")
    metrics = document.get("metrics") or {}
    if document.get("metrics") is not None:
        _check_metrics(metrics, route)
    priority = document.get("priority")
    if priority is not None and not supports_priority(route.kind):
        raise BadSettings("priority is available on vLLM and OpenAI-compatible routes only", "priority")
    _check_range(priority, 1, MAX_PRIORITY, "priority")
    window = None if document.get("window") is None else _window(document["window"])
    return SchedulingRow(
        route_id=route.route_id,
        max_concurrency=most,
        yield_live_threshold=threshold,
        metrics_url=metrics.get("url"),
        metrics_max_waiting=metrics.get("max_waiting"),
        metrics_max_running=metrics.get("max_running"),
        metrics_max_kv_cache_percent=metrics.get("max_kv_cache_percent"),
        priority=priority,
        window_timezone=None if window is None else window.timezone,
        window_days=None if window is None else sum(1 << day for day in window.days),
        window_start_minute=None if window is None else window.start_minute,
        window_end_minute=None if window is None else window.end_minute,
        updated_at=updated_at,
        updated_by=updated_by,
        min_concurrency=least,
        latency_share_percent=document.get("latency_share_percent"),
        reopen_after_s=reopen_after_s,
    )


def settings_document(row: SchedulingRow) -> dict[str, Any]:
    """Return the document that ``read_settings`` reads as this row; every key is there."""
    most: int | dict[str, int] = row.max_concurrency
    if row.min_concurrency is not None:
        most = {"min": row.min_concurrency, "max": row.max_concurrency}
    metrics = None
    if row.metrics_url is not None:
        metrics = {
            "url": row.metrics_url,
            "max_waiting": row.metrics_max_waiting,
            "max_running": row.metrics_max_running,
            "max_kv_cache_percent": row.metrics_max_kv_cache_percent,
        }
    window = window_of(row)
    return {
        "max_concurrency": most,
        "yield_live_threshold": row.yield_live_threshold,
        "metrics": metrics,
        "priority": row.priority,
        "window": None if window is None else window_document(window),
        "latency_share_percent": row.latency_share_percent,
        "reopen_after_s": row.reopen_after_s,
    }


def window_document(window: Window) -> dict[str, Any]:
    """Return the window's part of the document."""
    return {
        "timezone": window.timezone,
        "days": [DAYS[day] for day in sorted(window.days)],
        "start": clock_text(window.start_minute),
        "end": clock_text(window.end_minute),
    }


def clock_text(minute: int) -> str:
    """Return a minute of the day as ``HH:MM``."""
    return f"{minute // 60:02}:{minute % 60:02}"


def supports_priority(kind: str) -> bool:
    """Return whether routes of this kind may have a priority hint."""
    return kind in PRIORITY_KINDS


def window_of(row: SchedulingRow) -> Window | None:
    """Return the window of a row; None for any time."""
    if row.window_timezone is None:
        return None
    assert row.window_days is not None and row.window_start_minute is not None and row.window_end_minute is not None
    days = frozenset(day for day in range(7) if row.window_days >> day & 1)
    return Window(row.window_timezone, days, row.window_start_minute, row.window_end_minute)


# Shape


def _check_shape(document: Any) -> None:
    """Refuse what has another form than the document, before any value is looked at."""
    _check_object(document, _NAMES, "")
    if "max_concurrency" not in document:
        raise BadSettings("max_concurrency is required", "max_concurrency")
    most = document["max_concurrency"]
    if isinstance(most, dict):
        _check_object(most, ("min", "max"), "max_concurrency")
        for name in ("min", "max"):
            if name not in most:
                raise BadSettings(f"max_concurrency.{name} is required in a range", f"max_concurrency.{name}")
            _check_whole(most[name], f"max_concurrency.{name}")
    elif not _is_whole(most):
        raise BadSettings("max_concurrency must be a whole number, or an object with min and max", "max_concurrency")
    for name in ("yield_live_threshold", "priority", "latency_share_percent", "reopen_after_s"):
        if document.get(name) is not None:
            _check_whole(document[name], name)
    metrics = document.get("metrics")
    if metrics is not None:
        _check_object(metrics, ("url", *_LIMITS), "metrics")
        _check_text(metrics.get("url"), "metrics.url")
        for name in _LIMITS:
            if metrics.get(name) is not None:
                _check_whole(metrics[name], f"metrics.{name}")
    window = document.get("window")
    if window is not None:
        _check_object(window, _WINDOW, "window")
        for name in ("timezone", "start", "end"):
            _check_text(window.get(name), f"window.{name}")
        if not isinstance(window.get("days"), list):
            raise BadSettings("window.days must be a list of days", "window.days")


def _check_object(value: Any, names: Iterable[str], path: str) -> None:
    if not isinstance(value, dict):
        raise BadSettings(f"{path or 'the settings'} must be an object", path)
    for name in value:
        if name not in names:
            inner = f"{path}.{name}" if path else str(name)
            raise BadSettings(f"unknown field; expected {', '.join(names)}", inner[:128])


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_whole(value: Any, path: str) -> None:
    if not _is_whole(value):
        raise BadSettings(f"{path} must be a whole number", path)


def _check_text(value: Any, path: str) -> None:
    if not isinstance(value, str):
        raise BadSettings(f"{path} is required, as text", path)


# Values


def _check_range(value: int | None, least: int, most: int, path: str) -> None:
    if value is not None and not least <= value <= most:
        raise BadSettings(f"{path} must be from {least} to {most}", path)


def _concurrency(document: dict[str, Any]) -> tuple[int | None, int]:
    """Return the lower bound, None for a fixed cap, and the upper one."""
    given, share = document["max_concurrency"], document.get("latency_share_percent")
    if not isinstance(given, dict):
        _check_range(given, 1, MAX_CONCURRENCY, "max_concurrency")
        if share is not None:
            raise BadSettings("latency_share_percent needs a max_concurrency with min and max", "latency_share_percent")
        return None, given
    for name in ("min", "max"):
        _check_range(given[name], 1, MAX_CONCURRENCY, f"max_concurrency.{name}")
    if given["min"] > given["max"]:
        raise BadSettings("max_concurrency.min must not be above max_concurrency.max", "max_concurrency.min")
    _check_range(share, 1, MAX_LATENCY_SHARE_PERCENT, "latency_share_percent")
    return given["min"], given["max"]


def _check_metrics(metrics: dict[str, Any], route: RouteFacts) -> None:
    if all(metrics.get(name) is None for name in _LIMITS):
        raise BadSettings(f"metrics needs at least one of {', '.join(_LIMITS)}", "metrics")
    _check_range(metrics.get("max_waiting"), 0, MAX_REQUESTS, "metrics.max_waiting")
    _check_range(metrics.get("max_running"), 0, MAX_REQUESTS, "metrics.max_running")
    _check_range(metrics.get("max_kv_cache_percent"), 1, MAX_PERCENT, "metrics.max_kv_cache_percent")
    url = metrics["url"]
    if not MIN_URL_CHARS <= len(url) <= MAX_URL_CHARS or url not in route.metrics_urls:
        raise BadSettings(
            "metrics.url must be the base URL of an approved endpoint, with /metrics in place of its final /v1",
            "metrics.url",
        )


def _window(given: dict[str, Any]) -> Window:
    timezone, days = given["timezone"], given["days"]
    if not 1 <= len(timezone) <= MAX_ZONE_CHARS:
        raise BadSettings(f"window.timezone must have 1 to {MAX_ZONE_CHARS} characters", "window.timezone")
    try:
        zones.zone(timezone)
    except zones.UnknownZone as error:
        raise BadSettings(f"window.timezone: {error}", "window.timezone") from None
    if not days:
        raise BadSettings("window.days must name at least one day", "window.days")
    if not all(isinstance(day, str) and day in DAYS for day in days):
        raise BadSettings(f"window.days must be of {', '.join(DAYS)}", "window.days")
    if len(set(days)) != len(days):
        raise BadSettings("window.days names a day twice", "window.days")
    minutes = {name: _minute(given[name], f"window.{name}") for name in ("start", "end")}
    return Window(timezone, frozenset(map(DAYS.index, days)), minutes["start"], minutes["end"])


def _minute(text: str, path: str) -> int:
    if not _TIME.fullmatch(text):
        raise BadSettings(f"{path} must be HH:MM, from 00:00 to 23:59", path)
    return int(text[:2]) * 60 + int(text[3:])
