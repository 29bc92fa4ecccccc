"""``ringserve migrate`` and ``ringserve keys``: the gateway's database from the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engines.errors import AlreadyExists, NotFound, ServingError
from frontend.batches.keys import make_key, new_workspace_id
from frontend.batches.store.migrate import Part
from frontend.batches.store.protocol import Store, open_store
from frontend.batches.store.rows import SECOND_US, KeyRow, WorkspaceRow
from frontend.cli import EXIT_FAILED, EXIT_USAGE
from frontend.commands.settings import load_settings
from frontend.gateway_settings import GatewaySettings

Action = Callable[[Store, argparse.Namespace], Awaitable[int]]


def migrate(arguments: argparse.Namespace) -> int:
    """Bring the database to this program's schema; return 0, also if there was nothing to do."""
    settings = _gateway(arguments)
    if settings is None:
        return EXIT_USAGE
    part: Part = "after" if arguments.after else "before"
    try:
        ran = asyncio.run(_migrate(settings, part))
    except ServingError as error:
        print(f"ringserve: {error}", file=sys.stderr)
        return EXIT_FAILED
    for name in ran:
        print(f"ran {name}")
    print("the database is up to date")
    return 0


async def _migrate(settings: GatewaySettings, part: Part) -> list[str]:
    if not settings.store:
        # Opening it is enough: SQLite has one host, so old and new programs never share it for long.
        store = open_store(settings, Path(settings.state_dir))
        await store.start()
        await store.close()
        return []
    from frontend.batches.store.postgres import PostgresDatabase

    database = PostgresDatabase(settings.store, settings.store_password_env)
    await database.open()
    try:
        return [f"{one.version:04d} {one.part}" for one in await database.migrate(part)]
    finally:
        await database.close()


def keys(arguments: argparse.Namespace) -> int:
    """Create, list or revoke API keys; a new key's secret is printed once, alone on standard output."""
    settings = _gateway(arguments)
    if settings is None:
        return EXIT_USAGE
    actions: dict[str, Action] = {"create": _create, "list": _list, "revoke": _revoke}
    try:
        return asyncio.run(_with_store(settings, actions[arguments.keys_command], arguments))
    except ServingError as error:
        print(f"ringserve: {error}", file=sys.stderr)
        return EXIT_FAILED


async def _with_store(settings: GatewaySettings, action: Action, arguments: argparse.Namespace) -> int:
    store = open_store(settings, Path(settings.state_dir))
    try:
        await store.start()
        return await action(store, arguments)
    finally:
        await store.close()


async def _create(store: Store, arguments: argparse.Namespace) -> int:
    workspace = await store.keys.workspace(arguments.workspace)
    if workspace is None:
        workspace = await _new_workspace(store, arguments.workspace)
    key = make_key()
    row = await store.keys.create_key(key.id, workspace.id, arguments.role, arguments.name, key.prefix, key.key_hash)
    if arguments.json:
        print(json.dumps({**_shown(row, workspace.name), "key": key.secret}))
        return 0
    print(f"key {row.id} of workspace {workspace.name}, role {row.role}; it is shown this once:", file=sys.stderr)
    print(key.secret)
    return 0


async def _new_workspace(store: Store, name: str) -> WorkspaceRow:
    try:
        made = await store.keys.create_workspace(new_workspace_id(), name)
    except AlreadyExists:
        found = await store.keys.workspace(name)
        assert found is not None, "the name was taken a moment ago, and workspaces are never deleted"
        return found
    print(f"created workspace {name} ({made.id})", file=sys.stderr)
    return made


async def _list(store: Store, arguments: argparse.Namespace) -> int:
    names = {workspace.id: workspace.name for workspace in await store.keys.workspaces()}
    only = None
    if arguments.workspace is not None:
        workspace = await store.keys.workspace(arguments.workspace)
        if workspace is None:
            raise NotFound(f"no workspace {arguments.workspace!r}; there are: {', '.join(names.values()) or 'none'}")
        only = workspace.id
    shown = [_shown(row, names.get(row.workspace_id, "")) for row in await store.keys.list_keys(only)]
    if arguments.json:
        print(json.dumps(shown, indent=2))
        return 0
    for one in shown:
        state = f"revoked {one['revoked_at']}" if one["revoked_at"] else "active"
        print(
            f"{one['id']}  {one['prefix']}…  {one['workspace']}  {one['role']}  {state}"
            f"  created {one['created_at']}  {one['name']}"
        )
    return 0


async def _revoke(store: Store, arguments: argparse.Namespace) -> int:
    row = await store.keys.revoke_key(arguments.key_id)
    if arguments.json:
        print(json.dumps(_shown(row, "")))
    else:
        print(f"key {row.id} is revoked; running processes refuse it within 5 seconds")
    return 0


def _shown(row: KeyRow, workspace: str) -> dict[str, Any]:
    return {
        "id": row.id,
        "prefix": row.prefix,
        "workspace": workspace,
        "workspace_id": row.workspace_id,
        "role": row.role,
        "name": row.name,
        "created_at": _time(row.created_at),
        "revoked_at": None if row.revoked_at is None else _time(row.revoked_at),
    }


def _time(us: int) -> str:
    return datetime.fromtimestamp(us / SECOND_US, UTC).isoformat(timespec="seconds")


def _gateway(arguments: argparse.Namespace) -> GatewaySettings | None:
    # A leaked key must be revocable from a shell that has none of the upstreams' secrets.
    loaded = load_settings(arguments, need_models=False, need_upstream_keys=False)
    return None if loaded is None else loaded.settings.gateway
