"""Files as the API knows them: receiving, showing, reading, deleting. No HTTP in here but the codes of its refusals.

Order of an upload
    bytes into a temporary object, hashed and checked as they come -> row reserved (so that a crash leaves a trace for
    the sweeper) -> object published -> row committed, the quota checked in the same transaction. Until the last step
    the file does not exist for anybody; whatever fails before it leaves neither row nor bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from engines.errors import NotFound, ServingError
from frontend.batches.filenames import clean_filename
from frontend.batches.multipart import Field, FileEnd, FileStart, FormReader, shown
from frontend.batches.objects import (
    ObjectCorrupt,
    Objects,
    ObjectWriter,
    StorageUnavailable,
    Written,
    object_path,
)
from frontend.batches.store.errors import InputInUse, QuotaExceeded, StoreUnavailable
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import SECOND_US, FilePurpose, FileRow, NewFile, Page, WrittenFile
from frontend.gateway_settings import FileSettings
from frontend.openai.errors import ApiError
from frontend.openai.principal import Principal

log = logging.getLogger(__name__)

ANCHOR: Final = "created_at"
MIN_EXPIRY_SECONDS: Final = 3600
MAX_EXPIRY_SECONDS: Final = 2_592_000
DAY_SECONDS: Final = 86_400
BATCH: Final = "batch"
BATCH_OUTPUT: Final = "batch_output"
PURPOSES: Final[dict[str, FilePurpose]] = {BATCH: "batch_input", "user_data": "user_file"}
"""What clients may upload, and how it is stored."""
OTHER_PURPOSES: Final = frozenset({"assistants", "evals", "fine-tune", "fine-tune-results", "vision"})
"""Purposes of features that are not offered here."""
LISTED_PURPOSES: Final = frozenset({*PURPOSES, BATCH_OUTPUT})
_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_SECONDS: Final = re.compile(r"[0-9]{1,10}")
_BOM: Final = b"\xef\xbb\xbf"
_BLANK: Final = b" \t\r\n\v\f"


def new_file_id() -> str:
    return "file-" + secrets.token_hex(16)


def is_file_id(text: str) -> bool:
    """Return whether this could be an id of ours; nothing else reaches the store or a path."""
    return _ID.fullmatch(text) is not None


def file_object(row: FileRow) -> dict[str, Any]:
    """Return the API's file object."""
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.bytes,
        "created_at": row.created_at // SECOND_US,
        "expires_at": None if row.expires_at is None else row.expires_at // SECOND_US,
        "filename": row.filename,
        "purpose": row.api_purpose,
        "status": "processed",
        "status_details": None,
    }


def expiry_seconds(value: int | None, param: str) -> int:
    """Return a file's chosen life. Raises: ApiError outside of what is allowed."""
    if value is None or not MIN_EXPIRY_SECONDS <= value <= MAX_EXPIRY_SECONDS:
        raise ApiError(
            400, f"expected a whole number of seconds from {MIN_EXPIRY_SECONDS} to {MAX_EXPIRY_SECONDS}",
            code="invalid_value", param=param,
        )  # fmt: skip
    return value


def retention_us(settings: FileSettings, chosen_seconds: int | None, *, batch: bool) -> int | None:
    """Return how long a file is kept, None for ever.

    Files of batches (input, output, errors) are kept for ``batch_retention_days``, or for ``chosen_seconds`` if sooner.
    """
    if not batch:
        return None if chosen_seconds is None else chosen_seconds * SECOND_US
    kept = settings.batch_retention_days * DAY_SECONDS
    return min(kept, kept if chosen_seconds is None else chosen_seconds) * SECOND_US


@dataclass(slots=True)
class Content:
    """What is learnt of a file's content while it passes."""

    size: int = 0
    has_nul: bool = False
    first: int | None = None
    _head: bytes = b""

    def take(self, piece: bytes) -> None:
        self.size += len(piece)
        self.has_nul = self.has_nul or b"\0" in piece
        if self.first is not None:
            return
        head = self._head + piece
        # A BOM may be cut anywhere; blanks before the first character are not kept.
        if _BOM.startswith(head):
            self._head = head
            return
        text = head.removeprefix(_BOM).lstrip(_BLANK)
        self._head = _BOM
        if text:
            self.first = text[0]

    def refuse_unless_batch(self, *, complete: bool) -> None:
        """Raise ApiError as soon as this cannot be a batch file."""
        if self.has_nul:
            raise ApiError(
                400, "a batch file is JSON Lines; this one holds a NUL byte", code="invalid_file", param="file"
            )
        if (self.first is None and complete) or (self.first is not None and self.first != ord("{")):
            raise ApiError(
                400, "a batch file is JSON Lines: its first character must be '{'", code="invalid_file", param="file"
            )


