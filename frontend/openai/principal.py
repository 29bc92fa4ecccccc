"""Who calls: a workspace, the key that proved it, and what its holder may do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What the holder of a key may do."""

    MEMBER = "member"
    """Use models; own files and batch jobs of its workspace."""
    WORKSPACE_ADMIN = "workspace_admin"
    """The same, and manage the keys of its workspace."""
    PLATFORM_ADMIN = "platform_admin"
    """Everything, in every workspace."""
    AUDITOR = "auditor"
    """Read settings and state of every workspace, change nothing."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        workspace_id: owner of everything the call makes or sees.
        key_id: public id of the key, fit for logs.
        user_id: the person behind the key, None if the key belongs to nobody in particular.
    """

    workspace_id: str
    key_id: str
    role: Role
    user_id: str | None = None
