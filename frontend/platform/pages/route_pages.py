"""Routes: the list, one route with its settings, what happened on it, and the form with its preview."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Final
from zoneinfo import ZoneInfo

from frontend.batches.scheduling import plain_words, settings_document, zones
from frontend.batches.scheduling.plain_words import OFF, InWords
from frontend.batches.store.rows import SchedulingRow
from frontend.openai.errors import ApiError
from frontend.platform.access import require_platform_admin, require_platform_reader
from frontend.platform.pages import chart, settings_form, wording
from frontend.platform.pages.effect_words import effect_text
from frontend.platform.pages.rendering import Renderer
from frontend.platform.pages.settings_form import DAYS, FIELD_LABELS, SettingsForm
from frontend.platform.pages.visits import Reply, Visit, first, link, redirect
from frontend.platform.read_models import Deployment, OpenInterval, PreviewView, RouteView
from frontend.platform.views import Changes, Views

SPANS: Final = ((6, "6 h"), (24, "24 h"), (72, "3 days"), (168, "7 days"))
DEFAULT_HOURS: Final = 24
SHOWN_EFFECTS: Final = 8
LIST_LIVE: Final = "-live"
"""No route can be called so: ids begin with a letter or digit."""
_LABELS: Final = {
    "metrics": "the load signal",
    "max_waiting": "waiting requests",
    "max_running": "running requests",
    "max_kv_cache_percent": "KV cache use",
    "max_concurrency.min": "“At least”",
    "max_concurrency.max": "“At most”",
    "max_concurrency": "lines at once",
    "latency_share_percent": "the rise of live latency",
    "reopen_after_s": "the pause after live requests",
    "yield_live_threshold": "number of live requests to pause at",
}
"""What names of the API are called in the form."""


class RoutePages:
    """Answers below ``routes``."""

    def __init__(self, views: Views, changes: Changes, renderer: Renderer) -> None:
        self._views = views
        self._changes = changes
        self._renderer = renderer

    async def answer(self, visit: Visit) -> Reply | None:
        """See ``Section``."""
        require_platform_reader(visit.signed_in.principal)
        match visit.segments[1:]:
            case ():
                return self._renderer.page("routes.html", visit, routes=await self._views.routes_view())
            case (segment,) if segment == LIST_LIVE:
                return self._renderer.fragment("routes_live.html", visit, routes=await self._views.routes_view())
            case (route_id,):
                return await self._route(visit, route_id)
            case (route_id, "live"):
                return self._renderer.fragment("route_live.html", visit, view=await self._views.route_view(route_id))
            case (route_id, "chart"):
                view = await self._views.route_view(route_id)
                return self._renderer.fragment("route_chart.html", visit, **await self._chart(visit, view))
            case (route_id, "edit"):
                require_platform_admin(visit.signed_in.principal)
                await self._require_configured(route_id)
                return await (self._send(visit, route_id) if visit.posts else self._edit(visit, route_id))
            case (route_id, "preview") if visit.posts:
                require_platform_admin(visit.signed_in.principal)
                return await self._preview(visit, route_id)
        raise ApiError(404, "There is no page at this address.")

    async def _require_configured(self, route_id: str) -> None:
        if not (await self._views.deployment(route_id)).configured:
            raise ApiError(409, "This route is not configured any more: its settings can be read, but not changed.")

    async def _route(self, visit: Visit, route_id: str) -> Reply:
        view = await self._views.route_view(route_id)
        return self._renderer.page(
            "route.html",
            visit,
            view=view,
            in_words=words_of(
                plain_words.in_words(view.settings), priority_supported=view.deployment.priority_supported
            ),
            saved=bool(first(visit.query, "saved")),
            spans=SPANS,
            **await self._chart(visit, view),
        )

    async def _chart(self, visit: Visit, view: RouteView) -> dict[str, Any]:
        hours = chart_hours(visit)
        charted = await self._views.chart_view(view.deployment.id, hours)
        # Some milliseconds for a gate that changed thousands of times: not on the loop that serves requests.
        drawing = await asyncio.to_thread(
            chart.draw, charted, zone_of(view.settings), view.settings.yield_live_threshold
        )
        return {"chart": drawing, "chart_hours": hours}

    async def _edit(self, visit: Visit, route_id: str) -> Reply:
        view = await self._views.route_view(route_id)
        document = settings_document.settings_document(view.settings)
        form = settings_form.from_document(document)
        preview = await self._views.preview(route_id, document)
        return self._form(visit, view, form, view.version, preview=preview)

    async def _send(self, visit: Visit, route_id: str) -> Reply:
        form = settings_form.from_fields(visit.form)
        version = first(visit.form, "version")
        try:
            if first(visit.form, "do") == "preview":
                preview = await self._views.preview(route_id, form.document())
                return self._form(visit, await self._views.route_view(route_id), form, version, preview=preview)
            versions = frozenset({version}) if version else None
            await self._changes.put_settings(visit.signed_in.principal, route_id, form.document(), versions)
        except ApiError as error:
            if error.status not in (400, 412):
                raise
            view = await self._views.route_view(route_id)
            if error.status == 400:
                return self._form(visit, view, form, version, error=error)
            return await self._overtaken(visit, view, form)
        return redirect(link("routes", route_id, saved=1))

    async def _overtaken(self, visit: Visit, view: RouteView, form: SettingsForm) -> Reply:
        """Show the form again with what stands in it, and what others have saved since it was opened.

        It carries the version that is shown now: who saves it once more has seen what that replaces.
        """
        route_id = view.deployment.id
        preview = await self._views.preview(route_id, form.document())
        mine = dict(words_said(preview.words, priority_supported=view.deployment.priority_supported))
        theirs = words_said(plain_words.in_words(view.settings), priority_supported=view.deployment.priority_supported)
        differences = [(title, text, mine[title]) for title, text in theirs if text != mine[title]]
        return self._form(visit, view, form, view.version, preview=preview, differences=differences)

    def _form(
        self,
        visit: Visit,
        view: RouteView,
        form: SettingsForm,
        version: str,
        *,
        preview: PreviewView | None = None,
        error: ApiError | None = None,
        differences: Sequence[tuple[str, str, str]] | None = None,
    ) -> Reply:
        """Return the form; ``differences``: title, what others saved, what stands in it; None if nobody did."""
        return self._renderer.page(
            "route_edit.html",
            visit,
            http_status=400 if error else 200 if differences is None else 412,
            view=view,
            version=version,
            differences=differences,
            form=form,
            days=DAYS,
            field_labels=FIELD_LABELS,
            zones=sorted(zones.names()),
            wrong=form.field_of(error.param) if error else None,
            message=in_a_form(str(error), error.param) if error else "",
            **preview_values(preview, form, view.deployment, "", view.now_us),
        )

    async def _preview(self, visit: Visit, route_id: str) -> Reply:
        """Return the preview alone, for the page's script, also where there is none because of a mistake."""
        form = settings_form.from_fields(visit.form)
        deployment = await self._views.deployment(route_id)
        preview, mistake = None, ""
        try:
            preview = await self._views.preview(route_id, form.document())
        except ApiError as error:
            if error.status != 400:
                raise
            mistake = in_a_form(str(error), error.param)
        now_us = await self._views.now_us()
        values = preview_values(preview, form, deployment, mistake, now_us)
        return self._renderer.fragment("preview.html", visit, **values)