@dataclass(slots=True)
class Form:
    """Fields of an upload so far."""

    values: dict[str, str] = field(default_factory=dict)

    def take(self, one: Field) -> None:
        if one.name not in _FIELDS:
            raise ApiError(400, "unknown form field", code="unknown_parameter", param=shown(one.name))
        self.values[one.name] = one.value
        if one.name == "purpose":
            _checked_purpose(one.value)

    @property
    def purpose(self) -> str | None:
        return self.values.get("purpose")

    def expiry(self) -> int | None:
        """Return the chosen life in seconds. Raises: ApiError."""
        anchor, seconds = (self.values.get(name) for name in _FIELDS[1:])
        if anchor is None and seconds is None:
            return None
        if anchor != ANCHOR:
            raise ApiError(400, f"expected '{ANCHOR}'", code="invalid_value", param="expires_after[anchor]")
        number = int(seconds) if seconds is not None and _SECONDS.fullmatch(seconds) else None
        return expiry_seconds(number, "expires_after[seconds]")


class Files:
    """The Files API of every workspace."""

    def __init__(self, store: Store, objects: Objects, settings: FileSettings) -> None:
        self._store = store
        self._objects = objects
        self._settings = settings

    @property
    def max_file_bytes(self) -> int:
        return self._settings.max_file_bytes

    def too_large(self) -> ApiError:
        """Return the refusal of a file above the limit."""
        most = self._settings.max_file_bytes
        return ApiError(
            413, f"the file is larger than gateway.files.max_file_bytes = {most} bytes", code="file_too_large",
            param="file",
        )  # fmt: skip

    async def receive(self, principal: Principal, content_type: str, body: AsyncIterator[bytes]) -> FileRow:
        """Return the file that a form brings, durable and visible.

        Raises:
            ApiError: refused; as early in the body as it can be known.
            Unavailable: storage or store cannot take it now.
        """
        reader = FormReader(content_type)
        stored = await self._store.files.stored_bytes(principal.workspace_id)
        room = self._settings.quota_bytes_per_workspace - stored
        form, content = Form(), Content()
        filename: str | None = None
        ended = False
        writer = await self._objects.open_writer(object_path(file_id := new_file_id()))
        try:
            async for piece in body:
                for event in reader.feed(piece):
                    if isinstance(event, Field):
                        form.take(event)
                    elif isinstance(event, FileStart):
                        filename = clean_filename(event.filename)
                    elif isinstance(event, FileEnd):
                        ended = True
                    else:
                        content.take(event)
                        self._check_size(content, room)
                        if form.purpose == BATCH:
                            content.refuse_unless_batch(complete=False)
                        await writer.write(event)
            reader.finish()
            if filename is None or not ended:
                raise ApiError(400, "the form has no field 'file'", code="missing_required_parameter", param="file")
            new = self._new_file(principal, file_id, filename, form, content)
            return await self._publish(new, writer)
        except BaseException:
            await writer.abort()
            raise

    async def get(self, workspace_id: str, file_id: str) -> FileRow:
        """Return a visible file. Raises: ApiError 404."""
        row = await self._store.files.get(workspace_id, file_id) if is_file_id(file_id) else None
        if row is None:
            raise no_file()
        return row

    async def page(
        self, workspace_id: str, limit: int, purpose: str | None, after: str | None, order: Literal["asc", "desc"]
    ) -> Page[FileRow]:
        """Return one page of the workspace's files. Raises: ApiError."""
        if purpose is not None and purpose not in LISTED_PURPOSES:
            known = ", ".join(sorted(LISTED_PURPOSES))
            raise ApiError(400, f"expected one of {known}", code="invalid_value", param="purpose")
        try:
            if after is not None and not is_file_id(after):
                raise NotFound("no id")
            return await self._store.files.list_files(
                workspace_id, limit, api_purpose=purpose, after=after, order=order
            )
        except NotFound:
            raise ApiError(404, "'after' names no file", code="not_found", param="after") from None

    async def read(self, row: FileRow, offset: int, length: int) -> AsyncGenerator[bytes, None]:
        """Yield a file's bytes; a whole file is checked against its checksum before its last piece is given.

        Raises:
            ObjectMissing, ObjectCorrupt: what is stored is not what was uploaded.
        """
        assert row.storage_path is not None, "visible files have objects"
        digest = hashlib.sha256() if length == row.bytes else None
        held: bytes | None = None
        async with contextlib.aclosing(self._objects.open_reader(row.storage_path, offset, length)) as pieces:
            async for piece in pieces:
                if digest is not None:
                    digest.update(piece)
                if held is not None:
                    yield held
                held = piece
        if digest is not None and digest.hexdigest() != row.sha256:
            raise ObjectCorrupt("the stored file is damaged")
        if held is not None:
            yield held

    async def delete(self, workspace_id: str, file_id: str) -> None:
        """Delete a file: gone for everybody at once. Raises: ApiError 404, 409 while a validation reads it."""
        if not is_file_id(file_id):
            raise no_file()
        try:
            row = await self._store.files.delete(workspace_id, file_id)
        except InputInUse as error:
            raise ApiError(409, str(error), code="file_in_use") from error
        if row is None:
            raise no_file()
        with contextlib.suppress(StorageUnavailable, StoreUnavailable):
            # The room is wanted back now; what cannot be removed now, the sweeper removes.
            await self.discard(row)

    async def discard(self, row: FileRow) -> None:
        """Remove the object of a row that is deleted."""
        if row.storage_path is not None:
            await self._objects.delete(row.storage_path)
            await self._store.files.mark_swept([row.id])

    def _check_size(self, content: Content, room: int) -> None:
        if content.size > self._settings.max_file_bytes:
            raise self.too_large()
        if content.size > room:
            raise self._over_quota()

    def _over_quota(self) -> ApiError:
        most = self._settings.quota_bytes_per_workspace
        return ApiError(
            413, f"the workspace's files would exceed its quota of {most} bytes; delete files that are not needed",
            code="storage_quota_exceeded", param="file",
        )  # fmt: skip

    def _new_file(self, principal: Principal, file_id: str, filename: str, form: Form, content: Content) -> NewFile:
        purpose = form.purpose
        if purpose is None:
            raise ApiError(400, "the form has no field 'purpose'", code="missing_required_parameter", param="purpose")
        if content.size == 0:
            raise ApiError(400, "the file is empty", code="invalid_file", param="file")
        if purpose == BATCH:
            content.refuse_unless_batch(complete=True)
        return NewFile(
            id=file_id,
            workspace_id=principal.workspace_id,
            purpose=PURPOSES[purpose],
            api_purpose=purpose,
            filename=filename,
            content_type="application/octet-stream",
            storage_path=object_path(file_id),
            created_by_key_id=principal.key_id,
            created_by_user_id=principal.user_id,
            expires_in_us=retention_us(self._settings, form.expiry(), batch=purpose == BATCH),
        )

    async def _publish(self, new: NewFile, writer: ObjectWriter) -> FileRow:
        await self._store.files.insert(new)
        try:
            written: Written = await writer.commit()
            file = WrittenFile(new.id, written.bytes, written.sha256)
            return await self._store.files.commit(file, self._settings.quota_bytes_per_workspace)
        except StoreUnavailable:
            # It may be committed all the same. Then it stays, as an answer that was lost would leave it;
            # if not, the sweeper finds the reserved row.
            if (row := await self._committed(new.id)) is not None:
                return row
            raise
        except BaseException as error:
            await asyncio.shield(self._withdraw(new, writer))
            if isinstance(error, QuotaExceeded):
                raise self._over_quota() from error
            raise

    async def _committed(self, file_id: str) -> FileRow | None:
        with contextlib.suppress(StoreUnavailable):
            return await self._store.files.get_internal(file_id)
        return None

    async def _withdraw(self, new: NewFile, writer: ObjectWriter) -> None:
        """Undo a file that could not be committed; what fails here is left to the sweeper."""
        try:
            await writer.abort()
            await self._store.files.delete_internal([new.id])
            await self._objects.delete(new.storage_path)
            await self._store.files.mark_swept([new.id])
        except ServingError as error:
            log.warning("files.left_to_sweeper file=%s error=%s", new.id, type(error).__name__)


def no_file() -> ApiError:
    """Return the refusal of an id that names no file of the caller; it says the same of another workspace's."""
    return ApiError(404, "no such file", code="not_found", param="id")


def _checked_purpose(purpose: str) -> None:
    if purpose in PURPOSES:
        return
    known = " or ".join(f"'{name}'" for name in PURPOSES)
    if purpose in OTHER_PURPOSES:
        raise ApiError(
            400, f"files for this purpose are not offered here, expected {known}",
            code="unsupported_capability", param="purpose",
        )  # fmt: skip
    raise ApiError(400, f"expected a purpose of {known}", code="invalid_value", param="purpose")
