"""Batches as the API knows them: creating with whole-file validation, showing, cancelling. No HTTP but its codes.

Order of a create
    request checked -> input visible, of the right purpose -> a job slot free -> work file's row reserved -> the input
    validated and copied in one pass -> batch and work file committed in one transaction. Until then nothing exists for
    anybody; whatever fails before it leaves no batch, no file row and no bytes (or a reserved row for the sweeper).
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from engines.errors import NotFound, ServingError
from frontend.batches.batch_requests import BatchRequest
from frontend.batches.files import BATCH, is_file_id, new_file_id
from frontend.batches.objects import Objects, Written, object_path
from frontend.batches.store.errors import (
    ActiveBatchLimit,
    BatchNotCancellable,
    IdempotencyConflict,
    StoreUnavailable,
)
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import BatchRow, FileRow, Idempotency, NewBatch, NewFile, Page, WrittenFile
from frontend.batches.validation import MIXED, InputCheck, Models, Rules, Validated
from frontend.gateway_settings import BatchSettings
from frontend.openai.errors import ApiError
from frontend.openai.principal import Principal

log = logging.getLogger(__name__)

SLOT_RETRY_SECONDS: Final = 60
_ID: Final = re.compile(r"batch_[0-9a-f]{32}")


def new_batch_id() -> str:
    return "batch_" + secrets.token_hex(16)


def is_batch_id(text: str) -> bool:
    """Return whether this could be an id of ours."""
    return _ID.fullmatch(text) is not None


def work_file(workspace_id: str) -> NewFile:
    """Return the row of a private copy about to be written; internal, so it is never listed or served."""
    file_id = new_file_id()
    return NewFile(
        id=file_id,
        workspace_id=workspace_id,
        purpose="batch_input",
        api_purpose=None,
        filename="work",
        content_type="application/octet-stream",
        storage_path=object_path(file_id),
    )


@dataclass(frozen=True, slots=True)
class Created:
    """Answer to a create. ``lines``: by model, None where they were not looked at (or an earlier create answers)."""

    row: BatchRow
    lines: Mapping[str, int] | None = None


class Jobs:
    """The Batches API of every workspace.

    Attributes:
        created: batches, in this process.
    """

    def __init__(
        self, store: Store, objects: Objects, check: InputCheck, models: Models, settings: BatchSettings
    ) -> None:
        self._store = store
        self._objects = objects
        self._check = check
        self._models = models
        self._settings = settings
        self.created = 0

    def rules(self, request: BatchRequest) -> Rules:
        """Return what the lines of a batch must satisfy."""
        settings = self._settings
        return Rules(request.contract, self._models, settings.max_lines, settings.max_line_bytes)

    async def create(self, principal: Principal, request: BatchRequest, key: str | None) -> Created:
        """Return the new batch, or the earlier one of a repeated ``Idempotency-Key``.

        Raises:
            ApiError: refused.
            InvalidBatchInput: with the report of the file's lines.
            ObjectMissing, ObjectCorrupt, Unavailable: the input cannot be read, or its copy not be kept.
        """
        if not self._settings.enabled:
            raise ApiError(400, "batches are switched off here", code="batch_files_disabled")
        idempotency = None if key is None else Idempotency(key, request.body_sha256)
        if idempotency is not None:
            try:
                earlier = await self._store.batches.find_idempotent(principal.workspace_id, idempotency)
            except IdempotencyConflict as error:
                raise _conflict() from error
            if earlier is not None:
                return Created(earlier)
        source = await self._input(principal.workspace_id, request.input_file_id)
        if (
            await self._store.batches.active_count(principal.workspace_id)
            >= self._settings.active_batches_per_workspace
        ):
            raise self._no_slot()
        if self._settings.validation == "async":
            return Created(await self._insert(_new_batch(principal, request, None, None), idempotency))
        work = work_file(principal.workspace_id)
        await self._store.files.insert(work)
        try:
            assert source.storage_path is not None, "visible files have objects"
            validated = await self._check.copy_validated(
                source.storage_path, Written(source.bytes, source.sha256), work.storage_path, self.rules(request)
            )
            written = WrittenFile(work.id, validated.written.bytes, validated.written.sha256)
            row = await self._insert(_new_batch(principal, request, written, validated), idempotency)
        except StoreUnavailable:
            # It may be committed all the same: the copy stays; if nothing refers to it, the sweeper takes it.
            raise
        except BaseException:
            await asyncio.shield(self._withdraw(work))
            raise
        if row.work_file_id != work.id:
            await asyncio.shield(self._withdraw(work))  # an earlier batch answers for this key
            return Created(row)
        return Created(row, dict(zip(validated.models, validated.counts, strict=True)))

    async def get(self, workspace_id: str, batch_id: str) -> BatchRow:
        """Return a batch of the workspace. Raises: ApiError 404."""
        row = await self._store.batches.get(workspace_id, batch_id) if is_batch_id(batch_id) else None
        if row is None:
            raise no_batch()
        return row

    async def page(self, workspace_id: str, limit: int, after: str | None) -> Page[BatchRow]:
        """Return one page of the workspace's batches, newest first. Raises: ApiError."""
        if after is None:
            return await self._store.batches.list_batches(workspace_id, limit)
        try:
            if not is_batch_id(after):
                raise NotFound("no id")
            return await self._store.batches.list_batches(workspace_id, limit, after=after)
        except NotFound:
            raise ApiError(404, "'after' names no batch", code="not_found", param="after") from None

    async def cancel(self, workspace_id: str, batch_id: str) -> BatchRow:
        """Ask for a stop; repeating it is harmless. Raises: ApiError 404, 409 if it has ended."""
        if not is_batch_id(batch_id):
            raise no_batch()
        try:
            return await self._store.batches.cancel(workspace_id, batch_id)
        except NotFound:
            raise no_batch() from None
        except BatchNotCancellable as error:
            raise ApiError(409, "the batch has ended; it is unchanged", code="batch_not_cancellable") from error

    async def _input(self, workspace_id: str, file_id: str) -> FileRow:
        row = await self._store.files.get(workspace_id, file_id) if is_file_id(file_id) else None
        if row is None:
            raise _no_input()
        if row.api_purpose != BATCH:
            raise ApiError(
                400, f"the input file was uploaded with another purpose, expected '{BATCH}'",
                code="invalid_input_file", param="input_file_id",
            )  # fmt: skip
        return row

    async def _insert(self, batch: NewBatch, idempotency: Idempotency | None) -> BatchRow:
        try:
            row, is_new = await self._store.batches.create(
                batch, active_limit=self._settings.active_batches_per_workspace, idempotency=idempotency
            )
        except ActiveBatchLimit as error:
            raise self._no_slot() from error
        except IdempotencyConflict as error:
            raise _conflict() from error
        except NotFound as error:
            raise _no_input() from error
        self.created += is_new
        return row

    def _no_slot(self) -> ApiError:
        most = self._settings.active_batches_per_workspace
        return ApiError(
            429, f"the workspace has {most} unfinished batches, which is its limit; wait for some to end",
            code="job_limit_exceeded", headers=(("Retry-After", str(SLOT_RETRY_SECONDS)), ("x-should-retry", "false")),
        )  # fmt: skip

    async def _withdraw(self, work: NewFile) -> None:
        """Undo a reserved work file; what fails here is left to the sweeper."""
        try:
            await self._store.files.delete_internal([work.id])
            await self._objects.delete(work.storage_path)
            await self._store.files.mark_swept([work.id])
        except ServingError as error:
            log.warning("batches.left_to_sweeper file=%s error=%s", work.id, type(error).__name__)


def no_batch() -> ApiError:
    """Return the refusal of an id that names no batch of the caller; it says the same of another workspace's."""
    return ApiError(404, "no such batch", code="not_found", param="id")


def _new_batch(
    principal: Principal, request: BatchRequest, work: WrittenFile | None, validated: Validated | None
) -> NewBatch:
    return NewBatch(
        id=new_batch_id(),
        workspace_id=principal.workspace_id,
        api_key_id=principal.key_id,
        user_id=principal.user_id,
        endpoint=request.contract.endpoint,
        public_model=MIXED if validated is None else validated.public_model,
        input_file_id=request.input_file_id,
        work_file=work,
        completion_window_hours=request.window_hours,
        retry_limit=request.retry_limit,
        request_total=0 if validated is None else validated.lines,
        metadata=request.metadata,
        output_expires_after_seconds=request.output_expires_after_seconds,
    )


def _no_input() -> ApiError:
    return ApiError(404, "no such file", code="not_found", param="input_file_id")


def _conflict() -> ApiError:
    return ApiError(
        409, "this Idempotency-Key was used within 24 hours for another request", code="idempotency_conflict",
        param="Idempotency-Key",
    )  # fmt: skip