def words_of(said: InWords, *, priority_supported: bool) -> list[tuple[str, str, str]]:
    """Return settings in plain words: title, text, a second line."""
    url = said.metrics_url if said.server_load != OFF else ""
    found = [
        ("Batch lines at once", said.concurrency, ""),
        ("Yield to live traffic", said.live_traffic, ""),
        ("Server load signal", said.server_load, url),
        ("Time window", said.window, ""),
    ]
    if priority_supported:
        found.append(("Priority hint", said.priority, ""))
    return found


def words_said(said: InWords, *, priority_supported: bool) -> list[tuple[str, str]]:
    """Return settings in plain words, the metrics URL among them: title and text."""
    found = []
    for title, text, more in words_of(said, priority_supported=priority_supported):
        found.append((title, f"{text} ({more})" if more else text))
    return found


def preview_values(
    preview: PreviewView | None, form: SettingsForm, view: Deployment, mistake: str, now_us: int
) -> dict[str, Any]:  # fmt: skip
    """Return what the preview's template shows."""
    found = None if preview is None else preview.effects
    shown = found.batches[:SHOWN_EFFECTS] if found else ()
    zone = zone_named(form.timezone)
    return {
        "preview": preview,
        "preview_words": words_of(preview.words, priority_supported=view.priority_supported) if preview else (),
        "intervals": [_opening(one, zone) for one in preview.intervals] if preview else (),
        "mistake": mistake,
        "effects": found,
        "effect_rows": [effect_text(one, now_us) for one in shown],
        "effects_left_out": found.left_out + len(found.batches) - len(shown) if found else 0,
    }


def _opening(one: OpenInterval, zone: ZoneInfo) -> dict[str, str | bool]:
    opens = wording.local(one.opens_us, zone)
    closes = None if one.closes_us is None else wording.local(one.closes_us, zone)
    if closes is None:
        ends = "…"
    else:
        ends = f"{closes:%H:%M}" if closes.date() == opens.date() else f"{closes:%a} {closes:%H:%M}"
    return {
        "day": f"{opens:%a} {opens.day} {opens:%b}",
        "opens": "now" if one.open_now else f"{opens:%H:%M}",
        "closes": ends,
        "zone": (closes or opens).tzname() or "",
        "length": "" if one.closes_us is None else wording.duration(one.closes_us - one.opens_us),
        "note": one.note,
    }


def in_a_form(message: str, param: str | None) -> str:
    """Return a refusal of the API as it stands beside its field: without the names that only programs use."""
    text = message
    for name in (param, param.rpartition(".")[2]) if param else ():
        text = re.sub(rf"^{re.escape(name)}:? ", "", text)
    text = text.removesuffix(", or an object with min and max")
    for name in sorted(_LABELS, key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}\b", _LABELS[name], text)
    return text[:1].upper() + text[1:]


def chart_hours(visit: Visit) -> int:
    """Return how long a chart is asked for, one of ``SPANS``."""
    text = first(visit.query, "hours")
    return next((hours for hours, _ in SPANS if str(hours) == text), DEFAULT_HOURS)


def zone_of(settings: SchedulingRow) -> ZoneInfo:
    """Return the zone of a route's window, UTC if it has none: people think of the chart in it."""
    return zone_named(settings.window_timezone or "UTC")


def zone_named(name: str) -> ZoneInfo:
    """Return a zone, UTC for a name that is none."""
    try:
        return zones.zone(name)
    except zones.UnknownZone:
        return zones.zone("UTC")
