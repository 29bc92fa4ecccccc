"""Batches: the list, one batch with its reasons and places, its files, and cancelling it after being asked."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Final, Literal, Protocol

from engines.errors import ServingError
from frontend.batches.filenames import attachment
from frontend.batches.store.rows import FileRow
from frontend.httpd.exchange import ClientDisconnected
from frontend.openai.auth import Forbidden
from frontend.openai.errors import ApiError
from frontend.openai.principal import Role
from frontend.platform.access import BatchAccess, require_platform_reader
from frontend.platform.pages.guard import HEADERS
from frontend.platform.pages.rendering import Renderer
from frontend.platform.pages.visits import Reply, Visit, first, link, page_number, redirect
from frontend.platform.read_models import BatchView
from frontend.platform.views import BatchStatus, Changes, Views

PAGE: Final = 25
LIST_LIVE: Final = "-live"
STATUSES: Final[tuple[BatchStatus, ...]] = ("active", "finished", "all")
ResultName = Literal["output", "errors"]


class ResultFiles(Protocol):
    """Where results are read: ``frontend.batches.files.Files``."""

    async def get(self, workspace_id: str, file_id: str) -> FileRow: ...

    def read(self, row: FileRow, offset: int, length: int) -> AsyncGenerator[bytes, None]: ...


class BatchPages:
    """Answers below ``batches``."""

    def __init__(self, views: Views, changes: Changes, files: ResultFiles, renderer: Renderer) -> None:
        self._views = views
        self._changes = changes
        self._files = files
        self._renderer = renderer

    async def answer(self, visit: Visit) -> Reply | None:
        """See ``Section``."""
        match visit.segments[1:]:
            case ():
                return self._renderer.page("batches.html", visit, **await self._list(visit))
            case (segment,) if segment == LIST_LIVE:
                return self._renderer.fragment("batches_live.html", visit, **await self._list(visit))
            case (batch_id,):
                values = await self._batch(visit, batch_id)
                return self._renderer.page(
                    "batch.html", visit, cancelled=bool(first(visit.query, "cancelled")), **values
                )
            case (batch_id, "live"):
                return self._renderer.fragment("batch_live.html", visit, **await self._batch(visit, batch_id))
            case (batch_id, "cancel"):
                return await self._cancel(visit, batch_id)
            case (batch_id, "output"):
                return await self._download(visit, batch_id, "output")
            case (batch_id, "errors"):
                return await self._download(visit, batch_id, "errors")
        raise ApiError(404, "There is no page at this address.")

    async def _list(self, visit: Visit) -> dict[str, Any]:
        principal = visit.signed_in.principal
        asked = first(visit.query, "status", "active")
        status: BatchStatus = next((one for one in STATUSES if one == asked), "active")
        number = page_number(visit.query)
        offset = (number - 1) * PAGE
        totals = None
        may_cancel = visit.edits_platform
        if everywhere := first(visit.query, "scope") == "all":
            require_platform_reader(principal)
            rows = await self._views.all_batch_rows(principal, status, PAGE, offset)
            totals = await self._views.personal_totals()
        else:
            access = await self._views.access(principal, principal.workspace_id)
            rows = await self._views.batch_rows(principal, access, status, PAGE, offset)
            may_cancel = access.may_cancel
        return {
            "list": rows,
            "status": status,
            "scope": "all" if everywhere else "",
            "page_number": number,
            "totals": totals,
            "may_cancel": may_cancel,
            "may_read_files": may_read_files(visit),
            "now_us": await self._views.now_us(),
        }

    async def _batch(self, visit: Visit, batch_id: str) -> dict[str, Any]:
        view, access = await self._find(visit, batch_id)
        return {
            "view": view,
            "may_cancel": access.may_cancel,
            "may_read_files": may_read_files(visit),
            "now_us": await self._views.now_us(),
        }

    async def _find(self, visit: Visit, batch_id: str) -> tuple[BatchView, BatchAccess]:
        """Return a batch that the visitor may see. Raises: ApiError 404, Forbidden."""
        principal = visit.signed_in.principal
        if visit.reads_platform:
            view = await self._views.any_batch_view(principal, batch_id)
            return view, await self._views.access(principal, view.batch.workspace_id)
        access = await self._views.access(principal, principal.workspace_id)
        return await self._views.batch_view(principal, access, batch_id), access

    async def _cancel(self, visit: Visit, batch_id: str) -> Reply:
        view, access = await self._find(visit, batch_id)
        if not access.may_cancel:
            raise Forbidden("An auditor's key reads; it cancels nothing.")
        if visit.posts:
            await self._changes.cancel_batch(visit.signed_in.principal, access, batch_id)
            return redirect(link("batches", batch_id, cancelled=1))
        if view.batch.finished:
            return redirect(link("batches", batch_id))
        return self._renderer.page("batch_cancel.html", visit, view=view)

    async def _download(self, visit: Visit, batch_id: str, which: ResultName) -> Reply | None:
        """Stream a result file to the browser, which saves it."""
        if not may_read_files(visit):
            raise Forbidden("An auditor's key reads settings and states; it cannot read files.")
        view, _ = await self._find(visit, batch_id)
        batch = view.batch
        file_id = batch.output_file_id if which == "output" else batch.error_file_id
        if file_id is None:
            raise ApiError(404, "This batch has no such file.")
        row = await self._files.get(batch.workspace_id, file_id)
        exchange = visit.exchange
        headers = [
            (b"Content-Type", b"application/octet-stream"),
            (b"Content-Disposition", attachment(f"{batch_id}_{which}.jsonl")),
            (b"Cache-Control", b"private, no-store"),
            *HEADERS,
        ]
        async with contextlib.aclosing(self._files.read(row, 0, row.bytes)) as pieces:
            head = await anext(pieces, b"")  # what cannot be read at all still gets an error page
            exchange.start(200, headers)
            try:
                await exchange.send(head)
                async for piece in pieces:
                    await exchange.send(piece)
            except ClientDisconnected:
                return None
            except ServingError:
                exchange.abort()
                return None
        await exchange.end()
        return None


def may_read_files(visit: Visit) -> bool:
    """Return whether results may be read: by everybody but auditors, of what they may see."""
    return visit.signed_in.principal.role is not Role.AUDITOR
