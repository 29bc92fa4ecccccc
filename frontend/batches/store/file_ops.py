"""File rows. An object is written first and its row committed after; it is deleted the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from engines.errors import NotFound
from frontend.batches.store.errors import InputInUse, QuotaExceeded
from frontend.batches.store.rows import FileRow, NewFile, Page, WrittenFile
from frontend.batches.store.transaction import Bulk, Database, Op, Row, clock, columns_of, insert_of, sql

FILE: Final = columns_of(FileRow)
INSERT_FILE: Final = insert_of("files", FILE.split(", "))
VISIBLE: Final = (
    "workspace_id = :workspace AND api_purpose IS NOT NULL AND committed_at IS NOT NULL AND deleted_at IS NULL"
    " AND (expires_at IS NULL OR expires_at > :now)"
)
"""What the API may show of a workspace."""


class FileOps:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def insert(self, file: NewFile) -> FileRow:
        def op() -> Op[FileRow]:
            now = yield from clock()
            rows = yield from sql(
                f"{INSERT_FILE} RETURNING {FILE}",
                id=file.id,
                workspace_id=file.workspace_id,
                purpose=file.purpose,
                api_purpose=file.api_purpose,
                filename=file.filename,
                content_type=file.content_type,
                bytes=0,
                sha256="",
                created_by_key_id=file.created_by_key_id,
                created_by_user_id=file.created_by_user_id,
                created_at=now,
                committed_at=None,
                expires_at=None if file.expires_in_us is None else now + file.expires_in_us,
                deleted_at=None,
                storage_path=file.storage_path,
                key_id=None,
            )
            return FileRow(*rows[0])

        return await self._db.write(op)

    async def commit(self, written: WrittenFile, quota_bytes: int | None = None) -> FileRow:
        def op() -> Op[FileRow]:
            now = yield from clock()
            rows = yield from sql(f"SELECT {FILE} FROM files WHERE id = :id", id=written.file_id)
            if not rows:
                raise NotFound(f"no file {written.file_id!r}")
            file = FileRow(*rows[0])
            if quota_bytes is not None and file.committed_at is None:
                # Two uploads that end together must not both fit into the last room.
                yield from sql("SELECT 1 FROM workspaces WHERE id = :id", id=file.workspace_id, lock="FOR UPDATE")
                stored = yield from _stored_bytes(file.workspace_id, now)
                if stored + written.bytes > quota_bytes:
                    raise QuotaExceeded(
                        f"the workspace stores {stored} bytes; {written.bytes} more would exceed its quota,"
                        f" {quota_bytes} bytes"
                    )
            return (yield from commit_file(written, now))

        return await self._db.write(op)

    async def get(self, workspace_id: str, file_id: str) -> FileRow | None:
        return await self._db.read(lambda: _visible(workspace_id, file_id))

    async def get_internal(self, file_id: str) -> FileRow | None:
        def op() -> Op[FileRow | None]:
            rows = yield from sql(
                f"SELECT {FILE} FROM files WHERE id = :id AND committed_at IS NOT NULL AND deleted_at IS NULL",
                id=file_id,
            )
            return FileRow(*rows[0]) if rows else None

        return await self._db.read(op)

    async def list_files(
        self,
        workspace_id: str,
        limit: int,
        *,
        api_purpose: str | None = None,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Page[FileRow]:
        beyond = ">" if order == "asc" else "<"

        def op() -> Op[Page[FileRow]]:
            now = yield from clock()
            start_at, start_id = yield from cursor("files", workspace_id, after)
            rows = yield from sql(
                f"SELECT {FILE} FROM files WHERE {VISIBLE}"
                " AND (CAST(:purpose AS TEXT) IS NULL OR api_purpose = :purpose)"
                f" AND (CAST(:start_at AS BIGINT) IS NULL OR (created_at, id) {beyond} (:start_at, :start_id))"
                f" ORDER BY created_at {order}, id {order} LIMIT CAST(:limit AS BIGINT)",
                workspace=workspace_id,
                now=now,
                purpose=api_purpose,
                start_at=start_at,
                start_id=start_id,
                limit=limit + 1,
            )
            return Page(tuple(FileRow(*row) for row in rows[:limit]), len(rows) > limit)

        return await self._db.read(op)

    async def delete(self, workspace_id: str, file_id: str) -> FileRow | None:
        def op() -> Op[FileRow | None]:
            now = yield from clock()
            file = yield from _visible(workspace_id, file_id)
            if file is None:
                return None
            in_use = yield from sql(
                "SELECT 1 FROM batches WHERE workspace_id = :workspace AND completed_at IS NULL"
                " AND input_file_id = :file AND work_file_id IS NULL LIMIT 1",
                workspace=workspace_id,
                file=file_id,
            )
            if in_use:
                raise InputInUse(f"file {file_id!r} is being validated for a batch; delete it when that is done")
            rows = yield from sql(
                f"UPDATE files SET deleted_at = :now WHERE id = :id AND deleted_at IS NULL RETURNING {FILE}",
                now=now,
                id=file_id,
            )
            return FileRow(*rows[0]) if rows else None

        return await self._db.write(op)

    async def delete_internal(self, file_ids: Sequence[str]) -> None:
        await self._db.write(lambda: delete_files(file_ids))

    async def stored_bytes(self, workspace_id: str) -> int:
        def op() -> Op[int]:
            return (yield from _stored_bytes(workspace_id, (yield from clock())))

        return await self._db.read(op)

    async def to_sweep(self, limit: int, abandoned_after_us: int) -> tuple[FileRow, ...]:
        def op() -> Op[tuple[FileRow, ...]]:
            now = yield from clock()
            rows = yield from sql(
                f"SELECT {FILE} FROM files WHERE storage_path IS NOT NULL AND (deleted_at IS NOT NULL"
                " OR expires_at IS NOT NULL OR committed_at IS NULL) AND (deleted_at IS NOT NULL OR expires_at <= :now"
                " OR (committed_at IS NULL AND created_at <= :abandoned))"
                " ORDER BY created_at LIMIT CAST(:limit AS BIGINT)",
                now=now,
                abandoned=now - abandoned_after_us,
                limit=limit,
            )
            return tuple(FileRow(*row) for row in rows)

        return await self._db.read(op)

    async def mark_swept(self, file_ids: Sequence[str]) -> None:
        def op() -> Op[None]:
            now = yield from clock()
            yield from sql(
                "UPDATE files SET storage_path = NULL, deleted_at = coalesce(deleted_at, :now) WHERE id IN :ids[text]",
                now=now,
                ids=list(file_ids),
            )

        await self._db.write(op)


def commit_file(written: WrittenFile, now: int) -> Op[FileRow]:
    """Make an inserted file readable. Raises: NotFound if the row is gone or deleted."""
    rows = yield from sql(
        "UPDATE files SET bytes = :bytes, sha256 = :sha256, committed_at = coalesce(committed_at, :now)"
        f" WHERE id = :id AND deleted_at IS NULL RETURNING {FILE}",
        bytes=written.bytes,
        sha256=written.sha256,
        now=now,
        id=written.file_id,
    )
    if not rows:
        raise NotFound(f"no file {written.file_id!r}")
    return FileRow(*rows[0])


def delete_files(file_ids: Sequence[str]) -> Op[None]:
    """Mark files deleted, whatever they are."""
    now = yield from clock()
    yield Bulk(
        "UPDATE files SET deleted_at = coalesce(deleted_at, :now) FROM {rows} WHERE files.id = d.id",
        {"id": ("text", sorted(file_ids))},
        {"now": now},
    )


def visible_input(workspace_id: str, file_id: str) -> Op[FileRow]:
    """Return a file that the API shows. Raises: NotFound."""
    file = yield from _visible(workspace_id, file_id)
    if file is None:
        raise NotFound(f"no file {file_id!r}")
    return file


def cursor(table: str, workspace_id: str | None, after: str | None) -> Op[tuple[int | None, str | None]]:
    """Return where a page starts, from the id of the last row seen, visible still or not. Raises: NotFound."""
    if after is None:
        return None, None
    rows: list[Row] = yield from sql(
        f"SELECT created_at, id FROM {table} WHERE id = :after"
        " AND (CAST(:workspace AS TEXT) IS NULL OR workspace_id = :workspace)",
        after=after,
        workspace=workspace_id,
    )
    if not rows:
        raise NotFound(f"'after' names no object: {after!r}")
    return int(rows[0][0]), str(rows[0][1])


def _visible(workspace_id: str, file_id: str) -> Op[FileRow | None]:
    now = yield from clock()
    rows = yield from sql(
        f"SELECT {FILE} FROM files WHERE id = :id AND {VISIBLE}", id=file_id, workspace=workspace_id, now=now
    )
    return FileRow(*rows[0]) if rows else None


def _stored_bytes(workspace_id: str, now: int) -> Op[int]:
    rows = yield from sql(
        f"SELECT CAST(coalesce(sum(bytes), 0) AS BIGINT) FROM files WHERE {VISIBLE}", workspace=workspace_id, now=now
    )
    return int(rows[0][0])
