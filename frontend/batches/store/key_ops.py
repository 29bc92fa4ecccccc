"""Workspaces and API keys."""

from __future__ import annotations

from engines.errors import NotFound
from frontend.batches.store.rows import KeyRow, Role, WorkspaceKind, WorkspaceRow
from frontend.batches.store.transaction import Database, Op, clock, columns_of, insert_of, query, sql

WORKSPACE = columns_of(WorkspaceRow)
KEY = columns_of(KeyRow)
INSERT_KEY = insert_of("api_keys", KEY.split(", "))


class KeyOps:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def create_workspace(self, workspace_id: str, name: str, kind: WorkspaceKind = "team") -> WorkspaceRow:
        def op() -> Op[WorkspaceRow]:
            row = WorkspaceRow(workspace_id, name, kind, (yield from clock()))
            yield from sql(
                insert_of("workspaces", WORKSPACE.split(", ")),
                id=row.id,
                name=name,
                kind=kind,
                created_at=row.created_at,
            )
            return row

        return await self._db.write(op)

    async def workspace(self, id_or_name: str) -> WorkspaceRow | None:
        rows = await query(
            self._db,
            f"SELECT {WORKSPACE} FROM workspaces WHERE id = :wanted OR name = :wanted"
            " ORDER BY id = :wanted DESC LIMIT 1",
            wanted=id_or_name,
        )
        return WorkspaceRow(*rows[0]) if rows else None

    async def workspaces(self) -> tuple[WorkspaceRow, ...]:
        rows = await query(self._db, f"SELECT {WORKSPACE} FROM workspaces ORDER BY created_at, id")
        return tuple(WorkspaceRow(*row) for row in rows)

    async def create_key(
        self, key_id: str, workspace_id: str, role: Role, name: str, prefix: str, key_hash: str
    ) -> KeyRow:
        def op() -> Op[KeyRow]:
            if not (yield from sql("SELECT 1 FROM workspaces WHERE id = :id", id=workspace_id)):
                raise NotFound(f"no workspace {workspace_id!r}")
            now = yield from clock()
            row = KeyRow(key_id, workspace_id, role, name, prefix, key_hash, now, None)
            yield from sql(
                INSERT_KEY,
                id=key_id,
                workspace_id=workspace_id,
                role=role,
                name=name,
                prefix=prefix,
                key_hash=key_hash,
                created_at=now,
                revoked_at=None,
            )
            return row

        return await self._db.write(op)

    async def find_key(self, key_hash: str) -> KeyRow | None:
        rows = await query(self._db, f"SELECT {KEY} FROM api_keys WHERE key_hash = :key_hash", key_hash=key_hash)
        return KeyRow(*rows[0]) if rows else None

    async def key(self, key_id: str) -> KeyRow | None:
        rows = await query(self._db, f"SELECT {KEY} FROM api_keys WHERE id = :id", id=key_id)
        return KeyRow(*rows[0]) if rows else None

    async def list_keys(self, workspace_id: str | None = None) -> tuple[KeyRow, ...]:
        rows = await query(
            self._db,
            f"SELECT {KEY} FROM api_keys WHERE CAST(:workspace AS TEXT) IS NULL OR workspace_id = :workspace"
            " ORDER BY created_at, id",
            workspace=workspace_id,
        )
        return tuple(KeyRow(*row) for row in rows)

    async def revoke_key(self, key_id: str) -> KeyRow:
        def op() -> Op[KeyRow]:
            now = yield from clock()
            rows = yield from sql(
                f"UPDATE api_keys SET revoked_at = coalesce(revoked_at, :now) WHERE id = :id RETURNING {KEY}",
                now=now,
                id=key_id,
            )
            if not rows:
                raise NotFound(f"no key {key_id!r}")
            return KeyRow(*rows[0])

        return await self._db.write(op)
