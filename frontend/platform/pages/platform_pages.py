"""Incidents, changes and weights of workspaces: what platform admins and auditors see beside routes and batches."""

from __future__ import annotations

from typing import Any, Final

from frontend.openai.errors import ApiError
from frontend.platform.access import require_platform_admin, require_platform_reader
from frontend.platform.http_calls import MAX_NAME_CHARS
from frontend.platform.pages.change_words import ACTIONS, change_text
from frontend.platform.pages.incident_words import Moment, incident_text
from frontend.platform.pages.rendering import Renderer
from frontend.platform.pages.settings_form import number
from frontend.platform.pages.visits import Reply, Visit, first, link, page_number, redirect
from frontend.platform.views import Changes, IncidentStatus, Views

INCIDENTS_PAGE: Final = 25
CHANGES_PAGE: Final = 30
WORKSPACES_PAGE: Final = 100
LIVE: Final = "-live"


class IncidentPages:
    """Answers below ``incidents``."""

    def __init__(self, views: Views, renderer: Renderer) -> None:
        self._views = views
        self._renderer = renderer

    async def answer(self, visit: Visit) -> Reply | None:
        """See ``Section``."""
        require_platform_reader(visit.signed_in.principal)
        match visit.segments[1:]:
            case ():
                return self._renderer.page("incidents.html", visit, **await self._list(visit))
            case (segment,) if segment == LIVE:
                return self._renderer.fragment("incidents_live.html", visit, **await self._list(visit))
        raise ApiError(404, "There is no page at this address.")

    async def _list(self, visit: Visit) -> dict[str, Any]:
        which: IncidentStatus = "past" if first(visit.query, "status") == "past" else "open"
        page = page_number(visit.query)
        rows = await self._views.incidents(which, INCIDENTS_PAGE + 1, (page - 1) * INCIDENTS_PAGE)
        return {
            "incidents": [incident_text(row) for row in rows[:INCIDENTS_PAGE]],
            "has_more": len(rows) > INCIDENTS_PAGE,
            "which": which,
            "page_number": page,
            "now_us": await self._views.now_us(),
            "is_moment": lambda part: isinstance(part, Moment),
        }


class ChangePages:
    """Answers below ``changes``: the audit log."""

    def __init__(self, views: Views, renderer: Renderer) -> None:
        self._views = views
        self._renderer = renderer

    async def answer(self, visit: Visit) -> Reply | None:
        """See ``Section``."""
        require_platform_reader(visit.signed_in.principal)
        if visit.segments[1:]:
            raise ApiError(404, "There is no page at this address.")
        action = first(visit.query, "what")
        action = action if action in ACTIONS else ""
        route = first(visit.query, "route")
        route = route if route.isprintable() and len(route) <= MAX_NAME_CHARS else ""
        before = number(first(visit.query, "before"))
        before_seq = before if isinstance(before, int) and before > 0 else None
        rows = await self._views.audit_log(CHANGES_PAGE + 1, before_seq, action or None, route or None)
        workspaces = {one.id: one for one in await self._views.workspaces()}
        routes = {view.deployment.id for view in await self._views.routes_view()}
        return self._renderer.page(
            "changes.html",
            visit,
            changes=[change_text(row) for row in rows[:CHANGES_PAGE]],
            older=rows[CHANGES_PAGE - 1].seq if len(rows) > CHANGES_PAGE else None,
            is_newest=before_seq is None,
            routes=sorted(routes | ({route} if route else set())),
            route=route,
            action=action,
            actions=ACTIONS,
            workspaces=workspaces,
        )


class WorkspacePages:
    """Answers below ``workspaces``: their weights."""

    def __init__(self, views: Views, changes: Changes, renderer: Renderer) -> None:
        self._views = views
        self._changes = changes
        self._renderer = renderer

    async def answer(self, visit: Visit) -> Reply | None:
        """See ``Section``."""
        require_platform_reader(visit.signed_in.principal)
        match visit.segments[1:]:
            case ():
                return await self._list(visit)
            case (workspace,) if visit.posts:
                require_platform_admin(visit.signed_in.principal)
                return await self._save(visit, workspace)
        raise ApiError(404, "There is no page at this address.")

    async def _save(self, visit: Visit, workspace: str) -> Reply:
        text = first(visit.form, "weight")
        page = page_number(visit.form)
        try:
            await self._changes.set_weight(visit.signed_in.principal, workspace, number(text))
        except ApiError as error:
            if error.status != 400:
                raise
            return await self._list(visit, wrong=workspace, text=text, message=str(error))
        return redirect(link("workspaces", saved=workspace, page=page if page > 1 else None))

    async def _list(self, visit: Visit, *, wrong: str = "", text: str = "", message: str = "") -> Reply:
        page = page_number(visit.form if wrong else visit.query)
        workspaces = await self._views.workspaces()
        start = (page - 1) * WORKSPACES_PAGE
        return self._renderer.page(
            "workspaces.html",
            visit,
            http_status=400 if wrong else 200,
            workspaces=workspaces[start : start + WORKSPACES_PAGE],
            total_weight=sum(one.weight for one in workspaces),
            has_more=len(workspaces) > start + WORKSPACES_PAGE,
            page_number=page,
            saved=next((one for one in workspaces if one.id == first(visit.query, "saved")), None),
            wrong=wrong,
            text=text,
            message=message[:1].upper() + message[1:],
        )
