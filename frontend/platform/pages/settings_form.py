"""The form of a route's scheduling settings: settings to fields, fields to the document that is checked. Pure.

A field keeps the text that somebody typed: a number is made of it only if it is one, so that what is wrong with it is
said by the one check that API and pages share, and shown beside the field with the text still in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from frontend.platform.pages.visits import Fields, first

DAYS: Final = (
    ("mon", "Mon", "Monday"),
    ("tue", "Tue", "Tuesday"),
    ("wed", "Wed", "Wednesday"),
    ("thu", "Thu", "Thursday"),
    ("fri", "Fri", "Friday"),
    ("sat", "Sat", "Saturday"),
    ("sun", "Sun", "Sunday"),
)
LIMITS: Final = ("max_waiting", "max_running", "max_kv_cache_percent")
DEFAULT_START, DEFAULT_END, DEFAULT_ZONE = "19:00", "07:00", "UTC"
DEFAULT_MIN: Final = "1"
FIELD_LABELS: Final = {
    "max_concurrency": "Lines at once",
    "cap_min": "At least",
    "cap_max": "At most",
    "latency_share_percent": "Live latency",
    "yield_live_threshold": "Live requests",
    "reopen_after_s": "Pause after live requests",
    "metrics_url": "Server metrics URL",
    "max_waiting": "Server load signal",
    "max_running": "Running requests",
    "max_kv_cache_percent": "KV cache use",
    "days": "Days",
    "start": "From",
    "end": "Until",
    "timezone": "Time zone",
    "priority": "Priority",
}
"""What a field is called where its mistake is said at the top of the page."""
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,15}")
_FIELD_OF: Final = {
    "max_concurrency.min": "cap_min",
    "max_concurrency.max": "cap_max",
    "metrics": "max_waiting",
    "metrics.url": "metrics_url",
    "window": "days",
    "window.days": "days",
    "window.timezone": "timezone",
    "window.start": "start",
    "window.end": "end",
}


@dataclass(frozen=True, slots=True)
class SettingsForm:
    """What stands in the fields.

    Attributes:
        adaptive: the range is used, not ``max_concurrency``.
        zone_is_default: nobody has chosen one: a browser puts in its own.
    """

    adaptive: bool
    max_concurrency: str
    cap_min: str
    cap_max: str
    latency_share_percent: str
    yield_live_threshold: str
    metrics_url: str
    max_waiting: str
    max_running: str
    max_kv_cache_percent: str
    days: frozenset[str]
    start: str
    end: str
    timezone: str
    priority: str
    reopen_after_s: str = ""
    zone_is_default: bool = False

    def document(self) -> dict[str, Any]:
        """Return the settings as the API takes them: limits only with a URL, times only with a day."""
        cap: Any = number(self.max_concurrency)
        document: dict[str, Any] = {"max_concurrency": cap}
        if self.adaptive:
            document["max_concurrency"] = {"min": number(self.cap_min), "max": number(self.cap_max)}
            document["latency_share_percent"] = number(self.latency_share_percent)
        document["yield_live_threshold"] = number(self.yield_live_threshold)
        document["reopen_after_s"] = number(self.reopen_after_s)
        document["metrics"] = self._metrics() if self.metrics_url else None
        document["priority"] = number(self.priority)
        document["window"] = self._window() if self.days else None
        return document

    def _metrics(self) -> dict[str, Any]:
        limits = zip(LIMITS, (self.max_waiting, self.max_running, self.max_kv_cache_percent), strict=True)
        return {"url": self.metrics_url, **{name: number(text) for name, text in limits}}

    def _window(self) -> dict[str, Any]:
        days = [day for day, _, _ in DAYS if day in self.days]
        return {"timezone": self.timezone, "days": days, "start": self.start, "end": self.end}

    def field_of(self, param: str | None) -> str:
        """Return the field that a refusal is about; empty for the form as a whole."""
        if not param:
            return ""
        if param == "max_concurrency":
            return "cap_max" if self.adaptive else param
        name = _FIELD_OF.get(param, param.removeprefix("metrics."))
        return name if name in self.__dataclass_fields__ else ""


def from_document(document: Mapping[str, Any]) -> SettingsForm:
    """Return the form of settings in force."""
    cap = document["max_concurrency"]
    adaptive = isinstance(cap, Mapping)
    most = cap["max"] if isinstance(cap, Mapping) else cap
    metrics = document.get("metrics") or {}
    window = document.get("window") or {}
    return SettingsForm(
        adaptive=adaptive,
        max_concurrency=str(most),
        cap_min=str(cap["min"]) if isinstance(cap, Mapping) else DEFAULT_MIN,
        cap_max=str(most),
        latency_share_percent=_text(document.get("latency_share_percent")),
        yield_live_threshold=_text(document.get("yield_live_threshold")),
        metrics_url=_text(metrics.get("url")),
        max_waiting=_text(metrics.get("max_waiting")),
        max_running=_text(metrics.get("max_running")),
        max_kv_cache_percent=_text(metrics.get("max_kv_cache_percent")),
        days=frozenset(window.get("days", ())),
        start=window.get("start", DEFAULT_START),
        end=window.get("end", DEFAULT_END),
        timezone=window.get("timezone", DEFAULT_ZONE),
        priority=_text(document.get("priority")),
        reopen_after_s=_text(document.get("reopen_after_s")),
        zone_is_default=not window,
    )


def from_fields(fields: Fields) -> SettingsForm:
    """Return the form as it was sent."""
    return SettingsForm(
        adaptive=first(fields, "cap") == "adaptive",
        max_concurrency=first(fields, "max_concurrency"),
        cap_min=first(fields, "cap_min"),
        cap_max=first(fields, "cap_max"),
        latency_share_percent=first(fields, "latency_share_percent"),
        yield_live_threshold=first(fields, "yield_live_threshold"),
        metrics_url=first(fields, "metrics_url"),
        max_waiting=first(fields, "max_waiting"),
        max_running=first(fields, "max_running"),
        max_kv_cache_percent=first(fields, "max_kv_cache_percent"),
        days=frozenset(fields.get("days", ())),
        start=first(fields, "start"),
        end=first(fields, "end"),
        timezone=first(fields, "timezone"),
        priority=first(fields, "priority"),
        reopen_after_s=first(fields, "reopen_after_s"),
    )


def number(text: str) -> int | str | None:
    """Return what a field says: nothing, a whole number, or the text for the check to refuse."""
    if not text:
        return None
    return int(text) if text.isascii() and _NUMBER.fullmatch(text) else text


def _text(value: Any) -> str:
    return "" if value is None else str(value)
