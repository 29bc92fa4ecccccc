"""Development mode's one key: made by the node, known to every process and after every restart.

The key lies in the state directory in a file that only its user may read, because it must be printed again at the next
start; that is a thing for trying out, and the reason why production keys are shown once and stored as hashes. Whoever
wants another one deletes the file, or revokes the key and deletes the file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from engines.errors import AlreadyExists
from frontend.batches.keys import PREFIX_CHARS, hash_key, make_key, well_formed
from frontend.batches.store.protocol import Keys

KEY_FILE: Final = "development.key"
WORKSPACE_ID: Final = "ws_development"
_MAX_FILE_BYTES: Final = 1024


class DevelopmentKeyError(Exception):
    """The key's file cannot be used; the text names it and says why."""


def development_key(state_dir: Path) -> str:
    """Return the key of this state directory, made now if there is none.

    Raises:
        DevelopmentKeyError: the file is not ours alone, is something else, or cannot be made.
    """
    path = state_dir / KEY_FILE
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write(path, make_key().secret)
        return read_development_key(state_dir)
    except OSError as error:
        raise DevelopmentKeyError(f"{path}: {error.strerror}") from error


def read_development_key(state_dir: Path) -> str:
    """Return the key that the node has made.

    Raises:
        DevelopmentKeyError: there is none that may be used.
    """
    path = state_dir / KEY_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DevelopmentKeyError(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise DevelopmentKeyError(f"{path}: expected a file of this user with mode 0600; delete it for a new key")
        key = file.read(_MAX_FILE_BYTES).strip()
    if not well_formed(key):
        raise DevelopmentKeyError(f"{path}: holds no key; delete it for a new one")
    return key


async def register(keys: Keys, key: str) -> None:
    """Make workspace and key known to the store; every process does it, once is enough. A revoked key stays so."""
    digest = hash_key(key)
    if await keys.find_key(digest) is not None:
        return
    # Another process, or an earlier start, may have been first.
    with contextlib.suppress(AlreadyExists):
        await keys.create_workspace(WORKSPACE_ID, "development", "personal")
    with contextlib.suppress(AlreadyExists):
        await keys.create_key(
            f"key_{digest[:32]}", WORKSPACE_ID, "platform_admin", "development", key[:PREFIX_CHARS], digest
        )


def _write(path: Path, key: str) -> None:
    """Make the file whole or not at all; another process may be first, then its key stands."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()
